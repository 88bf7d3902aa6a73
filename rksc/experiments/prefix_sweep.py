"""Speed-up of sharing a prefix, against its length and the number of branches.

Beside each measured ratio stands the roofline's: every phase takes what its operations or its bytes
take, at two rates that this machine reached on the same workload with one branch.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..calibration.runner import Bench, Lab, Result
from ..engine.load import Model
from . import workload
from .plots import LINES, errorbars, style
from .table import Column, Finding, Table, draws

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STEP_TOKENS = 512
_RANGE: tuple[Callable[[list[float]], float], ...] = (statistics.median, min, max)


def prefix_sweep(model: Model | str | Path | Lab, **options: Any) -> Table:
    """W1 and its neighbours: shared against No-KV, measured and predicted."""
    lab = Lab.of(model, options)
    prefixes, branches = ((64, 256, 1024), (2, 8)) if lab.quick else (
        (64, 256, 1024, 2048, 4096, 8192), (2, 4, 8, 16, 32)
    )  # fmt: skip
    most = lab.bench.model.config.max_positions - 64
    shapes = [(p, b) for b in branches for p in prefixes if p <= most]
    repeat = 2 if lab.quick else 3
    roof = lab.measure(roofline, [{"prefix": min(1024, most)}], timed=True)[0]
    items = [{"prefix": p, "branches": b, "repeat": repeat} for p, b in shapes]
    rows: list[tuple[Any, ...]] = []
    for (p, b), result in zip(shapes, lab.measure(shape_times, items, timed=True), strict=True):
        ratios = [alone / shared for shared, alone in
                  zip(result["shared"], result["No-KV"], strict=True)]  # fmt: skip
        predicted = _predict(lab, workload.Shape(prefix=p, branches=b), roof)
        rows.append((
            b, p, *(f(result[way]) for way in ("shared", "No-KV") for f in _RANGE),
            *(f(ratios) for f in _RANGE), predicted,
            result["tokens"]["shared"], result["tokens"]["No-KV"], result["same"],
        ))  # fmt: skip
    columns = (
        Column("branches"), Column("prefix", "tokens"),
        Column("shared", "s"), Column("shared lowest", "s"), Column("shared highest", "s"),
        Column("No-KV", "s"), Column("No-KV lowest", "s"), Column("No-KV highest", "s"),
        Column("speed-up", "x"), Column("lowest", "x"), Column("highest", "x"),
        Column("roofline", "x"), Column("computed shared", "tokens"),
        Column("computed No-KV", "tokens"), Column("same results"),
    )  # fmt: skip
    table = Table(
        "prefix_sweep", "Speed-up of a shared prefix over recomputing it for every branch",
        columns, rows, lab.meta(repeat=repeat, roofline=roof),
    )  # fmt: skip
    table.findings.extend(_findings(table))
    return table


def shape_times(bench: Bench, prefix: int, branches: int, repeat: int) -> Result:
    """Seconds of `repeat` alternating runs of both ways; tokens computed; equal results?"""
    shape = workload.Shape(prefix=prefix, branches=branches)
    runs = workload.measure(bench.model, shape, repeat, step_tokens=STEP_TOKENS, **bench.engine)
    first = runs["shared"][0]
    every = [run for measured in runs.values() for run in measured]
    result: Result = {name: [run.seconds for run in measured] for name, measured in runs.items()}
    result["tokens"] = {
        name: sum(phase.tokens for phase in measured[0].phases.values())
        for name, measured in runs.items()
    }
    result["same"] = all((r.chosen, r.scores) == (first.chosen, first.scores) for r in every)
    return result


def roofline(bench: Bench, prefix: int) -> Result:
    """What this machine reaches on this model: operations a second in a long prefill, steps a
    second with one row (each reads all weights once)."""
    best: dict[str, float] = {"flop_per_s": 0.0, "steps_per_s": 0.0}
    shape = workload.Shape(prefix=prefix, branches=1)
    for _ in range(2):
        run = workload.measure(bench.model, shape, 1, **bench.engine)["shared"][0]
        cost = workload.expected(bench.model.config, shape, shared=True)
        prefill, decode = run.phases["prefill"].seconds, run.phases["decode"].seconds
        best["flop_per_s"] = max(best["flop_per_s"], cost["prefill"].flop / prefill)
        best["steps_per_s"] = max(best["steps_per_s"], shape.new / decode)
    return dict(best)


def _predict(lab: Lab, shape: workload.Shape, roof: Mapping[str, float]) -> float:
    seconds = {}
    for shared in (True, False):
        costs = workload.expected(lab.bench.model.config, shape, shared)
        seconds[shared] = sum(
            max(
                cost.flop / roof["flop_per_s"],
                (shape.new if name == "decode" else math.ceil(cost.tokens / STEP_TOKENS))
                / roof["steps_per_s"],
            )
            for name, cost in costs.items()
        )
    return seconds[False] / seconds[True]


def _findings(table: Table) -> list[Finding]:
    rows = table.dicts()
    best, worst = (pick(rows, key=lambda r: r["speed-up"]) for pick in (max, min))
    off = [r["roofline"] / r["speed-up"] - 1 for r in rows]
    over = sum(o > 0 for o in off)
    same = all(r["same results"] for r in rows)
    return [
        Finding(
            f"Sharing the prefix is {best['speed-up']:.2f} times as fast as recomputing it at "
            f"{best['prefix']:,} tokens and {best['branches']} branches {_runs(best)}, "
            f"{worst['speed-up']:.2f} times at {worst['prefix']:,} and {worst['branches']} "
            f"{_runs(worst)}.",
            worst["speed-up"] > 1 and (True if worst["lowest"] > 1 else None),
        ),
        Finding(
            "The roofline, two rates measured on this same workload, predicts more than was "
            f"measured in {over} of {len(rows)} shapes: {np.median(off):+.0%} in the median, "
            f"{min(off):+.0%} to {max(off):+.0%}.", False if np.median(off) > 0 else None,
        ),
        Finding(
            "Both ways gave the same tokens and scores, bit for bit, in "
            + ("all shapes." if same else "NOT all shapes."), same,
        ),
    ]  # fmt: skip


def _runs(row: Mapping[str, Any]) -> str:
    return f"({row['lowest']:.2f} to {row['highest']:.2f} in the single runs)"


@draws("prefix_sweep")
def draw(figure: Figure, table: Table) -> None:
    """Left: ratio against prefix, by branches. Right: seconds."""
    left, right = figure.subplots(1, 2)
    for i, branches in enumerate(dict.fromkeys(table.column("branches"))):
        part = table.where(branches=branches)
        x = part.column("prefix")
        errorbars(left, x, part.column("speed-up"), part.column("lowest"), part.column("highest"),
                  i, label=f"{branches} branches")  # fmt: skip
        left.plot(x, part.column("roofline"), color=style(i)["color"], linestyle=LINES[3],
                  label=None if i else "roofline")  # fmt: skip
        for j, way in enumerate(("No-KV", "shared")):
            y, low, high = (part.column(f"{way}{end}") for end in ("", " lowest", " highest"))
            errorbars(right, x, y, low, high, i, label=f"{way}, {branches} branches",
                      linestyle=LINES[j], markerfacecolor="white" if j else None)  # fmt: skip
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted(set(table.column("prefix"))))
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
        axes.set_xlabel("shared prefix [tokens]")
        axes.legend()
    left.set_ylabel("speed-up over No-KV [x]")
    left.set_ylim(bottom=0)
    left.set_title("Measured (range of runs), predicted")
    right.set_yscale("log", subs=[])
    low, high = (np.log10(bound) for bound in right.get_ylim())
    ticks = [m * 10.0**e for e in range(int(low) - 1, int(high) + 1) for m in (1, 2, 5)]
    right.set_yticks([t for t in ticks if low <= np.log10(t) <= high])
    right.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
    right.set_ylabel("time of the whole workload [s]")
    right.set_title("Seconds (range of runs)")
