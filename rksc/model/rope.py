"""RoPE: the frequencies by which positions turn q and k, under the scalings that rksc computes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from ..formats.fields import Fields
from ..formats.files import reading, shown
from ..scalars import as_float

_LIMIT = 1 << 16  # of head_dim; far above any model's


def check_head_dim(head_dim: int) -> None:
    """Before a table of half as many frequencies is made."""
    if head_dim > _LIMIT:
        raise ValueError(f"head_dim must be at most {_LIMIT}, got {head_dim}")
    if head_dim < 2 or head_dim % 2:
        raise ValueError(f"head_dim must be even, got {head_dim}")


def check_frequencies(given: Iterable[Any], field: str) -> tuple[float, ...]:
    """As floats; ValueError names the field unless all are positive and finite."""
    found = tuple(f for f in map(as_float, given) if f is not None and math.isfinite(f) and f > 0)
    if len(found) != len(tuple(given)):
        raise ValueError(f"{field} must be positive and finite")
    return found


def rope_frequencies(
    head_dim: int, theta: Any, scaling: Mapping[str, Any], max_positions: int
) -> tuple[float, ...]:
    """theta**(-2i / head_dim), i < head_dim / 2, under a Hugging Face scaling dict.

    Kinds: "default", "linear" (all divided by factor) and "llama3", which divides the slow
    ones by factor, keeps the fast ones, and interpolates between. Any other is a ValueError.
    """
    check_head_dim(head_dim)
    theta = Fields({"rope_theta": theta}).number("rope_theta", positive=True)
    with reading("rope_theta"):  # a power of a tiny one overflows
        base = tuple(theta ** (-2.0 * i / head_dim) for i in range(head_dim // 2))
    # What neither changes the frequencies nor says anything new.
    given = {
        key: value
        for key, value in scaling.items()
        if key not in ("rope_type", "type", "rope_theta") and value is not None
    }
    if given.pop("partial_rotary_factor", 1.0) != 1.0:
        value = scaling["partial_rotary_factor"]
        raise ValueError(f"partial_rotary_factor {shown(value)} is not supported")
    kind = _kind(scaling)
    if kind == "default":
        if given.pop("factor", 1.0) != 1.0:
            raise ValueError(f"rope_scaling: kind default with factor {shown(scaling['factor'])}")
        given.pop("original_max_position_embeddings", None)
        scaled = base
    elif kind == "linear":
        factor = _positive(given, "factor")
        given.pop("original_max_position_embeddings", None)
        scaled = tuple(f / factor for f in base)
    elif kind == "llama3":
        given.setdefault("original_max_position_embeddings", max_positions)
        scaled = _llama3(base, given)
    else:
        raise ValueError(
            f"rope_scaling: kind {shown(kind)} is not supported (default, linear, llama3)"
        )
    if given:
        key, value = next(iter(given.items()))
        raise ValueError(f"rope_scaling: {key} = {shown(value)} is not supported for kind {kind}")
    return check_frequencies(scaled, "rope_theta and rope_scaling: the frequencies")


def _kind(scaling: Mapping[str, Any]) -> str:
    kinds = [scaling[key] for key in ("rope_type", "type") if scaling.get(key) is not None]
    if not all(isinstance(kind, str) for kind in kinds):
        raise ValueError(f"rope_scaling: type must be a name, got {shown(kinds)}")
    if len(set(kinds)) > 1:
        raise ValueError(f"rope_scaling: type and rope_type disagree: {shown(sorted(kinds))}")
    return kinds[0] if kinds else "default"


def _positive(given: dict[str, Any], key: str) -> float:
    fields = Fields({f"rope_scaling: {key}": given.pop(key, None)})
    return fields.number(f"rope_scaling: {key}", positive=True)


def _llama3(base: tuple[float, ...], given: dict[str, Any]) -> tuple[float, ...]:
    factor = _positive(given, "factor")
    low = _positive(given, "low_freq_factor")
    high = _positive(given, "high_freq_factor")
    context = _positive(given, "original_max_position_embeddings")
    if high <= low:
        raise ValueError(
            f"rope_scaling: high_freq_factor {high} must be above low_freq_factor {low}"
        )

    def scale(frequency: float) -> float:
        turns = context * frequency / (2 * math.pi)  # within the original context
        if turns > high:
            return frequency
        if turns < low:
            return frequency / factor
        smooth = (turns - low) / (high - low)
        return (1 - smooth) * frequency / factor + smooth * frequency

    return tuple(scale(f) for f in base)
