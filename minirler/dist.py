"""The policy over several ranks: shards of its float32 masters, and whole copies to sample from.

FSDP2: every parameter is split over the ranks (HSDP: over the ranks of one of several replicas); a
layer's parameters are gathered in the compute dtype when the layer runs, and its gradients are
summed in float32 and split again. The sampler reads a copy of its own that is whole and is filled
in place after each step, one parameter at a time.

One process has the same three faces of the policy without any of this: in float32 they are one
model, and in bfloat16 the copy is what is trained and the masters take up its gradients.

    python -m minirler.dist plan CONFIG ...      is `python -m minirler.plan CONFIG ...`

Not here: the processes (`ranks`), files (`weights`, `state`). Only the CPU's half (gloo) has been
run.
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from . import plan
from .config import ConfigError, DistConfig
from .qwen3 import Qwen3
from .ranks import Ranks
from .weights import DTYPES, fill_from_, load_model, read_config


@dataclass(frozen=True)
class Policy:
    """The policy's three faces; some of them may be the same model."""

    masters: Qwen3  # float32: what the optimiser updates; shards where there are several ranks
    trained: Qwen3  # what the loss is computed with
    copy: Qwen3  # what the sampler reads: whole, in the compute dtype, at fixed addresses

    def sync_(self) -> None:
        """Fill the copy from the masters, in place: once a step, on all ranks together."""
        if self.copy is not self.masters:
            fill_(self.copy, self.masters)


def open_policy(masters: Qwen3, path: Path, dtype: str, ranks: Ranks) -> Policy:
    """The policy of these masters, computing in `dtype`; `path` is an HF folder of its shape."""
    place = next(masters.parameters()).device.type
    if ranks.size == 1 and dtype == "float32" and place == torch.device(ranks.device).type:
        return Policy(masters, masters, masters)
    copy = empty_model(path, dtype, dtype, DistConfig(), Ranks(device=ranks.device))
    fill_(copy, masters)
    if ranks.size > 1:
        return Policy(masters, masters, copy.requires_grad_(False))
    pass_gradients_(copy, masters)
    return Policy(masters, copy, copy)


def open_reference(path: Path, dtype: str, settings: DistConfig, ranks: Ranks) -> Qwen3:
    """A model that stays as it is, in shards where there are several ranks; never offloaded."""
    if ranks.size == 1:
        return load_model(path, dtype, ranks.device)
    settings = replace(settings, offload=False)
    model = empty_model(path, dtype, dtype, settings, ranks).requires_grad_(False)
    fill_from_(model, path, put_)
    return model


def empty_model(
    path: Path, dtype: str, compute: str, settings: DistConfig, ranks: Ranks
) -> Qwen3:
    """The model of an HF folder with room for its weights, or for this rank's shards, in `dtype`.

    `compute` is the dtype in which shards are gathered. ConfigError: `replicas` does not divide the
    number of ranks.
    """
    with torch.device("meta"):
        model = Qwen3(read_config(Path(path))).to(DTYPES[dtype])
    if ranks.size > 1:
        shard_(model, compute, settings, ranks)
    return model.to_empty(device="cpu" if settings.offload else ranks.device)


def shard_(model: Qwen3, compute: str, settings: DistConfig, ranks: Ranks) -> None:
    """Split every parameter over the ranks; the order (inner modules first) is FSDP's.

    Embedding and head are groups of their own, or the root would hold both while all layers run.
    A tied embedding stays gathered from the forward's start to the backward's end, as the head
    needs it too.
    """
    if ranks.size % settings.replicas:
        raise ConfigError(
            f"dist.replicas = {settings.replicas} does not divide the {ranks.size} ranks"
        )
    kind, per_replica = ranks.device.split(":")[0], ranks.size // settings.replicas
    if settings.replicas == 1:
        mesh = init_device_mesh(kind, (ranks.size,))
    else:
        shape, names = (settings.replicas, per_replica), ("replica", "shard")
        mesh = init_device_mesh(kind, shape, mesh_dim_names=names)
    how = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(DTYPES[compute], torch.float32)}
    if settings.offload and kind == "cuda":
        how["offload_policy"] = CPUOffloadPolicy()
    is_tied = model.config.tie_word_embeddings
    fully_shard(model.model.embed_tokens, reshard_after_forward=not is_tied, **how)
    for layer in model.model.layers:
        fully_shard(layer, **how)
    if not is_tied:
        fully_shard(model.lm_head, **how)
    fully_shard(model, **how)


def pass_gradients_(copy: Qwen3, masters: Qwen3) -> None:
    """Add each gradient of the copy to its master's, in float32, the moment that it is whole."""
    for parameter, master in zip(copy.parameters(), masters.parameters(), strict=True):

        def move(parameter: Tensor, master: Tensor = master) -> None:
            gradient = parameter.grad.to(master.device, master.dtype)
            master.grad = gradient if master.grad is None else master.grad.add_(gradient)
            parameter.grad = None

        parameter.register_post_accumulate_grad_hook(move)


@torch.no_grad()
def fill_(copy: Qwen3, masters: Qwen3) -> None:
    """Copy every parameter whole, in place: one parameter of extra memory, in the copy's dtype.

    A collective: all ranks walk the parameters in the same order.
    """
    targets = dict(copy.named_parameters())
    for name, parameter in masters.named_parameters():
        target = targets[name]
        target.copy_(whole(parameter.to(target.device, target.dtype)))


def whole(tensor: Tensor) -> Tensor:
    """The tensor of which every rank holds a shard; a collective. Others are whole already."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def like(tensor: Tensor, model: Tensor) -> Tensor:
    """This rank's shard of a whole tensor, split as `model` is; itself where `model` is whole."""
    if not isinstance(model, DTensor) or not tensor.dim():
        return tensor
    # None: every rank has read the whole, so nobody has to send anything.
    return distribute_tensor(tensor, model.device_mesh, model.placements, src_data_rank=None)


@torch.no_grad()
def put_(parameter: Tensor, tensor: Tensor) -> None:
    """Fill a parameter, or this rank's shard of it, with a whole tensor."""
    parameter.copy_(like(tensor, parameter))


if __name__ == "__main__":
    if sys.argv[1:2] != ["plan"]:
        sys.exit("usage: python -m minirler.dist plan CONFIG [key=value ...] [--ranks N]")
    sys.exit(plan.main(sys.argv[2:]))
