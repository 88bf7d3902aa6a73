"""Intervals and tests: a rate without its interval says little.

Of a rate Wilson's, of the difference of two paired rates Tango's, of a mean or a ratio Student's
around the jackknife, of a median order statistics'. All hold for small samples as far as theirs
can; nothing is drawn at random.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

LEVEL = 0.95


def scipy(part: str) -> Any:
    """scipy.stats or another part of SciPy; ImportError says how to get it."""
    try:
        return importlib.import_module(f"scipy.{part}")
    except ImportError:
        raise ImportError("intervals need SciPy: pip install 'rksc[experiments]'") from None


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
    questions against that of as many independent flags (Kish, 1965), both estimated without bias,
    so that d is 1 where each question has one flag. Where all flags are equal, or all of one
    question, it cannot be estimated, and a question counts once.
    """
    k, n = int(np.count_nonzero(flags)), len(flags)
    if groups is None or n == 0:
        return Rate(k, n)
    of = np.unique(groups, return_inverse=True)[1]
    sizes = np.bincount(of)
    n_groups = len(sizes)
    if k in (0, n) or n_groups == 1:
        return Rate(k, n, float(n_groups))
    p = k / n
    between = float(np.sum((np.bincount(of, np.asarray(flags, float)) - p * sizes) ** 2))
    spread = between * n_groups / (n_groups - 1)
    alone = n * p * (1 - p) * n / (n - 1)
    return Rate(k, n, min(float(n), n * alone / spread) if spread else float(n))


def _deviations(level: float) -> float:
    """z such that a normal variable lies within -z .. z with probability `level`."""
    return NormalDist().inv_cdf((1 + level) / 2)


def wilson(k: float, n: float, level: float = LEVEL) -> tuple[float, float]:
    """Wilson's score interval of a rate k / n; (0, 1) when n is 0.

    ValueError: k outside of 0 .. n.
    """
    if not 0 <= k <= n:
        raise ValueError(f"k must be in 0 .. n = {n}, got {k}")
    if n == 0:
        return 0.0, 1.0
    z = _deviations(level)
    p, spread = k / n, z * z / n
    centre = (p + spread / 2) / (1 + spread)
    half = math.sqrt(spread * (p * (1 - p) + spread / 4)) / (1 + spread)
    # the ends are exact: rounding must not put 0 of n above 0
    return (0.0 if k == 0 else centre - half), (1.0 if k == n else centre + half)


def paired(gained: int, lost: int, n: int, level: float = LEVEL) -> tuple[float, float]:
    """Interval of the difference of two rates on the same n, by Tango's score (1998).

    gained, lost: where one is true and the other is not. Also where nothing differs it has a
    width: none of n may still be one of the next n. (-1, 1) when n is 0.
    """
    if min(gained, lost) < 0 or gained + lost > n:
        raise ValueError(f"gained, lost must be in 0 .. n = {n} together, got {gained}, {lost}")
    if n == 0:
        return -1.0, 1.0
    z = _deviations(level)

    def excess(delta: float) -> float:
        """How much farther than z deviations the data lie from a difference of delta."""
        b = (2 * n - gained + lost) * delta - gained - lost
        root = math.sqrt(max(0.0, b * b + 8 * n * lost * delta * (1 - delta)))
        variance = n * (2 * (root - b) / (4 * n) + delta * (1 - delta))
        return abs(gained - lost - n * delta) - z * math.sqrt(max(0.0, variance))

    middle = (gained - lost) / n

    def bound(end: float) -> float:
        inside = middle + 1e-9 * (end - middle)  # the middle itself may be a root without width
        if excess(end) <= 0:
            return end
        return float(scipy("optimize").brentq(excess, inside, end, xtol=1e-15))

    return bound(-1.0), bound(1.0)


def jackknife(
    values: ArrayLike,
    statistic: Callable[[NDArray[Any]], NDArray[Any]] | None = None,
    level: float = LEVEL,
) -> tuple[float, float]:
    """Interval of a smooth statistic (None: the mean) of values (n, ...): Student's t of n - 1
    degrees times the jackknife's error. Of a mean that is Student's own interval.

    The statistic maps samples (samples, n, ...) to (samples,). (NaN, NaN) for fewer than two
    values; equal values leave no width.
    """
    rows = np.asarray(values, float)
    n = len(rows)
    if n < 2:
        return math.nan, math.nan
    of = statistic or (lambda samples: samples.mean(axis=1))
    without = of(np.stack([np.delete(rows, i, axis=0) for i in range(n)]))
    error = math.sqrt((n - 1) / n * float(((without - without.mean()) ** 2).sum()))
    half = float(scipy("stats").t.ppf((1 + level) / 2, n - 1)) * error
    middle = float(of(rows[None])[0])
    return middle - half, middle + half


def median_interval(values: ArrayLike, level: float = LEVEL) -> tuple[float, float]:
    """Interval of the median, between two of the values: holds for any distribution.

    (NaN, NaN) for fewer than six values, which cannot have one of 95 %.
    """
    rows = np.sort(np.asarray(values, float))
    n = len(rows)
    # the least rank that more than (1 - level) / 2 of all samples leave below the median
    rank = int(scipy("stats").binom.ppf((1 - level) / 2, n, 0.5)) if n else 0
    return (float(rows[rank - 1]), float(rows[n - rank])) if rank else (math.nan, math.nan)


# ---- what may be said --------------------------------------------------------------------------

FEWEST = 6  # of fewer, all on one side come about by chance more often than once in twenty times


def above(value: float, low: float, n: int, limit: float = 0.0) -> bool | None:
    """That something is more than limit: False where it was not, None where it was but the
    interval's low end, or fewer than FEWEST, leave it open (and where n is 0)."""
    if value <= limit:
        return False
    return True if low > limit and n >= FEWEST else None


def below(value: float, high: float, n: int, limit: float) -> bool | None:
    """That something is at most limit, likewise."""
    if value > limit:
        return False
    return True if high <= limit and n >= FEWEST else None


def higher(value: float, low: float, than: float, high: float, n: int) -> bool | None:
    """That something is more than another that is measured too, whose interval ends at `high`:
    False where it was not, None where the intervals, or fewer than FEWEST, leave it open."""
    return False if value <= than else above(value, low, n, high) or None


def every(*verdicts: bool | None) -> bool | None:
    """All of them hold; None: none is False, but one is open."""
    return False if False in verdicts else None if None in verdicts else True


def needed(limit: float, level: float = LEVEL) -> int:
    """Of how many none must be true for Wilson's interval to stay below limit."""
    z = _deviations(level)
    return math.ceil(z * z * (1 - limit) / limit)


def auc(positives: ArrayLike, negatives: ArrayLike) -> float:
    """Area under the ROC curve: how often a positive is larger than a negative, ties half."""
    high, low = np.asarray(positives, float), np.asarray(negatives, float)
    if not len(high) or not len(low):
        return math.nan
    u = scipy("stats").mannwhitneyu(high, low, method="asymptotic").statistic
    return float(u) / (len(high) * len(low))


def mcnemar(gained: int, lost: int) -> float:
    """Exact two-sided p-value of McNemar's test on paired outcomes that differ."""
    n = gained + lost
    return float(scipy("stats").binomtest(gained, n, 0.5).pvalue) if n else 1.0


def halves(groups: Sequence[str], seed: int = 0) -> tuple[set[str], set[str]]:
    """The different groups in two random halves, so that no group stands in both."""
    names = sorted(set(groups))
    order = np.random.default_rng(seed).permutation(len(names))
    first = {names[i] for i in order[: (len(names) + 1) // 2]}
    return first, set(names) - first
