"""Task accuracy: greedy, self-consistency, best of n; with and without the shortcuts, paired.

Uses the same answers as `cgee`: every difference is between choices, never between draws.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..load import Model
from .cgee import PRESETS, _counts, answered
from .fitting import Verified
from .plots import bars
from .replay import majority
from .runner import Lab, Result
from .stats import bootstrap, mcnemar, rate
from .table import Column, Finding, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FULL = "best of n, verified in full"


def accuracy(model: Model | str | Path | Lab, **options: Any) -> Table:
    """Right answers of each way to answer, per data set and over all, against full verification."""
    lab = Lab.of(model, options)
    sets, results = answered(lab)
    names = [name for name, _ in sets]
    ways = _ways(results)
    rows: list[tuple[Any, ...]] = []
    for name in [*dict.fromkeys(names), "all"]:
        picked = [i for i, n in enumerate(names) if name in (n, "all")]
        full = np.array([ways[FULL][i] for i in picked])
        for way, right in ways.items():
            mine = np.array([right[i] for i in picked])
            r = rate(mine)
            difference = mine.astype(int) - full.astype(int)
            low, high = bootstrap(difference, seed=lab.seed)
            rows.append((
                name, way, 100 * r.value, 100 * r.low, 100 * r.high,
                100 * float(difference.mean()), 100 * low, 100 * high,
                int((difference > 0).sum()), int((difference < 0).sum()),
                mcnemar(int((difference > 0).sum()), int((difference < 0).sum())), r.n,
            ))  # fmt: skip
    columns = (
        Column("set"), Column("way"), Column("right", "%"), Column("low", "%"), Column("high", "%"),
        Column("against full", "points"), Column("from", "points"), Column("to", "points"),
        Column("gained"), Column("lost"), Column("p (McNemar)"), Column("problems"),
    )  # fmt: skip
    meta = lab.meta(n_branches=len(results[0]["answer"]), sets=_counts(sets))
    table = Table("accuracy", "Task accuracy, paired on the same answers", columns, rows, meta)
    table.findings.extend(_findings(table))
    return table


def _ways(results: list[Result]) -> dict[str, list[bool]]:
    verified = [Verified.of(str(i), result) for i, result in enumerate(results)]
    ways = {
        "greedy": [bool(r["greedy right"]) for r in results],
        "self-consistency": [bool(r["right"][majority(r["answer"])]) for r in results],
        "best of n, by confidence": [
            bool(r["right"][int(np.argmax(v.confidence))])
            for r, v in zip(results, verified, strict=True)
        ],
        FULL: [bool(r["right"][v.winner]) for r, v in zip(results, verified, strict=True)],
    }
    for name, settings in PRESETS.items():
        ways[f"best of n, {name}"] = [
            bool(r["right"][v.judge(settings).winner])
            for r, v in zip(results, verified, strict=True)
        ]
    return ways


def _findings(table: Table) -> list[Finding]:
    rows = {row["way"]: row for row in table.where(set="all").dicts()}
    found = []
    greedy = rows["greedy"]
    full = rows[FULL]
    found.append(Finding(
        f"Best of n with full verification is right in {full['right']:.1f} % of "
        f"{full['problems']}, greedy in {greedy['right']:.1f} %: {-greedy['against full']:+.1f} "
        f"points [{-greedy['to']:+.1f}, {-greedy['from']:+.1f}].", -greedy["to"] > 0,
    ))  # fmt: skip
    vote = rows["self-consistency"]
    found.append(Finding(
        f"Self-consistency is right in {vote['right']:.1f} %, {vote['against full']:+.1f} "
        f"points against full verification [{vote['from']:+.1f}, {vote['to']:+.1f}].",
        vote["against full"] < 0,
    ))  # fmt: skip
    for name in PRESETS:
        row = rows[f"best of n, {name}"]
        found.append(Finding(
            f"{name} changes accuracy by {row['against full']:+.1f} points [{row['from']:+.1f}, "
            f"{row['to']:+.1f}]: {row['gained']} gained, {row['lost']} lost of "
            f"{row['problems']}.",
            row["from"] > -5,
        ))  # fmt: skip
    return found


def shown(table: Table) -> list[Table]:
    """All sets together."""
    return [table.where(set="all")]


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
    panels[0].set_ylim(len(table.where(set=names[0])) - 0.4, -0.6)
