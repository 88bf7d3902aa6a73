"""Build parts of csrc as a plain shared library and drive them through ctypes.

`load()` compiles everything below csrc but csrc/py; `load("cpu")` or `load("kv/kv.c", "kv/plan.c")`
compiles the named files and directories alone (error.c always comes along), so that a part can be
tested while its neighbours do not compile. Libraries live in build/native and are rebuilt when a
source, a header or a flag changes. CC chooses the compiler, RKSC_NATIVE_FLAGS adds flags
(-fsanitize=address, ...).
"""

from __future__ import annotations

import ctypes as c
import hashlib
import os
import platform
import runpy
import shlex
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self

ROOT = Path(__file__).resolve().parents[2]
SOURCE = Path(os.environ.get("RKSC_CUDA_ROOT", ROOT)) / "csrc"  # another tree: mutate.py's
BUILD = ROOT / "build" / "native"

FLAGS = [
    *("-std=c11", "-O3", "-g", "-fPIC", "-pthread", "-fvisibility=default"),
    *("-Wall", "-Wextra", "-Werror", "-ffp-contract=off", "-D_GNU_SOURCE"),
    runpy.run_path(str(SOURCE / "abi.py"))["flag"](SOURCE),
]
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c"]
ISA_FLAGS = {
    "kernels_avx2.c": ["-mavx2", "-mfma", "-mf16c"],
    "kernels_avx512.c": AVX512,
    "int16_avx2.c": ["-mavx2", "-mfma", "-mf16c"],
    "int16_avxvnni.c": ["-mavx2", "-mfma", "-mf16c", "-mavxvnni"],
    "int16_avx512vnni.c": [*AVX512, "-mavx512vnni"],
    "int8_avx2.c": ["-mavx2", "-mfma", "-mf16c"],
    "int8_avxvnni.c": ["-mavx2", "-mfma", "-mf16c", "-mavxvnni"],
    "int8_avx512vnni.c": [*AVX512, "-mavx512vnni"],
    "kernels_avx512_bf16.c": [*AVX512, "-mavx512bf16"],
    "kernels_amx.c": [*AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"],
}

# ---- building --------------------------------------------------------------------------------


def sources(*parts: str) -> list[Path]:
    """The .c files of the named parts of csrc (files or directories), sorted, once each."""
    found = {SOURCE / "error.c"}
    for part in parts or (".",):
        path = (SOURCE / part).resolve()
        found.update(_plain(path) if path.is_dir() else [path])
    return sorted(found)


def _plain(folder: Path) -> list[Path]:
    """The .c files below it that need neither Python nor CUDA."""
    parts = {"py", "cuda"}
    return [p for p in folder.rglob("*.c") if not parts & set(p.relative_to(SOURCE).parts)]


def _flags(source: Path) -> list[str]:
    isa = ISA_FLAGS.get(source.name, []) if platform.machine() in ("x86_64", "AMD64") else []
    return [*FLAGS, *isa, *shlex.split(os.environ.get("RKSC_NATIVE_FLAGS", ""))]


def _object(compiler: list[str], source: Path, headers: bytes, extra: list[str]) -> Path:
    """Compile one file; the name of the object is a hash of all that goes into it."""
    flags = [*_flags(source), *extra]
    key = hashlib.sha256(headers + source.read_bytes())
    key.update("\0".join([*compiler, *flags, str(source)]).encode())
    target = BUILD / f"{source.stem}-{key.hexdigest()[:16]}.o"
    if not target.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        part = target.with_suffix(f".{os.getpid()}.part")
        command = [*compiler, *flags, "-I", str(SOURCE), "-c", str(source), "-o", str(part)]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
        if done.returncode:
            raise RuntimeError(f"{shlex.join(command)}\n{done.stderr}")
        part.replace(target)
    return target


def objects(sources: list[Path], *extra: str) -> list[Path]:
    """The object of each .c file, compiled with these flags, too; RuntimeError with the compiler's
    text."""
    compiler = shlex.split(os.environ.get("CC", "cc"))
    headers = b"".join(p.read_bytes() for p in sorted(SOURCE.rglob("*.h")))
    return [_object(compiler, source, headers, list(extra)) for source in sources]


def build(*parts: str) -> Path:
    """Path of a library of the named parts of csrc; RuntimeError with the compiler's text."""
    compiler = shlex.split(os.environ.get("CC", "cc"))
    made = objects(sources(*parts))
    key = hashlib.sha256("\0".join(map(str, made)).encode()).hexdigest()[:16]
    library = BUILD / f"librksc_test-{key}.so"
    if not library.exists():
        part = library.with_suffix(f".{os.getpid()}.part")
        extra = shlex.split(os.environ.get("RKSC_NATIVE_FLAGS", ""))
        command = [*compiler, "-shared", "-pthread", *extra, *map(str, made), "-lm"]
        done = subprocess.run(
            [*command, "-o", str(part)], check=False, capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(f"{shlex.join(command)}\n{done.stderr}")
        part.replace(library)
    return library


@cache
def load(*parts: str) -> c.CDLL:
    """The library of `build(*parts)`, opened once per process."""
    return c.CDLL(str(build(*parts)))


# ---- rksc.h ----------------------------------------------------------------------------------

RK_F32, RK_F16, RK_BF16 = 0, 1, 2
RK_ROUND_ACT, RK_ROUND_INT16, RK_ROUND_INT8 = 0, 1, 2
RK_TILE, RK_CHUNK_ROWS = 256, 32
STATUS = ("OK", "EVALUE", "ETYPE", "EBUFFER", "ENOMEM", "ECAPACITY", "ESTATE", "EINTERRUPTED")
RK_OK, RK_EVALUE, RK_ETYPE, RK_EBUFFER, RK_ENOMEM, RK_ECAPACITY, RK_ESTATE, RK_EINTERRUPTED = range(
    len(STATUS)
)


class Error(c.Structure):
    """rk_error"""

    _fields_ = [("status", c.c_int), ("text", c.c_char * 512)]


class Matrix(c.Structure):
    """rk_matrix"""

    _fields_ = [
        ("data", c.c_void_p),
        ("bias", c.c_void_p),
        ("type", c.c_int),
        ("rows", c.c_int32),
        ("cols", c.c_int32),
    ]


class Config(c.Structure):
    """rk_config"""

    _fields_ = [
        *((name, c.c_int32) for name in ("n_layers", "width", "ffn_width")),
        *((name, c.c_int32) for name in ("n_heads", "n_kv_heads", "head_dim")),
        *((name, c.c_int32) for name in ("vocab_size", "max_positions")),
        ("norm_eps", c.c_float),
        ("rope_interleaved", c.c_bool),
        ("window", c.c_int32),
        ("window_from", c.c_int32),
        ("inv_freq", c.c_void_p),
    ]


class Layer(c.Structure):
    """rk_layer"""

    _fields_ = [
        ("attention_norm", c.c_void_p),
        *((name, Matrix) for name in ("query", "key", "value", "output")),
        ("ffn_norm", c.c_void_p),
        *((name, Matrix) for name in ("gate", "up", "down")),
    ]


class Model(c.Structure):
    """rk_model"""

    _fields_ = [
        ("config", Config),
        ("compute", c.c_int),
        ("embedding", Matrix),
        ("head", Matrix),
        ("norm", c.c_void_p),
        ("layers", c.POINTER(Layer)),
    ]


# ---- backend.h -------------------------------------------------------------------------------


class Segment(c.Structure):
    """rk_segment"""

    _fields_ = [
        *((name, c.c_int32) for name in ("key_begin", "key_end", "row_begin", "row_end")),
        ("blocks", c.c_void_p),
    ]


class Chunk(c.Structure):
    """rk_chunk"""

    _fields_ = [
        (name, c.c_int32) for name in ("row_begin", "row_end", "segment_begin", "segment_end")
    ]


class Batch(c.Structure):
    """rk_batch"""

    _fields_ = [
        ("n_rows", c.c_int32),
        ("tokens", c.c_void_p),
        ("positions", c.c_void_p),
        ("slots", c.c_void_p),
        ("n_chunks", c.c_int32),
        ("chunks", c.POINTER(Chunk)),
        ("n_segments", c.c_int32),
        ("segments", c.POINTER(Segment)),
        ("roomy", c.c_bool),
    ]


class Draw(c.Structure):
    """rk_draw"""

    _fields_ = [
        *((name, c.c_float) for name in ("temperature", "top_p", "min_p")),
        ("top_k", c.c_int32),
        ("forced", c.c_int32),
        ("seed", c.c_uint64),
        ("stream", c.c_uint64),
        ("position", c.c_int64),
    ]


class Pick(c.Structure):
    """rk_pick"""

    _fields_ = [
        ("token", c.c_int32),
        ("top", c.c_int32),
        *((name, c.c_float) for name in ("logprob", "top_prob", "entropy", "top_logprob")),
    ]


class Extent(c.Structure):
    """rk_extent"""

    _fields_ = [
        ("compute", c.c_int),
        ("kv_type", c.c_int),
        ("block_tokens", c.c_int32),
        ("n_blocks", c.c_int64),
        ("max_rows", c.c_int32),
        ("max_outputs", c.c_int32),
        ("rounding", c.c_int),
    ]


_P, _I, _N = c.c_void_p, c.c_int32, c.c_size_t


def _op(result: Any, *arguments: Any) -> Any:
    return c.CFUNCTYPE(result, c.c_void_p, *arguments)


class Ops(c.Structure):
    """rk_ops"""

    _fields_ = [
        ("alloc", _op(_P, _N)),
        ("free", _op(None, _P)),
        ("upload", _op(None, _P, _P, _N)),
        ("download", _op(None, _P, _P, _N)),
        ("destroy", _op(None)),
        ("check", _op(c.c_int, c.POINTER(Error))),
        ("holds", _op(c.c_bool, _P)),
        ("lend", _op(c.c_int, _P, _P, _N, _P)),
        ("kv_copy", _op(None, _I, _I)),
        ("kv_fill", _op(None, _I, c.c_uint8)),
        ("begin", _op(None, c.POINTER(Batch))),
        ("embed", _op(None, _P, c.POINTER(Matrix))),
        ("norm", _op(None, _P, _P, _P, _I)),
        ("qkv", _op(None, _P, _P, c.POINTER(Layer), _I)),
        ("attention", _op(None, _P, _P, _I)),
        ("linear", _op(None, _P, _P, c.POINTER(Matrix), _I, c.c_bool)),
        ("swiglu", _op(None, _P, _P, c.POINTER(Matrix), c.POINTER(Matrix), _I)),
        ("gather", _op(None, _P, _P, _P, _I, _I)),
        ("pick", _op(None, _P, _P, c.POINTER(Draw), _I)),
        ("answer", _op(None, _P, _P, _P, c.POINTER(Matrix), _P, _I, _I)),
        ("mean", _op(None, _P, _P, _P, _I, c.c_int64)),
        ("cosine", _op(None, _P, _P, _P, _P, _I)),
    ]


class DeviceHead(c.Structure):
    """rk_device: every device begins with its table."""

    _fields_ = [("ops", c.POINTER(Ops)), ("input", c.c_int), ("query", c.c_int)]


class IntegerProduct(c.Structure):
    """cpu_integer_product"""

    _fields_ = [
        ("out", c.c_void_p),
        ("out_stride", c.c_int64),
        ("a", c.c_void_p),
        ("w", c.c_void_p),
        ("row_bytes", c.c_int64),
        ("type", c.c_int),
        ("bias", c.c_void_p),
        *((name, c.c_int32) for name in ("m", "n", "k")),
        ("accumulate", c.c_bool),
        ("scratch", c.c_void_p),
    ]


class Int16Kernels(c.Structure):
    """cpu_int16_kernels"""

    _fields_ = [
        ("quantize", c.CFUNCTYPE(None, c.c_void_p, c.c_void_p, c.c_int32)),
        ("product", c.CFUNCTYPE(None, c.POINTER(IntegerProduct))),
        ("scratch_bytes", c.c_size_t),
    ]


INT16_BLOCK = 256, 768
"""Values and bytes of a cpu_int16_block."""


ISAS = ("portable", "avx2", "avx512", "avx512_bf16", "amx")


def isas(library: c.CDLL) -> list[int]:
    """The instruction sets (rk_isa) that this machine has."""
    return [i for i in range(len(ISAS)) if bool(library.rk_isa_supported(i) & 1)]


class Device:
    """A CPU device and its ops: `device.norm(out, x, weight, n)` calls ops->norm(dev, ...)."""

    def __init__(
        self, library: c.CDLL, config: Config, extent: Extent, isa: int, n_threads: int = 1
    ) -> None:
        self._memory = c.c_void_p()
        error = Error()
        status = library.rk_cpu_create(
            c.byref(self._memory), c.byref(config), c.byref(extent), isa, n_threads, c.byref(error)
        )
        if status != RK_OK:
            raise RuntimeError(f"{STATUS[status]}: {error.text.decode()}")
        head = c.cast(self._memory, c.POINTER(DeviceHead)).contents
        self._ops = head.ops.contents
        self.config, self.extent = config, extent

    def __getattr__(self, name: str) -> Callable[..., Any]:
        op = getattr(self._ops, name)
        return lambda *arguments: op(self._memory, *arguments)

    def close(self) -> None:
        """Destroy the device, once."""
        if self._memory:
            self._ops.destroy(self._memory)
            self._memory = c.c_void_p()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
