"""Experiments: statistics, tables, memory of measurements, replays against real runs, calibration.

Every experiment also runs whole, on a random model of four layers and data of a few lines.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes as c
import importlib.util
import json
import math
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_policy as policy
from support.letters import Letters
from support.models import KEEN, SHARP, Small

from rksc import ASKS, CGEE, Model, Tensor, calibrate, calibrate_cgee, is_rewording
from rksc.calibration import runner, stats
from rksc.calibration import tasks as task_module
from rksc.calibration.fitting import (
    Effect,
    Gate,
    Seen,
    Verified,
    effect,
    fit,
    fit_cgee,
    lens_costs,
    see,
)
from rksc.calibration.fitting import report as gate_report
from rksc.calibration.measure import LENSES, answers, centres, difference, wordings
from rksc.calibration.replay import Lenses, judge, majority, select, sigma
from rksc.calibration.runner import Bench, Log
from rksc.calibration.tasks import Pair, Problem, find_data, problem_sets, turned, wording_pairs
from rksc.cli import experiment as command_module
from rksc.experiments import EXPERIMENTS, Column, Finding, Lab, Table, report
from rksc.experiments.accuracy import shown as accuracy_shown
from rksc.experiments.cgee import _against_contenders, _baselines, _layers, _settles
from rksc.experiments.decomposition import _findings as decomposition_findings
from rksc.experiments.eviction import _findings as eviction_findings
from rksc.experiments.eviction import _paired
from rksc.experiments.rewording import Wording, _acceptance, _reached
from rksc.reasoning.prompts import Wordings

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


def a_table() -> Table:
    more = Table("cgee", "More", (Column("x"),), [(1,)])
    return Table(
        "cgee", "A title", (Column("name"), Column("time", "s"), Column("ok")),
        [("a|b", 1.23456, True), ("c", None, False)], {"model": "m", "seed": 3},
        [Finding("it works", True)], {"more": more},
    )  # fmt: skip


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


# ---- data --------------------------------------------------------------------------------------

CHOICE = Problem("m", "Which?", "B", ("x", "y", "z"))


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("The answer is B.", "B"),
        ("A or C? Answer: **b**", "B"),
        ("C is wrong. Answer:\n(a).", "A"),
        ("ANSWER IS C", "C"),
        ("The answer is a gas.", ""),  # an article, no choice
        ("It is B: the answer is a gas.", "B"),
        ("Answer: a gas", ""),
        ("I take A", "A"),
        ("Answer: D", ""),  # there is no D; "D" is no choice
        ("none of it", ""),
        ("", ""),
    ],
)
def test_letters_are_read(text: str, answer: str) -> None:
    assert CHOICE.read(text) == answer


def test_numbers_are_read_and_choices_shown() -> None:
    assert Problem("g", "How many?", "12").read("so 3 * 4 = 12\nAnswer: 12 apples") == "12"
    assert CHOICE.text == "Which?\nA. x\nB. y\nC. z"


@pytest.mark.parametrize(
    ("answer", "said", "right"),
    [
        ("12", "Answer: $12.00", True),
        ("1200", "Answer: 1{,}200 apples", True),
        ("-3", "#### \u22123", True),
        ("50", "The answer is 50%.", True),  # a known answer names no unit
        ("30", "Answer: 12:30", False),
        ("4", "Answer: 3/4", False),
        ("3", "Answer: -3", False),
        ("12", "", False),
    ],
)
def test_numbers_are_right_however_they_are_written(answer: str, said: str, right: bool) -> None:
    row = Problem("g", "How many?", answer)
    assert row.is_right(row.read(said)) is right
    assert CHOICE.is_right(CHOICE.read("Answer: b")) and not CHOICE.is_right("A")


def test_words_turn_round() -> None:
    assert turned("He has 3 more than she.") == "He has 3 fewer than she."
    assert turned("5 minutes more") == "5 minutes fewer"
    assert turned("nothing here") is None


def write(folder: Path, name: str, rows: Sequence[dict[str, Any]]) -> None:
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few lines of every file."""
    folder = tmp_path_factory.mktemp("data")
    write(folder, "gsm8k", [
        {"id": f"g{i}", "question": f"th {i} abc", "answer": str(i)} for i in range(5)
    ])  # fmt: skip
    write(folder, "mmlu_stem", [
        {"id": f"m{i}", "question": f"e {i}", "answer": "AB"[i % 2], "choices": ["a", "b"]}
        for i in range(4)
    ])  # fmt: skip
    rows = [
        {"gsm8k_id": f"q{i}", "question": f"{i} more th abc {'ab' * i} the",
         "reworded": f"e the {'th' * i} abc fewer {i}", "answer": str(i) if i < 7 else None}
        for i in range(8)
    ]  # fmt: skip
    write(folder, "rewordings", rows)
    kinds = ["numerical substitution", "critical thinking", "reversing operation",
             "adding operation", "distraction insertion"]  # fmt: skip
    write(folder, "near_duplicates", [
        {"gsm8k_id": row["gsm8k_id"], "type": kind, "question": row["question"],
         "reworded": f"{row['question']} {i}", "answer_differs": True}
        for row in rows for i, kind in enumerate(kinds)
    ])  # fmt: skip
    return folder


def test_pairs_of_a_question(data: Path) -> None:
    by_group = wording_pairs(data)
    assert sorted(by_group) == [f"q{i}" for i in range(8)]
    kinds = {pair.kind for pair in by_group["q3"]}
    assert kinds == set(task_module.KINDS)
    for group, pairs in by_group.items():
        other = next(p for p in pairs if p.kind == task_module.UNRELATED)
        assert other.own != other.root and all(p.group == group for p in pairs)
        assert [p.same for p in pairs if p.kind == task_module.REWORDING] == [True]
    assert list(wording_pairs(data, 3)) == list(by_group)[:3]


@pytest.mark.parametrize("n", [2, 3, 5, None])
def test_no_half_sees_a_question_of_the_other(data: Path, n: int | None) -> None:
    by_group = wording_pairs(data, n, seed=3)
    first, second = stats.halves(list(by_group), 3)
    roots = {half: {by_group[g][0].root for g in half} for half in map(frozenset, (first, second))}
    (a, others), (b, more) = (
        (texts, {p.own for g in half for p in by_group[g] if p.kind == task_module.UNRELATED})
        for half, texts in roots.items()
    )
    assert not others & b and not more & a and not others & more
    assert len(others) == len(first) and len(more) == len(second)


def test_a_half_of_one_question_may_have_no_unrelated_one(tmp_path: Path) -> None:
    rows = [{"gsm8k_id": f"q{i}", "question": f"How many, {i}?", "reworded": "x"} for i in range(2)]
    write(tmp_path, "rewordings", rows)
    kinds = {pair.kind for of in wording_pairs(tmp_path).values() for pair in of}
    assert kinds == {task_module.REWORDING}


def test_answers_of_reworded_questions(data: Path, tmp_path: Path) -> None:
    assert task_module.wording_answers(data) == {f"q{i}": str(i) for i in range(7)}  # not of q7
    assert len(task_module.wording_answers(find_data())) == 300


def test_data_are_found_from_below(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A notebook's kernel works in its own folder."""
    (tmp_path / "data").symlink_to(data)
    (tmp_path / "examples" / "deep").mkdir(parents=True)
    for folder in (tmp_path, tmp_path / "examples", tmp_path / "examples" / "deep"):
        monkeypatch.chdir(folder)
        assert find_data() == tmp_path / "data"
    monkeypatch.setattr(task_module, "__file__", str(tmp_path / "a" / "b" / "c" / "tasks.py"))
    monkeypatch.chdir("/")
    with pytest.raises(FileNotFoundError, match="a folder data of / or above"):
        find_data()


def test_the_package_has_what_it_may_hold(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Outside of a clone: two sets, and questions of our own for the gate; the rest is named."""
    package = Path(task_module.__file__).parents[1]
    monkeypatch.setattr(
        task_module, "__file__", str(tmp_path / "rksc" / "experiments" / "tasks.py")
    )
    (tmp_path / "rksc").mkdir()
    (tmp_path / "rksc" / "data").symlink_to(package / "data")
    monkeypatch.chdir("/")
    folder = find_data()
    assert folder == tmp_path / "rksc" / "data"
    sizes = {name: len(rows) for name, rows in problem_sets(folder).items()}
    assert sizes == {"gsm8k": 200, "mmlu_stem": 200}
    assert task_module.examples(folder, "gsm8k", 8).count("Question:") == 8
    by_group = wording_pairs(folder)
    assert len(by_group) == 12
    for pairs in by_group.values():
        assert {p.kind for p in pairs} >= {
            task_module.REWORDING, task_module.NUMBER_CHANGED, task_module.FACT_REMOVED,
            task_module.REVERSED, task_module.ADDED, task_module.UNRELATED,
        }  # fmt: skip
        assert all(is_rewording(p.own, p.root) for p in pairs if p.kind == task_module.REWORDING)
    said = task_module.missing_data(folder)
    assert said is not None and "arc_challenge" in said and "--data FOLDER" in said
    assert task_module.missing_data(tmp_path) is None


def test_data_say_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="--data"):
        find_data(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"rewordings\.jsonl"):
        wording_pairs(tmp_path)
    (tmp_path / "gsm8k.jsonl").write_text('{"question": "?", "answer": "1"}\nnot json\n')
    with pytest.raises(ValueError, match=r"gsm8k\.jsonl: line 2"):
        problem_sets(tmp_path)
    write(tmp_path, "gsm8k", [{"question": "?", "answer": 1}])
    with pytest.raises(ValueError, match="answer must be a non-empty text"):
        problem_sets(tmp_path)
    write(tmp_path, "gsm8k", [{"question": "?", "answer": "C", "choices": ["a", "b"]}])
    with pytest.raises(ValueError, match="letter of a choice"):
        problem_sets(tmp_path)


def test_the_committed_data_are_whole() -> None:
    folder = find_data()
    sizes = {name: len(problems) for name, problems in problem_sets(folder).items()}
    assert sizes == {"gsm8k": 200, "arc_challenge": 200, "mmlu_stem": 200}
    pairs = wording_pairs(folder)
    assert len(pairs) == 300
    true = [p for of in pairs.values() for p in of if p.kind == task_module.REWORDING]
    copies = [p for of in pairs.values() for p in of if p.kind == task_module.TURNED]
    assert np.mean([is_rewording(p.own, p.root) for p in true]) > 0.8
    assert np.mean([is_rewording(p.own, p.root) for p in copies]) < 0.02


# ---- what is remembered ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small() -> Model:
    """T4 with sharper logits as a Model with a tokenizer, nothing on disk."""
    return as_model(KEEN)


def as_model(model: Small) -> Model:
    weights = {
        name: Tensor(np.ascontiguousarray(w), "F32", w.shape) for name, w in model.weights.items()
    }
    return Model(weights, model.model_config, Letters(chat=True))  # type: ignore[arg-type]


def lab_of(model: Any, **options: Any) -> Lab:
    engine = {"dtype": "float32", "kv_bytes": "8MiB", "n_threads": 1}
    return Lab(model, progress=False, engine=engine, **options)


CALLS: list[int] = []


def square(bench: Bench, x: int) -> dict[str, Any]:
    CALLS.append(x)
    if x < 0:
        raise ValueError("negative")
    return {"square": x * x, "float": x / 3}


def test_measurements_are_made_once(tmp_path: Path, small: Model) -> None:
    items = [{"x": x} for x in (3, 1, 2)]
    CALLS.clear()
    first = lab_of(small, out=tmp_path).measure(square, items)
    assert [r["square"] for r in first] == [9, 1, 4] and CALLS == [3, 1, 2]
    again = lab_of(small, out=tmp_path).measure(square, [*items, {"x": 5}])
    assert again == [*first, {"square": 25, "float": 5 / 3}] and CALLS == [3, 1, 2, 5]
    lab_of(as_model(SHARP), out=tmp_path).measure(square, items[:1])
    assert CALLS[4:] == [3]  # the same configuration, other weights
    lab_of(as_model(KEEN), out=tmp_path).measure(square, items[:1])
    assert CALLS[5:] == []  # the same model, made anew
    bfloat16 = replace(lab_of(small, out=tmp_path), engine={"dtype": "bfloat16"})
    bfloat16.measure(square, items[:1])
    assert CALLS[5:] == [3]


def test_times_are_of_one_processor_and_results_of_one_version(
    tmp_path: Path, small: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(timed: bool, threads: int) -> list[int]:
        CALLS.clear()
        lab = replace(
            lab_of(small, out=tmp_path), engine={"dtype": "float32", "n_threads": threads}
        )
        lab.measure(square, [{"x": 1}], timed=timed)
        return CALLS

    assert measure(True, 1) == [1] and measure(True, 1) == []
    assert measure(True, 2) == [1] and measure(False, 2) == [1] and measure(False, 1) == []
    monkeypatch.setattr("rksc.calibration.runner.processor", lambda: "another")
    assert measure(True, 1) == [1] and measure(False, 1) == []
    monkeypatch.setattr("rksc.calibration.runner.__version__", "another")
    assert measure(False, 1) == [1]


def say(bench: Bench, text: str) -> dict[str, Any]:
    return {"text": text}


def test_any_text_is_remembered(tmp_path: Path, small: Model) -> None:
    """Among them what `str.splitlines` takes for the end of a line."""
    items = [{"text": f"a{end}b"} for end in "\u2028\u0085\x0b\x1c\n\r"]
    made = lab_of(small, out=tmp_path).measure(say, items)
    kept = Log(tmp_path / "raw", "say").read().values()
    assert made == items == [record["result"] for record in kept]


def test_only_what_was_asked_for_is_counted(tmp_path: Path, small: Model) -> None:
    """The folder may hold other runs; what is asked for twice was made once."""
    lab_of(small, out=tmp_path).measure(square, [{"x": x} for x in range(5)])
    log = Log(tmp_path / "raw", "square")
    records = [json.loads(line) for line in log.path.read_text().splitlines()]
    log.path.unlink()
    for record in records:
        log.append({**record, "seconds": 2.0, "cpu": 1.0})
    lab = lab_of(small, out=tmp_path)
    for _ in range(2):
        lab.measure(square, [{"x": 3}, {"x": 1}])
    assert sum(spent.seconds for spent in lab.spent.values()) == 4
    assert lab.noise() is None


HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None


def test_kept_measurements_are_mentioned(small: Model, tmp_path: Path) -> None:
    first, second = lab_of(small, out=tmp_path), lab_of(small, out=tmp_path)
    for _ in range(2):
        first.measure(square, [{"x": 1}, {"x": 2}], timed=True)
    assert first.kept() is None
    second.measure(square, [{"x": 1}, {"x": 3}, {"x": 2}], timed=True)
    assert str(second.kept()).startswith("2 of 3 measurements are those of an earlier run")


def test_times_that_ray_does_not_take_are_mentioned(small: Model, tmp_path: Path) -> None:
    lab = lab_of(small)
    lab.measure(square, [{"x": 1}, {"x": 2}], timed=True)
    assert lab.not_on_ray() is None
    object.__setattr__(lab, "ray", True)
    assert str(lab.not_on_ray()).startswith("2 timed measurements ran on this machine")


@pytest.mark.parametrize(
    ("missing", "plots", "told"),
    [
        ({"matplotlib"}, True, "need matplotlib: pip install 'rksc\\[experiments\\]'; --no-plots"),
        ({"matplotlib", "scipy"}, True, "need SciPy and matplotlib: pip install"),
        ({"scipy"}, False, "need SciPy: pip install"),
        ({"matplotlib"}, False, None),
    ],
)
def test_what_the_end_of_a_run_needs_is_asked_for_first(
    monkeypatch: pytest.MonkeyPatch, missing: set[str], plots: bool, told: str | None
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name in missing else name)
    with pytest.raises(ImportError, match=told) if told else contextlib.nullcontext():
        command_module.require_packages(plots)


def test_others_on_the_machine_are_mentioned(small: Model) -> None:
    lab = lab_of(small)
    lab.measure(square, [{"x": 1}], timed=True)
    for cpu, said in ((0.9, False), (0.5, True)):
        lab.spent.update(dict.fromkeys(lab.spent, runner.Spent(1.0, cpu, True, False)))
        assert (lab.noise() is not None) is said
    assert "0.5 of 1 processors" in str(lab.noise())


def test_a_process_of_ray_keeps_its_model(monkeypatch: pytest.MonkeyPatch, small: Model) -> None:
    loaded = []
    monkeypatch.setattr(runner, "_bench", None)
    monkeypatch.setattr(runner, "load", lambda path: loaded.append(path) or small)
    (work,) = runner.Work.of(model_of, {"key": {}}, None)
    for path, threads in (("a", 1), ("a", 1), ("b", 1), ("b", 2), ("b", 2)):
        made = runner._run_there(path, {"n_threads": threads}, work)
        assert made["key"]["result"] == {"layers": 4}
    assert loaded == ["a", "b", "b"]


def model_of(bench: Bench) -> dict[str, Any]:
    return {"layers": bench.model.config.n_layers}


def test_a_stopped_run_goes_on(tmp_path: Path, small: Model) -> None:
    CALLS.clear()
    with pytest.raises(ValueError, match="negative"):
        lab_of(small, out=tmp_path).measure(square, [{"x": 1}, {"x": -1}, {"x": 2}])
    log = tmp_path / "raw" / "square.jsonl"
    with log.open("a") as file:
        file.write('{"key": "cut o')  # the machine went down here
    made = lab_of(small, out=tmp_path).measure(square, [{"x": 1}, {"x": 2}])
    assert [r["square"] for r in made] == [1, 4] and CALLS == [1, -1, 2]
    assert len(log.read_text().splitlines()) == 2


def test_a_broken_memory_is_named(tmp_path: Path) -> None:
    log = Log(tmp_path, "square")
    whole = '{"key": "a", "seconds": 1, "cpu": 1, "result": {}}'
    log.path.write_text(f'{whole}\n{{"key": 1\n{whole}\n')
    with pytest.raises(ValueError, match=r"square\.jsonl: line 2 is broken"):
        log.read()


def test_results_must_be_plain(small: Model) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        lab_of(small).measure(nothing, [{}])


def nothing(bench: Bench) -> dict[str, Any]:
    return {"value": NAN}


def test_workers_give_the_same_results(tmp_path: Path, smollm2: Model) -> None:
    items = [
        {"root": f"Tom has {n} apples.", "others": [f"There are {n} apples that Tom owns."],
         "centre": ["What is red?", "Who sings?"], "instruction": "Think."}
        for n in (3, 4)
    ]  # fmt: skip
    engine = {"kv_bytes": "64MiB", "n_threads": 1}
    alone = Lab(smollm2, engine=dict(engine), progress=False).measure(wordings, items)
    lab = Lab(smollm2, n_workers=2, engine=dict(engine), progress=False, out=tmp_path)
    assert lab.measure(wordings, items) == alone
    assert Lab(smollm2, engine=dict(engine), out=tmp_path).measure(wordings, items) == alone
    problems = [
        asked({"id": "p", "question": f"What is {n} + 4?", "answer": "7", "choices": []})
        for n in (1, 2, 3)
    ]
    apart = Lab(smollm2, engine=dict(engine), progress=False).measure(answers, problems, together=3)
    assert lab.measure(answers, problems, together=2) == apart


def test_ray_gives_the_same_results(smollm2: Model) -> None:
    pytest.importorskip("ray")
    items = [{"root": "Tom has 3 apples.", "others": ["Tom owns 3 apples."],
              "centre": ["What is red?", "Who sings?"], "instruction": "Think."}]  # fmt: skip
    engine = {"kv_bytes": "64MiB", "n_threads": 1}
    alone = Lab(smollm2, engine=dict(engine), progress=False).measure(wordings, items)
    over = Lab(smollm2, ray=True, engine=dict(engine), progress=False)
    assert over.measure(wordings, items) == alone


def test_a_lab_checks_its_settings(small: Model) -> None:
    with pytest.raises(ValueError, match="n_workers must be"):
        lab_of(small, n_workers=0)
    for n in (1, 2.0, True):
        with pytest.raises(ValueError, match="n must be"):
            lab_of(small, n=n)
    lab = lab_of(small, n=np.int64(3), n_workers=np.int32(1))
    assert type(lab.size(12, None)) is int and lab.n == 3 and type(lab.n_workers) is int
    with pytest.raises(ValueError, match="from its path"):
        lab_of(small, n_workers=2)
    with pytest.raises(ValueError, match="already has its quick"):
        EXPERIMENTS["cgee"](lab_of(small), quick=True)


# ---- replays -----------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.0, 1.5, -3.0, 2000.0])
def test_sigma_is_the_cores(alpha: float) -> None:
    rng = np.random.default_rng(7)
    for n in (1, 4, 30):
        cosines = rng.uniform(-1, 1, n).astype(np.float32)
        expected = policy.decide(cosines.tolist(), policy.weights(n, alpha), 0.5)[1]
        assert float(sigma(cosines, alpha)) == pytest.approx(expected, abs=1e-12)
    assert sigma(np.ones((2, 3)), alpha).tolist() == [1.0, 1.0]


CGEES = [
    CGEE(kappa=0.0), CGEE(), CGEE(kappa=0.9), CGEE(kappa=0.97, verify_batch=1),
    CGEE(kappa=0.0, skip_top=0.6, skip_lead=0.02), CGEE.fast(verify_batch=2),
    CGEE(kappa=0.0, skip_top_relative=0.5, skip_lead_relative=0.05),
    CGEE(kappa=0.0, verify_batch=1), CGEE(kappa=0.0, verify_batch=3),
]  # fmt: skip


def by_the_core(cgee: CGEE, confidence: list[float], scores: list[float]) -> tuple[list[bool], int]:
    """Who is verified, and the winner, by csrc/policy."""
    fields: dict[str, Any] = {
        name: getattr(cgee, name)
        for name in ("skip_top", "skip_lead", "skip_top_relative", "skip_lead_relative", "kappa")
        if getattr(cgee, name) is not None
    }
    order = policy.order_of(confidence)
    _, n = policy.skip_of(fields, confidence)
    made, best = [NAN] * len(scores), NAN
    for begin in range(0, n, cgee.verify_batch):
        some = [i for i in order[begin : min(begin + cgee.verify_batch, n)]
                if policy.can_win(confidence[i], best)]  # fmt: skip
        for i in some:
            made[i] = scores[i]
        for i in some:
            best = np.fmax(best, policy.mark(scores[i], confidence[i]))
    return [not math.isnan(s) for s in made], policy.select(made, confidence)


@pytest.mark.parametrize("cgee", CGEES)
def test_replays_are_the_cores_decisions(cgee: CGEE) -> None:
    rng = np.random.default_rng(11)
    nothing_seen = Lenses(np.empty((0, 0)), np.empty((0, 0)))
    for _ in range(200):
        n = int(rng.integers(1, 9))
        confidence = np.round(rng.uniform(0.3, 1, n), int(rng.integers(1, 4))).tolist()
        scores = np.round(rng.uniform(0, 1, n), 2).tolist()
        made = judge(cgee, confidence, scores, nothing_seen, 4)
        verified, winner = by_the_core(cgee, confidence, scores)
        assert (~np.isnan(made.scores)).tolist() == verified
        assert made.winner == winner and made.skipped == (not any(verified))
        assert made.layers.tolist() == [4 * v for v in verified]


def test_exits_are_the_cores() -> None:
    rng = np.random.default_rng(13)
    library = policy.policy()
    for _ in range(200):
        entropies = rng.uniform(0, 3, (1, 12))
        scores = rng.uniform(0, 1, (1, 12))
        cgee = CGEE(
            kappa=0.0, lens="full", theta=float(rng.uniform(0, 3)),
            epsilon=float(rng.uniform(0, 2)), min_layer=int(rng.integers(1, 8)),
            lens_every=int(rng.integers(1, 4)),
        )  # fmt: skip
        raw = policy.cgee(theta=cgee.theta, epsilon=cgee.epsilon, min_layer=cgee.min_layer,
                          lens_every=cgee.lens_every)  # fmt: skip
        layer, checks, previous = 12, 0, NAN
        for at in range(1, 12):
            if not library.rk_cgee_check(c.byref(raw), at, 12):
                continue
            h = entropies[0, at - 1]
            checks += 1
            if library.rk_cgee_exit(c.byref(raw), at, 12, c.c_double(h), c.c_double(previous)):
                layer = at
                break
            previous = h
        made = judge(cgee, [0.5], [0.25], Lenses(entropies, scores), 12)
        assert (made.layers[0], made.checks[0]) == (layer, checks)
        assert made.scores[0] == (0.25 if layer == 12 else scores[0, layer - 1])


@pytest.mark.parametrize("lens", ["answer", "full"])
@pytest.mark.parametrize("norm", [True, False])
def test_a_replayed_verification_is_a_real_one(small: Model, lens: Any, norm: bool) -> None:
    """Thresholds are taken from the middle between what was seen, so that rounding decides
    nothing."""
    lab = lab_of(small)
    problem = {"id": "p", "question": "th 3 abc", "answer": "3", "choices": []}
    (seen,) = answers(lab.bench, [asked(problem)])
    verified = Verified.of("p", seen)
    assert list(seen["lenses"]) == list(LENSES) and verified.n_layers == 4
    session = lab.bench.session
    words, kids = branches_of(lab, problem)
    name = f"{lens}{' norm' if norm else ''}"
    h = np.sort(verified.lenses[name].entropies[:, 1:3].ravel())
    unit = math.log(2) if lens == "answer" else 1.0
    layers_seen = set()
    for at in range(1, len(h)):
        if h[at] - h[at - 1] < 1e-4:
            continue
        cgee = CGEE(kappa=0.0, lens=lens, norm=norm, theta=float(h[at - 1] + h[at]) / 2 / unit,
                    epsilon=100.0, min_layer=1)  # fmt: skip
        verdicts = session.verify(kids, words.verification(), *words.answers(None, None), cgee=cgee)
        replayed = verified.judge(cgee)
        assert replayed.layers.tolist() == [v.layers for v in verdicts]
        assert replayed.scores == pytest.approx([v.score for v in verdicts], abs=1e-5)
        assert session.select(kids) is kids[replayed.winner]
        layers_seen.update(replayed.layers.tolist())
    assert len(layers_seen) > 1


@pytest.mark.parametrize("cgee", [None, CGEE(), CGEE(kappa=0.97, verify_batch=1), CGEE.fast()])
def test_a_replayed_choice_is_a_real_one(small: Model, cgee: CGEE | None) -> None:
    lab = lab_of(small)
    for i in range(3):
        problem = {"id": "p", "question": f"th {i} abc", "answer": "3", "choices": []}
        verified = Verified.of("p", answers(lab.bench, [asked(problem)])[0])
        words, kids = branches_of(lab, problem)
        session = lab.bench.session
        verdicts = session.verify(kids, words.verification(), *words.answers(None, None), cgee=cgee)
        replayed = verified.judge(cgee)
        assert (~np.isnan(replayed.scores)).tolist() == [v.score is not None for v in verdicts]
        assert session.select(kids) is kids[replayed.winner]


def asked(problem: dict[str, Any]) -> dict[str, Any]:
    return {"problem": problem, "n_branches": 4, "max_new_tokens": 8, "seed": 0}


def test_answers_do_not_depend_on_what_is_asked_with_them(small: Model) -> None:
    """A run that was stopped goes on with other company in its batches."""
    lab = lab_of(small)
    items = [
        asked({"id": "p", "question": f"th {i} abc", "answer": "3", "choices": ["yes", "no"][:i]})
        for i in range(3)
    ]
    items[1] |= {"n_branches": 3, "max_new_tokens": 5, "seed": 1}
    assert answers(lab.bench, items) == [answers(lab.bench, [item])[0] for item in items]


def test_branches_ask_in_turn_and_share_where_the_gate_lets_them(small: Model) -> None:
    """On their own KV they are what each wording gives alone; shared, what the root gives."""
    lab, problem = lab_of(small), {"id": "p", "question": "th 3 abc e the", "answer": "3",
                                   "choices": []}  # fmt: skip
    item, others = asked(problem), ["3 more e th abc"]
    (alone,) = answers(lab.bench, [item])
    (apart,) = answers(lab.bench, [{**item, "others": others}])
    assert apart["confidence"][::2] == alone["confidence"][::2]
    assert apart["confidence"][1::2] != alone["confidence"][1::2]
    assert not any(apart["approximate"])
    for centre, accepted in ((["the", "abc 9"], True), (["a 1 the", "b 2 the e"], False)):
        (made,) = answers(lab.bench, [{**item, "others": others, "centre": centre}])
        assert made["approximate"] == [False, accepted] * 2
        assert made["confidence"] == (alone if accepted else apart)["confidence"]
        assert lab.bench.session.asks is None


def branches_of(lab: Lab, problem: dict[str, Any]) -> tuple[Any, list[Any]]:
    """The branches that `answers` verified, once more."""
    from rksc.calibration.measure import sampling

    row = Problem(problem["id"], problem["question"], problem["answer"])
    words = Wordings(lab.bench.session, row.instruction)
    kids = lab.bench.session.prefill(words.problem(row.text)).fork(4)
    for i, kid in enumerate(kids):
        kid.stream = i
    lab.bench.session.generate(kids, 8, sampling(0))
    return words, kids


def test_centres_are_those_of_the_prompts_with_their_header(small: Model) -> None:
    """A worker keeps them; experiments with and without worked examples come one after the
    other."""
    lab, questions = lab_of(small), ["th 1 abc", "a 2"]
    plain, headed = (
        centres(lab.bench, Wordings(lab.bench.session, "x", header), questions)
        for header in (None, "th 9")
    )
    assert not np.array_equal(plain["mean"], headed["mean"])


@pytest.mark.parametrize("pool", ["mean", "last"])
def test_a_replayed_gate_is_the_real_one(small: Model, pool: Any) -> None:
    lab = lab_of(small)
    roots = ["3 more th abc", "the abc e 7", "fewer e th 12 the"]
    others = ["e abc fewer 3 th", "3 more th abd", "the e e"]

    words = Wordings(lab.bench.session, "Think.")
    centre = centres(lab.bench, words, roots)[pool]
    for root in roots:
        seen = wordings(lab.bench, root, others, roots, "Think.")["others"]
        for depth, alpha in ((1, 1.5), (4, 0.0)):
            for text, measured in zip(others, seen, strict=True):
                session = lab.bench.session
                session.asks = ASKS(center=centre, tau=-1.0, alpha=alpha, probe_layers=depth,
                                    pool=pool, guard=None)  # fmt: skip
                own = session.prefill(
                    words.problem(text), similar_to=session.prefill(words.problem(root))
                )
                session.asks = None
                cosines = measured[pool][:depth]
                assert own.gate.cosines == pytest.approx(cosines, abs=1e-5)
                assert own.gate.sigma == pytest.approx(float(sigma(cosines, alpha)), abs=1e-5)


def test_a_pair_is_measured_against_its_own_root(small: Model) -> None:
    """A question may have several first texts."""
    lab, centre = lab_of(small), ["th 1 abc", "a 2"]
    pairs = [Pair("g", "k", root, "e abc fewer 3 th", True) for root in ("3 more th abc", "the 7")]
    for made, pair in zip(see(lab, pairs, centre, "Think."), pairs, strict=True):
        (other,) = wordings(lab.bench, pair.root, [pair.own], centre, "Think.")["others"]
        assert made.cosines is not None and made.cosines["mean"].tolist() == other["mean"]


def test_the_tokens_that_differ() -> None:
    assert difference([1, 2, 3, 9], [1, 5, 6, 7, 9]) == (1, 3, 4)
    assert difference([1, 2, 9], [1, 2, 3, 9]) == (2, 3, 4)  # an insertion: one neighbour
    assert difference([1, 2], [1, 2, 3]) == (1, 2, 3)


def test_select_and_majority() -> None:
    assert select([0.5, NAN, 0.5], [0.25, 1.0, 0.25]) == 0
    assert select([None, None], [0.1, 0.2]) == 1
    assert majority(["3", "", "4", "4", "", ""]) == 2
    assert majority(["", ""]) == 0
    assert majority(["5", "4.00", "5", "$4", "4", "5 M"]) == 1  # one answer in three notations
    assert majority(["30", "12:30", "-3", "3", "12:30"]) == 1
    assert majority(["a", "b", "A", "b.", "A."]) == 0
    assert majority([r"\frac{1}{2}", "2", "0.5", "2"]) == 0


# ---- guards ------------------------------------------------------------------------------------

STEM = "Tom has 3 red apples and 4 green ones in his basket. How many more does he need for 10?"


@pytest.mark.parametrize(
    ("other", "passes"),
    [
        ("A basket of Tom's holds 3 apples that are red, 4 that are green. 10 are wanted: what is "
         "missing?", True),
        (STEM.replace("more", "fewer"), False),  # one word turned round
        (STEM.replace("4", "5"), False),  # a number
        (STEM + " He then drops all of them.", False),  # an operation added
        (STEM.replace(" in his basket", ""), False),  # a fact removed
        (STEM, False),
    ],
)  # fmt: skip
def test_a_rewording_is_no_near_copy(other: str, passes: bool) -> None:
    header = "Solve it.\nQuestion: one\nAnswer: two\n"
    assert is_rewording(STEM, other) is passes
    assert is_rewording(other, STEM) is passes
    # equal lines around the question do not count
    assert is_rewording(f"{header}{STEM}\nThink.", f"{header}{other}\nThink.") is passes


# ---- calibration -------------------------------------------------------------------------------


def pair(group: int, kind: str, same: bool, level: float, passes: str = "both") -> Seen:
    guards = {"both": {"numbers", "reworded", None}, "numbers": {"numbers", None}, "none": {None}}
    cosines = {pool: np.full(8, level) for pool in ("mean", "last")}
    return Seen(f"q{group}", kind, same, frozenset(guards[passes]), cosines)


def test_what_is_separable_is_separated() -> None:
    rng = np.random.default_rng(17)
    seen = [pair(i, "same", True, rng.uniform(0.6, 0.9)) for i in range(100)]
    seen += [pair(i, "other", False, rng.uniform(-0.2, 0.3)) for i in range(100)]
    gate = fit(seen, 8, 0.01)
    assert gate is not None
    assert 0.3 < gate.tau < 0.65 and gate.probe_layers == 1 and gate.guard == "numbers"
    assert all(gate.accepts(s) is bool(s.same) or s.same for s in seen)
    assert np.mean([gate.accepts(s) for s in seen if s.same]) >= 0.97


def test_near_duplicates_are_the_guards_to_stop() -> None:
    """They are more alike than rewordings: only a guard that refuses them leaves any reuse."""
    seen = [pair(i, "same", True, 0.8) for i in range(50)]
    seen += [pair(i, "turned", False, 0.99, "numbers") for i in range(50)]
    gate = fit(seen, 8, 0.01)
    assert gate is not None and gate.guard == "reworded"
    assert not any(gate.accepts(s) for s in seen if not s.same)
    assert fit(seen, 8, 0.01, guards=("numbers",)) is None
    tolerant = fit(seen, 8, 1.0, guards=("numbers",))
    assert tolerant is not None and all(tolerant.accepts(s) for s in seen)


def test_what_is_inseparable_stays_closed() -> None:
    rng = np.random.default_rng(19)
    seen = [pair(i, "same", True, rng.uniform(0, 0.9)) for i in range(200)]
    seen += [pair(i, "other", False, rng.uniform(0.1, 1.0)) for i in range(200)]
    assert fit(seen, 8, 0.0) is None


def test_the_allowed_errors_are_counted() -> None:
    seen = [pair(i, "same", True, 0.5) for i in range(10)]
    seen += [pair(i, "other", False, 0.9 if i < 2 else 0.1) for i in range(100)]
    assert fit(seen, 8, 0.01) is None
    gate = fit(seen, 8, 0.02)
    assert gate is not None and sum(gate.accepts(s) for s in seen if not s.same) == 2


def test_pairs_of_both_kinds_are_needed() -> None:
    with pytest.raises(ValueError, match="there must be some that may share"):
        fit([pair(0, "same", True, 0.5)], 8, 0.01)
    with pytest.raises(ValueError, match="unprobed"):
        Gate(None, "mean", 1, 1.5).accepts(Seen("q", "k", True, frozenset({None})))


def verified_problem(i: int, confidence: list[float], scores: list[float]) -> Verified:
    n = len(scores)
    sure = Lenses(np.full((n, 8), 0.01), np.tile(np.array(scores)[:, None], 8))
    lenses = dict.fromkeys(LENSES, sure)
    return Verified(f"p{i}", np.array(confidence), np.array(scores), lenses, 8, 10)


def test_level_2_is_taken_where_it_pays() -> None:
    """Lenses that see the final score from the first layer on."""
    problems = [verified_problem(i, [0.9, 0.89], [0.2, 0.8]) for i in range(16)]
    found = fit_cgee(problems, 0.0, {"answer": 0.01, "full": 5.0})
    assert found.level2 and found.cgee.lens == "answer"
    assert found.held_out.saved > 0.5 and found.held_out.changed.k == 0
    assert "Level 2 pays" in found.says
    dear = fit_cgee(problems, 0.0, {"answer": 100.0, "full": 100.0})
    assert not dear.level2 and dear.cgee.lens is None and "Level 2 is off" in dear.says


def test_level_2_must_surely_pay() -> None:
    """Its lens sees the score in one problem of eight on the half that chooses."""
    problems = [verified_problem(i, [0.9, 0.89], [0.2, 0.8]) for i in range(16)]
    first, _ = stats.halves([p.group for p in problems])
    blind = Lenses(np.full((2, 8), 9.0), np.zeros((2, 8)))
    problems = [p if p.group == min(first) else replace(p, lenses=dict.fromkeys(LENSES, blind))
                for p in problems]  # fmt: skip
    found = fit_cgee(problems, 0.0, {"answer": 0.0, "full": 0.0})
    assert found.cgee.lens is None and "no sure saving" in found.says


def test_the_held_out_half_only_measures() -> None:
    """What the choosing half decides stands, also where the other half speaks against it."""
    problems = [verified_problem(i, [0.9, 0.89], [0.2, 0.8]) for i in range(16)]
    _, second = stats.halves([p.group for p in problems])
    misleading = Lenses(np.full((2, 8), 0.01), np.tile([[0.9], [0.1]], 8))
    problems = [
        replace(p, lenses=dict.fromkeys(LENSES, misleading)) if p.group in second else p
        for p in problems
    ]
    found = fit_cgee(problems, 0.0, {"answer": 0.01, "full": 5.0})
    assert found.level2 and found.chosen_on.changed.k == 0
    assert found.held_out.changed == stats.Rate(8, 8)
    assert found.keeps is False and "The wanted 0.0% is missed." in found.says


def test_kappa_is_as_large_as_the_wanted_rate_allows() -> None:
    """The rival is 0.8 as confident and wins in one problem of four."""
    problems = [
        verified_problem(i, [0.8, 0.64], [0.1 if i % 4 == 0 else 0.9, 0.9]) for i in range(32)
    ]
    problems = [replace(p, lenses={n: Lenses(np.full((2, 8), 9.0), np.zeros((2, 8)))
                                   for n in LENSES}) for p in problems]  # fmt: skip
    costs = {"answer": 0.01, "full": 1.0}
    strict, loose = (fit_cgee(problems, rate, costs) for rate in (0.0, 0.5))
    assert strict.cgee.kappa <= 0.8 and strict.held_out.saved == 0
    assert loose.held_out.saved == 1.0 and 0 < loose.held_out.changed.value < 0.5
    assert not strict.level2 and not loose.level2
    whole = effect(CGEE(kappa=0.0), problems, 0.0)
    assert whole == Effect(0.0, stats.Rate(0, 32))


def test_a_calibration_says_whether_it_could_tell() -> None:
    """Of eight nothing changed: that is no proof of one in a hundred, but of one in two."""
    problems = [verified_problem(i, [0.9, 0.1], [0.8, 0.2]) for i in range(16)]
    for limit, keeps, said in ((0.01, None, "takes 381"), (0.5, True, "is kept")):
        found = fit_cgee(problems, limit, {"answer": 0.01, "full": 5.0})
        assert found.held_out.changed == stats.Rate(0, 8)
        assert found.keeps is keeps and said in found.says
    held = [pair(i, "other", False, 0.1) for i in range(3)] + [pair(9, "same", True, 0.9)]
    for level, keeps in ((0.5, None), (0.0, False)):
        made = gate_report(None, Gate("numbers", "mean", 1, 1.5, level), held, 0.01)
        assert made.keeps is keeps


def test_calibrate_on_a_model(data: Path, small: Model) -> None:
    pairs = [p for of in wording_pairs(data).values() for p in of]
    found = calibrate(small, pairs, 1.0, guards=(None,), progress=False, engine=dict(ENGINE))
    assert found.asks is not None and found.same.n == 4
    assert found.accepted[task_module.REWORDING] == found.same
    assert str(found.same) in found.says
    session = small.session(asks=found.asks, dtype="float32")
    assert session.asks is found.asks
    plain = [
        (f"th {i}", own, same)
        for i in range(4)
        for own, same in (("e", np.bool_(True)), ("the", np.bool_(False)))
    ]
    found = calibrate(small, plain, 0.0, guards=(None,), progress=False, engine=dict(ENGINE))
    assert (found.same.n, found.other.n) == (2, 2)


ENGINE: dict[str, Any] = {"dtype": "float32", "kv_bytes": "8MiB", "n_threads": 1}


@pytest.mark.parametrize("pairs", [[("a", "b", True)], [("a", "b")], [("a", 3, True)]])
def test_calibrate_refuses(small: Model, pairs: Any) -> None:
    with pytest.raises(ValueError, match="pairs"):
        calibrate(small, pairs, progress=False, engine=dict(ENGINE))


def test_calibrate_cgee_on_a_model(small: Model) -> None:
    problems = [(f"th {i} abc", str(i)) for i in range(6)]
    found = calibrate_cgee(small, problems, 0.5, n_branches=3, max_new_tokens=6, progress=False,
                           engine=dict(ENGINE))  # fmt: skip
    assert found.held_out.changed.n == 3 and found.says in str(found)
    with pytest.raises(ValueError, match="max_changed"):
        calibrate_cgee(small, problems, 2.0)
    for bad in (problems[:1], ["a question"], [("a", 1)], [("a", "")]):
        with pytest.raises(ValueError, match="problems"):
            calibrate_cgee(small, bad, engine={"dtype": "no session is opened"})  # type: ignore[arg-type]
    costs = lens_costs(lab_of(small))
    assert 0 < costs["answer"] < costs["full"]


# ---- whole experiments -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def results(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Table]]:
    """All experiments on the small model, made once."""
    out = tmp_path_factory.mktemp("results")
    lab = lab_of(as_model(KEEN), quick=True, n=2, data=data, out=out)
    return out, {name: run(lab) for name, run in EXPERIMENTS.items()}


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_runs_whole(name: str, results: tuple[Path, dict[str, Table]]) -> None:
    table = results[1][name]
    assert table.name == name and len(table) and table.findings
    assert {"model", "machine", "rksc", "seed", "quick"} <= set(table.meta)
    for part in (table, *table.also.values()):
        for column in part.columns:
            if column.unit == "%":
                known = [v for v in part.column(column.name) if v is not None]
                assert all(-1e-9 <= v <= 100 + 1e-9 or "net" in column.name for v in known), column


def test_exact_ways_agree(results: tuple[Path, dict[str, Table]]) -> None:
    tables = results[1]
    assert all(tables["prefix_sweep"].column("same results"))
    assert set(tables["eviction"].column("same winner")) <= {100.0, None}
    exact = tables["decomposition"].where(arm="exact caching")
    assert set(exact.column("winners changed")) == {0.0}
    alone = tables["decomposition"].where(arm="No-KV")
    assert set(alone.column("winners changed")) == {0.0}
    for a, b in zip(alone.column("computed"), exact.column("computed"), strict=True):
        assert a > b
    full = tables["accuracy"].where(way="best of n, verified in full")
    assert set(full.column("against full")) == {0.0}
    assert set(full.column("other answer than full")) == {0.0}
    asks = tables["accuracy"].where(way="best of n, ASKS")
    assert asks.column("set") == ["reworded"]
    assert tables["cgee"].where(rule="contenders", threshold=0.5).column("layers saved")[0] >= 0


def test_a_run_that_is_there_is_not_made_again(
    data: Path, results: tuple[Path, dict[str, Table]], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, tables = results
    monkeypatch.setattr("rksc.calibration.runner.Work.run", None)
    lab = lab_of(as_model(KEEN), quick=True, n=2, data=data, out=out)
    assert EXPERIMENTS["cgee"](lab)._plain() == tables["cgee"]._plain()


def test_the_report_puts_what_speaks_against_it_first(
    results: tuple[Path, dict[str, Table]], small: Model
) -> None:
    out, tables = results
    lab = lab_of(small, quick=True, n=2, out=out)
    page = report(tables, lab, "the command", HAS_MATPLOTLIB).read_text()
    titles = ["What speaks against it", "What it leaves open", "What speaks for it"]
    assert sorted(titles, key=page.index) == titles
    assert "`the command`" in page
    for name, table in tables.items():
        assert f"## {name}" in page and (out / f"{name}.csv").is_file()
        assert (out / f"{name}.png").is_file() == (out / f"{name}.pdf").is_file()
        for finding in table.findings:
            assert finding.text in page
        assert Table.from_json(out / f"{name}.json").rows == [
            tuple(None if isinstance(v, float) and math.isnan(v) else v for v in row)
            for row in table.rows
        ]


def test_kinds_without_pairs_are_no_failure(tmp_path: Path, small: Model) -> None:
    rows = [{"gsm8k_id": f"q{i}", "question": f"{i} more th abc", "reworded": f"e the abc {i}"}
            for i in range(2)]  # fmt: skip
    write(tmp_path, "rewordings", rows)
    table = EXPERIMENTS["rewording"](lab_of(small, quick=True, n=2, data=tmp_path))
    unrelated = table.where(kind=task_module.UNRELATED)
    assert set(unrelated.column("accepted")) == {None} and set(unrelated.column("pairs")) == {0}
    assert not any("None" in finding.text or "nan" in finding.text for finding in table.findings)


@pytest.mark.parametrize("answers_of", [None, ("", "")])
def test_accuracy_does_without_rewordings(
    tmp_path: Path, small: Model, answers_of: tuple[str, ...] | None
) -> None:
    """The file is missing, or no question in it has an answer to be right about."""
    write(tmp_path, "gsm8k", [
        {"id": f"g{i}", "question": f"th {i} abc", "answer": str(i)} for i in range(2)
    ])  # fmt: skip
    if answers_of is not None:
        write(tmp_path, "rewordings", [
            {"gsm8k_id": f"q{i}", "question": f"{i} th abc", "reworded": f"e {i}", "answer": answer}
            for i, answer in enumerate(answers_of)
        ])  # fmt: skip
    table = EXPERIMENTS["accuracy"](lab_of(small, quick=True, n=2, data=tmp_path))
    assert set(table.column("set")) == {"gsm8k", "all"} and table.meta["sets"] == {"gsm8k": 2}
    assert not any("reworded" in f.text or "nan" in f.text for f in table.findings)
    assert len(accuracy_shown(table)) == 1


def test_what_a_guard_lets_through_is_no_sample() -> None:
    """Of three pairs one passed a guard and was probed, and all of a question probed in full."""

    def wording(group: str, level: float | None, whole: bool) -> Wording:
        cosines = None if level is None else {"mean": np.full(8, level)}
        seen = Seen(group, "k", False, frozenset({None}), cosines)
        tokens = None if level is None else 10
        return Wording(Pair(group, "k", "", "", False), seen, tokens, tokens and 2, whole)

    def decide(w: Wording) -> bool | None:
        return None if w.seen.cosines is None else bool(w.seen.cosines["mean"][0] > 0.5)

    probed = [wording("full", 0.9, True), wording("full", 0.1, True)]
    selected = wording("part", 0.9, False)
    assert _acceptance([*probed, selected], decide)[-2:] == (3, 2)
    with_hole = [*probed, selected, wording("part", None, False)]
    accepted, *_, reused, over, n, questions = _acceptance(with_hole, decide)
    assert (accepted, reused, over, n, questions) == (50.0, 60.0, 40.0, 2, 1)
    assert _acceptance(with_hole[2:], decide) == (None,) * 5 + (0, 0)


@pytest.mark.parametrize(
    ("kind", "accepted", "questions", "good"),
    [
        (task_module.REWORDING, 70.0, 6, True),
        (task_module.REWORDING, 70.0, 5, None),
        (task_module.REWORDING, 60.0, 5, False),
        (task_module.UNRELATED, 0.0, 5, None),
        (task_module.UNRELATED, 2.0, 80, False),
    ],
)
def test_few_questions_neither_reach_nor_miss(
    kind: str, accepted: float, questions: int, good: bool | None
) -> None:
    row = {"kind": kind, "accepted": accepted, "pairs": 80, "questions": questions}
    assert _reached(row) is good


def grown(fits: bool, computed: int = 0, seconds: float = 1.0) -> dict[str, Any]:
    return {"fits": fits, "computed": computed, "seconds": seconds}


def test_orders_are_compared_on_trees_that_fit_under_both() -> None:
    ours = [grown(True, 10), grown(True, 20), grown(False)]
    recent = [grown(True, 13, 2.0), grown(False), grown(True, 900)]
    table = _paired([0.5], [*ours, *recent], ours, {})
    assert table.rows[0][:2] == (0.5, 3.0) and table.rows[0][-4:][0] == pytest.approx(2.0)
    assert table.rows[0][-1] == 1 and math.isnan(table.rows[0][2])  # of one there is no interval
    everything = Table("eviction", "", (Column("recomputed"), Column("same winner")), [])
    everything.also["paired"] = table
    found = eviction_findings(everything)
    assert [f.good for f in found] == [True, None] and "nan" not in found[1].text
    for n, good in ((6, True), (5, None)):  # fewer are too few for a verdict
        ours, recent = [grown(True, i) for i in range(n)], [grown(True, 9 + i) for i in range(n)]
        everything.also["paired"] = _paired([0.5], [*ours, *recent], ours, {})
        assert eviction_findings(everything)[1].good is good
    everything.also["paired"] = _paired([0.5], ours * 2, ours, {})  # a tie
    assert [f.good for f in eviction_findings(everything)] == [True, False]
    assert not len(_paired([0.5], [grown(False)] * 6, ours[:3], {}))


def test_baselines_are_paired() -> None:
    """Verification finds the right branch, confidence never; of four branches one is right."""
    problems = [verified_problem(i, [0.9, 0.8, 0.7, 0.6], [0, 0, 0, 1.0]) for i in range(6)]
    results = [{"right": [False] * 3 + [True], "answer": ["1", "1", "1", "2"]}] * 6
    rows = {row["choice by"]: row for row in _baselines(problems, results, {}).dicts()}
    lead = [rows["confidence"][name] for name in ("verification over it", "from", "to")]
    assert lead == pytest.approx([100, *(100 * end for end in stats.paired(6, 0, 6))])
    assert rows["score alone"]["verification over it"] == 0
    chance = [rows["chance"][name] for name in ("right", "low", "high", "from")]
    assert chance == [25, 25, 25, 75]
    sure = [{"right": [i > 0] * 4, "answer": ["1"] * 4} for i in range(6)]
    rows = {row["choice by"]: row for row in _baselines(problems, sure, {}).dicts()}
    assert rows["chance"]["high"] <= 100 and rows["chance"]["from"] == 0


def test_a_lens_that_says_the_same_of_all_knows_nothing() -> None:
    """It agrees with half of the verdicts for good, and so does a constant."""
    scores = np.array([0.9, 0.8, 0.2, 0.1])
    for level, good in ((None, False), (scores, True)):
        inner = np.full((4, 8), 0.7) if level is None else np.tile(level[:, None], 8)
        inner[:, -1] = scores
        lenses = dict.fromkeys(LENSES, Lenses(np.full((4, 8), 0.1), inner))
        verified = [Verified(f"p{i}", np.full(4, 0.5), scores, lenses, 8, 1) for i in range(40)]
        layers = _layers(verified, {})
        assert layers.column("decides as at the end")[0] == (100 if good else 50)
        found = _settles(layers.dicts(), 40)
        assert found.good is good and ("after 0 of" if good else "after 7 of") in found.text
        assert "area under the curve" in found.text
    scores[:] = 0.9  # nothing to rank
    verified = [replace(v, scores=scores, lenses=dict.fromkeys(
        LENSES, Lenses(np.full((4, 8), 0.1), np.full((4, 8), 0.9)))) for v in verified]  # fmt: skip
    found = _settles(_layers(verified, {}).dicts(), 40)
    assert "nan" not in found.text and "area under the curve" not in found.text


def test_a_preset_is_held_against_contenders_alone(
    results: tuple[Path, dict[str, Table]],
) -> None:
    """kappa 0.6 to 0.9 verifies nobody here; level 1 of the preset wants a higher confidence."""
    problems = [verified_problem(i, [0.6, 0.2], [0.9, 0.1]) for i in range(8)]
    table = results[1]["cgee"]
    found = _against_contenders("CGEE.fast()", table, problems)
    assert found.good is False and found.text.startswith("CGEE.fast() saves +0.0 points")


@pytest.mark.parametrize(
    ("low", "changed", "n", "good"),
    [
        (1.2, (0, 4), 80, True),
        (1.2, (67, 94), 80, False),  # faster, and another winner
        (0.9, (0, 4), 80, None),
        (1.2, (0, 36), 8, None),  # none of eight is no proof of fewer than one in twenty
        (1.2, (0, 4), 3, None),
    ],
)
def test_speed_alone_does_not_speak_for_sharing(
    low: float, changed: tuple[int, int], n: int, good: bool | None
) -> None:
    names = ("set", "arm", "over exact", "over exact low", "over exact high", "computed",
             "winners changed", "changed low", "changed high", "answers changed",
             "problems")  # fmt: skip
    rows = [("reworded", arm, 1.5, low, 2.0, 700.0, float(changed[0]), 0.0, float(changed[1]),
             100.0, n) for arm in ("exact caching", "all", "all, paper's presets")]  # fmt: skip
    table = Table("decomposition", "", tuple(Column(name) for name in names), rows)
    arm = {"seconds": {"prefill": 1.0}, "winner": 0, "tokens": [[1]]}
    results = [dict.fromkeys(("No-KV", "exact caching", "all, paper's presets"), arm)] * 8
    exact, faster, reworded, paper = decomposition_findings(table, results)
    assert exact.good is True and faster.good is False  # as fast: no faster
    assert reworded.good is good and paper.good is None


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_plots_itself(
    name: str, results: tuple[Path, dict[str, Table]], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    figure = results[1][name].plot(tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000
    for axes in figure.axes:
        assert axes.get_xlabel() and axes.get_title(loc="left")
    assert figure.axes[0].get_ylabel() or figure.axes[0].get_yticklabels()


def test_the_command(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], small: Model
) -> None:
    parser = argparse.ArgumentParser()
    command_module.add_experiment_options(parser)
    assert tuple(EXPERIMENTS) == command_module.NAMES
    options = parser.parse_args(["prefix_sweep", "--quick", "--out", str(tmp_path), "--threads",
                                 "1", "--dtype", "float32", "--data", str(data),
                                 "--no-plots"])  # fmt: skip
    options.model = small
    assert command_module.experiment(options) == 0
    printed = capsys.readouterr().out
    assert "speed-up [x]" in printed and str(tmp_path / "prefix_sweep.csv") in printed


def test_all_keep_what_is_made_before_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: Model
) -> None:
    def broken(lab: Lab) -> Table:
        raise OSError("the machine went down")

    parser = argparse.ArgumentParser()
    command_module.add_experiment_options(parser)
    options = parser.parse_args(["all", "--no-plots", "--out", str(tmp_path)])
    options.model = small
    made = replace(a_table(), name="eviction", also={})
    monkeypatch.setattr("rksc.experiments.EXPERIMENTS", {"eviction": lambda _: made, "x": broken})
    with pytest.raises(OSError, match="went down"):
        command_module.experiment(options)
    assert Table.from_json(tmp_path / "eviction.json").rows == made.rows


@pytest.mark.parametrize(
    "line",
    ["rksc experiment all --no-plots", "rksc experiment cgee --n 3 --ray --seed 1",
     "rksc experiment all --model 'a b.gguf' --quick --out there --workers 2 --dtype float32"],
)  # fmt: skip
def test_a_report_tells_its_command(line: str) -> None:
    parser = argparse.ArgumentParser()
    command_module.add_experiment_options(parser)
    assert command_module._command(parser.parse_args(shlex.split(line)[2:])) == line


def test_the_progress_bar_counts_items(capsys: pytest.CaptureFixture[str], small: Model) -> None:
    replace(lab_of(small), progress=True).measure(square, [{"x": 1}, {"x": 2}])
    err = capsys.readouterr().err
    assert "square" in err and "item" in err


def test_unused_pairs_do_not_exist() -> None:
    """A Pair is what people pass: its fields are the documented ones."""
    assert Pair("g", "k", "a", "b", True).same is True
