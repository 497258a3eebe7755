"""Low-rank adapters: y = x W^T + (alpha / rank) (x A^T) B^T, with W frozen (arXiv 2106.09685).

Sampler and trainer apply them unmerged, through the same modules: merged into bfloat16 weights,
most of a small early change would be rounded away. With the adapters off the model is the one that
training began with, so the reference of the KL needs no second model. Files are PEFT's.

Not here: dropout, biases, several adapters at once, shards (one process trains them).
"""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from .config import ConfigError, LoraConfig
from .linear import Linear, linear
from .qwen3 import Qwen3

FILE, SETTINGS = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model."  # of PEFT's names


class Adapter(nn.Module):
    """A [r, d] and B [e, r] of one `Linear`, float32; B starts at 0, so that nothing changes."""

    def __init__(self, base: Linear, rank: int, alpha: float, draw: torch.Generator):
        super().__init__()
        place, bound = base.weight.device, math.sqrt(1 / base.in_features)
        a = (2 * torch.rand(rank, base.in_features, generator=draw) - 1) * bound
        self.lora_A = nn.Parameter(a.to(place))
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, rank, device=place))
        self.scale, self.is_on = alpha / rank, True

    def forward(self, x: Tensor, rows: tuple[int, ...]) -> Tensor | float:
        """x [N, d] -> what is added to the base's [N, e]; 0 while it is off."""
        if not self.is_on:
            return 0.0
        inner = linear(x, self.lora_A.to(x.dtype), rows)  # [N, r]
        return linear(inner, self.lora_B.to(x.dtype), rows) * self.scale

    def delta(self) -> Tensor:
        """What merging adds to the weight, float32 [e, d]."""
        return self.scale * (self.lora_B @ self.lora_A)


def attach_(model: Qwen3, settings: LoraConfig, seed: int) -> None:
    """Freeze the model and give its target products adapters. ConfigError: an unknown target."""
    targets = [name for part in settings.targets.split(",") if (name := part.strip())]
    found = {name.rpartition(".")[2]: 0 for name, m in model.named_modules() if is_target(m)}
    if not targets or set(targets) - found.keys():
        raise ConfigError(f"lora.targets = {settings.targets!r}: choose from {', '.join(found)}")
    model.requires_grad_(False)
    draw = torch.Generator().manual_seed(seed)
    for name, module in list(model.named_modules()):
        if is_target(module) and name.rpartition(".")[2] in targets:
            module.adapter = Adapter(module, settings.rank, settings.alpha, draw)


def is_target(module: nn.Module) -> bool:
    """Whether a module can have an adapter."""
    return isinstance(module, Linear)


def adapters(model: Qwen3) -> dict[str, Adapter]:
    """The adapters by the name of the product that they belong to."""
    return {name.removesuffix(".adapter"): module for name, module in model.named_modules()
            if isinstance(module, Adapter)}  # fmt: skip


@contextmanager
def off(model: Qwen3) -> Iterator[None]:
    """Within, the model is the one without adapters."""
    for adapter in adapters(model).values():
        adapter.is_on = False
    try:
        yield
    finally:
        for adapter in adapters(model).values():
            adapter.is_on = True


@torch.no_grad()
def merge_(model: Qwen3) -> None:
    """Add the adapters to the weights, in float32, and take them off: for export alone."""
    for name, adapter in adapters(model).items():
        base = model.get_submodule(name)
        base.weight.copy_(base.weight.float() + adapter.delta())
        base.adapter = None


def save_adapter(model: Qwen3, folder: Path, settings: LoraConfig, base: str) -> None:
    """Write PEFT's two files; `base` is the name of the model that they belong to."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"{PREFIX}{name}.{part}.weight": getattr(adapter, part).detach().cpu().contiguous()
               for name, adapter in adapters(model).items() for part in ("lora_A", "lora_B")}
    save_file(tensors, str(folder / FILE), metadata={"format": "pt"})
    targets = sorted({name.rpartition(".")[2] for name in adapters(model)})
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base,
              "r": settings.rank, "lora_alpha": settings.alpha, "target_modules": targets,
              "lora_dropout": 0.0, "bias": "none", "fan_in_fan_out": False,
              "inference_mode": True}  # fmt: skip
    (folder / SETTINGS).write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


@torch.no_grad()
def load_adapter_(model: Qwen3, folder: Path) -> None:
    """Fill the adapters from PEFT's file. ValueError: other names or shapes than the model has."""
    tensors = load_file(folder / FILE)
    wanted = {f"{PREFIX}{name}.{part}.weight": getattr(adapter, part)
              for name, adapter in adapters(model).items() for part in ("lora_A", "lora_B")}
    if different := sorted(tensors.keys() ^ wanted.keys()):
        raise ValueError(f"{folder / FILE} and the model differ in {different[0]}: other targets")
    for name, parameter in wanted.items():
        if parameter.shape != tensors[name].shape:
            raise ValueError(f"{folder / FILE}: {name} is {list(tensors[name].shape)}, the model "
                             f"has {list(parameter.shape)}: another lora.rank")  # fmt: skip
        parameter.copy_(tensors[name])
