"""Statistics against their tables and by simulation; tables of results."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.labs import a_table

from rksc.calibration import stats
from rksc.experiments import Finding, Table

NAN = math.nan

# ---- statistics --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("k", "n", "low", "high"),
    [  # Wilson, 1927, by hand: (p + z2/2n -+ z sqrt(p q / n + z2 / 4 n2)) / (1 + z2 / n)
        (0, 10, 0.0, 0.2775),
        (10, 10, 0.7225, 1.0),
        (5, 10, 0.2366, 0.7634),
        (6, 1616, 0.0017, 0.0081),  # the paper's wrong exits
        (0, 0, 0.0, 1.0),
    ],
)
def test_wilson(k: int, n: int, low: float, high: float) -> None:
    assert stats.wilson(k, n) == pytest.approx((low, high), abs=5e-5)


@pytest.mark.parametrize(("k", "n"), [(-1, 3), (4, 3)])
def test_wilson_refuses(k: int, n: int) -> None:
    with pytest.raises(ValueError, match="k must be"):
        stats.wilson(k, n)


def test_statistics_are_those_of_the_books() -> None:
    """Counted one by one, or SciPy's where it has them in one call."""
    scipy_stats = pytest.importorskip("scipy.stats")
    rng = np.random.default_rng(5)
    for _ in range(40):
        n = int(rng.integers(1, 400))
        k = int(rng.integers(0, n + 1))
        theirs = scipy_stats.binomtest(k, n).proportion_ci(0.95, method="wilson")
        assert stats.wilson(k, n) == pytest.approx((theirs.low, theirs.high), abs=1e-12)
        a, b = rng.integers(0, 9, n), rng.integers(2, 11, 7)
        wins = np.mean((a[:, None] > b) + (a[:, None] == b) / 2)
        assert stats.auc(a, b) == pytest.approx(wins, abs=1e-12)
        gained, lost = (int(v) for v in rng.integers(0, 12, 2))
        if gained + lost:
            m = gained + lost
            tail = sum(math.comb(m, i) for i in range(min(gained, lost) + 1))
            exact = min(1.0, 2 * tail / 2**m)
            assert stats.mcnemar(gained, lost) == pytest.approx(exact, abs=1e-12)
    values = rng.exponential(size=20)
    error = scipy_stats.sem(values)
    theirs = scipy_stats.t.interval(0.95, 19, values.mean(), error)
    assert stats.jackknife(values) == pytest.approx(theirs, abs=1e-9)


@pytest.mark.parametrize(("df", "t"), [(1, 12.706), (2, 4.303), (5, 2.571), (10, 2.228)])
def test_the_interval_of_a_mean_is_students(df: int, t: float) -> None:
    """Any table of the distribution has these."""
    values = np.arange(df + 1.0)
    error = np.std(values, ddof=1) / math.sqrt(df + 1)
    assert stats.jackknife(values)[1] - values.mean() == pytest.approx(t * error, rel=2e-4)


def test_the_jackknife_takes_a_statistic() -> None:
    """A ratio of sums: by hand, three values leave one out each."""
    values = np.array([(2.0, 1.0), (3.0, 1.0), (4.0, 2.0)])
    ratios = np.array([7 / 3, 6 / 3, 5 / 2])
    half = 4.303 * math.sqrt(2 / 3 * ((ratios - ratios.mean()) ** 2).sum())
    made = stats.jackknife(values, lambda x: x[..., 0].sum(axis=1) / x[..., 1].sum(axis=1))
    assert made == pytest.approx((9 / 4 - half, 9 / 4 + half), abs=1e-3)
    assert all(math.isnan(v) for v in stats.jackknife([1.0]))


def test_the_median_lies_between_two_values() -> None:
    """Of twelve the third and the tenth: chance 2 * 79 / 4096 that the median is not between."""
    assert stats.median_interval(np.arange(12)[::-1]) == (2, 9)
    assert stats.median_interval(np.arange(6)) == (0, 5)
    assert all(math.isnan(v) for v in stats.median_interval(np.arange(5)))
    assert all(math.isnan(v) for v in stats.median_interval([]))
    low, high = stats.median_interval(np.arange(2000))  # sqrt(2000) on both sides of the middle
    assert low == 1999 - high and high - low == pytest.approx(1.96 * math.sqrt(2000), abs=2)


def test_a_paired_difference_has_a_width_where_nothing_differs() -> None:
    """By hand: none of 36 differ, so z2 / (n + z2) on both sides."""
    assert stats.paired(0, 0, 36) == pytest.approx((-3.8415 / 39.8415, 3.8415 / 39.8415), abs=1e-5)
    low, high = stats.paired(12, 2, 50)
    assert stats.paired(2, 12, 50) == pytest.approx((-high, -low))
    assert low < 0.2 < high and stats.paired(7, 0, 7)[1] == pytest.approx(1)
    assert stats.paired(0, 0, 0) == (-1, 1)
    with pytest.raises(ValueError, match="gained, lost must be"):
        stats.paired(3, 2, 4)


@pytest.mark.parametrize(("gain", "loss"), [(0.1, 0.1), (0.3, 0.1), (0.5, 0.4), (0.2, 0.0)])
def test_paired_intervals_cover(gain: float, loss: float) -> None:
    """Over every outcome of 20, by its probability, the true difference lies inside."""
    n, covered = 20, 0.0
    for gained in range(n + 1):
        for lost in range(n + 1 - gained):
            low, high = stats.paired(gained, lost, n)
            if low - 1e-9 <= gain - loss <= high + 1e-9:
                rest = n - gained - lost
                ways = math.comb(n, gained) * math.comb(n - gained, lost)
                covered += ways * gain**gained * loss**lost * (1 - gain - loss) ** rest
    assert covered >= 0.94


def test_what_may_be_said() -> None:
    assert stats.above(2, 1, 6) is True and stats.above(2, 1, 5) is None  # too few
    assert stats.above(2, 0, 36) is None and stats.above(0, -1, 36) is False
    assert stats.below(0, 1, 36, 1) is True and stats.below(0, 2, 36, 1) is None
    assert stats.below(2, 3, 5, 1) is False and stats.below(NAN, 1, 0, 1) is None
    assert stats.higher(5, 4, 2, 3, 6) is True and stats.higher(2, 1, 2, 3, 6) is False
    assert stats.higher(5, 2, 2, 3, 6) is None and stats.higher(5, 4, 2, 3, 5) is None
    assert stats.higher(2.5, 2, 2, 3, 36) is None  # inside the other's interval
    assert stats.every(True, None) is None and stats.every(None, False) is False
    assert stats.every(True, True) is True
    for limit in (0.01, 0.05):
        n = stats.needed(limit)
        assert stats.wilson(0, n)[1] <= limit < stats.wilson(0, n - 1)[1]


def test_auc_counts_ties_half() -> None:
    assert stats.auc([2, 3], [0, 1]) == 1.0
    assert stats.auc([1, 1], [1]) == 0.5
    assert math.isnan(stats.auc([], [1]))


def test_mcnemar() -> None:
    assert stats.mcnemar(0, 0) == 1.0
    assert stats.mcnemar(0, 5) == pytest.approx(2 / 32)
    assert stats.mcnemar(3, 3) == 1.0


def test_halves_share_no_group() -> None:
    groups = [f"q{i // 3}" for i in range(30)]
    first, second = stats.halves(groups, seed=4)
    assert first | second == set(groups) and not first & second and len(first) == 5
    assert stats.halves(groups[::-1], seed=4) == (first, second)
    assert stats.halves(groups, seed=5) != (first, second)


def test_a_rate_says_its_interval() -> None:
    assert str(stats.Rate(1, 4)) == "25.0 % (1 of 4; 95 % interval 4.6 to 69.9)"
    assert str(stats.Rate(0, 0)) == "none measured"
    assert stats.rate([True, False, True]) == stats.Rate(2, 3)


def test_what_is_said_twice_is_no_more_certain() -> None:
    flags = [True, False, True, True, False, False, True]
    once = stats.rate(flags)
    alone = stats.rate(flags, groups=range(7))
    assert (alone.low, alone.high) == pytest.approx((once.low, once.high))
    # by hand: of 21 as independent flags p q / 20, of seven questions 7 / 6 * p q / 7
    three = stats.rate(flags * 3, groups=list(range(7)) * 3)
    assert (three.k, three.n, three.effective) == (12, 21, pytest.approx(6.3))
    assert three.low == pytest.approx(stats.wilson(6.3 * 4 / 7, 6.3)[0])
    # within a group as different as between groups: nothing is lost
    even = stats.rate([True, False] * 5, groups=[i // 2 for i in range(10)])
    assert (even.low, even.high) == stats.wilson(5, 10)
    assert stats.rate([False] * 12, ["a", "b", "c"] * 4).high == stats.wilson(0, 3)[1]
    assert stats.rate([True] * 12, ["a", "b", "c"] * 4).low == stats.wilson(3, 3)[0]
    assert stats.rate([], []) == stats.Rate(0, 0)


# ---- tables ------------------------------------------------------------------------------------


def test_a_table_is_read_by_names() -> None:
    table = a_table()
    assert table.column("time") == [1.23456, None] and len(table) == 2
    assert table.where(ok=False).rows == [("c", None, False)]
    assert table.dicts()[0] == {"name": "a|b", "time": 1.23456, "ok": True}
    with pytest.raises(KeyError, match="no column 'seconds', but name, time, ok"):
        table.column("seconds")
    with pytest.raises(ValueError, match="row 1 has 2 values for 3"):
        replace(table, rows=[("a", 1, True), ("b", 2)])


def test_a_table_keeps_everything_in_json(tmp_path: Path) -> None:
    table = a_table()
    table.to_json(tmp_path / "t.json")
    again = Table.from_json(tmp_path / "t.json")
    assert again._plain() == table._plain()
    assert again.also["more"].rows == [(1,)] and again.findings == table.findings


def test_a_table_as_csv_tells_units_and_origin(tmp_path: Path) -> None:
    a_table().to_csv(tmp_path / "t.csv")
    lines = (tmp_path / "t.csv").read_text().splitlines()
    assert lines[:3] == ['# model: "m"', "# seed: 3", "name,time [s],ok"]
    assert lines[3:] == ["a|b,1.23456,True", "c,,False"]


def test_a_table_prints() -> None:
    text = str(a_table())
    assert "time [s]" in text and "1.235" in text and "+ it works" in text and "More" in text
    assert [str(Finding("x", good)) for good in (True, False, None)] == ["+ x", "- x", "? x"]
    assert "<th>time [s]</th>" in a_table()._repr_html_()
    assert a_table().markdown().splitlines()[1] == "| --- | --- | --- |"
