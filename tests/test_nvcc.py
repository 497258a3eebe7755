"""The kernels as nvcc compiles them: no spills, and the registers that they were planned for."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from minirler import kernels

SOURCES = sorted((Path(__file__).parent.parent / "csrc").glob("*.cu"))
ARCHS = ("sm_80", "sm_90")
NVCC = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
# Registers a thread, by the blocks that are to fit a multiprocessor at once: of 512 threads (a row)
# 2 with 64, 3 with 40; of 128 threads (attention) 2 with 255, 3 with 168, 4 with 128.
CAPS = {
    "logprob_kernel": 40,
    "logprob_backward_kernel": 48,
    "sample_kernel": 64,
    "group_advantages_kernel": 48,
    "kv_write_kernel": 40,
    "kv_copy_kernel": 40,
    "fold_kernel": 48,
    "grad_q_kernel": 80,
    "grad_kv_kernel": 96,
    "attention_kernel of 1": 128,
    "attention_kernel of 2": 128,
    "attention_kernel of 4": 168,
    "attention_kernel of 8": 255,
}
KERNEL = re.compile(r"_Z\d+([a-z_]+_kernel)(?:I.*Li(\d)EE)?")
REPORT = re.compile(
    r"Compiling entry function '(\w+)' for '(\w+)'.*?(\d+) bytes spill stores.*?Used (\d+) reg",
    re.S,
)


def compile_verbosely(source, target):
    """What ptxas says about every kernel: [(name, arch, bytes spilled, registers)]."""
    codes = [f"-gencode=arch=compute_{a[3:]},code={a}" for a in ARCHS]
    command = [NVCC, "-O3", "-std=c++17", "-fmad=false", "-Xptxas", "-v,-warn-spills", *codes]
    process = subprocess.run([*command, "-c", source, "-o", target], stdout=subprocess.PIPE,
                             stderr=subprocess.STDOUT, text=True)  # fmt: skip
    assert process.returncode == 0, process.stdout
    return [(name, arch, int(spilled), int(registers))
            for name, arch, spilled, registers in REPORT.findall(process.stdout)]  # fmt: skip


@pytest.mark.long
@pytest.mark.skipif(NVCC is None, reason="no nvcc: the kernels were not compiled for a GPU")
@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_every_kernel_compiles_without_spills_in_its_registers(source, tmp_path):
    reports = compile_verbosely(source, tmp_path / "out.o")
    assert {arch for _, arch, _, _ in reports} == set(ARCHS)
    kernels = set(re.findall(r"(\w+_kernel)\(", source.read_text("utf-8")))
    assert {KERNEL.match(name)[1] for name, *_ in reports} == kernels
    wrong = []
    for name, arch, spilled, registers in reports:
        kernel, group = KERNEL.match(name).groups()
        cap = CAPS[f"{kernel} of {group}" if kernel == "attention_kernel" else kernel]
        if spilled or registers > cap:
            wrong.append((name, arch, f"{spilled} bytes spilled", f"{registers} of {cap}"))
    assert not wrong


def test_a_launch_without_a_gpu_becomes_an_exception():
    if "cuda" not in kernels.NATIVE:
        pytest.skip("the kernels are not built for CUDA")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    rows = (0, 0, 1, 1, 1, 1, 1.0)  # of null pointers, which no kernel gets to see
    for name, arguments in (
        ("logprob", (*rows, 0, 0, 0, 0, 0, 0)),
        ("group_advantages", (0, 0, 0, 1, 0, 1e-8, 1e-6, 0, 0)),
        ("packed_attention", (0, 0, 0, 0, 0, 1, 1, 1, 1, 32, 1.0, 0, 0, 0)),
    ):
        with pytest.raises(RuntimeError, match=rf"{name}_cuda: error \d+, "):
            kernels.NATIVE["cuda"][name](*arguments)
