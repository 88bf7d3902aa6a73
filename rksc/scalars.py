"""Numbers as callers hand them over: Python's, NumPy's and others'; True and False are none."""

from __future__ import annotations

import math
import numbers
import operator

import numpy as np


def as_int(value: object) -> int | None:
    """The int that a value stands for; None: it does not."""
    if isinstance(value, (bool, np.bool_)):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def as_float(value: object) -> float | None:
    """The float that a real number is (infinite where it is too large); None: it is none."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf  # type: ignore[operator]
