"""Intervals and tests: a rate without its interval says little.

Everything is computed from counts or with a seeded generator; no library but NumPy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

LEVEL = 0.95


@dataclass(frozen=True)
class Rate:
    """k of n, with its Wilson interval. value is NaN when n is 0.

    effective: how many independent ones say as much as these n (None: n).
    """

    k: int
    n: int
    effective: float | None = None

    @property
    def value(self) -> float:
        return self.k / self.n if self.n else math.nan

    @property
    def low(self) -> float:
        return self._interval[0]

    @property
    def high(self) -> float:
        return self._interval[1]

    @property
    def _interval(self) -> tuple[float, float]:
        n = self.n if self.effective is None else self.effective
        return wilson(self.k * n / self.n if self.n else 0, n)

    def __str__(self) -> str:
        if not self.n:
            return "none measured"
        low, high = (100 * bound for bound in self._interval)
        of = f"{self.k} of {self.n}; 95 % interval {low:.1f} to {high:.1f}"
        return f"{100 * self.value:.1f} % ({of})"


def rate(flags: Sequence[bool] | NDArray[np.bool_], groups: ArrayLike | None = None) -> Rate:
    """How many of the flags are true. groups: which question each belongs to, where several of
    one question are not independent.

    The interval is then Wilson's for n / d, d the design effect: the variance of the rate over
    questions against that of as many independent flags (Kish, 1965). Where all flags are equal, or
    all of one question, it cannot be estimated, and a question counts once.
    """
    k, n = int(np.count_nonzero(flags)), len(flags)
    if groups is None or n == 0:
        return Rate(k, n)
    of = np.unique(groups, return_inverse=True)[1]
    sizes = np.bincount(of)
    if k in (0, n) or len(sizes) == 1:
        return Rate(k, n, float(len(sizes)))
    p = k / n
    spread = float(np.sum((np.bincount(of, np.asarray(flags, float)) - p * sizes) ** 2))
    return Rate(k, n, min(float(n), n * n * p * (1 - p) / spread) if spread else float(n))


def wilson(k: float, n: float, level: float = LEVEL) -> tuple[float, float]:
    """Wilson's score interval of a rate k / n; (0, 1) when n is 0.

    ValueError: k outside of 0 .. n.
    """
    if not 0 <= k <= n:
        raise ValueError(f"k must be in 0 .. n = {n}, got {k}")
    if n == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf((1 + level) / 2)
    p, spread = k / n, z * z / n
    centre = (p + spread / 2) / (1 + spread)
    half = math.sqrt(spread * (p * (1 - p) + spread / 4)) / (1 + spread)
    # the ends are exact: rounding must not put 0 of n above 0
    return (0.0 if k == 0 else centre - half), (1.0 if k == n else centre + half)


def bootstrap(
    values: ArrayLike,
    statistic: Callable[[NDArray[Any]], NDArray[Any]] | None = None,
    level: float = LEVEL,
    n: int = 2000,
    seed: int = 0,
) -> tuple[float, float]:
    """Percentile bootstrap interval of a statistic (None: the mean) of values (n, ...).

    Rows are drawn with replacement; the statistic maps draws (draws, n, ...) to (draws,).
    (NaN, NaN) without values.
    """
    rows = np.asarray(values)
    if not len(rows):
        return math.nan, math.nan
    rng = np.random.default_rng(seed)
    picks = rng.integers(0, len(rows), (n, len(rows)))
    drawn = rows[picks].mean(axis=1) if statistic is None else statistic(rows[picks])
    low, high = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def auc(positives: ArrayLike, negatives: ArrayLike) -> float:
    """Area under the ROC curve: how often a positive is larger than a negative, ties half."""
    high, low = np.asarray(positives, float), np.sort(np.asarray(negatives, float))
    if not len(high) or not len(low):
        return math.nan
    below = np.searchsorted(low, high, "left")
    not_above = np.searchsorted(low, high, "right")
    return float((below + not_above).sum() / (2 * len(high) * len(low)))


def mcnemar(gained: int, lost: int) -> float:
    """Exact two-sided p-value of McNemar's test on paired outcomes that differ."""
    n, k = gained + lost, min(gained, lost)
    if n == 0:
        return 1.0
    tail = sum(math.comb(n, i) for i in range(k + 1))
    return float(min(1.0, 2 * (tail / 2**n)))


def halves(groups: Sequence[str], seed: int = 0) -> tuple[set[str], set[str]]:
    """The different groups in two random halves, so that no group stands in both."""
    names = sorted(set(groups))
    order = np.random.default_rng(seed).permutation(len(names))
    first = {names[i] for i in order[: (len(names) + 1) // 2]}
    return first, set(names) - first
