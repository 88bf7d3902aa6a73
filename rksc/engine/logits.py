"""Logits to log-probabilities, for what compares distributions outside of the engine."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def log_softmax(logits: Any) -> NDArray[np.float64]:
    """Over the last axis, in float64."""
    x = np.asarray(logits, np.float64)
    x = x - x.max(axis=-1, keepdims=True)
    return np.asarray(x - np.log(np.exp(x).sum(axis=-1, keepdims=True)))
