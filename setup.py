"""Builds minirler._C from csrc/ with ninja: C++ always, the .cu files where nvcc is found.

    pip install -e .

    MINIRLER_CUDA=0|1|auto       without CUDA; with, or fail; with where nvcc is (default)
    MINIRLER_CUDA_ARCHS=80;90    compute capabilities; newer chips compile the last one's PTX
    MINIRLER_NATIVE=require      a failed build is an error; by default it is a warning, and the
                                 operations run in plain torch
    CXX, CUDA_HOME               the compiler (GCC: the sources use its vector types), the toolkit

torch is not needed, and not looked at: the launchers take pointers.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
FLAGS = (
    "-O3 -std=c++17 -fPIC -fopenmp -fno-math-errno -fno-trapping-math "
    "-mprefer-vector-width=512 -Wall -Wextra -Wno-psabi"
)
# no contraction: z = x / temperature has to have the same bits in sampling and in log-probs
CUDA_FLAGS = "-O3 -std=c++17 -fmad=false -t 2 -Xcompiler -fPIC"
RULES = """\
rule cxx
  command = $cxx $flags -MMD -MF $out.d -c $in -o $out
  depfile = $out.d
  deps = gcc
rule cuda
  command = $nvcc -ccbin $cxx $cuda_flags -MMD -MF $out.d -c $in -o $out
  depfile = $out.d
  deps = gcc
rule link
  command = $link -o $out $in
"""


def main() -> None:
    """Everything else about the package stands in pyproject.toml."""
    sources = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").glob("*.c*"))
    setup(
        ext_modules=[Extension("minirler._C", sources, optional=True)],
        cmdclass={"build_ext": NinjaBuild},
    )


class NinjaBuild(build_ext):
    """Writes build/native/build.ninja and runs it, in place of the compiler classes."""

    def build_extension(self, ext: Extension) -> None:
        """Build `ext` into the path that setuptools wants; see the module for failures."""
        target, nvcc = Path(self.get_ext_fullpath(ext.name)).resolve(), find_nvcc()
        try:
            build(target, nvcc)
        except (OSError, ImportError, subprocess.CalledProcessError) as error:
            is_asked_for = os.environ.get("MINIRLER_CUDA") == "1"
            if is_asked_for or os.environ.get("MINIRLER_NATIVE") == "require":
                raise
            print(f"WARNING: minirler._C was not built ({error}). minirler works without it, in "
                  "plain torch, slower. With g++ (and MINIRLER_CUDA=0, if it is nvcc that fails): "
                  "pip install -e .", file=sys.stderr)  # fmt: skip


def build(target: Path, nvcc: str | None) -> None:
    """Compile and link; only what changed is compiled again."""
    import ninja  # not at the top: a metadata query has to work without it
    import pybind11

    cxx = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or "c++"
    folder = ROOT / "build" / "native"
    folder.mkdir(parents=True, exist_ok=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    includes = [pybind11.get_include(), sysconfig.get_path("include")]
    (folder / "build.ninja").write_text(ninja_file(target, cxx, nvcc, includes), "utf-8")
    subprocess.run([Path(ninja.BIN_DIR) / "ninja", "-C", folder], check=True)


def ninja_file(target: Path, cxx: str, nvcc: str | None, includes: list[str]) -> str:
    """The text of build.ninja."""
    flags = " ".join([FLAGS, *(f"-isystem {path}" for path in includes)])
    if nvcc:
        flags += " -DMINIRLER_CUDA"
    link = f"{cxx} -shared -fopenmp"
    if nvcc:
        link = f"{nvcc} -ccbin {cxx} -shared -cudart static -Xcompiler -fopenmp"
    lines = [f"cxx = {cxx}", f"nvcc = {nvcc}", f"flags = {flags}", f"link = {link}",
             f"cuda_flags = {CUDA_FLAGS} {gencodes()}", RULES]  # fmt: skip
    objects = []
    for source in sorted((ROOT / "csrc").glob("*.c*")):
        if source.suffix == ".cpp" or nvcc:
            rule = "cxx" if source.suffix == ".cpp" else "cuda"
            objects.append(f"{source.name}.o")
            lines.append(f"build {objects[-1]}: {rule} {escaped(source)}")
    return "\n".join([*lines, f"build {escaped(target)}: link {' '.join(objects)}", ""])


def escaped(path: Path) -> str:
    """A path as ninja reads it."""
    return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def gencodes() -> str:
    """nvcc's options for the architectures, and PTX of the last one for newer chips."""
    archs = os.environ.get("MINIRLER_CUDA_ARCHS", "80;90").split(";")
    codes = [f"-gencode arch=compute_{a},code=sm_{a}" for a in archs]
    return " ".join([*codes, f"-gencode arch=compute_{archs[-1]},code=compute_{archs[-1]}"])


def find_nvcc() -> str | None:
    """Path of nvcc, or None where CUDA is not wanted or not there. RuntimeError: wanted, absent."""
    wanted = os.environ.get("MINIRLER_CUDA", "auto")
    if wanted not in ("0", "1", "auto"):
        raise RuntimeError(f"MINIRLER_CUDA is {wanted!r}: use 0, 1 or auto")
    if wanted == "0":
        return None
    homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    found = shutil.which("nvcc", path=os.pathsep.join(
        [f"{home}/bin" for home in homes[:1] if home] + [os.environ.get("PATH", "")]
        + [f"{homes[1]}/bin"]))  # fmt: skip
    if wanted == "1" and not found:
        raise RuntimeError("MINIRLER_CUDA=1 but there is no nvcc: set CUDA_HOME or PATH")
    return found


main()
