"""Checkpoints: everything or nothing, and append-only logs cut back to where a checkpoint stands.

    runs/x/checkpoints/step_000120/   model/  optimizer.safetensors  state.json  COMPLETE

A folder is written under a temporary name; every file is forced to the disk; COMPLETE, which lists
the files with their sizes and hashes, comes last; then the folder gets its name; older ones go
after that. So a kill at any point leaves the checkpoints that were there. `load_latest` believes
folders alone: no pointer file says which is the newest. Of several ranks (which need a file system
that all of them see) each writes, forces and hashes its shards, and rank 0 does the rest.

    python -m minirler.checkpoint export RUN/step_000120 OUT      # an HF folder

Not here: what is in the state (`run` collects it), how a model is written (`state`).
"""

import hashlib
import json
import os
import re
import shutil
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from . import lora
from .config import DistConfig, asset_path, load_config
from .ranks import ALONE, Ranks
from .state import load_masters
from .weights import DTYPES, load_model, save_model

MARK = "COMPLETE"
TEMPORARY = ".tmp"  # suffix of folders that are being written or deleted
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json",
             "merges.txt", "added_tokens.json", "chat_template.jinja")  # fmt: skip
STATE_KEYS = {  # without these a resumed run would not go on as it was
    "buffer": "the rubric buffer",
    "data": "the data position",
    "rng": "the states of the random generators",
    "logs": "the lengths of the append-only logs",
}


class CheckpointError(OSError):
    """A checkpoint could not be written; the message is one line with the way out."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint; `path / "model"` is the HF folder of its model."""

    path: Path
    step: int
    state: dict  # what was given to `save`, with "step" added

    @property
    def optimizer(self) -> dict[str, Tensor]:
        """For `state.load_optimizer`; read anew each time. Empty where the moments are shards."""
        return safetensors.torch.load_file(self.path / "optimizer.safetensors")


def save(
    run_dir: str | Path, step: int, *, write_model: Callable[[Path], None],
    optimizer: dict[str, Tensor], state: dict, keep: int, ranks: Ranks = ALONE,
) -> Path:  # fmt: skip
    """Write checkpoint `step` of a run and delete all but the newest `keep`; returns its folder.

    write_model(folder) fills a folder; `optimizer` comes from `optimizer_state`; `state` holds JSON
    values and at least STATE_KEYS. All ranks call this, and every one's write_model is called; of
    the rest, rank 0's arguments count. A complete checkpoint of this step is left as it is: the
    same step of a run is the same state. CheckpointError: the disk is full or not writable (earlier
    checkpoints are untouched, nothing is left over). ValueError: state that is no strict JSON.
    """
    folder = Path(run_dir) / "checkpoints"
    final = folder / f"step_{step:06d}"
    if keep < 1:
        raise ValueError(f"keep is {keep}: at least one checkpoint has to stay")
    text = _state_text(state | {"step": step}, final) if ranks.is_first else ""
    if ranks.gather(ranks.is_first and final.exists() and _fault(final) is None)[0]:
        return final
    temporary = final.with_name(final.name + TEMPORARY)
    try:
        if ranks.is_first:
            shutil.rmtree(temporary, ignore_errors=True)
            (temporary / "model").mkdir(parents=True)
        ranks.barrier()
        write_model(temporary / "model")
        if ranks.is_first:
            safetensors.torch.save_file(optimizer, temporary / "optimizer.safetensors")
            (temporary / "state.json").write_text(text, encoding="utf-8")
        listings = ranks.gather(_listing(temporary, ranks))
        if ranks.is_first:
            _seal(temporary, {name: entry for part in listings for name, entry in part.items()})
            shutil.rmtree(final, ignore_errors=True)  # a damaged one of the same step
            os.rename(temporary, final)
            _fsync(folder)
            _fsync(folder.parent)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(_not_saved(final, error)) from error
    finally:
        if ranks.is_first:
            shutil.rmtree(temporary, ignore_errors=True)
    if ranks.is_first:
        _prune(folder, step, keep)
    return final


def load_latest(run_dir: str | Path) -> Checkpoint | None:
    """The newest complete checkpoint, by number; None where there is none.

    Warns of every newer folder that is damaged (and why) and of temporary ones, which it removes.
    Every byte is hashed. ValueError: the newest complete one lacks something of STATE_KEYS.
    """
    folder = Path(run_dir) / "checkpoints"
    for leftover in sorted(folder.glob("step_*" + TEMPORARY)):
        warnings.warn(f"{leftover} was left by a save that did not end: removed", stacklevel=2)
        shutil.rmtree(leftover)
    for step, path in reversed(_numbered(folder)):
        if (fault := _fault(path)) is None:
            state = json.loads((path / "state.json").read_text(encoding="utf-8"))
            return Checkpoint(path, step, _checked(state, path))
        warnings.warn(f"{path} is not complete ({fault}): passed over", stacklevel=2)
    return None


def export(source: str | Path, out: str | Path) -> Path:
    """Write the model of a checkpoint as an HF folder, with its tokenizer, in the run's dtype.

    `source` is RUN/checkpoints/step_N, or RUN/step_N for short. ValueError: it is none, or damaged.
    """
    path = Path(source)
    path = path if (path / MARK).exists() else path.parent / "checkpoints" / path.name
    if (fault := _fault(path)) is not None:
        raise ValueError(f"{source} is no complete checkpoint ({fault}): name RUN/step_N")
    config = load_config([str(path.parents[1] / "config.toml")])
    if config.lora.rank:  # the adapters alone are there: merged into the model that they belong to
        model = load_model(asset_path(config.model.path))
        lora.attach_(model, config.lora, config.run.seed)
        lora.load_adapter_(model, path / "model")
        lora.merge_(model)
    else:
        model = load_masters(path / "model", "float32", DistConfig(), ALONE)
    save_model(model.to(DTYPES[config.model.dtype]), out)
    for name in TOKENIZER:
        if (file := asset_path(config.model.path) / name).exists():
            shutil.copy(file, out)
    return Path(out)


def log_offset(path: str | Path) -> int:
    """Bytes of an append-only file (0: there is none), which is forced to the disk first.

    To be taken after the writer has flushed: a checkpoint must not point beyond a power cut.
    """
    if not Path(path).exists():
        return 0
    _fsync(Path(path))
    return Path(path).stat().st_size


def truncate_log(path: str | Path, offset: int) -> None:
    """Cut an append-only file back to `offset` bytes, where a checkpoint stands.

    ValueError: the file is shorter, so that lines which the checkpoint knows are lost.
    """
    path = Path(path)
    size = path.stat().st_size if path.exists() else 0
    if size < offset:
        raise ValueError(f"{path} has {size} bytes, its checkpoint {offset}: restore the file")
    if size > offset:
        with open(path, "r+b") as file:
            file.truncate(offset)
            os.fsync(file.fileno())


def _listing(folder: Path, ranks: Ranks) -> dict[str, dict]:
    """Size and hash of every file that this rank wrote, which it forces to the disk."""
    listing = {}
    for path in sorted(folder.rglob("*")):
        shard = re.fullmatch(r"__(\d+)_\d+\.distcp", path.name)
        if ranks.rank != (int(shard[1]) if shard else 0):
            continue
        _fsync(path)
        if path.is_file():
            name, size = path.relative_to(folder).as_posix(), path.stat().st_size
            listing[name] = {"bytes": size, "sha256": _sha256(path)}
    return listing


def _seal(folder: Path, listing: dict[str, dict]) -> None:
    """Write the mark that lists the folder's files."""
    (folder / MARK).write_text(json.dumps({"files": listing}, indent=1), encoding="utf-8")
    _fsync(folder / MARK)
    _fsync(folder)


def _fault(folder: Path) -> str | None:
    """Why the folder is not a complete checkpoint; None if it is."""
    try:
        listing = json.loads((folder / MARK).read_text(encoding="utf-8"))["files"]
    except FileNotFoundError:
        return f"no {MARK}"
    except (ValueError, KeyError, OSError):
        return f"{MARK} is unreadable"
    for name, expected in listing.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != expected["bytes"]:
            return f"{name} has {path.stat().st_size} bytes instead of {expected['bytes']}"
        if _sha256(path) != expected["sha256"]:
            return f"{name} was altered"
    return None


def _prune(folder: Path, step: int, keep: int) -> None:
    """Delete all but the newest keep - 1 of the marked checkpoints before `step`.

    Later ones do not count: a run that went back because of damage must keep what it has.
    """
    older = [path for n, path in _numbered(folder) if n < step and (path / MARK).exists()]
    for path in older[: max(len(older) - (keep - 1), 0)]:
        doomed = path.with_name(path.name + TEMPORARY)  # so a kill leaves a known leftover
        os.rename(path, doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def _numbered(folder: Path) -> list[tuple[int, Path]]:
    """(step, folder) by number: as text, step_9 would come after step_10."""
    found = [(re.fullmatch(r"step_(\d+)", p.name), p) for p in folder.glob("step_*") if p.is_dir()]
    return sorted((int(match[1]), path) for match, path in found if match)


def _state_text(state: dict, path: Path) -> str:
    parts = []
    for key, value in _checked(state, path).items():
        try:
            parts.append(f"{json.dumps(key)}: {json.dumps(value, allow_nan=False)}")
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: state {key!r} is no strict JSON: {error}") from error
    return "{" + ",\n".join(parts) + "}\n"


def _checked(state: dict, path: Path) -> dict:
    for key, meaning in STATE_KEYS.items():
        if key not in state:
            raise ValueError(
                f"{path}/state.json has no {key!r} ({meaning}), so the run cannot go on as it was: "
                "start a new run.dir with this checkpoint's model as model.path"
            )
    return state


def _not_saved(final: Path, error: Exception) -> str:
    kept = ["none", *(p.name for _, p in _numbered(final.parent) if (p / MARK).exists())]
    say = f"the last usable one is {kept[-1]}; make room there, then resume"
    return f"{final} was not saved ({error}); {say}"


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fsync(path: Path) -> None:
    """Force a file or a folder's entries to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    argv = sys.argv[1:] if argv is None else argv
    if len(argv) != 3 or argv[0] != "export":
        print("usage: python -m minirler.checkpoint export RUN/step_N OUT", file=sys.stderr)
        return 2
    try:
        print(f"wrote {export(*argv[1:])}")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
