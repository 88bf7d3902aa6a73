"""Task accuracy: greedy, self-consistency, best of n; with and without the shortcuts, paired.

Uses the same answers as `cgee`: differences are between choices, not between draws. Sharing changes
what is drawn from, so reworded questions are answered twice, with the same random streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..answers.final import same_answer
from ..calibration.fitting import Verified
from ..calibration.measure import TOGETHER, answers, mean_of
from ..calibration.replay import majority
from ..calibration.runner import Lab, Result
from ..calibration.stats import above, below, every, mcnemar, paired, rate
from ..calibration.tasks import reworded_problems
from ..engine.load import Model
from .cgee import N_BRANCHES, PRESETS, _counts, answer_item, answered
from .plots import bars
from .table import Column, Finding, Table, draws, shows, signed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FULL, SHARED = "best of n, verified in full", "best of n, ASKS"
REWORDED = "reworded"
Choice = tuple[str, bool]  # an answer, and whether it is right


def accuracy(model: Model | str | Path | Lab, **options: Any) -> Table:
    """Right answers of each way to answer, per data set and over all, against full verification.

    In the set `reworded` branches ask in other words, on their own KV and as ASKS lets them share;
    it is left out where the data have no rewordings with an answer.
    """
    lab = Lab.of(model, options)
    sets, results = answered(lab)
    names = [name for name, _ in sets]
    own, shared = _reworded(lab)
    names += [REWORDED] * len(own)
    ways, best = _ways([*results, *own]), _best(shared)
    sharing = {SHARED: best[FULL], f"{SHARED} and CGEE()": best["best of n, CGEE()"]}
    rows: list[tuple[Any, ...]] = []
    for name in [*_counts(sets), "all", *dict.fromkeys([REWORDED] * len(own))]:
        picked = [i for i, n in enumerate(names) if name in (n, "all")]
        full = [ways[FULL][i] for i in picked]
        for way, chosen in ways.items():
            mine = full if way == FULL else [chosen[i] for i in picked]
            rows.append((name, way, *_row(mine, full)))
        if name == REWORDED:
            rows += [(name, way, *_row(chosen, full)) for way, chosen in sharing.items()]
    columns = (
        Column("set"), Column("way"), Column("right", "%"), Column("low", "%"), Column("high", "%"),
        Column("against full", "points"), Column("from", "points"), Column("to", "points"),
        Column("gained"), Column("lost"), Column("p (McNemar)"),
        Column("other answer than full", "%"), Column("other low", "%"), Column("other high", "%"),
        Column("problems"),
    )  # fmt: skip
    meta = lab.meta(n_branches=N_BRANCHES, sets=_counts(sets))
    if own:
        meta["sets"][REWORDED] = len(own)
        meta["branches_shared"] = 100 * mean_of([a for r in shared for a in r["approximate"]])
    table = Table("accuracy", "Task accuracy, paired on the same problems", columns, rows, meta)
    table.findings.extend(_findings(table))
    return table


def _reworded(lab: Lab) -> tuple[list[Result], list[Result]]:
    """Reworded questions, answered by branches on their own KV and by branches that may share."""
    asked, centre = reworded_problems(lab.folder, lab.size(12, None), lab.seed)
    items = [
        {**answer_item(lab, problem), "others": others}
        for problem, others in asked if problem.answer
    ]  # fmt: skip
    return (lab.measure(answers, items, together=TOGETHER),
            lab.measure(answers, [{**item, "centre": centre} for item in items],
                        together=TOGETHER))  # fmt: skip


def _row(mine: Sequence[Choice], full: Sequence[Choice]) -> tuple[Any, ...]:
    right = rate([ok for _, ok in mine])
    gained, lost = (
        sum(a > b for (_, a), (_, b) in zip(*pair, strict=True))
        for pair in ((mine, full), (full, mine))
    )
    # full verification does not differ from itself, by no chance
    low, high = (0.0, 0.0) if mine is full else paired(gained, lost, right.n)
    other = rate([not same_answer(a, b) for (a, _), (b, _) in zip(mine, full, strict=True)])
    return (
        100 * right.value, 100 * right.low, 100 * right.high,
        100 * (gained - lost) / right.n, 100 * low, 100 * high, gained, lost,
        mcnemar(gained, lost), 100 * other.value, 100 * other.low, 100 * other.high, right.n,
    )  # fmt: skip


def _ways(results: Sequence[Result]) -> dict[str, list[Choice]]:
    return {
        "greedy": [(r["greedy answer"], r["greedy right"]) for r in results],
        "self-consistency": [_of(r, majority(r["answer"])) for r in results],
        "best of n, by confidence": [_of(r, int(np.argmax(r["confidence"]))) for r in results],
        **_best(results),
    }


def _best(results: Sequence[Result]) -> dict[str, list[Choice]]:
    """Best of n by verification: in full, and with each preset's shortcuts."""
    verified = [Verified.of(str(i), result) for i, result in enumerate(results)]
    both = list(zip(results, verified, strict=True))
    made = {FULL: [_of(r, v.winner) for r, v in both]}
    for name, settings in PRESETS.items():
        made[f"best of n, {name}"] = [_of(r, v.judge(settings).winner) for r, v in both]
    return made


def _of(result: Result, branch: int) -> Choice:
    return result["answer"][branch], bool(result["right"][branch])


def _findings(table: Table) -> list[Finding]:
    found = []
    rows = {row["way"]: row for row in table.where(set="all").dicts()}
    full, n = rows[FULL], rows[FULL]["problems"]
    right = f"Best of n with full verification is right in {full['right']:.1f} %"
    for way, row in [(way, rows[way]) for way in ("greedy", "self-consistency")]:
        more, low, high = (-row[name] for name in ("against full", "to", "from"))
        found.append(Finding(
            f"{right} [{full['low']:.1f}, {full['high']:.1f}], {way} in {row['right']:.1f} %: "
            f"{signed(more)} points [{signed(low)}, {signed(high)}], n = {n}.",
            above(more, low, n),
        ))  # fmt: skip
    reworded = {row["way"]: row for row in table.where(set=REWORDED).dicts()}
    shortcuts = [(name, rows[f"best of n, {name}"]) for name in PRESETS]
    if reworded:
        shortcuts.append(("ASKS on reworded questions", reworded[SHARED]))
    for name, row in shortcuts:
        found.append(Finding(
            f"{name}: another answer in {row['other answer than full']:.0f} % "
            f"[{row['other low']:.0f}, {row['other high']:.0f}], accuracy "
            f"{signed(row['against full'])} points [{signed(row['from'])}, {signed(row['to'])}], "
            f"{row['gained']} gained, {row['lost']} lost of {row['problems']}.",
            every(above(row["against full"], row["from"], row["problems"], -5),
                  below(row["other answer than full"], row["other high"], row["problems"], 5)),
        ))  # fmt: skip
    floor = [row["set"] for row in table.where(way=FULL).dicts() if row["right"] == 0]
    if floor:
        found.append(Finding(
            f"{' and '.join(floor)}: full verification is right in no problem. Where nothing can "
            "be lost, accuracy says nothing about a shortcut; the changed answers do.", None,
        ))  # fmt: skip
    return found


@shows("accuracy")
def shown(table: Table) -> list[Table]:
    """All sets together, and the one where ASKS decides."""
    parts = [table.where(set="all"), table.where(set=REWORDED)]
    return [part for part in parts if len(part)]


@draws("accuracy")
def draw(figure: Figure, table: Table) -> None:
    """Accuracy by way, one panel for each set."""
    names = list(dict.fromkeys(table.column("set")))
    figure.set_size_inches(2.0 + 2.1 * len(names), 3.0)
    panels = figure.subplots(1, len(names), sharey=True, sharex=True, squeeze=False)[0]
    for axes, name in zip(panels, names, strict=True):
        part = table.where(set=name)
        low, high = part.column("low"), part.column("high")
        bars(axes, part.column("way"), part.column("right"), low, high)
        axes.set_title(f"{name}, n = {part.column('problems')[0]}")
        axes.set_xlabel("right answers [%]")
    panels[0].set_ylim(len(set(table.column("way"))) - 0.4, -0.6)
