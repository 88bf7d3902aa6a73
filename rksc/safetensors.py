"""Reader of safetensors files: 8 bytes of header length, a JSON header, then the data.

Nothing in a file is trusted: every length is checked before it is used, every byte of the
data must belong to exactly one tensor, and the data are mapped, not read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .stored import Stored, map_file, read_json

_HEADER_LIMIT = 100 << 20  # the format's own
_DIMS_LIMIT = 8

_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip


def read_safetensors(path: str | Path) -> dict[str, Stored]:
    """All tensors of one file by name, in the header's order.

    ValueError, naming file and tensor, for a truncated file, a span that is not what shape
    and dtype need, overlaps, holes, trailing bytes, repeated names or a malformed header.
    """
    path = Path(path)
    data = map_file(path)
    if len(data) < 8:
        raise ValueError(f"{path}: {len(data)} bytes are no safetensors file")
    n_header = int.from_bytes(data[:8], "little")
    if n_header > min(len(data) - 8, _HEADER_LIMIT):
        raise ValueError(
            f"{path}: a header of {n_header} bytes does not fit the file of {len(data)} "
            f"(limit {_HEADER_LIMIT}); it may be truncated"
        )
    header = _parse(path, bytes(data[8 : 8 + n_header]))
    body = data[8 + n_header :]
    spans: list[tuple[int, int, str]] = []
    tensors: dict[str, Stored] = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        dtype, shape, start, end = _entry(path, name, entry)
        if end > len(body):
            raise ValueError(
                f"{path}: tensor {name}: its bytes {start}..{end} reach past the end of the "
                f"data at {len(body)}; the file may be truncated"
            )
        spans.append((start, end, name))
        tensors[name] = Stored(path, name, dtype, shape, body[start:end])
    _check_cover(path, spans, len(body))
    return tensors


def _parse(path: Path, header: bytes) -> dict[str, Any]:
    def integer(digits: str) -> int:
        if len(digits) > 20:
            raise ValueError(f"a number of {len(digits)} digits")
        return int(digits)

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in pairs:
            if key in result:
                raise ValueError(f"{key} appears twice")
            result[key] = value
        return result

    if not header.startswith(b"{"):
        raise ValueError(f"{path}: the header is no JSON object")
    try:
        parsed = json.loads(header.decode(), parse_int=integer, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: malformed header: {error}") from None
    assert isinstance(parsed, dict)  # it starts with a brace
    return parsed


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _entry(path: Path, name: str, entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    """dtype, shape and span of one header entry, which agree with each other."""
    where = f"{path}: tensor {name}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{where}: its entry must have dtype, shape and data_offsets")
    dtype, shape, span = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise ValueError(f"{where}: unknown dtype {dtype!r}")
    if not isinstance(shape, list) or not all(map(_is_size, shape)) or len(shape) > _DIMS_LIMIT:
        raise ValueError(f"{where}: shape {shape!r} is no list of up to {_DIMS_LIMIT} sizes")
    if not isinstance(span, list) or len(span) != 2 or not all(map(_is_size, span)):
        raise ValueError(f"{where}: data_offsets {span!r} are no two positions")
    start, end = span
    bits = _BITS[dtype]
    for size in shape:
        bits *= size
    if start > end or bits != 8 * (end - start):
        raise ValueError(
            f"{where}: bytes {start}..{end} are not what {dtype} of shape {shape} takes"
        )
    return dtype, tuple(shape), start, end


def _check_cover(path: Path, spans: Iterable[tuple[int, int, str]], n_bytes: int) -> None:
    """Each byte of the data belongs to exactly one tensor."""
    done, before = 0, "the header"
    for start, end, name in sorted(spans):
        if start != done:
            kind = "overlaps with" if start < done else "leaves a hole after"
            raise ValueError(f"{path}: tensor {name}: byte {start} {kind} {before} ({done})")
        done, before = end, name
    if done != n_bytes:
        raise ValueError(f"{path}: {n_bytes - done} bytes after the last tensor, {before}")


def read_folder(folder: str | Path) -> dict[str, Stored]:
    """All tensors of `model.safetensors`, or of the shards that its index names."""
    folder = Path(folder)
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        return read_safetensors(single)
    if not index.exists():
        raise ValueError(f"{folder}: neither model.safetensors nor {index.name} is there")
    where = _weight_map(index)
    missing = sorted(name for name in set(where.values()) if not (folder / name).is_file())
    if missing:
        raise ValueError(
            f"{folder}: {len(missing)} shards that {index.name} names are missing: {missing[0]}"
        )
    tensors: dict[str, Stored] = {}
    for file in dict.fromkeys(where.values()):
        for name, stored in read_safetensors(folder / file).items():
            if name in tensors:
                raise ValueError(f"{stored.path}: tensor {name} is in {tensors[name].path} too")
            tensors[name] = stored
    for name, file in where.items():
        if name not in tensors or tensors[name].path.name != file:
            raise ValueError(f"{folder / file}: tensor {name} is missing, {index.name} names it")
    return tensors


def _weight_map(index: Path) -> dict[str, str]:
    """The index's map from tensor to file name; names stay inside the folder."""
    where = read_json(index).get("weight_map")
    if not isinstance(where, dict) or not where:
        raise ValueError(f"{index}: weight_map must map tensors to files")
    for name, file in where.items():
        if (
            not isinstance(file, str)
            or Path(file).name != file
            or file in ("", "..")
            or "\0" in file
        ):
            raise ValueError(f"{index}: tensor {name}: {file!r} is no file of this folder")
    return where
