"""The shape of the package: order of imports, size, what ships, what must not be there."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import minirler

PACKAGE = Path(__file__).parent.parent / "minirler"
ROOT = PACKAGE.parent

# The order in which to read the package: a module imports only modules before it.
ORDER = """
settings config records data log ranks
noise kernels ops_ref linear attention ops tokenizer rotary qwen3 weights lora
blocks scheduler sampler
recording endpoint search mcp_tools tools world
lm offline rubrics judge evolve research
reward grpo pack policy plan dist state checkpoint monitor
rollout evaluate sft parts run report update replay train bootstrap ask serve view
""".split()

# These run where torch is not installed.
NO_TORCH = """
settings config records data log blocks scheduler recording endpoint search tools world lm offline
rubrics judge evolve reward monitor
""".split()

# Optional extras may be imported inside a function, where they are used.
EXTRAS = {"tensorboard", "wandb", "mcp", "rich", "transformers", "trl"}

FILES = sorted(PACKAGE.glob("*.py"))
MODULES = [path.stem for path in FILES if path.stem != "__init__"]
TREES = {path.stem: ast.parse(path.read_text("utf-8"), str(path)) for path in FILES}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def imports(tree):
    """(module of the package or None, top-level name) of every import statement below `tree`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ("minirler." * bool(node.level) + (node.module or "")).rstrip(".")
            whole = base == "minirler"
            names = [f"{base}.{alias.name}" for alias in node.names] if whole else [base]
        else:
            continue
        for name in names:
            first, _, rest = name.partition(".")
            yield (rest.split(".")[0] if first == "minirler" else None), first


def of_package(module):
    return {name for name, _ in imports(TREES[module]) if name in TREES}


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_modules_before_it(module):
    assert module in ORDER, f"give {module} its place in the reading order"
    late = {name for name in of_package(module) if ORDER.index(name) >= ORDER.index(module)}
    assert not late, f"{module} imports {late}, which come after it"


@pytest.mark.parametrize("module", [name for name in NO_TORCH if name in TREES])
def test_modules_that_need_no_torch_import_none_even_through_others(module):
    seen, left = set(), {module}
    while left:
        name = left.pop()
        seen.add(name)
        assert "torch" not in {top for _, top in imports(TREES[name])}, f"{module} via {name}"
        left |= of_package(name) - seen


def test_modules_that_need_no_torch_run_where_there_is_none():
    names = [f"minirler.{name}" for name in NO_TORCH if name in TREES]
    code = f"import sys; sys.modules['torch'] = None; import {', '.join(names)}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()


@pytest.mark.parametrize("module", MODULES)
def test_modules_functions_and_lines_stay_short(module):
    lines = (PACKAGE / f"{module}.py").read_text("utf-8").split("\n")
    assert len(lines) <= 301  # 300 and the empty rest after the last newline
    assert max(map(len, lines)) <= 100
    for node in ast.walk(TREES[module]):
        if isinstance(node, FUNCTIONS):
            length = node.end_lineno - node.lineno + 1
            assert length <= 50, f"{module}.{node.name} has {length} lines"


def test_the_package_stays_readable_in_a_day():
    assert sum(len(path.read_text("utf-8").split("\n")) - 1 for path in FILES) <= 11_500


def test_the_kernels_stay_small():
    # each of them twice, C++ and CUDA, attention with its backward pass
    sources = [path.read_text("utf-8").split("\n") for path in (ROOT / "csrc").iterdir()]
    assert sum(len(lines) - 1 for lines in sources) <= 1900
    assert max(len(line) for lines in sources for line in lines) <= 100


def test_functions_are_short_by_the_median():
    lengths = sorted(
        node.end_lineno - node.lineno + 1
        for tree in TREES.values() for node in ast.walk(tree) if isinstance(node, FUNCTIONS)
    )  # fmt: skip
    assert lengths[len(lengths) // 2] < 15


@pytest.mark.parametrize("module", MODULES)
def test_imports_stand_at_the_top_but_for_optional_extras(module):
    for node in ast.walk(TREES[module]):
        if isinstance(node, FUNCTIONS):
            inside = {top for _, top in imports(node)}
            assert inside <= EXTRAS, f"{module}.{node.name} imports {inside - EXTRAS}"


@pytest.mark.parametrize("module", MODULES)
def test_modules_and_what_they_offer_are_documented(module):
    tree = TREES[module]
    assert ast.get_docstring(tree), f"{module} has no docstring"
    for node in tree.body:
        public = isinstance(node, (*FUNCTIONS, ast.ClassDef)) and not node.name.startswith("_")
        assert not public or ast.get_docstring(node), f"{module}.{node.name} has no docstring"


def test_inheritance_is_one_deep_and_only_from_the_outside():
    ours = {node.name: {ast.unparse(base) for base in node.bases}
            for tree in TREES.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    for name, bases in ours.items():
        for base in bases & set(ours):
            assert not ours[base] & set(ours), f"{name} inherits twice over"


MACHINE = re.compile(r"/(?:home|root|Users|mnt|work|opt|tmp)/\w")
MARKS = re.compile(r"\b(?:TODO|FIXME|XXX|NotImplementedError)\b")


def ours():
    """Every text file of the project."""
    for pattern in ("minirler/*.py", "minirler/prompts/*.txt", "tests/*.py", "bench/*.py",
                    "configs/*.toml", "*.md", "*.toml", "Makefile", ".ci/run"):
        yield from ROOT.glob(pattern)


def test_no_file_names_a_path_of_one_machine_or_is_left_unfinished():
    for path in ours():
        if path.name != "test_structure.py":
            text = path.read_text("utf-8")
            assert not MACHINE.findall(text), f"{path}: {MACHINE.findall(text)}"
            assert not MARKS.findall(text), f"{path}: {MARKS.findall(text)}"


def test_prompts_and_assets_are_in_the_package_where_it_is_installed():
    installed = Path(minirler.__file__).parent
    assert list((installed / "prompts").glob("*.txt"))
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        assert (installed / "assets" / "almanac" / name).is_file(), name
    assert (ROOT / "configs" / "almanac.toml").is_file()


def test_what_the_package_ships_stays_small():
    sizes = [path.stat().st_size for path in (PACKAGE / "assets").rglob("*") if path.is_file()]
    assert sum(sizes) <= 5_000_000
