"""The compiled kernels, `minirler._C`, by device; this file alone calls them.

They take addresses and sizes and check nothing (`csrc/kernels.h`); whoever calls `launch` has
checked devices, dtypes, shapes and ranges. Where `_C` is not built, or MINIRLER_OPS=torch, there
are none, and operations run in plain torch (`ops_ref`).
"""

import os
import warnings

import torch
from torch import Tensor

try:
    from . import _C  # after torch: both then share one pool of OpenMP threads
except ImportError as error:
    _C, MISSING = None, str(error)

DTYPES = {torch.float32: 0, torch.bfloat16: 1}  # as the kernels number them
NAMES = (
    "logprob", "logprob_backward", "group_advantages", "sample", "kv_write", "kv_copy",
    "paged_attention", "packed_attention", "packed_attention_backward",
)  # fmt: skip


def load() -> dict:
    """Device type -> name -> launcher; warns where nothing is built."""
    choice = os.environ.get("MINIRLER_OPS", "")
    if choice not in ("", "torch"):
        raise ValueError(f"MINIRLER_OPS is {choice!r}: set it to torch, or not at all")
    if choice == "torch":
        return {}
    if _C is None:
        warnings.warn(
            f"the kernels are not built ({MISSING}): operations run in plain torch, slower. To "
            "build them: pip install -e . (it needs g++)",
            stacklevel=2,
        )
        return {}
    devices = [device for device in ("cpu", "cuda") if hasattr(_C, f"sample_{device}")]
    return {d: {name: getattr(_C, f"{name}_{d}") for name in NAMES} for d in devices}


NATIVE = load()


def is_native(*tensors: Tensor) -> bool:
    """Whether kernels can take these tensors: one device, one dtype, both known."""
    device, dtype = tensors[0].device, tensors[0].dtype
    return (
        device.type in NATIVE
        and dtype in DTYPES
        and all(x.device == device and x.dtype == dtype for x in tensors)
    )


def launch(name: str, device: torch.device, *arguments) -> None:
    """Call a kernel on the current stream. Tensors go as pointers, None as the null pointer.

    The caller keeps the tensors alive. RuntimeError: what CUDA says.
    """
    flat = [x.data_ptr() if isinstance(x, Tensor) else 0 if x is None else x for x in arguments]
    if device.type == "cuda":
        with torch.cuda.device(device):
            NATIVE["cuda"][name](*flat, torch.cuda.current_stream(device).cuda_stream)
    else:
        NATIVE[device.type][name](*flat, 0)


def backend() -> str:
    """Where operations run on this machine: "cuda", "cpu" or, without kernels, "torch"."""
    if "cuda" in NATIVE and torch.cuda.is_available():
        return "cuda"
    return "cpu" if "cpu" in NATIVE else "torch"


def in_rows(x: torch.Tensor) -> torch.Tensor:
    """x [N, V] itself where each row is contiguous, else a copy."""
    return x if x.stride(1) == 1 and x.stride(0) >= x.shape[1] else x.contiguous()


def contiguous(x: torch.Tensor | None) -> torch.Tensor | None:
    """x.contiguous(), None for None."""
    return None if x is None else x.contiguous()
