"""The least time that the workload can take on a machine, from shapes and the machine's rates.

    bound = sum over ops of max(bytes / read rate, operations / product rate)

Bytes are those that must come from memory: weights, and keys and values, each block once however
many branches attend to it. Activations stay in the caches.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from .._core import Tensor
from ..experiments.workload import Shape
from ..model.config import ModelConfig
from ..model.names import EMBEDDING

ITEM_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Op:
    """`count` equal operations of a step: floating-point operations and bytes of each."""

    count: int
    flop: float
    read: float


def decode_ops(config: ModelConfig, shape: Shape, weight_bytes: float, kv_bytes: float) -> list[Op]:
    """All ops of the decode phase (shape.new steps of one row for each branch).

    weight_bytes: of one element of a matrix; kv_bytes: of one element of a key or value.
    """
    c, rows = config, shape.branches
    q, kv = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim

    def product(count: int, outputs: int, inputs: int) -> Op:
        size = outputs * inputs
        return Op(count, 2.0 * rows * size, size * weight_bytes)

    layers = c.n_layers * shape.new
    ops = [
        product(layers, q + 2 * kv, c.width),
        product(layers, c.width, q),
        product(layers, 2 * c.ffn_width, c.width),
        product(layers, c.width, c.ffn_width),
        product(shape.new, c.vocab_size, c.width),
    ]
    full = c.n_layers if not c.window else min(c.window_from, c.n_layers)
    for n_layers, window in ((full, 0), (c.n_layers - full, c.window)):
        for step in range(shape.new if n_layers else 0):
            ops.append(_attention(n_layers, shape, step, window, q, 2 * kv * kv_bytes))
    return ops


def weight_bytes(weights: Mapping[str, Tensor], config: ModelConfig, dtype: str) -> float:
    """Of an element of the matrices that a step reads, on average: block types are read as they
    are, others in the session's dtype. An embedding that is not the head is looked up."""
    n = n_bytes = 0
    for name, tensor in weights.items():
        if len(tensor.shape) == 2 and (config.tied or name != EMBEDDING):
            size = math.prod(tensor.shape)
            n += size
            plain = tensor.type in ("F32", "F16", "BF16")
            n_bytes += size * ITEM_BYTES[dtype] if plain else tensor.nbytes
    return n_bytes / n


def _attention(
    n_layers: int, shape: Shape, step: int, window: int, q: int, token_bytes: float
) -> Op:
    own = shape.suffix + step
    keys = shape.prefix + own
    if window:
        keys, own = min(keys, window), min(own, window)
    unique = (keys - own) + shape.branches * own
    return Op(n_layers, 4.0 * q * keys * shape.branches, unique * token_bytes)


def seconds(ops: Iterable[Op], read: float, products: float) -> float:
    """Least time of the ops at these rates (bytes and operations per second)."""
    return sum(op.count * max(op.read / read, op.flop / products) for op in ops)


def read_bytes(ops: Iterable[Op]) -> int:
    return int(sum(op.count * op.read for op in ops))


def fraction(achieved: float, limit: float, what: str) -> float:
    """achieved / limit. Nothing is faster than the machine: ValueError where the limit is wrong."""
    if achieved > limit:
        raise ValueError(
            f"{what}: {achieved / limit:.3f} of the machine's limit. The limit was measured too "
            "low: run again on an idle machine; if it stays, rksc/limits/peak.c lacks a loop that "
            "is as fast as this processor"
        )
    return achieved / limit


def as_rows(ops: Sequence[Op]) -> list[list[float]]:
    """For JSON: [count, flop, bytes] of each."""
    return [[op.count, op.flop, op.read] for op in ops]


def from_rows(rows: Sequence[Sequence[float]]) -> list[Op]:
    return [Op(int(count), flop, read) for count, flop, read in rows]
