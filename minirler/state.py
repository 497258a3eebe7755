"""What of a run a checkpoint holds as tensors: model, optimiser and random generators.

One process writes an HF folder and a file of moments. Several ranks write their shards of both,
each into files of its own (torch.distributed.checkpoint); any other number of ranks reads them, one
process too. Not here: that a checkpoint is whole or not there at all (`checkpoint`).
"""

import random
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor

from .config import DistConfig
from .dist import empty_model, like, put_
from .qwen3 import Qwen3
from .ranks import Ranks
from .weights import fill_from_, load_model, save_config, save_model


def write_model(folder: Path, model: Qwen3, optimizer: torch.optim.Optimizer, ranks: Ranks) -> None:
    """Write the model to a folder that exists; of several ranks the moments too. A collective.

    One process: an HF folder. Several: shards and config.json.
    """
    if ranks.size == 1:
        return save_model(model, folder)
    if ranks.is_first:
        save_config(model, folder)
    moments = {
        f"optimizer/{field}/{name}": torch.as_tensor(value)
        for name, parameter in _parameter_names(optimizer, model).items()
        for field, value in optimizer.state.get(parameter, {}).items()
    }
    tensors = {f"model/{name}": tensor for name, tensor in model.state_dict().items()}
    dcp.save(tensors | moments, checkpoint_id=folder)


def is_sharded(folder: Path) -> bool:
    """Did several ranks write this model?"""
    return (folder / ".metadata").exists()


def load_masters(folder: Path, compute: str, settings: DistConfig, ranks: Ranks) -> Qwen3:
    """The float32 model (of several ranks: this one's shards) in an HF folder or in shards."""
    if ranks.size == 1 and not is_sharded(folder):
        # Not by copying: how memory is aligned decides the last bit of some products of matrices.
        return load_model(folder, device="cpu" if settings.offload else ranks.device)
    model = empty_model(folder, "float32", compute, settings, ranks)
    if is_sharded(folder):
        _load(folder, {f"model/{name}": tensor for name, tensor in model.state_dict().items()})
    else:
        fill_from_(model, folder, put_)
    return model


def read_moments_(path: Path, model: Qwen3, optimizer: torch.optim.Optimizer) -> None:
    """Fill a fresh optimiser from the checkpoint `path`, whoever wrote it."""
    folder = path / "model"
    if not is_sharded(folder):
        return load_optimizer(optimizer, model, load_file(path / "optimizer.safetensors"))
    known = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    parameters, moments = dict(model.named_parameters()), {}
    for key, entry in known.items():
        if key.startswith("optimizer/"):
            parameter = parameters[key.split("/", 2)[2]]
            moments[key] = torch.zeros_like(parameter) if entry.size else torch.zeros(())
    _load(folder, moments)
    tensors = {key.removeprefix("optimizer/"): tensor for key, tensor in moments.items()}
    load_optimizer(optimizer, model, tensors)


def _load(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Fill tensors in place; without a process group this process reads all of it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as it is meant to be
        dcp.load(tensors, checkpoint_id=folder, no_dist=not torch.distributed.is_initialized())


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
    for name, fields in states.items():
        states[name] = {field: like(tensor, names[name]) for field, tensor in fields.items()}
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
