"""What the op tests share: devices with random weights, guarded outputs, batches of paged rows."""

from __future__ import annotations

import ctypes as c
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from support import native
from support.native import RK_BF16, RK_CHUNK_ROWS, RK_F32, RK_TILE

Array = NDArray[Any]
GUARD = 64  # elements before and after each output
TYPES = (RK_F32, RK_BF16)


def library() -> c.CDLL:
    """The CPU backend alone."""
    return native.load("cpu", "model/quant.c")


# ---- numbers ---------------------------------------------------------------------------------


def to_bf16(x: Array) -> Array:
    """float32 rounded to nearest even, as uint16 bits (finite values)."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(bits: Array) -> Array:
    """uint16 bits as float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def act(x: Array, compute: int) -> Array:
    """An activation or weight array of the compute type."""
    return to_bf16(x) if compute == RK_BF16 else np.ascontiguousarray(x, np.float32)


def guarded(x: Array) -> Array:
    """The same array with NaN before and after it: reading past an end spoils the result."""
    whole = np.zeros(x.size + 2 * GUARD, x.dtype)
    whole.view(np.uint8)[:] = 0xFF
    inner = whole[GUARD:-GUARD]
    inner[:] = x.ravel()
    return inner.reshape(x.shape)


def value(x: Array) -> Array:
    """float64 values of an array that `act` made."""
    return (from_bf16(x) if x.dtype == np.uint16 else x).astype(np.float64)


def eps(compute: int) -> float:
    """Relative rounding error of an output of the compute type."""
    return 2.0**-8 if compute == RK_BF16 else 2.0**-22


class Output:
    """An output array between guard words; `get()` checks them."""

    def __init__(self, shape: tuple[int, ...], dtype: Any) -> None:
        self.shape, n = shape, int(np.prod(shape))
        self._all = np.zeros(n + 2 * GUARD, dtype)
        self._all.view(np.uint8)[:] = 0xA5
        self.address = self._all.ctypes.data + GUARD * self._all.itemsize

    def get(self) -> Array:
        """A copy of what was written."""
        edges = np.concatenate([self._all[:GUARD], self._all[-GUARD:]])
        assert (edges.view(np.uint8) == 0xA5).all(), "written outside the output"
        return self._all[GUARD:-GUARD].reshape(self.shape).copy()


def act_output(shape: tuple[int, ...], compute: int) -> Output:
    """An output of the compute type."""
    return Output(shape, np.uint16 if compute == RK_BF16 else np.float32)


def matrix(data: Array, bias: Array | None = None, dtype: int | None = None) -> native.Matrix:
    """rk_matrix over arrays that the caller keeps alive."""
    rows, cols = data.shape
    if dtype is None:
        dtype = RK_BF16 if data.dtype == np.uint16 else RK_F32
    return native.Matrix(
        data.ctypes.data, None if bias is None else bias.ctypes.data, dtype, rows, cols
    )


# ---- devices ---------------------------------------------------------------------------------


@dataclass
class Shape:
    """Sizes of a rig; the defaults are small and odd on purpose."""

    n_layers: int = 2
    width: int = 48
    ffn_width: int = 40
    n_heads: int = 6
    n_kv_heads: int = 2
    head_dim: int = 8
    vocab_size: int = 101
    block_tokens: int = 16
    n_blocks: int = 64
    max_rows: int = 256
    max_outputs: int = 16
    rounding: int = native.RK_ROUND_ACT
    kv_type: int | None = None  # None: as `compute`
    rope_interleaved: bool = False
    window: int = 0
    window_from: int = 0
    inv_freq: list[float] = field(default_factory=list)


def describe(shape: Shape, compute: int) -> tuple[native.Config, native.Extent, Array]:
    """What a backend is told of `shape`, and the inv_freq that the config points to: keep it."""
    half = shape.head_dim // 2
    freq = np.array(shape.inv_freq or [10000.0 ** (-i / half) for i in range(half)])
    names = ["n_layers", "width", "ffn_width", "n_heads", "n_kv_heads", "head_dim"]
    names += ["vocab_size", "rope_interleaved", "window", "window_from"]
    config = native.Config(**{name: getattr(shape, name) for name in names})
    config.norm_eps, config.max_positions = 1e-5, 1 << 20
    config.inv_freq = freq.ctypes.data
    names = ["block_tokens", "n_blocks", "max_rows", "max_outputs", "rounding"]
    kv_type = compute if shape.kv_type is None else shape.kv_type
    extent = native.Extent(
        compute=compute, kv_type=kv_type, **{n: getattr(shape, n) for n in names}
    )
    return config, extent, freq


class Rig(native.Device):
    """A device of one shape, type, instruction set and number of threads."""

    def __init__(self, shape: Shape, compute: int, isa: int, n_threads: int = 1) -> None:
        config, extent, freq = describe(shape, compute)
        super().__init__(library(), config, extent, isa, n_threads)
        self.shape, self.compute, self.freq = shape, compute, freq

    def poison(self) -> None:
        """NaN in all of the pool, in either type."""
        for block in range(self.shape.n_blocks):
            self.kv_fill(block, 0xFF)


# ---- batches ---------------------------------------------------------------------------------


@dataclass
class Row:
    """A row of a batch: a position of the sequence whose block table is `table`."""

    table: list[int]
    position: int
    token: int = 0
    write: bool = True


class Plan:
    """rk_batch of rows: `cut` "shared" merges what rows share, "rows" gives each its own segments,
    cut at random keys; `chunk_rows` rows at most in a chunk."""

    def __init__(
        self,
        rows: list[Row],
        block_tokens: int,
        cut: str = "shared",
        chunk_rows: int = RK_CHUNK_ROWS,
        rng: np.random.Generator | None = None,
    ) -> None:
        self.rows, self.block_tokens, self.rng = rows, block_tokens, rng
        self.tables = {id(r.table): np.array(r.table, np.int32) for r in rows}
        self.tokens = np.array([r.token for r in rows], np.int32)
        self.positions = np.array([r.position for r in rows], np.int32)
        self.slots = np.array([self._slot(r) for r in rows], np.int64)
        segments: list[tuple[int, int, int, int, int]] = []
        chunks = []
        for begin in range(0, len(rows), chunk_rows):
            end = min(begin + chunk_rows, len(rows))
            found = self._shared(begin, end) if cut == "shared" else self._split(begin, end)
            found.sort(key=lambda s: (s[0] // RK_TILE, s[0], s[2]))
            chunks.append((begin, end, len(segments), len(segments) + len(found)))
            segments += found
        self.segments = (native.Segment * len(segments))(*[native.Segment(*s) for s in segments])
        self.chunks = (native.Chunk * len(chunks))(*[native.Chunk(*c_) for c_ in chunks])
        self.batch = native.Batch(
            len(rows),
            self.tokens.ctypes.data,
            self.positions.ctypes.data,
            self.slots.ctypes.data,
            len(chunks),
            self.chunks,
            len(segments),
            self.segments,
        )

    def _slot(self, row: Row) -> int:
        block = row.table[row.position // self.block_tokens]
        offset = row.position % self.block_tokens
        return block * self.block_tokens + offset if row.write else -1

    def _address(self, row: int) -> int:
        return self.tables[id(self.rows[row].table)].ctypes.data

    def _shared(self, begin: int, end: int) -> list[tuple[int, int, int, int, int]]:
        last = max(self.rows[i].position for i in range(begin, end)) // self.block_tokens
        open_: dict[tuple[int, int], list[int]] = {}
        found = []
        for block in range(last + 1):
            groups = []
            i = begin
            while i < end:
                table = self.rows[i].table
                if self.rows[i].position < block * self.block_tokens:
                    i += 1
                    continue
                j = i + 1
                while (
                    j < end
                    and self.rows[j].position >= block * self.block_tokens
                    and self.rows[j].table[block] == table[block]
                ):
                    j += 1
                groups.append((i, j))
                i = j
            key = block * self.block_tokens
            for rows in list(open_):
                if rows not in groups or key % RK_TILE == 0:
                    found.append((*open_.pop(rows), *rows, self._address(rows[0])))
            for rows in groups:
                same = rows in open_ and all(
                    self.rows[r].table[:block] == self.rows[rows[0]].table[:block]
                    for r in range(*rows)
                )
                if rows in open_ and not same:
                    found.append((*open_.pop(rows), *rows, self._address(rows[0])))
                open_.setdefault(rows, [key, key])[1] = key + self.block_tokens
        found += [(*keys, *rows, self._address(rows[0])) for rows, keys in open_.items()]
        return [(s[0], s[1], s[2], s[3], s[4]) for s in found]

    def _split(self, begin: int, end: int) -> list[tuple[int, int, int, int, int]]:
        found = []
        rng = self.rng or np.random.default_rng(0)
        for i in range(begin, end):
            key, last = 0, self.rows[i].position + 1
            while key < last:
                limit = min(last, key // RK_TILE * RK_TILE + RK_TILE)
                cut = int(rng.integers(key + 1, limit + 1))
                found.append((key, cut, i, i + 1, self._address(i)))
                key = cut
        return found
