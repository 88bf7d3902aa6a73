"""Choosing settings from measurements, and what they do on measurements not used to choose them.

`fit` chooses ASKS' gate from pairs of wordings, `fit_cgee` CGEE's thresholds from problems.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ..answers.guard import is_rewording, same_numbers
from ..engine.options import ASKS, CGEE
from .measure import n_layers_of, wordings
from .replay import Judged, Lenses, judge, select, sigma
from .runner import Lab
from .stats import LEVEL, Rate, above, below, halves, jackknife, needed, rate
from .tasks import Pair, Problem

GIVE_UP = 0.03
ALPHAS = (1.5, 0.0, 3.0)
GUARDS: dict[str | None, Any] = {
    "numbers": same_numbers,
    "reworded": is_rewording,
    None: lambda own, root: True,
}

# ---- ASKS --------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Seen:
    """A measured pair. cosines: {"mean" | "last": (layers,)}, centred; None: not probed, which
    is allowed where every guard refuses the pair. passes: the guards that let it through."""

    group: str
    kind: str
    same: bool | None
    passes: frozenset[str | None]
    cosines: dict[str, NDArray[np.float64]] | None = None


@dataclass(frozen=True)
class Gate:
    """What `calibrate` chooses among."""

    guard: Literal["numbers", "reworded"] | None
    pool: Literal["mean", "last"]
    probe_layers: int
    alpha: float
    tau: float = 0.0

    def accepts(self, pair: Seen) -> bool:
        """As the engine would decide; ValueError for a pair that was not probed."""
        if self.guard not in pair.passes:
            return False
        if pair.cosines is None:
            raise ValueError(f"a {pair.kind} pair of {pair.group} passes the guard unprobed")
        return bool(sigma(pair.cosines[self.pool][: self.probe_layers], self.alpha) >= self.tau)


@dataclass(frozen=True, eq=False)
class Calibration:
    """ASKS' settings and what they do on the held-out half.

    asks: None when no setting keeps the wanted rate where it was chosen. accepted: acceptance by
    kind of pair on the held-out half. same, other: of pairs that may share and that must not.
    keeps: the held-out half shows the wanted rate, misses it, or (None) is too small to tell. says:
    in words.
    """

    asks: ASKS | None
    gate: Gate | None
    accepted: dict[str, Rate]
    same: Rate
    other: Rate
    keeps: bool | None
    says: str

    def __str__(self) -> str:
        lines = [self.says]
        lines += [f"  {kind:28} accepted {r}" for kind, r in self.accepted.items()]
        return "\n".join(lines)


def as_pair(pair: Pair | tuple[str, str, bool]) -> Pair:
    if isinstance(pair, Pair):
        return pair
    try:
        root, own, same = pair
    except (TypeError, ValueError):
        raise ValueError(f"pairs: {pair!r} is not (text, other wording, same)") from None
    if not isinstance(root, str) or not isinstance(own, str) or not _is_label(same):
        raise ValueError(f"pairs: {pair!r} is not (text, other wording, same)")
    return Pair(root, "same meaning" if same else "other meaning", root, own, bool(same))


def as_problem(problem: Problem | tuple[str, str]) -> Problem:
    if isinstance(problem, Problem):
        return problem
    if isinstance(problem, str) or len(problem) != 2 or not all(map(_is_text, problem)):
        raise ValueError(f"problems: {problem!r} is not (question, answer)")
    return Problem(problem[0], *problem)


def _is_label(value: Any) -> bool:
    return isinstance(value, (bool, np.bool_))


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def see(
    lab: Lab,
    pairs: Sequence[Pair],
    centre: Sequence[str],
    instruction: str,
    probed: Sequence[bool] | None = None,
) -> list[Seen]:
    """Measure the pairs, those with one root at a time. probed: which must be probed even where
    every guard refuses them (None: all)."""
    by_root: dict[tuple[str, str], list[int]] = {}
    passes: list[frozenset[str | None]] = []
    for i, pair in enumerate(pairs):
        allowed = frozenset(name for name, g in GUARDS.items() if g(pair.own, pair.root))
        passes.append(allowed)
        if probed is None or probed[i] or len(allowed) > 1:
            by_root.setdefault((pair.group, pair.root), []).append(i)
    items = [
        {
            "root": root,
            "others": [pairs[i].own for i in of_root],
            "centre": list(centre),
            "instruction": instruction,
        }
        for (_, root), of_root in by_root.items()
    ]
    found: dict[int, Any] = {}
    for of_root, result in zip(by_root.values(), lab.measure(wordings, items), strict=True):
        for i, other in zip(of_root, result["others"], strict=True):
            found[i] = {**other, "suffix": result["suffix"]}
    return [
        Seen(
            pair.group, pair.kind, pair.same, passes[i],
            {k: np.array(v) for k, v in found[i].items()} if i in found else None,
        )
        for i, pair in enumerate(pairs)
    ]  # fmt: skip


def fit(
    seen: Sequence[Seen],
    n_layers: int,
    max_false_accept: float,
    guards: Sequence[Literal["numbers", "reworded"] | None] = ("numbers", "reworded"),
) -> Gate | None:
    """The gate that `calibrate` describes, chosen on these pairs; None: there is none."""
    same, other = ([s for s in seen if s.same is want] for want in (True, False))
    if not same or not other:
        raise ValueError("pairs: there must be some that may share and some that must not")
    allowed = int(max_false_accept * len(other))
    depths = sorted({max(1, n_layers // part) for part in (8, 4, 2, 1)})
    pools: tuple[Literal["mean", "last"], ...] = ("mean", "last")
    best: tuple[float, int, int] | None = None
    chosen = None
    for i, (guard, pool, depth, alpha) in enumerate(
        itertools.product(guards, pools, depths, ALPHAS)
    ):
        gate = Gate(guard, pool, depth, alpha)
        good, bad = (_sigmas(gate, pairs) for pairs in (same, other))
        floor = bad[allowed] if len(bad) > allowed else -np.inf
        kept = good[good > floor]
        if not len(kept):
            continue
        # two settings that keep the same hundredth of the rewordings are alike
        rank = (-round(len(kept) / len(same), 2), depth, i)
        if best is None or rank < best:
            best, chosen = rank, replace(gate, tau=_strict(kept, float(floor)))
    return chosen


def _sigmas(gate: Gate, pairs: Sequence[Seen]) -> NDArray[np.float64]:
    """Sigma of the pairs that pass the gate's guard, largest first."""
    rows = [
        s.cosines[gate.pool][: gate.probe_layers]
        for s in pairs
        if gate.guard in s.passes and s.cosines is not None
    ]
    if not rows:
        return np.empty(0)
    return np.asarray(np.sort(sigma(np.array(rows), gate.alpha))[::-1])


def _strict(kept: NDArray[np.float64], floor: float) -> float:
    """Between the weakest rewording that is kept and what lies below it, in three digits where
    that changes nothing."""
    n_given_up = int(GIVE_UP * len(kept))
    weakest = float(kept[len(kept) - 1 - n_given_up])
    below = kept[len(kept) - n_given_up :]
    low = max(floor, float(below[0]) if len(below) else floor, weakest - 0.02)
    tau = round((weakest + low) / 2, 3)
    return tau if low < tau <= weakest else weakest


def report(
    asks: ASKS | None, gate: Gate | None, held: Sequence[Seen], max_false_accept: float
) -> Calibration:
    """What a gate does on held-out pairs."""
    decided = [gate is not None and gate.accepts(pair) for pair in held]

    def accepted_of(which: Callable[[Seen], bool]) -> Rate:
        some = [(d, pair.group) for d, pair in zip(decided, held, strict=True) if which(pair)]
        return rate([d for d, _ in some], [group for _, group in some])

    accepted = {
        kind: accepted_of(lambda pair, kind=kind: pair.kind == kind)  # type: ignore[misc]
        for kind in dict.fromkeys(pair.kind for pair in held)
    }
    same, other = (
        accepted_of(lambda pair, want=want: pair.same is want)  # type: ignore[misc]
        for want in (True, False)
    )
    keeps = _keeps(other, max_false_accept)
    if gate is None:
        says = (
            f"No setting accepts any rewording while it accepts at most {max_false_accept:.1%} "
            "of the pairs that must not share: leave ASKS off for such prompts."
        )
    else:
        says = (
            f"guard {gate.guard!r}, pool {gate.pool!r}, {gate.probe_layers} probe layers, alpha "
            f"{gate.alpha:g}, tau {gate.tau:.3f}. On the held-out half it accepts of the pairs "
            f"that may share {same}, of those that must not {other}. "
            f"{_kept(keeps, max_false_accept)}"
        )
    return Calibration(asks, gate, accepted, same, other, keeps, says)


def _keeps(held: Rate, limit: float) -> bool | None:
    """Do held-out data show the wanted rate?"""
    return below(held.value, held.high, held.n, limit)


def _kept(keeps: bool | None, limit: float) -> str:
    if keeps is None:
        enough = f": that takes {needed(limit):,} different ones with none" if limit else ""
        return f"Too few to tell whether the wanted {limit:.1%} is kept{enough}."
    return f"The wanted {limit:.1%} is {'kept' if keeps else 'missed'}."


# ---- CGEE --------------------------------------------------------------------------------------

KAPPAS = (0.0, *(round(0.5 + 0.05 * i, 2) for i in range(11)))
SKIP_TOPS = (None, 0.70, 0.80, 0.90)
SKIP_LEADS = (0.03, 0.06, 0.12)
THETAS = (0.05, 0.1, 0.2, 0.4, 0.7)
EPSILONS = (0.03, 0.1)


@dataclass(frozen=True, eq=False)
class Verified:
    """A problem's branches, verified in full: confidence, score (branches,), what each lens
    saw, and how many rows a verification has."""

    group: str
    confidence: NDArray[np.float64]
    scores: NDArray[np.float64]
    lenses: dict[str, Lenses]
    n_layers: int
    n_rows: int = 1

    @classmethod
    def of(cls, group: str, result: dict[str, Any]) -> Verified:
        """From a record of `measure.answers`."""
        lenses = {
            name: Lenses(np.array(seen["entropies"]), np.array(seen["scores"]))
            for name, seen in result["lenses"].items()
        }
        return cls(
            group, np.array(result["confidence"]), np.array(result["score"]), lenses,
            n_layers_of(result), result["question tokens"] + 1,
        )  # fmt: skip

    def judge(self, cgee: CGEE | None) -> Judged:
        """The verification under these settings."""
        name = lens_name(cgee)
        return judge(cgee, self.confidence, self.scores, self.lenses[name], self.n_layers)

    @cached_property
    def winner(self) -> int:
        """Of full verification."""
        return select(self.scores, self.confidence)


def lens_name(cgee: CGEE | None) -> str:
    """Which of `measure.LENSES` the settings look through."""
    if cgee is None or cgee.lens is None:
        return "answer"
    return f"{cgee.lens}{' norm' if cgee.norm else ''}"


@dataclass(frozen=True)
class Effect:
    """What settings do to a set of verifications. saved: part of the layers that full
    verification runs, after the cost of the lens; changed: problems with another winner."""

    saved: float
    changed: Rate


def effect(cgee: CGEE | None, verified: Sequence[Verified], lens_cost: float) -> Effect:
    """lens_cost: of one lens on one branch, in layers of one row."""
    judged = [problem.judge(cgee) for problem in verified]
    changed = [j.winner != problem.winner for j, problem in zip(judged, verified, strict=True)]
    return Effect(float(saved(layers_run(judged, verified, lens_cost)[None])[0]), rate(changed))


def layers_run(
    judged: Sequence[Judged], verified: Sequence[Verified], lens_cost: float
) -> NDArray[np.float64]:
    """(problems, 2): layers of full verification, and those that these verifications ran."""
    return np.array([
        (problem.n_layers * len(problem.scores),
         float(j.layers.sum()) + float(j.checks.sum()) * lens_cost / problem.n_rows)
        for j, problem in zip(judged, verified, strict=True)
    ]).reshape(-1, 2)  # fmt: skip


def more_saved(
    cgee: CGEE, than: CGEE, verified: Sequence[Verified], lens_cost: float
) -> NDArray[np.float64]:
    """Part of each problem's layers that cgee saves beyond `than`, which has no lens."""
    mine, theirs = (
        layers_run([problem.judge(c) for problem in verified], verified, lens_cost)
        for c in (cgee, than)
    )
    return np.asarray((theirs[:, 1] - mine[:, 1]) / mine[:, 0])


def saved(layers: NDArray[np.float64]) -> NDArray[np.float64]:
    """Part of the layers of full verification that is saved: (draws, problems, 2) to (draws,)."""
    full, run = np.moveaxis(layers.sum(axis=1), -1, 0)
    return np.asarray(1 - run / full)


@dataclass(frozen=True, eq=False)
class CGEECalibration:
    """CGEE's settings and what they do on the held-out half.

    chosen_on: the same on the half that chose. level2: whether leaving inside the pass pays there.
    keeps: the held-out half shows the wanted rate, misses it, or (None) is too small to tell.
    """

    cgee: CGEE
    held_out: Effect
    chosen_on: Effect
    level2: bool
    keeps: bool | None
    says: str
    table: dict[str, Effect] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [self.says]
        for name, e in self.table.items():
            lines.append(
                f"  {name:24} saves {e.saved:6.1%} of the layers, changes winners {e.changed}"
            )
        return "\n".join(lines)


def lens_costs(lab: Lab) -> dict[str, float]:
    """Cost of one look through each lens, in layers of one row, by counting operations."""
    c = lab.bench.model.config
    q, kv = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
    layer = c.width * (2 * q + 2 * kv) + 3 * c.width * c.ffn_width
    return {"answer": 2 * c.width / layer, "full": c.vocab_size * c.width / layer}


def fit_cgee(
    verified: Sequence[Verified], max_changed: float, costs: dict[str, float], seed: int = 0
) -> CGEECalibration:
    """`calibrate_cgee` on measured problems."""
    first, second = halves([v.group for v in verified], seed)
    choose, hold = ([v for v in verified if v.group in half] for half in (first, second))
    plain = CGEE(kappa=0.0)
    cgee, on_first = plain, effect(plain, choose, 0.0)
    for kappa, top, lead in itertools.product(KAPPAS, SKIP_TOPS, SKIP_LEADS):
        if top is None and lead != SKIP_LEADS[0]:
            continue
        tried = CGEE(kappa=kappa, skip_top=top, skip_lead=lead)
        e = effect(tried, choose, 0.0)
        if e.changed.value <= max_changed and e.saved > on_first.saved:
            cgee, on_first = tried, e
    level1 = cgee
    deeper, on_deeper, held_deeper = _level2(cgee, choose, hold, max_changed, costs)
    held = effect(level1, hold, 0.0)
    # the held-out half measures: it has no say here
    pays = deeper is not None and _pays(deeper, level1, choose, costs)
    table = {"kappa and level 1": held}
    if deeper is not None:
        table[f"with the {deeper.lens} lens"] = held_deeper
    if pays and deeper is not None:
        cgee, on_first, held = deeper, on_deeper, held_deeper
    keeps = _keeps(held.changed, max_changed)
    kept = _kept(keeps, max_changed)
    says = _say_cgee(cgee, held, kept, table["kappa and level 1"], deeper)
    return CGEECalibration(cgee, held, on_first, pays, keeps, says, table)


def _pays(deeper: CGEE, level1: CGEE, choose: Sequence[Verified], costs: dict[str, float]) -> bool:
    more = more_saved(deeper, level1, choose, costs[deeper.lens or "answer"])
    return above(float(more.mean()), jackknife(more)[0], len(more)) is True


def _level2(
    base: CGEE,
    choose: Sequence[Verified],
    hold: Sequence[Verified],
    max_changed: float,
    costs: dict[str, float],
) -> tuple[CGEE | None, Effect, Effect]:
    """The best settings of level 2 on top of `base`, and what they do on both halves."""
    n_layers = choose[0].n_layers
    best: CGEE | None = None
    found = Effect(-np.inf, Rate(0, 0))
    lenses: tuple[Literal["answer", "full"], ...] = ("answer", "full")
    starts = sorted({max(2, n_layers * part // 8) for part in (1, 4, 6, 7)})
    for lens, start, theta, epsilon, every in itertools.product(
        lenses, starts, THETAS, EPSILONS, (1, 2)
    ):
        scale = 1.0 if lens == "answer" else 8.0  # nats of a vocabulary
        tried = replace(
            base, lens=lens, theta=theta * scale, epsilon=epsilon * scale, min_layer=start,
            lens_every=every,
        )  # fmt: skip
        e = effect(tried, choose, costs[lens])
        if e.changed.value <= max_changed and e.saved > found.saved:
            best, found = tried, e
    if best is None or best.lens is None:
        return None, found, found
    return best, found, effect(best, hold, costs[best.lens])


def _say_cgee(
    cgee: CGEE, held: Effect, kept: str, level1_alone: Effect, deeper: CGEE | None
) -> str:
    level1 = "off" if cgee.skip_top is None else f"top {cgee.skip_top:g}, lead {cgee.skip_lead:g}"
    says = (
        f"kappa {cgee.kappa:g}, level 1 {level1}. On the held-out half it saves "
        f"{held.saved:.1%} of the verification's layers and changes winners {held.changed}. "
        f"{kept} "
    )
    if cgee.lens is not None:
        return (
            f"{says}Level 2 pays where settings were chosen: {cgee.lens} lens, theta "
            f"{cgee.theta:g}, from layer {cgee.min_layer}; on the held-out half without it "
            f"{level1_alone.saved:.1%} are saved."
        )
    if deeper is None:
        return says + "Level 2 is off: no threshold keeps the wanted rate of changed winners."
    return (
        f"{says}Level 2 is off: where settings were chosen it shows no sure saving beyond its lens "
        f"({LEVEL:.0%})."
    )
