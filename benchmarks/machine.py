"""What this machine can do by itself: loops that share no code with the engine (peak.c)."""

from __future__ import annotations

import ctypes as c
import functools
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from rksc.calibration.runner import processor

ROOT = Path(__file__).resolve().parent.parent
READ_BYTES = 1 << 30  # larger than most caches


@dataclass(frozen=True)
class Rates:
    """Of n threads together, each the best of several loops: operations per second (a multiply
    and an add are two) of float32 multiply-adds, bf16 dot products and AMX tiles, 0 where the CPU
    has none; bytes read per second, again and again, from an area of a given size."""

    fma: float
    bf16: float
    amx: float
    read: float

    def products(self, isa: str, dtype: str) -> float:
        """The rate of matrix products in `dtype` with an instruction set of rksc's."""
        if dtype == "bfloat16" and isa in ("amx", "avx512_bf16"):
            return self.amx if isa == "amx" else self.bf16
        return self.fma


@functools.cache
def _library() -> c.CDLL:
    target = ROOT / "build" / "native" / "peak.so"
    target.parent.mkdir(parents=True, exist_ok=True)
    flags = ["-O3", "-march=native", "-shared", "-fPIC", "-pthread"]
    source = str(ROOT / "benchmarks" / "peak.c")
    subprocess.run(["cc", *flags, source, "-o", str(target)], check=True)
    lib = c.CDLL(str(target))
    for name in ("peak_fma", "peak_bf16", "peak_amx", "peak_read"):
        getattr(lib, name).restype = c.c_double
    lib.peak_read.argtypes = [c.c_int, c.c_size_t]
    return lib


def measure(n_threads: int, read_bytes: int = READ_BYTES) -> Rates:
    """A few seconds; compiles peak.c the first time.

    read_bytes: what is read again and again, such as the weights of a model: where it fits
    into a cache, the cache is what limits the reader.
    """
    lib = _library()
    return Rates(
        fma=lib.peak_fma(n_threads),
        bf16=lib.peak_bf16(n_threads),
        amx=lib.peak_amx(n_threads),
        read=lib.peak_read(n_threads, read_bytes),
    )


def describe() -> str:
    """One line: processor, cores that this process may use, memory."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{processor()}, {len(os.sched_getaffinity(0))} cores, {memory:.0f} GiB"
