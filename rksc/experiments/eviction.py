"""Budget against recomputed work: RSBCM's order against least recently used, on search trees.

A search by breadth that expands one branch after the other comes back to branches that it left
earlier, so what was evicted may be wanted again. Each tree is grown without a limit, then with less
and less memory under both orders.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .._core import CapacityError
from ..calibration.measure import sampling
from ..calibration.runner import Bench, Lab, Result
from ..calibration.stats import above, jackknife
from ..calibration.tasks import problem_sets
from ..engine.load import Model
from ..engine.session import mark
from ..reasoning.prompts import INSTRUCTION, VALUE, Wordings
from .plots import errorbars
from .table import Column, Finding, Table, draws

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RSBCM, RECENT = "RSBCM", "least recently used"


def eviction(model: Model | str | Path | Lab, **options: Any) -> Table:
    """Recomputed tokens and time under shrinking budgets, and whether the winner stays."""
    lab = Lab.of(model, options)
    budgets = (0.6, 0.45, 0.3) if lab.quick else (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
    problems = problem_sets(lab.folder, lab.size(6, 20), lab.seed)["gsm8k"]
    common = {"depth": 4 if lab.quick else 6, "beam": 3 if lab.quick else 5, "expand": 4,
              "max_new_tokens": 20, "seed": lab.seed}  # fmt: skip
    unlimited = [{**common, "problem": p.text, "blocks": None, "order": RSBCM} for p in problems]
    free = lab.measure(search_tree, unlimited, timed=True)
    items = [
        {**common, "problem": p.text, "order": order, "blocks": math.ceil(budget * f["peak"])}
        for budget in budgets
        for order in (RSBCM, RECENT)
        for p, f in zip(problems, free, strict=True)
    ]
    grown = lab.measure(search_tree, items, timed=True)
    rows: list[tuple[Any, ...]] = [(1.0, "no limit", *_row(free, free))]
    for i, budget in enumerate(budgets):
        for j, order in enumerate((RSBCM, RECENT)):
            at = (2 * i + j) * len(problems)
            rows.append((budget, order, *_row(grown[at : at + len(problems)], free)))
    columns = (
        Column("budget", "of the peak"), Column("order"), Column("recomputed", "tokens"),
        Column("low", "tokens"), Column("high", "tokens"), Column("blocks evicted"),
        Column("time", "s"), Column("time against no limit", "x"), Column("time low", "x"),
        Column("time high", "x"), Column("same winner", "%"),
        Column("does not fit"), Column("trees"),
    )  # fmt: skip
    meta = lab.meta(**{k: v for k, v in common.items() if k != "seed"})
    table = Table("eviction", "Search under a KV budget (means over trees)", columns, rows, meta)
    table.also["paired"] = _paired(budgets, grown, free, meta)
    table.findings.extend(_findings(table))
    return table


def search_tree(
    bench: Bench,
    problem: str,
    blocks: int | None,
    order: str,
    depth: int,
    beam: int,
    expand: int,
    max_new_tokens: int,
    seed: int,
) -> Result:
    """Grow a tree by breadth, one branch after the other; the best `beam` of a level go on.

    blocks: the budget (None: no limit). order: RSBCM's, or least recently used, which is RSBCM's
    tie-break once every omega is made equal.
    """
    size = bench.session.stats().block_bytes
    session = bench.open(**({} if blocks is None else {"kv_bytes": blocks * size}))
    words = Wordings(session, INSTRUCTION, verify_prompt=VALUE)
    yes, no = words.answers(None, None)
    question = words.verification()
    start = time.perf_counter()
    try:
        root = session.prefill(words.problem(problem))
        nodes, marks, frontier = [root], [math.inf], [0]
        _level(order, root)
        for _ in range(depth):
            open_ = []
            for parent in frontier:
                kids = nodes[parent].fork(expand)
                _level(order, *kids)
                made = session.generate(kids, max_new_tokens, sampling(seed))
                verdicts = session.verify(kids, question, yes, no, cgee=None)
                _level(order, *kids)
                for kid, verdict, generation in zip(kids, verdicts, made, strict=True):
                    if generation.finish_reason == "length":
                        open_.append(len(nodes))
                    nodes.append(kid)
                    marks.append(mark(verdict.score, kid.confidence))
            frontier = sorted(open_, key=lambda i: marks[i], reverse=True)[:beam]
    except CapacityError:
        return {"fits": False}
    seconds, stats = time.perf_counter() - start, session.stats()
    winner = int(np.argmax(marks[1:])) + 1
    return {
        "fits": True, "seconds": seconds, "peak": stats.blocks_peak, "winner": winner,
        "tokens": nodes[winner].tokens.tolist(), "marks": marks[1:],
        "computed": stats.tokens_computed + stats.tokens_recomputed, "evicted": stats.evictions,
    }  # fmt: skip


def _level(order: str, *branches: Any) -> None:
    """Least recently used: omega = score / (depth + 1) = 1 for every branch."""
    if order == RECENT:
        for branch in branches:
            branch.score = branch.depth + 1.0


def _row(results: list[Result], free: list[Result]) -> tuple[Any, ...]:
    fit = [(r, f) for r, f in zip(results, free, strict=True) if r["fits"]]
    if not fit:
        return (None,) * 9 + (len(results), len(results))
    # a fork of what was evicted computes it as its own: only the sum tells
    recomputed = [r["computed"] - f["computed"] for r, f in fit]
    low, high = jackknife(recomputed)
    same = [
        (r["winner"], r["tokens"], r["marks"]) == (f["winner"], f["tokens"], f["marks"])
        for r, f in fit
    ]
    return (
        float(np.mean(recomputed)), low, high, float(np.mean([r["evicted"] for r, _ in fit])),
        float(np.mean([r["seconds"] for r, _ in fit])),
        *_ratio([r["seconds"] / f["seconds"] for r, f in fit]),
        100 * float(np.mean(same)), len(results) - len(fit), len(results),
    )  # fmt: skip


def _paired(
    budgets: Sequence[float], grown: Sequence[Result], free: Sequence[Result], meta: Any
) -> Table:
    """Both orders on the trees that fit under both. grown: by budget, order and tree."""
    rows: list[tuple[Any, ...]] = []
    n = len(free)
    for i, budget in enumerate(budgets):
        ours, recent = (grown[at : at + n] for at in (2 * i * n, (2 * i + 1) * n))
        both = [(o, r) for o, r in zip(ours, recent, strict=True) if o["fits"] and r["fits"]]
        if both:
            fewer = [r["computed"] - o["computed"] for o, r in both]
            faster = [r["seconds"] / o["seconds"] for o, r in both]
            rows.append((budget, float(np.mean(fewer)), *jackknife(fewer), *_ratio(faster),
                         len(both)))  # fmt: skip
    columns = (
        Column("budget", "of the peak"), Column("fewer recomputed by RSBCM", "tokens"),
        Column("low", "tokens"), Column("high", "tokens"), Column("speed-up", "x"),
        Column("speed-up low", "x"), Column("speed-up high", "x"), Column("trees"),
    )  # fmt: skip
    title = "RSBCM against least recently used, on trees that fit under both"
    return Table("eviction", title, columns, rows, meta)


def _ratio(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Their geometric mean with its interval."""
    logs = np.log(ratios)
    low, high = jackknife(logs)
    return float(np.exp(logs.mean())), float(np.exp(low)), float(np.exp(high))


def _findings(table: Table) -> list[Finding]:
    rows = [r for r in table.dicts() if r["recomputed"] is not None]
    same = all(r["same winner"] == 100 for r in rows)
    found = [Finding(
        "Under every budget and both orders the winner, its tokens and all marks are "
        + ("those without a limit, bit for "
        "bit." if same else "NOT always those without a limit."), same,
    )]  # fmt: skip
    for pair in table.also["paired"].dicts():
        fewer = pair["fewer recomputed by RSBCM"]
        by = fast = ""  # one tree has no interval
        if pair["trees"] > 1:
            by = f" (fewer by [{pair['low']:,.0f}, {pair['high']:,.0f}])"
            fast = f" [{pair['speed-up low']:.2f}, {pair['speed-up high']:.2f}]"
        found.append(Finding(
            f"At {pair['budget']:.0%} of the peak RSBCM recomputes {abs(fewer):,.0f} tokens a tree "
            f"{'fewer' if fewer >= 0 else 'more'} than least recently used{by} and is "
            f"{pair['speed-up']:.2f} times as fast{fast}; paired, n = {pair['trees']} trees.",
            above(fewer, pair["low"], pair["trees"]),
        ))  # fmt: skip
    return found


@draws("eviction")
def draw(figure: Figure, table: Table) -> None:
    """Recomputed tokens and time against the budget."""
    left, right = figure.subplots(1, 2)
    for i, order in enumerate((RSBCM, RECENT)):
        rows = [r for r in table.dicts() if r["order"] == order and r["recomputed"] is not None]
        x = [100 * r["budget"] for r in rows]
        shift = [v + (0.4 if i else -0.4) for v in x]
        names = (("recomputed", "low", "high"), ("time against no limit", "time low", "time high"))
        for axes, columns in zip((left, right), names, strict=True):
            y, low, high = ([r[name] for r in rows] for name in columns)
            errorbars(axes, shift, y, low, high, i, label=order)
    for axes in (left, right):
        axes.set_xlabel("KV budget [% of the peak without a limit]")
        axes.invert_xaxis()
    left.legend()
    left.set_ylabel("tokens computed again, per tree")
    left.set_title("What is computed twice")
    right.set_ylabel("time against no limit [x]")
    right.set_title("What it costs")
