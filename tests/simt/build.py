"""Builds the CUDA kernels for the emulator (`simt.h`) and offers them as `minirler._C` would.

    python tests/simt/build.py        prints the path of the library

A library is named by the hash of what it is made of, and is built once.
"""

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
CSRC = ROOT / "csrc"
# no contraction, as nvcc's -fmad=false; no unique symbols, else two loaded emulators would be one
FLAGS = (
    "-O1", "-g1", "-std=c++17", "-fPIC", "-shared", "-fno-gnu-unique", "-ffp-contract=off",
    "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-Wno-unused-variable",
)  # fmt: skip
COMPILER = os.environ.get("CXX", "g++")
# For the tests that run themselves under a sanitizer, or with kernels that were broken on purpose.
SANITIZE = os.environ.get("SIMT_SANITIZE", "")
KERNELS = Path(os.environ.get("SIMT_KERNELS", CSRC))


def kernels(folder: Path = KERNELS) -> list[Path]:
    """The CUDA sources, of the project or of a folder with changed ones."""
    return sorted(folder.glob("*.cu"))


def build(*sources: Path, sanitize: str = SANITIZE) -> Path:
    """The shared library of `sources`, with -fsanitize=`sanitize`; RuntimeError: the compiler's."""
    flags = FLAGS + ((f"-fsanitize={sanitize}", "-fno-sanitize-recover") if sanitize else ())
    output = ROOT / "build" / "simt"
    output.mkdir(parents=True, exist_ok=True)
    headers = sorted({*sources[0].parent.glob("*.h"), *CSRC.glob("*.h"), HERE / "simt.h"})
    common = [COMPILER, *flags, *(_digest(path.read_bytes()) for path in headers)]
    names = [_digest(" ".join(common).encode() + path.read_bytes()) for path in sources]
    objects = [output / f"{p.stem}-{name}.o" for p, name in zip(sources, names, strict=True)]
    compilers = [
        _start([COMPILER, *flags, f"-I{CSRC}", f"-I{HERE}", "-c", "-x", "c++", source], target)
        for source, target in zip(sources, objects, strict=True)
        if not target.exists()
    ]
    for compiler in compilers:
        _finish(*compiler)
    library = output / f"{_digest(' '.join(names).encode())}.so"
    if not library.exists():
        _finish(*_start([COMPILER, *flags, *objects], library))
    return library


def _digest(data):
    return hashlib.sha256(data).hexdigest()[:16]


def _start(command, target):
    """Start a compiler: (process, what it writes, where that belongs)."""
    own = target.with_name(f"{os.getpid()}-{target.name}")
    return subprocess.Popen([*command, "-o", own], stderr=subprocess.PIPE, text=True), own, target


def _finish(process, own, target):
    errors = process.communicate()[1]
    if process.returncode:
        raise RuntimeError(errors)
    os.replace(own, target)


def environment(sanitize: str) -> dict[str, str]:
    """The variables under which Python can load what `build` made with `sanitize`."""
    runtime = "libtsan.so" if sanitize == "thread" else "libasan.so"
    found = subprocess.run([COMPILER, f"-print-file-name={runtime}"], stdout=subprocess.PIPE,
                           text=True, check=True).stdout.strip()  # fmt: skip
    return {
        "SIMT_SANITIZE": sanitize,
        "LD_PRELOAD": found,
        "ASAN_OPTIONS": "detect_leaks=0",
        "TSAN_OPTIONS": "exitcode=66",
        "OMP_NUM_THREADS": "1",  # torch's own threads are not instrumented: false reports
    }


class Logits(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p), ("dtype", ctypes.c_int), ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64), ("stride", ctypes.c_int64), ("num_valid", ctypes.c_int64),
        ("temperature", ctypes.c_float),
    ]  # fmt: skip


class Cache(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p), ("dtype", ctypes.c_int), ("blocks", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64), ("block_size", ctypes.c_int64), ("head_dim", ctypes.c_int64),
    ]  # fmt: skip


class Rows(ctypes.Structure):
    _fields_ = [
        ("rows", ctypes.c_int64), ("queries", ctypes.c_int64), ("cu_seqlens", ctypes.c_void_p),
        ("lengths", ctypes.c_void_p), ("tables", ctypes.c_void_p),
        ("table_stride", ctypes.c_int64), ("max_length", ctypes.c_int64),
    ]  # fmt: skip


P, I32, I64 = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64  # noqa: E741
F32, F64 = ctypes.c_float, ctypes.c_double
SIZES = (I32, P, I64, I64, I64, I64, I64, F32)  # of packed attention
SIGNATURES = {  # as in kernels.h
    "logprob": (Logits, P, P, P, P, P, P),
    "logprob_backward": (Logits, P, P, P, P, P, I64, P),
    "group_advantages": (P, P, P, I64, I32, F64, F64, P, P),
    "sample": (Logits, P, P, P, P, P, P, P),
    "kv_write": (Cache, P, P, P, I64, P),
    "kv_copy": (Cache, P, P, I64, P),
    "paged_attention": (P, Cache, Rows, I64, F32, P, P, I64, P),
    "packed_attention": (P, P, P, *SIZES, P, P, P),
    "packed_attention_backward": (P, P, P, P, P, P, *SIZES, P, P, P, P, P),
}


@functools.cache
def launchers() -> dict | None:
    """The launchers by name; None without a compiler.

    They take the arguments of kernels.h, structs field by field, pointers as integers. RuntimeError
    where the emulator finds an error.
    """
    if shutil.which(COMPILER) is None:
        return None
    emulator = ctypes.CDLL(str(build(*kernels())))
    emulator.simt_error.restype = ctypes.c_char_p
    return {
        name: _launcher(emulator, getattr(emulator, f"{name}_cuda"), types)
        for name, types in SIGNATURES.items()
        if hasattr(emulator, f"{name}_cuda")
    }


def _launcher(emulator, function, types):
    function.argtypes = types

    def launch(*flat):
        left = list(flat)
        arguments = []
        for kind in types:
            count = len(kind._fields_) if issubclass(kind, ctypes.Structure) else 1
            taken, left = left[:count], left[count:]
            arguments.append(kind(*taken) if issubclass(kind, ctypes.Structure) else taken[0])
        if left:
            raise TypeError(f"{function.__name__}: {len(left)} arguments too many")
        status = function(*arguments)
        if status:
            raise RuntimeError(f"status {status}: {emulator.simt_error().decode()}")

    return launch


if __name__ == "__main__":
    print(build(*kernels()))
