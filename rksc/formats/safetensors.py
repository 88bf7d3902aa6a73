"""Reader of safetensors files: 8 bytes of header length, a JSON header, then the data.

Nothing in a file is trusted: every length is checked before it is used, every byte of the
data must belong to exactly one tensor, and the data are mapped, not read.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .._core import Tensor
from .files import CUT_SHORT, contents, map_file, parse_json, read_json, reading, shown, what_is
from .tensors import tensor_of

_HEADER_LIMIT = 100 << 20  # the format's own
_DIMS_LIMIT = 8
_NAME_LIMIT = 255  # bytes, of Linux

_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip


def read_safetensors(path: str | Path, but: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """All tensors of one file by name, in the header's order; `but` those whose names end so.

    ValueError, naming file and tensor, for a truncated file, a span that is not what shape
    and dtype need, overlaps, holes, trailing bytes, repeated names, a malformed header or a
    dtype that no weight has.
    """
    path = Path(path)
    with reading(path):
        return _read_one(map_file(path), but)


def _read_one(data: memoryview, but: tuple[str, ...]) -> dict[str, Tensor]:
    header, body = _cut(data)
    spans: list[tuple[int, int, str]] = []
    found: list[tuple[str, str, tuple[int, ...], memoryview]] = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        dtype, shape, start, end = _entry(name, entry)
        if end > len(body):
            raise ValueError(
                f"tensor {name}: its bytes {start}..{end} reach past the end of the "
                f"data at {len(body)}; {CUT_SHORT}"
            )
        spans.append((start, end, name))
        found.append((name, dtype, shape, body[start:end]))
    _check_cover(spans, len(body))
    return {each[0]: tensor_of(*each) for each in found if not each[0].endswith(but)}


def _cut(data: memoryview) -> tuple[dict[str, Any], memoryview]:
    """The header, and the data behind it."""
    if len(data) < 8:
        raise ValueError(f"{len(data)} bytes are not a safetensors file")
    n_header = int.from_bytes(data[:8], "little")
    if n_header > min(len(data) - 8, _HEADER_LIMIT):
        other = what_is(bytes(data[:64]))
        raise ValueError(
            f"not a safetensors file but {other}"
            if other
            else f"a header of {n_header} bytes does not fit the file of {len(data)} "
            f"(limit {_HEADER_LIMIT}); {CUT_SHORT}"
        )
    header = bytes(data[8 : 8 + n_header])
    if not header.startswith(b"{"):
        raise ValueError("the header is not a JSON object")
    with reading("malformed header"):
        return parse_json(header, strict=True), data[8 + n_header :]


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _entry(name: str, entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    """dtype, shape and span of one header entry, which agree with each other."""
    where = f"tensor {name}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{where}: its entry must have dtype, shape and data_offsets")
    dtype, shape, span = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise ValueError(f"{where}: unknown dtype {shown(dtype)}")
    if not isinstance(shape, list) or not all(map(_is_size, shape)) or len(shape) > _DIMS_LIMIT:
        raise ValueError(
            f"{where}: shape {shown(shape)} is not a list of up to {_DIMS_LIMIT} sizes"
        )
    if not isinstance(span, list) or len(span) != 2 or not all(map(_is_size, span)):
        raise ValueError(f"{where}: data_offsets {shown(span)} are not two positions")
    start, end = span
    bits = _BITS[dtype]
    for size in shape:
        bits *= size
    if start > end or bits != 8 * (end - start):
        raise ValueError(
            f"{where}: bytes {start}..{end} are not what {dtype} of shape {shape} takes"
        )
    return dtype, tuple(shape), start, end


def _check_cover(spans: Iterable[tuple[int, int, str]], n_bytes: int) -> None:
    """Each byte of the data belongs to exactly one tensor."""
    done, before = 0, "the header"
    for start, end, name in sorted(spans):
        if start != done:
            kind = "overlaps with" if start < done else "leaves a hole after"
            raise ValueError(f"tensor {name}: byte {start} {kind} {before} ({done})")
        done, before = end, name
    if done != n_bytes:
        raise ValueError(f"{n_bytes - done} bytes after the last tensor, {before}")


def read_folder(folder: str | Path, but: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """All tensors of `model.safetensors`, or of the shards that its index names."""
    folder = Path(folder)
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        return read_safetensors(single, but)
    if not index.exists():
        raise ValueError(
            f"{folder}: neither model.safetensors nor {index.name} is there; the folder has "
            f"{contents(folder)}"
        )
    with reading(index):
        where = _weight_map(read_json(index, strict=True).get("weight_map"))
    missing = sorted(name for name in set(where.values()) if not (folder / name).is_file())
    if missing:
        raise ValueError(
            f"{folder}: {len(missing)} shards named by {index.name} are missing, the first "
            f"{missing[0]}"
        )
    tensors: dict[str, Tensor] = {}
    found: dict[str, str] = {}
    for file in dict.fromkeys(where.values()):
        for name, tensor in read_safetensors(folder / file, but).items():
            if name in found:
                raise ValueError(f"{folder / file}: tensor {name} is also in {found[name]}")
            tensors[name], found[name] = tensor, file
    for name, file in where.items():
        if found.get(name) != file and not name.endswith(but):
            raise ValueError(
                f"{folder / file}: tensor {name} is missing, though {index.name} names it"
            )
    return tensors


def _weight_map(where: Any) -> dict[str, str]:
    """An index's map from tensor to file name; names stay inside the folder."""
    if not isinstance(where, dict) or not where:
        raise ValueError("weight_map must map tensors to files")
    for name, file in where.items():
        if (
            not isinstance(file, str)
            or Path(file).name != file
            or file in ("", "..")
            or "\0" in file
            or len(file.encode()) > _NAME_LIMIT
        ):
            raise ValueError(f"tensor {name}: {shown(file)} is not a file in this folder")
    return where
