"""Every experiment whole, on a random model of four layers and data of a few lines; its report."""

from __future__ import annotations

import argparse
import importlib.util
import math
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.labs import a_table, as_model, lab_of, verified_problem, write
from support.models import KEEN

from rksc import Model
from rksc.calibration import stats
from rksc.calibration import tasks as task_module
from rksc.calibration.fitting import (
    Seen,
    Verified,
)
from rksc.calibration.measure import LENSES
from rksc.calibration.replay import Lenses
from rksc.calibration.tasks import Pair
from rksc.cli import experiment as command_module
from rksc.experiments import EXPERIMENTS, Column, Lab, Table, report
from rksc.experiments.accuracy import shown as accuracy_shown
from rksc.experiments.cgee import _against_contenders, _baselines, _layers, _settles
from rksc.experiments.decomposition import _findings as decomposition_findings
from rksc.experiments.eviction import _findings as eviction_findings
from rksc.experiments.eviction import _paired
from rksc.experiments.rewording import Wording, _acceptance, _reached

HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None


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


def test_unused_pairs_do_not_exist() -> None:
    """A Pair is what people pass: its fields are the documented ones."""
    assert Pair("g", "k", "a", "b", True).same is True
