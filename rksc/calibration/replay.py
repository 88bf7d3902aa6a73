"""The decisions of csrc/policy over recorded numbers, so that thresholds are swept without a model.

A mirror in NumPy; tests/test_replays.py holds it against the C functions and against real runs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..answers.final import answer_key
from ..engine.options import CGEE

Floats = NDArray[np.float64]

# ---- ASKS --------------------------------------------------------------------------------------


def sigma(cosines: ArrayLike, alpha: float) -> Floats:
    """1 - sum_l w_l (1 - cos_l) over the last axis, w_l proportional to exp(alpha l / L)."""
    c = np.minimum(np.asarray(cosines, float), 1.0)
    n = c.shape[-1]
    exponents = alpha * np.arange(1, n + 1) / n
    w = np.exp(exponents - exponents.max())
    return np.asarray(1.0 - ((w / w.sum()) * (1.0 - c)).sum(axis=-1))


# ---- CGEE --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lenses:
    """What a lens saw of one verification after each layer.

    entropies: (branches, layers), nats. scores: (branches, layers), what an exit there gives.
    """

    entropies: Floats
    scores: Floats


@dataclass(frozen=True)
class Judged:
    """A verification as CGEE would have done it.

    scores: NaN where a branch was not verified. layers: run for each branch; checks: lenses
    evaluated for each branch. skipped: level 1 or a single contender decided.
    """

    scores: Floats
    layers: NDArray[np.int64]
    checks: NDArray[np.int64]
    skipped: bool
    winner: int


def judge(
    cgee: CGEE | None, confidence: ArrayLike, scores: ArrayLike, lenses: Lenses, n_layers: int
) -> Judged:
    """Replay a verification from its full scores and what the lens would have seen.

    cgee None: all branches, in full. The lens' numbers must be those of cgee.lens and
    cgee.norm. Early stops while generating cannot be replayed: they change the texts.
    """
    confidence, full = np.asarray(confidence, float), np.asarray(scores, float)
    n = len(confidence)
    made = np.full(n, math.nan)
    layers, checks = np.zeros(n, np.int64), np.zeros(n, np.int64)
    order = list(range(n))
    n_contenders, batch = n, n
    if cgee is not None:
        order = sorted(range(n), key=lambda i: (-confidence[i], i))
        n_contenders, batch = _contenders(cgee, confidence[order]), cgee.verify_batch
    best = math.nan
    for begin in range(0, n_contenders, batch):
        able = [
            i
            for i in order[begin : min(begin + batch, n_contenders)]
            if cgee is None or math.isnan(best) or math.sqrt(confidence[i]) >= best
        ]
        for i in able:
            made[i], layers[i], checks[i] = _pass(cgee, full[i], i, lenses, n_layers)
        marks = [made[i] * math.sqrt(confidence[i]) for i in able]
        best = max([m for m in (best, *marks) if not math.isnan(m)], default=math.nan)
    return Judged(made, layers, checks, n_contenders == 0, select(made, confidence))


def _contenders(cgee: CGEE, falling: Floats) -> int:
    """How many of the confidences, largest first, are verified; 0: none has to be."""
    if not len(falling):
        return 0
    top = falling[0]
    lead = top - falling[1] if len(falling) > 1 else math.nan
    if cgee.skip_top is not None and top >= cgee.skip_top and lead >= cgee.skip_lead:
        return 0
    relative = cgee.skip_top_relative
    if relative is not None and top >= relative and lead / top >= cgee.skip_lead_relative:
        return 0
    if not cgee.kappa > 0:
        return len(falling)
    kept = 1 + int((falling[1:] >= cgee.kappa * top).sum())
    return 0 if kept == 1 else kept


def _pass(
    cgee: CGEE | None, score: float, i: int, lenses: Lenses, n_layers: int
) -> tuple[float, int, int]:
    """Score, layers and lens checks of branch i."""
    if cgee is None or cgee.lens is None or not cgee.theta > 0:
        return score, n_layers, 0
    unit = math.log(2.0) if cgee.lens == "answer" else 1.0
    at = np.arange(cgee.min_layer, n_layers, cgee.lens_every)  # never after the last layer
    h = lenses.entropies[i, at - 1]
    change = np.abs(np.diff(h, prepend=math.nan))
    out = np.flatnonzero((h < cgee.theta * unit) & (change < cgee.epsilon * unit))
    if not len(out):
        return score, n_layers, len(at)
    layer = int(at[out[0]])
    return float(lenses.scores[i, layer - 1]), layer, int(out[0]) + 1


def select(scores: Any, confidence: Any) -> int:
    """scores, confidence: floats (branches,), None or NaN where a branch has none.

    Index of the largest score * sqrt(confidence) among the verified, else of the largest
    confidence; the first on a tie."""
    scores, confidence = np.asarray(scores, float), np.asarray(confidence, float)
    if np.isnan(scores).all():
        return int(np.argmax(confidence))
    return int(np.nanargmax(scores * np.sqrt(confidence)))


def majority(answers: Sequence[str]) -> int:
    """Index of the first branch with the most frequent non-empty answer (0 without any). Answers
    are one where `same_answer` says so: 4.00, $4 and 4 vote together."""
    keys = [answer_key(answer) if answer else None for answer in answers]
    votes = Counter(key for key in keys if key is not None)
    return keys.index(votes.most_common(1)[0][0]) if votes else 0
