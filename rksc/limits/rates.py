"""What this machine can do by itself: loops that share no code with the engine (peak.c)."""

from __future__ import annotations

import ctypes as c
import functools
import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

READ_BYTES = 1 << 30  # larger than most caches


@dataclass(frozen=True)
class Rates:
    """Of n threads together, each the best of several loops: operations per second (a multiply
    and an add are two) of float32 multiply-adds, bf16 dot products, AMX tiles, and products of 16-
    and 8-bit integers, 0 where the CPU has none; bytes read per second, again and again, from an
    area of a given size."""

    fma: float
    bf16: float
    amx: float
    int16: float
    int8: float
    read: float

    def products(self, isa: str, arithmetic: str) -> float:
        """The rate of matrix products with an instruction set of rksc's. arithmetic: what
        activations become for them, "float32", "bfloat16", "int16" or "int8"."""
        if arithmetic in ("int16", "int8"):
            return self.int8 if arithmetic == "int8" else self.int16
        if arithmetic == "bfloat16" and isa in ("amx", "avx512_bf16"):
            return self.amx if isa == "amx" else self.bf16
        return self.fma


@functools.cache
def _library() -> c.CDLL:
    """peak.c for this very processor; OSError where there is no compiler."""
    source = Path(__file__).with_name("peak.c")
    flags = ["-O3", "-march=native", "-shared", "-fPIC", "-pthread"]
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "peak.so")
        command = [os.environ.get("CC", "cc"), *flags, str(source), "-o", str(target)]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
        except FileNotFoundError:
            raise OSError(
                f"the machine's limits are measured by loops in C, and there is no compiler "
                f"{command[0]}: install gcc or clang, or name one in CC"
            ) from None
        except subprocess.CalledProcessError as error:
            raise OSError(f"{' '.join(command)}: {error.stderr.strip()}") from None
        lib = c.CDLL(str(target))
    for name in Rates.__dataclass_fields__:
        getattr(lib, f"peak_{name}").restype = c.c_double
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
        int16=lib.peak_int16(n_threads),
        int8=lib.peak_int8(n_threads),
        read=lib.peak_read(n_threads, read_bytes),
    )
