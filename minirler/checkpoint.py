"""Checkpoints: everything or nothing, and append-only logs cut back to where a checkpoint stands.

    runs/x/checkpoints/step_000120/   model/  optimizer.safetensors  state.json  COMPLETE

A folder is written under a temporary name; every file is forced to the disk; COMPLETE, which lists
the files with their sizes and hashes, comes last; then the folder gets its name; older ones go
after that. So a kill at any point leaves the checkpoints that were there. `load_latest` believes
folders alone: no pointer file says which is the newest.

Not here: what is in the state (`train` collects it), how a model is written (`weights`), sharding.
"""

import hashlib
import json
import os
import random
import re
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

MARK = "COMPLETE"
TEMPORARY = ".tmp"  # suffix of folders that are being written or deleted
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
    optimizer: dict[str, Tensor]  # for `load_optimizer`


def save(
    run_dir: str | Path, step: int, *, write_model: Callable[[Path], None],
    optimizer: dict[str, Tensor], state: dict, keep: int,
) -> Path:  # fmt: skip
    """Write checkpoint `step` of a run and delete all but the newest `keep`; returns its folder.

    write_model(folder) fills an HF folder; `optimizer` comes from `optimizer_state`; `state` holds
    JSON values and at least STATE_KEYS. A complete checkpoint of this step is left as it is: the
    same step of a run is the same state. CheckpointError: the disk is full or not writable (earlier
    checkpoints are untouched, nothing is left over). ValueError: state that is no strict JSON.
    """
    folder = Path(run_dir) / "checkpoints"
    final = folder / f"step_{step:06d}"
    if keep < 1:
        raise ValueError(f"keep is {keep}: at least one checkpoint has to stay")
    text = _state_text(state | {"step": step}, final)
    if final.exists() and _fault(final) is None:
        return final
    temporary = final.with_name(final.name + TEMPORARY)
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        (temporary / "model").mkdir(parents=True)
        write_model(temporary / "model")
        safetensors.torch.save_file(optimizer, temporary / "optimizer.safetensors")
        (temporary / "state.json").write_text(text, encoding="utf-8")
        _seal(temporary)
        shutil.rmtree(final, ignore_errors=True)  # a damaged one of the same step
        os.rename(temporary, final)
        _fsync(folder)
        _fsync(folder.parent)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(_not_saved(final, error)) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
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
            tensors = safetensors.torch.load_file(path / "optimizer.safetensors")
            return Checkpoint(path, step, _checked(state, path), tensors)
        warnings.warn(f"{path} is not complete ({fault}): passed over", stacklevel=2)
    return None


def optimizer_state(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> dict[str, Tensor]:
    """The optimiser's tensors on the CPU: "exp_avg/NAME" as the parameter NAME, "step/NAME" 0-dim.

    Empty before the first step. Not in here: learning rates, which follow from the step.
    """
    names = _parameter_names(optimizer, model)
    return {
        f"{field}/{name}": torch.as_tensor(value).detach().cpu().contiguous()
        for name, parameter in names.items()
        for field, value in optimizer.state.get(parameter, {}).items()
    }


def load_optimizer(
    optimizer: torch.optim.Optimizer, model: torch.nn.Module, tensors: dict[str, Tensor]
) -> None:
    """Put what `optimizer_state` gave into a fresh optimiser of the same parameters.

    ValueError: a parameter without moments, moments without a parameter, a wrong shape.
    """
    names, states = _parameter_names(optimizer, model), {}
    for key, tensor in tensors.items():
        field, name = key.split("/", 1)
        states.setdefault(name, {})[field] = tensor
    _check_states(states, names)
    index = {name: i for i, name in enumerate(names)}
    # Through torch's own loader: it knows what stays on the CPU and what follows the parameter.
    state = {index[name]: fields for name, fields in states.items()}
    optimizer.load_state_dict(optimizer.state_dict() | {"state": state})


def rng_state() -> dict:
    """The global random generators (Python, torch, every CUDA device) as JSON values."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    states = [torch.get_rng_state(), *cuda]  # uint8
    return {"python": random.getstate(), "torch": [tensor_bytes(s).hex() for s in states]}


def restore_rng(state: dict) -> None:
    """Go back to `rng_state`; with another number of GPUs, theirs stay as they are."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    cpu, *cuda = [torch.tensor(list(bytes.fromhex(s)), dtype=torch.uint8) for s in state["torch"]]
    torch.set_rng_state(cpu)
    if cuda and len(cuda) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(cuda)


def tensor_bytes(tensor: Tensor) -> bytes:
    """The elements as they lie in memory, for hashes; any dtype, shape and device."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


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


def _seal(folder: Path) -> None:
    """Force everything in the folder to the disk, then write the mark that lists its files."""
    listing = {}
    for path in sorted(folder.rglob("*")):
        _fsync(path)
        if path.is_file():
            name, size = path.relative_to(folder).as_posix(), path.stat().st_size
            listing[name] = {"bytes": size, "sha256": _sha256(path)}
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


def _parameter_names(optimizer, model) -> dict[str, Tensor]:
    """{name: parameter} in the optimiser's own order."""
    names = {id(p): name for name, p in model.named_parameters()}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if not all(id(p) in names for p in parameters):
        raise ValueError("the optimiser has a parameter that is not one of the model's")
    return {names[id(p)]: p for p in parameters}


def _check_states(states: dict[str, dict[str, Tensor]], names: dict[str, Tensor]) -> None:
    if surplus := sorted(states.keys() - names.keys()):
        raise ValueError(f"optimiser state of {surplus[0]}, a parameter that is not trained")
    fields = {field for entry in states.values() for field in entry}
    for name, parameter in names.items():
        entry = states.get(name, {})
        if missing := sorted(fields - entry.keys()):
            raise ValueError(f"the optimiser state of {name} has no {missing[0]}")
        for field, tensor in entry.items():
            if tensor.dim() and tensor.shape != parameter.shape:
                shapes = f"{list(tensor.shape)}, the parameter {list(parameter.shape)}"
                raise ValueError(f"optimiser state {field}/{name} is {shapes}")


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
