"""Reader of GGUF files, split ones too.

A GGUF is a header, key-value metadata, tensor descriptions and, aligned, the data. Nothing
is trusted: counts are weighed against the bytes that are left before anything is built,
tensors must follow each other without overlap or hole, and the data are mapped, not read.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .._core import Tensor, tensor_types
from ..scalars import as_int
from .fields import Fields
from .files import CUT_SHORT, map_file, plain, reading, shown, what_is
from .tensors import tensor_of

_SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9

_TYPES = {
    0: "F32", 1: "F16", 30: "BF16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0",
    10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K",
}  # fmt: skip

# What the `gguf` package can turn into float32 where it is installed.
_RARE = {
    16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S",
    22: "IQ2_S", 23: "IQ4_XS", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip

MAGIC = b"GGUF"
_LENGTH = struct.Struct("<Q")
_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL | re.ASCII)


@dataclass(frozen=True)
class GGUF:
    """Metadata (int, float, bool, str, list of str, or array) and tensors by name."""

    metadata: dict[str, Any]
    tensors: dict[str, Tensor]


def read_gguf(path: str | Path) -> GGUF:
    """Read a GGUF, or all shards of a split one of which `path` is any.

    ValueError names file, and key or tensor, for whatever is malformed or missing. Types
    that only the `gguf` package knows are converted to float32 here.
    """
    path = Path(path)
    first = _read_one(path)
    with reading(path):
        count = Fields(first.metadata).integer("split.count", default=1)
        paths: Iterable[Path] = [path] if count in (0, 1) else _shard_paths(path, count)
    shards: list[GGUF] = []
    tensors: dict[str, Tensor] = {}
    found: dict[str, Path] = {}
    for i, shard_path in enumerate(paths):
        with reading(shard_path):
            shards.append(first if shard_path == path else _read_shard(shard_path, count))
            if count > 1:
                _check_shard(shards[i], shards[0], i, count)
            for name, tensor in shards[i].tensors.items():
                if name in tensors:
                    raise ValueError(f"tensor {name} is also in {found[name]}")
                tensors[name], found[name] = tensor, shard_path
    with reading(path):
        keys = Fields(shards[0].metadata)
        expected = keys.integer("split.tensors.count", default=len(tensors))
        if expected != len(tensors):
            raise ValueError(
                f"the shards hold {len(tensors)} tensors, split.tensors.count says {expected}"
            )
    return GGUF(shards[0].metadata, tensors)


def _shard_paths(path: Path, count: int) -> Iterator[Path]:
    """Where all shards should be, of which `path` is one."""
    match = _SHARD.fullmatch(path.name)
    if match is None:
        raise ValueError(f"split.count is {count}, so the name must end like -00001-of-00002.gguf")
    if int(match[3]) != count or not 1 <= int(match[2]) <= count:
        raise ValueError(f"the name disagrees with split.count = {count}")
    return (path.with_name(f"{match[1]}-{i + 1:05}-of-{match[3]}.gguf") for i in range(count))


def _read_shard(path: Path, count: int) -> GGUF:
    if not path.is_file():
        raise ValueError(f"this shard is missing; the model has {count}")
    return _read_one(path)


def _check_shard(shard: GGUF, first: GGUF, i: int, count: int) -> None:
    for key, value in (("split.no", i), ("split.count", count)):
        if as_int(shard.metadata.get(key)) != value:
            raise ValueError(f"{key} is {shown(shard.metadata.get(key))}, expected {value}")
    total = first.metadata.get("split.tensors.count")
    if as_int(shard.metadata.get("split.tensors.count", total)) != as_int(total):
        raise ValueError("split.tensors.count differs from the first shard's")


class _Cursor:
    """Reads values one after another; never past the end."""

    def __init__(self, data: memoryview) -> None:
        self.data, self.at = data, 0
        self.what = "the header"  # for messages

    def fail(self, text: str) -> ValueError:
        return ValueError(f"{self.what}: {text}")

    def take(self, n: int) -> int:
        """Claim the next n bytes; returns where they start."""
        start = self.at
        if n > len(self.data) - start:
            raise self.fail(f"{n} bytes reach past the end; {CUT_SHORT}")
        self.at = start + n
        return start

    def scalar(self, code: str) -> Any:
        size = struct.calcsize("<" + code)
        return struct.unpack_from("<" + code, self.data, self.take(size))[0]

    def string(self) -> str:
        n = self.scalar("Q")
        start = self.take(n)
        try:
            return str(self.data[start : start + n], "utf-8")
        except UnicodeDecodeError:
            raise self.fail("a string is not UTF-8") from None

    def strings(self, n: int) -> list[str]:
        """`n` strings; the vocabularies are what takes time in a file, so without detours."""
        data, at, end, length = self.data, self.at, len(self.data), _LENGTH.unpack_from
        result = []
        for _ in range(n):
            if at + 8 > end:
                raise self.fail(f"strings reach past the end; {CUT_SHORT}")
            start = at + 8
            at = start + length(data, at)[0]
            if at > end:
                raise self.fail(f"strings reach past the end; {CUT_SHORT}")
            try:
                result.append(str(data[start:at], "utf-8"))
            except UnicodeDecodeError:
                raise self.fail("a string is not UTF-8") from None
        self.at = at
        return result

    def count(self, least_bytes: int) -> int:
        """A count of things that take at least so many bytes each, weighed against the rest."""
        n: int = self.scalar("Q")
        if n > (len(self.data) - self.at) // least_bytes:
            raise self.fail(f"a count of {n} cannot fit the rest of the file; {CUT_SHORT}")
        return n

    def value(self) -> Any:
        kind = self.scalar("I")
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise self.fail(f"unknown value type {kind}")
        kind = self.scalar("I")
        if kind == _STRING:
            return self.strings(self.count(8))
        if kind not in _SCALARS:
            raise self.fail(f"unknown array type {kind}")
        dtype = np.dtype(_SCALARS[kind]).newbyteorder("<")
        n = self.count(dtype.itemsize)
        start = self.take(n * dtype.itemsize)
        return np.frombuffer(self.data, dtype, n, start).copy()


def _read_one(path: Path) -> GGUF:
    with reading(path):
        return _parse(_Cursor(map_file(path)))


def _parse(cursor: _Cursor) -> GGUF:
    magic = bytes(cursor.data[cursor.take(4) : 4])
    if magic != MAGIC:
        other = what_is(bytes(cursor.data[:64]))
        raise cursor.fail(f"magic {magic!r} is not {MAGIC!r}" + (f": {other}" if other else ""))
    version = cursor.scalar("I")
    if version not in (2, 3):
        raise cursor.fail(f"version {version} is not supported (2, 3, little-endian)")
    n_tensors = cursor.count(8 + 4 + 8 + 4 + 8)
    n_keys = cursor.count(8 + 4 + 1)
    metadata: dict[str, Any] = {}
    for _ in range(n_keys):
        cursor.what = "a metadata key"
        key = cursor.string()
        cursor.what = f"key {plain(key, 100)}"
        if key in metadata:
            raise cursor.fail("appears twice")
        metadata[key] = cursor.value()
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 8 <= alignment <= 65536 or alignment.bit_count() != 1:
        raise ValueError(
            f"general.alignment {shown(alignment)} is not a power of two from 8 to 65536"
        )
    return GGUF(metadata, _read_tensors(cursor, n_tensors, alignment))


def _read_tensors(cursor: _Cursor, n_tensors: int, alignment: int) -> dict[str, Tensor]:
    spans = []
    names: set[str] = set()
    for i in range(n_tensors):
        cursor.what = f"tensor description {i}"
        name = cursor.string()
        cursor.what = f"tensor {name}"
        if name in names:
            raise cursor.fail("appears twice")
        names.add(name)
        n_dims = cursor.scalar("I")
        if not 1 <= n_dims <= 4:
            raise cursor.fail(f"{n_dims} dimensions (1 to 4 are possible)")
        shape = tuple(cursor.scalar("Q") for _ in range(n_dims))[::-1]
        kind, offset = cursor.scalar("I"), cursor.scalar("Q")
        type_name, n_bytes = _measure(cursor, kind, shape)
        if offset % alignment:
            raise cursor.fail(f"offset {offset} is not a multiple of the alignment {alignment}")
        spans.append((offset, n_bytes, name, type_name, shape))
    start = -(-cursor.at // alignment) * alignment
    body = cursor.data[min(start, len(cursor.data)) :]
    done, before = 0, "the header"
    whole = max((offset + n_bytes for offset, n_bytes, *_ in spans), default=0)
    for offset, n_bytes, name, *_ in sorted(spans):
        cursor.what = f"tensor {name}"
        if offset != -(-done // alignment) * alignment:
            kind = "overlaps with" if offset < done else "leaves a hole after"
            raise cursor.fail(f"offset {offset} {kind} {before} ({done})")
        done, before = offset + n_bytes, name
        if done > len(body):
            raise cursor.fail(
                f"its bytes {offset}..{done} reach past the end of the data at {len(body)}: the "
                f"tensors take a file of {start + whole} bytes, this one has {len(cursor.data)}; "
                f"{CUT_SHORT}"
            )
    if len(body) > -(-done // alignment) * alignment:
        raise ValueError(f"{len(body) - done} bytes after the last tensor, {before}")
    return {
        name: _tensor(name, type_name, shape, body[offset : offset + n_bytes])
        for offset, n_bytes, name, type_name, shape in spans
    }


def _measure(cursor: _Cursor, kind: int, shape: tuple[int, ...]) -> tuple[str, int]:
    """Type name and bytes of a tensor; Python's integers cannot wrap."""
    name = _TYPES.get(kind) or _RARE.get(kind)
    if name is None:
        raise cursor.fail(f"tensor type {kind} is unknown or not supported for weights")
    block, block_bytes = tensor_types.get(name) or _rare_sizes(cursor, name)
    if any(size == 0 for size in shape):
        raise cursor.fail(f"shape {shape} has a dimension of 0")
    if shape[-1] % block:
        raise cursor.fail(f"a row of {shape[-1]} is not a multiple of {name}'s block of {block}")
    elements = 1
    for size in shape:
        elements *= size
    if elements >= 2**60:
        raise cursor.fail(f"shape {shape} has too many elements")
    return name, elements // block * block_bytes


def _rare_sizes(cursor: _Cursor, name: str) -> tuple[int, int]:
    try:
        import gguf
    except ImportError:
        raise cursor.fail(f"type {name} needs the gguf package: pip install gguf") from None
    try:
        block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    except KeyError:
        raise cursor.fail(f"type {name} needs a newer gguf package") from None
    return int(block), int(block_bytes)


def _tensor(name: str, type: str, shape: tuple[int, ...], raw: memoryview) -> Tensor:
    """Converted to F32 by the gguf package where rksc has no code of its own."""
    if type in tensor_types:
        return tensor_of(name, type, shape, raw)
    import gguf

    with reading(f"tensor {name}"):
        rows = np.frombuffer(raw, np.uint8).reshape(math.prod(shape[:-1]), -1)
        values = gguf.dequantize(rows, gguf.GGMLQuantizationType[type])
    dense = memoryview(np.ascontiguousarray(values, np.float32).data).cast("B")
    return tensor_of(name, "F32", shape, dense)
