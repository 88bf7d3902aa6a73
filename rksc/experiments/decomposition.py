"""Where the time goes and what each mechanism saves: the paper's tables, per data set.

The same branches in every arm: No-KV, exact prefix caching, sharing alone, CGEE alone, all, and the
paper's presets. In the set `reworded` branches ask in other words; elsewhere all ask alike and ASKS
has nothing to decide.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..answers.final import same_answer
from ..calibration.measure import SUFFIX, centres, sampling
from ..calibration.replay import Lenses, judge, select
from ..calibration.runner import Bench, Lab, Result
from ..calibration.stats import above, below, every, jackknife, rate
from ..calibration.tasks import Problem, examples, problem_sets, reworded_problems
from ..engine.load import Model
from ..engine.options import ASKS, CGEE, Sampling
from ..engine.session import BranchSession
from ..reasoning.prompts import Wordings
from .plots import COLOURS
from .table import Column, Finding, Table, draws
from .workload import PHASES, Clock, Work, alone

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NO_KV, EXACT, SHARING = "No-KV", "exact caching", "exact caching + ASKS"
CGEE_ALONE, ALL, FAST, PAPER = "CGEE alone", "all", "all, fast preset", "all, paper's presets"
REWORDED = "reworded"
_SHOWN = tuple(phase for phase in PHASES if phase != "suffix")


def decomposition(model: Model | str | Path | Lab, **options: Any) -> Table:
    """Seconds, tokens and changed winners of every arm, per data set."""
    lab = Lab.of(model, options)
    n_branches, n_tokens = 8, 24 if lab.quick else 256
    work = list(_work(lab, lab.size(3, 50)))
    items = [
        {**item, "n_branches": n_branches, "max_new_tokens": n_tokens, "seed": lab.seed}
        for _, item in work
    ]
    results = lab.measure(arms, items, timed=True)
    of_set: dict[str, list[Result]] = {}
    for (name, _), result in zip(work, results, strict=True):
        of_set.setdefault(name, []).append(result)
    rows = [
        (name, arm, *_row([r[arm] for r in of], [r[NO_KV] for r in of], [r[EXACT] for r in of]))
        for name, of in of_set.items()
        for arm in of[0]
    ]
    columns = (
        Column("set"), Column("arm"), *(Column(phase, "s") for phase in _SHOWN),
        Column("total", "s"), Column("speed-up", "x"), Column("low", "x"), Column("high", "x"),
        Column("over exact", "x"), Column("over exact low", "x"), Column("over exact high", "x"),
        Column("computed", "tokens"), Column("verified", "%"),
        Column("approximate", "%"), Column("winners changed", "%"), Column("changed low", "%"),
        Column("changed high", "%"), Column("answers changed", "%"), Column("right", "%"),
        Column("problems"),
    )  # fmt: skip
    meta = lab.meta(n_branches=n_branches, max_new_tokens=n_tokens)
    table = Table("decomposition", "What each mechanism saves (per problem)", columns, rows, meta)
    table.findings.extend(_findings(table, results))
    return table


def _work(lab: Lab, n: int | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """(set, settings) for n problems of each set and n reworded questions."""
    shots = {"gsm8k": 2, "arc_challenge": 3, "mmlu_stem": 3}
    for name, problems in problem_sets(lab.folder, n, lab.seed).items():
        header = examples(lab.folder, name, shots.get(name, 0))
        for problem in problems:
            yield name, {"problem": asdict(problem), "others": [], "header": header, "centre": []}
    header = examples(lab.folder, "gsm8k", shots["gsm8k"])
    asked, centre = reworded_problems(lab.folder, n, lab.seed)
    for problem, others in asked:
        yield REWORDED, {"problem": asdict(problem), "others": others, "header": header,
                         "centre": centre}  # fmt: skip


# ---- the arms ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One problem as every arm gets it: wordings, what follows each, how to judge."""

    words: Wordings
    problem: Problem
    texts: list[str]
    n_branches: int
    max_new_tokens: int
    sampling: Sampling

    def wording(self, i: int) -> int:
        """Which text branch i asks with."""
        return i % len(self.texts)


def arms(
    bench: Bench,
    problem: dict[str, Any],
    others: Sequence[str],
    header: str,
    centre: Sequence[str],
    n_branches: int,
    max_new_tokens: int,
    seed: int,
) -> Result:
    """Every arm's seconds by phase, tokens, winner and answer, for one problem."""
    row = Problem(**{**problem, "choices": tuple(problem["choices"])})
    session = bench.session
    case = Case(
        Wordings(session, row.instruction, header or None), row, [row.text, *others], n_branches,
        max_new_tokens, sampling(seed),
    )  # fmt: skip
    middle = centres(bench, case.words, centre)["mean"] if centre else None
    made: Result = {NO_KV: _apart(bench, case, None)}
    made[EXACT] = _shared(session, case, None, None)
    if middle is not None:
        made[SHARING] = _shared(session, case, ASKS(center=middle, guard="reworded"), None)
    made[CGEE_ALONE] = _apart(bench, case, CGEE())
    asks = None if middle is None else ASKS(center=middle, guard="reworded")
    made[ALL] = _shared(session, case, asks, CGEE())
    made[FAST] = _shared(session, case, asks, CGEE.fast())
    made[PAPER] = _shared(session, case, None if middle is None else ASKS.paper(), CGEE.paper())
    return made


def _shared(session: BranchSession, case: Case, asks: ASKS | None, cgee: CGEE | None) -> Result:
    session.invalidate()
    session.asks, session.cgee = asks, cgee
    words, suffix = case.words, case.words.suffix(SUFFIX)
    prompts = [words.problem(text) for text in case.texts]
    clock = Clock(session)
    try:
        with clock.phase("prefill"):
            root = session.prefill(prompts[0])
            planted = [root.fork([suffix])[0]]
            for prompt in prompts[1:]:
                planted.append(session.prefill(prompt, similar_to=root, suffix=suffix))
            session.compute(planted)
            kids = [planted[case.wording(i)].fork(1)[0] for i in range(case.n_branches)]
        for i, kid in enumerate(kids):
            kid.stream = i
        with clock.phase("decode"):
            made = session.generate(kids, case.max_new_tokens, case.sampling)
        with clock.phase("verify"):
            yes, no = words.answers(None, None)
            verdicts = session.verify(kids, words.verification(), yes, no)
    finally:
        session.asks, session.cgee = None, None
    result = _outcome(
        clock, case, [g.text or "" for g in made], [g.tokens for g in made],
        [kid.confidence for kid in kids], [v.score for v in verdicts],
        [kid.approximate for kid in kids],
    )  # fmt: skip
    for branch in (root, *planted, *kids):
        branch.drop()
    return result


def _apart(bench: Bench, case: Case, cgee: CGEE | None) -> Result:
    """Every branch computes its own prompt, every verification reads everything again. With
    CGEE: only what it would verify."""
    session: BranchSession = bench.memory.get("apart") or bench.open(share=False)
    bench.memory["apart"] = session
    suffix = list(case.words.suffix(SUFFIX))
    prompts = [[*case.words.problem(text), *suffix] for text in case.texts]
    yes, no = case.words.answers(None, None)
    work = Work(
        [], [prompts[case.wording(i)] for i in range(case.n_branches)], case.words.verification(),
        yes, no, case.max_new_tokens, case.sampling,
    )  # fmt: skip
    streams = list(range(case.n_branches))
    verified = None
    if cgee is not None:  # the confidences are those of any other arm
        known = bench.memory["confidence"]
        nothing = Lenses(np.empty((0, 0)), np.empty((0, 0)))
        judged = judge(cgee, known, np.zeros(len(known)), nothing, session.config.n_layers)
        verified = [i for i in streams if not np.isnan(judged.scores[i])]
    done = alone(session, work, streams, verified)
    confidence = [kid.confidence for kid in done.branches]
    bench.memory["confidence"] = confidence
    scores: list[float | None] = [None] * case.n_branches
    for i, verdict in zip(streams if verified is None else verified, done.verdicts, strict=True):
        scores[i] = verdict.score
    result = _outcome(
        done.clock, case, [g.text or "" for g in done.generations],
        [g.tokens for g in done.generations], confidence, scores, [False] * case.n_branches,
    )  # fmt: skip
    for branch in done.branches:
        branch.drop()
    return result


def _outcome(
    clock: Clock,
    case: Case,
    texts: Sequence[str],
    tokens: Sequence[NDArray[np.int32]],
    confidence: Sequence[float | None],
    scores: Sequence[float | None],
    approximate: Sequence[bool],
) -> Result:
    winner = select(
        [np.nan if s is None else s for s in scores],
        [1.0 if c is None else c for c in confidence],
    )
    answer = case.problem.read(texts[winner])
    return {
        "seconds": {name: phase.seconds for name, phase in clock.phases.items()},
        "computed": sum(phase.tokens for phase in clock.phases.values()),
        "winner": winner,
        "answer": answer,
        "right": case.problem.is_right(answer) if case.problem.answer else None,
        "verified": sum(s is not None for s in scores),
        "approximate": sum(approximate),
        "branches": len(texts),
        "tokens": [t.tolist() for t in tokens],
    }


# ---- the table ---------------------------------------------------------------------------------


def _row(
    mine: Sequence[Result], no_kv: Sequence[Result], exact: Sequence[Result]
) -> tuple[Any, ...]:
    n = len(mine)
    seconds = {p: float(np.mean([r["seconds"][p] for r in mine])) for p in PHASES}
    total, bare, cached = (_seconds(results) for results in (mine, no_kv, exact))
    changed = rate([a["winner"] != b["winner"] for a, b in zip(mine, exact, strict=True)])
    answers = rate(
        [not same_answer(a["answer"], b["answer"]) for a, b in zip(mine, exact, strict=True)]
    )
    branches = sum(r["branches"] for r in mine)
    known = [r["right"] for r in mine if r["right"] is not None]
    return (
        *(seconds[p] for p in _SHOWN), float(total.mean()),
        *_speedup(bare, total), *_speedup(cached, total),
        float(np.mean([r["computed"] for r in mine])),
        100 * sum(r["verified"] for r in mine) / branches,
        100 * sum(r["approximate"] for r in mine) / branches,
        100 * changed.value, 100 * changed.low, 100 * changed.high, 100 * answers.value,
        100 * float(np.mean(known)) if known else None, n,
    )  # fmt: skip


def _seconds(results: Sequence[Result]) -> NDArray[np.float64]:
    return np.array([sum(r["seconds"].values()) for r in results])


def _speedup(slow: NDArray[np.float64], fast: NDArray[np.float64]) -> tuple[float, float, float]:
    """Ratio of the sums over the same problems, with its interval."""

    def log_ratio(both: NDArray[np.float64]) -> NDArray[np.float64]:
        sums = np.log(both.sum(axis=1))
        return np.asarray(sums[:, 0] - sums[:, 1])

    low, high = jackknife(np.stack([slow, fast], axis=1), log_ratio)
    return float(slow.sum() / fast.sum()), math.exp(low), math.exp(high)


def _findings(table: Table, results: Sequence[Result]) -> list[Finding]:
    found = []
    same = all(r[NO_KV]["tokens"] == r[EXACT]["tokens"] for r in results)
    found.append(Finding(
        "No-KV and exact caching chose the same tokens in " + ("every" if same else "NOT every")
        + f" branch of {len(results)} problems.", same,
    ))  # fmt: skip
    n = len(results)
    ratio, low, high = _speedup(*(_seconds([r[arm] for r in results]) for arm in (NO_KV, EXACT)))
    found.append(Finding(
        f"Exact caching alone is {ratio:.1f} times as fast as No-KV [{low:.1f}, {high:.1f}], n = "
        f"{n} problems of all sets.", above(ratio, low, n, 1),
    ))  # fmt: skip
    names = list(dict.fromkeys(table.column("set")))
    for name in names:
        rows = {r["arm"]: r for r in table.where(set=name).dicts()}
        best, exact, n = rows[ALL], rows[EXACT], rows[ALL]["problems"]
        found.append(Finding(
            f"{name}: all mechanisms are {best['over exact']:.2f} times as fast as exact caching "
            f"alone [{best['over exact low']:.2f}, {best['over exact high']:.2f}], compute "
            f"{best['computed']:,.0f} tokens a problem for {exact['computed']:,.0f}, and change "
            f"{best['winners changed']:.0f} % of winners [{best['changed low']:.0f}, "
            f"{best['changed high']:.0f}] and {best['answers changed']:.0f} % of answers, n = {n}.",
            every(above(best["over exact"], best["over exact low"], n, 1),
                  below(best["winners changed"], best["changed high"], n, 5)),
        ))  # fmt: skip
    changed = rate([r[PAPER]["winner"] != r[EXACT]["winner"] for r in results])
    of_set = ", ".join(
        f"{name} {r['winners changed']:.0f} %"
        for name, r in zip(names, table.where(arm=PAPER).dicts(), strict=True)
    )
    found.append(Finding(
        f"The paper's presets change the winner in {changed}: {of_set}.",
        below(changed.value, changed.high, changed.n, 0.05),
    ))  # fmt: skip
    return found


@draws("decomposition")
def draw(figure: Figure, table: Table) -> None:
    """Seconds of each arm by phase, a panel for each set."""
    names = list(dict.fromkeys(table.column("set")))
    figure.set_size_inches(2.0 + 2.2 * len(names), 3.4)
    panels = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
    order = [
        a for a in (NO_KV, EXACT, SHARING, CGEE_ALONE, ALL, FAST, PAPER) if a in table.column("arm")
    ]
    y = np.arange(len(order))
    for axes, name in zip(panels, names, strict=True):
        rows = {r["arm"]: r for r in table.where(set=name).dicts()}
        left = np.zeros(len(order))
        for i, phase in enumerate(_SHOWN):
            values = np.array([rows[a][phase] if a in rows else 0.0 for a in order])
            axes.barh(y, values, left=left, color=COLOURS[i], label=phase, height=0.7)
            left += values
        for at, arm in enumerate(order):
            text, colour = " (nothing to decide)", "#888888"
            if arm in rows:
                ratio, low, high = (rows[arm][key] for key in ("speed-up", "low", "high"))
                text, colour = f" {ratio:.1f}x", "black"
                if arm != NO_KV:
                    text += f" [{low:.1f}, {high:.1f}]"
            axes.text(left[at], at, text, va="center", fontsize=6.5, color=colour)
        axes.set_xlim(0, 1.5 * left.max())
        axes.set_title(f"{name}, n = {table.where(set=name).column('problems')[0]}")
        axes.set_xlabel("time per problem [s]")
        axes.grid(axis="y", visible=False)
    panels[0].set_yticks(y, order)
    panels[0].invert_yaxis()
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper right", ncols=3)
    figure.suptitle("Speed-up over No-KV with its interval", x=0.01, ha="left", fontsize=9)
