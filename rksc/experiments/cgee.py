"""CGEE: what each shortcut saves, and how often it changes the winner.

Every problem is answered by several sampled branches and verified in full once; all thresholds are
replayed over these records by the pure policy. Is the verifier any good here? Does it settle early?
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..answers.final import same_answer
from ..calibration.fitting import (
    CGEECalibration,
    Verified,
    fit_cgee,
    layers_run,
    lens_costs,
    more_saved,
    saved,
)
from ..calibration.measure import TOGETHER, answers, mean_of
from ..calibration.replay import majority
from ..calibration.runner import Lab, Result
from ..calibration.stats import above, auc, below, every, jackknife, paired, rate, wilson
from ..calibration.tasks import Problem, problem_sets
from ..engine.load import Model
from ..engine.options import CGEE
from .plots import COLOURS, band, errorbars, style
from .table import Column, Finding, Table, draws, shows, signed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

N_BRANCHES = 8
WANTED = 0.02
_AREA = "area, YES at the end above"


def cgee(model: Model | str | Path | Lab, **options: Any) -> Table:
    """Savings and changed winners of contenders, level 1 and level 2; presets; baselines."""
    lab = Lab.of(model, options)
    sets, results = answered(lab)
    verified = [
        Verified.of(f"{name} {problem.id}", result)
        for (name, problem), result in zip(sets, results, strict=True)
    ]
    costs = lens_costs(lab)
    rows = [
        _row(rule, setting, threshold, settings, verified, results, costs)
        for rule, setting, threshold, settings in _sweep(verified[0].n_layers)
    ]
    columns = (
        Column("rule"), Column("setting"), Column("threshold"),
        Column("layers saved", "%"), Column("saved low", "%"), Column("saved high", "%"),
        Column("net of the lens", "%"), Column("net low", "%"), Column("net high", "%"),
        Column("winners changed", "%"), Column("low", "%"), Column("high", "%"),
        Column("answers changed", "%"), Column("answers low", "%"), Column("answers high", "%"),
        Column("decided without verification", "%"),
        Column("changed among these", "%"), Column("right", "%"), Column("problems"),
    )  # fmt: skip
    meta = lab.meta(n_branches=N_BRANCHES, sets=_counts(sets), lens_costs_layers=costs)
    table = Table(
        "cgee", "Shortcuts of verification against full verification", columns, rows, meta
    )
    table.also["baselines"] = _baselines(verified, results, meta)
    table.also["layers"] = _layers(verified, meta)
    table.also["risk"] = _risk(verified, meta)
    found = fit_cgee(verified, WANTED, costs, lab.seed)
    table.also["calibrated"] = _calibrated(found, meta)
    table.findings.extend(_findings(table))
    table.findings.append(_against_contenders("CGEE.fast()", table, verified))
    table.findings.append(
        Finding(f"calibrate_cgee with {WANTED:.0%} wanted: {found.says}", found.keeps)
    )
    return table


def answered(lab: Lab) -> tuple[list[tuple[str, Problem]], list[Result]]:
    """Problems of every set, each answered and verified (shared with `accuracy`)."""
    n = lab.size(12, None)
    sets = [
        (name, problem)
        for name, problems in problem_sets(lab.folder, n, lab.seed).items()
        for problem in problems
    ]
    items = [answer_item(lab, problem) for _, problem in sets]
    return sets, lab.measure(answers, items, together=TOGETHER)


def answer_item(lab: Lab, problem: Problem) -> dict[str, Any]:
    """How a problem is answered, for `measure.answers`."""
    return {"problem": asdict(problem), "n_branches": N_BRANCHES,
            "max_new_tokens": 96 if lab.quick else 320, "seed": lab.seed}  # fmt: skip


def _counts(sets: Sequence[tuple[str, Problem]]) -> dict[str, int]:
    names = [name for name, _ in sets]
    return {name: names.count(name) for name in dict.fromkeys(names)}


# ---- the sweep ---------------------------------------------------------------------------------

PRESETS = {"CGEE()": CGEE(), "CGEE.fast()": CGEE.fast(), "CGEE.paper()": CGEE.paper()}
_PLAIN = CGEE(kappa=0.0)


def _sweep(n_layers: int) -> Iterator[tuple[str, str, float | None, CGEE]]:
    for kappa in np.arange(0.5, 1.001, 0.02):
        yield "contenders", "kappa", float(kappa), CGEE(kappa=round(float(kappa), 2))
    for lead in (0.03, 0.06, 0.12):
        for top in np.arange(0.5, 0.96, 0.05):
            settings = replace(_PLAIN, skip_top=round(float(top), 2), skip_lead=lead)
            yield "level 1", f"lead {lead:g}", float(top), settings
    for lens in ("answer", "full"):
        unit, most = ("ln 2", 1.0) if lens == "answer" else ("nats", 11.0)
        for norm in (True, False):
            for start in (2, n_layers // 2, 7 * n_layers // 8):
                for part in np.linspace(0.05, 1.0, 20):
                    settings = replace(
                        _PLAIN, lens=lens, norm=norm, theta=float(part * most),
                        epsilon=most, min_layer=max(2, start),
                    )  # fmt: skip
                    name = (
                        f"{lens} lens{', norm' if norm else ''}, from layer {max(2, start)}, {unit}"
                    )
                    yield "level 2", name, float(part * most), settings
    for name, settings in PRESETS.items():
        yield "preset", name, None, settings


def _row(
    rule: str,
    setting: str,
    threshold: float | None,
    settings: CGEE,
    verified: Sequence[Verified],
    results: Sequence[Result],
    costs: dict[str, float],
) -> tuple[Any, ...]:
    judged = [v.judge(settings) for v in verified]
    changed = [j.winner != v.winner for j, v in zip(judged, verified, strict=True)]
    answers_changed = [
        not same_answer(r["answer"][j.winner], r["answer"][v.winner])
        for r, j, v in zip(results, judged, verified, strict=True)
    ]
    right = [r["right"][j.winner] for r, j in zip(results, judged, strict=True)]
    skipped = [j.skipped for j in judged]
    of_these = [c for c, s in zip(changed, skipped, strict=True) if s]
    gross, net = (_saved(layers_run(judged, verified, cost))
                  for cost in (0.0, costs[settings.lens or "answer"]))  # fmt: skip
    gross = max(0.0, gross[0]), max(0.0, gross[1]), gross[2]  # only a lens can cost more
    return (
        rule, setting, None if threshold is None else round(threshold, 4), *gross, *net,
        *_percent(changed), *_percent(answers_changed),
        100 * mean_of(skipped), 100 * mean_of(of_these) if of_these else None,
        100 * mean_of(right), len(verified),
    )  # fmt: skip


def _saved(layers: NDArray[np.float64]) -> tuple[float, float, float]:
    """Per cent, with the interval over problems."""
    low, high = jackknife(layers, saved)
    return 100 * float(saved(layers[None])[0]), 100 * low, 100 * min(1.0, high)


def _percent(flags: Sequence[bool]) -> tuple[float, float, float]:
    r = rate(flags)
    return 100 * r.value, 100 * r.low, 100 * r.high


# ---- is the verifier any good? -----------------------------------------------------------------


def _baselines(verified: Sequence[Verified], results: Sequence[Result], meta: Any) -> Table:
    """Accuracy of each way to choose among the same branches, and by how much verification is
    better, paired by problem."""

    def chosen(pick: Iterable[int]) -> list[float]:
        return [float(r["right"][i]) for r, i in zip(results, pick, strict=True)]

    ways: dict[str, list[float]] = {
        "verification": chosen(v.winner for v in verified),
        "confidence": chosen(int(np.argmax(v.confidence)) for v in verified),
        "score alone": chosen(int(np.argmax(v.scores)) for v in verified),
        "majority": chosen(majority(r["answer"]) for r in results),
        "chance": [mean_of(r["right"]) for r in results],  # of a problem: between 0 and 1
        "any branch right": [float(any(r["right"])) for r in results],
    }
    rows: list[tuple[Any, ...]] = []
    for name, right in ways.items():
        lead, n = np.array(ways["verification"]) - right, len(right)
        if name == "chance":
            rates = [100 * v for v in (mean_of(right), *np.clip(jackknife(right), 0, 1))]
            ends = jackknife(lead)
        else:
            rates = list(_percent([r == 1 for r in right]))
            ends = paired(int((lead > 0).sum()), int((lead < 0).sum()), n)
        if name == "verification":
            ends = 0.0, 0.0  # it does not differ from itself, by no chance
        rows.append((name, *rates, 100 * float(lead.mean()), *(100 * end for end in ends), n))
    columns = (Column("choice by"), Column("right", "%"), Column("low", "%"), Column("high", "%"),
               Column("verification over it", "points"), Column("from", "points"),
               Column("to", "points"), Column("problems"))  # fmt: skip
    return Table("cgee", "Who chooses best among the same branches", columns, rows, meta)


def _layers(verified: Sequence[Verified], meta: Any) -> Table:
    """By layer: the answer lens' entropy, and whether its decisions are the final ones."""
    n_layers = verified[0].n_layers
    entropies = np.concatenate([v.lenses["answer norm"].entropies for v in verified])
    seen = np.concatenate([v.lenses["answer norm"].scores for v in verified])
    full = np.concatenate([v.scores for v in verified])
    says, finally_ = seen > 0.5, full > 0.5
    problem = np.repeat(np.arange(len(verified)), [len(v.scores) for v in verified])
    vocabulary = np.concatenate([v.lenses["full norm"].entropies for v in verified])
    rows: list[tuple[Any, ...]] = []
    for layer in range(n_layers):
        winners = [
            int(np.argmax(v.lenses["answer norm"].scores[:, layer] * np.sqrt(v.confidence)))
            == v.winner
            for v in verified
        ]
        same = rate(says[:, layer] == finally_, problem)
        low, mid, high = np.quantile(entropies[:, layer], [0.25, 0.5, 0.75]) / np.log(2)
        rows.append((
            layer + 1, float(mid), float(low), float(high), float(np.median(vocabulary[:, layer])),
            100 * float(says[:, layer].mean()), 100 * same.value, 100 * same.low, 100 * same.high,
            auc(seen[finally_, layer], seen[~finally_, layer]), *_percent(winners),
        ))  # fmt: skip
    columns = (
        Column("layer"), Column("answer entropy", "ln 2"), Column("quarter", "ln 2"),
        Column("three quarters", "ln 2"), Column("vocabulary entropy", "nats"),
        Column("says YES", "%"), Column("decides as at the end", "%"), Column("decides low", "%"),
        Column("decides high", "%"), Column(_AREA),
        Column("winner as at the end", "%"), Column("winner low", "%"), Column("winner high", "%"),
    )  # fmt: skip
    return Table("cgee", "What a lens sees after each layer of a verification", columns, rows, meta)


def _risk(verified: Sequence[Verified], meta: Any) -> Table:
    """Risk-coverage: decide without verification where the lead of the top confidence is
    largest; how often is that another winner than verification's?"""
    leads, wrong = [], []
    for v in verified:
        order = np.argsort(-v.confidence, kind="stable")
        leads.append(v.confidence[order[0]] - v.confidence[order[1]])
        wrong.append(int(order[0]) != v.winner)
    by_lead = np.argsort(-np.array(leads), kind="stable")
    rows: list[tuple[Any, ...]] = []
    for n in range(1, len(by_lead) + 1):
        k = int(np.sum(np.array(wrong)[by_lead[:n]]))
        low, high = wilson(k, n)
        rows.append((100 * n / len(by_lead), float(leads[by_lead[n - 1]]), 100 * k / n, 100 * low,
                     100 * high))  # fmt: skip
    columns = (Column("coverage", "%"), Column("lead"), Column("risk", "%"), Column("low", "%"),
               Column("high", "%"))  # fmt: skip
    return Table(
        "cgee", "Winners changed when the largest leads skip verification", columns, rows, meta
    )


# ---- what it says ------------------------------------------------------------------------------


def _findings(table: Table) -> list[Finding]:
    found = []
    for row in table.where(rule="preset").dicts():
        changed = f"{row['winners changed']:.1f} % of winners [{row['low']:.1f}, {row['high']:.1f}]"
        found.append(Finding(
            f"{row['setting']} saves {row['net of the lens']:.1f} % [{row['net low']:.1f}, "
            f"{row['net high']:.1f}] of the verification's layers after the lens's own cost and "
            f"changes {changed}, n = {row['problems']}.",
            every(below(row["winners changed"], row["high"], row["problems"], 100 * WANTED),
                  above(row["net of the lens"], row["net low"], row["problems"])),
        ))  # fmt: skip
    level2 = [r for r in table.where(rule="level 2").dicts() if r["winners changed"] <= 5]
    most = max(level2, key=lambda r: r["net of the lens"], default=None)
    if most is not None:
        found.append(Finding(
            "Leaving inside the pass (level 2, any lens, any threshold swept) saves at most "
            f"{most['net of the lens']:.1f} % [{most['net low']:.1f}, {most['net high']:.1f}] of "
            "the layers, net of the lens, at no more than 5 % changed winners, n = "
            f"{most['problems']}.",
            above(most["net of the lens"], most["net low"], most["problems"], 5),
        ))  # fmt: skip
    found.append(_settles(table.also["layers"].dicts(), table.rows[0][-1]))
    right = {r["choice by"]: r for r in table.also["baselines"].dicts()}
    verification = right["verification"]
    others = [right[name] for name in ("confidence", "majority", "chance")]
    leads = "; ".join(
        f"{signed(r['verification over it'])} points [{signed(r['from'])}, {signed(r['to'])}] "
        f"against {r['choice by']} ({r['right']:.1f} %)" for r in others
    )  # fmt: skip
    found.append(Finding(
        f"Choosing by verification is right in {verification['right']:.1f} % "
        f"[{verification['low']:.1f}, {verification['high']:.1f}]: {leads}, n = "
        f"{verification['problems']}.",
        every(*(above(r["verification over it"], r["from"], r["problems"]) for r in others)),
    ))  # fmt: skip
    return found


def _settles(layers: Sequence[dict[str, Any]], n: Any) -> Finding:
    """Does the lens know the verdict before the last layer?"""
    *inner, last = layers
    constant = max(last["says YES"], 100 - last["says YES"])
    best = max(inner, key=lambda r: r["decides as at the end"])
    alike = sum(r["says YES"] in (0, 100) for r in inner)
    middle = layers[len(layers) // 2 - 1]
    ranks = ""  # where all final verdicts are one there is nothing to rank
    if 0 < last["says YES"] < 100:
        area = max(inner, key=lambda r: r[_AREA])
        ranks = (
            "Its score ranks YES above NO with an area under the curve of "
            f"{middle[_AREA]:.2f} after layer {middle['layer']} and {area[_AREA]:.2f} at most, "
            f"after layer {area['layer']}. "
        )
    nine = next(r["layer"] for r in layers if r["winner as at the end"] >= 90)
    return Finding(
        f"One and the same answer for all branches would agree with {constant:.1f} % of the final "
        f"YES or NO. Before the last layer the answer lens agrees with "
        f"{best['decides as at the end']:.1f} % [{best['decides low']:.1f}, "
        f"{best['decides high']:.1f}] at most; after {alike} of these {len(inner)} layers it gives "
        f"all branches one verdict. {ranks}The winner seen after layer {middle['layer']} is the "
        f"final one in {middle['winner as at the end']:.0f} % of problems "
        f"[{middle['winner low']:.0f}, "
        f"{middle['winner high']:.0f}], n = {n}; 90 % are reached after layer {nine} of "
        f"{len(layers)}.",
        every(above(best["decides as at the end"], best["decides low"], n, constant),
              nine <= len(layers) / 2),
    )  # fmt: skip


def _against_contenders(name: str, table: Table, verified: Sequence[Verified]) -> Finding:
    """A preset beside the kappa that saves most at no more changed winners."""
    preset = table.where(rule="preset", setting=name).dicts()[0]
    rows = [r for r in table.where(rule="contenders").dicts()
            if r["winners changed"] <= preset["winners changed"]]  # fmt: skip
    best = max(rows, key=lambda r: r["layers saved"])
    plain = CGEE(kappa=best["threshold"])
    more = more_saved(PRESETS[name], plain, verified, 0.0)
    low, high = (100 * end for end in jackknife(more))
    return Finding(
        f"{name} saves {signed(100 * more.mean())} points of the layers "
        f"[{signed(low)}, {signed(high)}] against contenders alone with kappa "
        f"{best['threshold']:g}, the best that changes no more winners on these same problems "
        f"({best['winners changed']:.1f} % against {preset['winners changed']:.1f} %), "
        f"n = {len(verified)}.",
        above(float(more.mean()), low / 100, len(verified)),
    )


def _calibrated(found: CGEECalibration, meta: Any) -> Table:
    """What `fit_cgee` chose, and what it does on both halves."""
    c = found.cgee
    settings = (c.kappa, c.skip_top, c.skip_lead, c.lens, c.theta if c.lens else None)
    rows: list[tuple[Any, ...]] = [
        (half, *settings, 100 * e.saved, 100 * WANTED, 100 * e.changed.value, 100 * e.changed.low,
         100 * e.changed.high, e.changed.n)
        for half, e in (("chosen on", found.chosen_on), ("held out", found.held_out))
    ]  # fmt: skip
    columns = (
        Column("half"), Column("kappa"), Column("level 1 top"), Column("level 1 lead"),
        Column("lens"), Column("theta"), Column("net of the lens", "%"), Column("wanted", "%"),
        Column("winners changed", "%"), Column("low", "%"), Column("high", "%"),
        Column("problems"),
    )  # fmt: skip
    return Table("cgee", "What calibrate_cgee chose", columns, rows, meta)


@shows("cgee")
def shown(table: Table) -> list[Table]:
    """Presets, baselines and what was calibrated; the sweep is in the picture and the file."""
    return [table.where(rule="preset"), table.also["baselines"], table.also["calibrated"]]


_LABELS = ((2, -13), (5, -11), (-6, 3))  # of the presets, in points from their marks


@draws("cgee")
def draw(figure: Figure, table: Table) -> None:
    """Saved against changed; by layer; risk against coverage."""
    figure.set_size_inches(10.5, 4.0)
    left, middle, right = figure.subplots(1, 3)
    series = [("contenders", "kappa"), ("level 1", "lead 0.06")]
    series += [("level 2", s) for s in dict.fromkeys(table.where(rule="level 2").column("setting"))
               if "norm" in s and "from layer 2," not in s]  # fmt: skip
    for i, (rule, setting) in enumerate(series):
        part = table.where(rule=rule, setting=setting)
        names = ("net of the lens", "winners changed", "low", "high")
        curve = sorted(zip(*map(part.column, names), strict=True))
        name = rule if rule != "level 2" else setting.split(", norm")[0] + setting.split("norm")[1]
        name = name.rsplit(", ", 1)[0] if rule == "level 2" else f"{rule} ({setting})"
        x, y, low, high = zip(*curve, strict=True)
        left.plot(x, y, label=name, **{**style(i), "markersize": 2.5})
        if rule != "level 2":
            band(left, x, low, high, i)
    for row, shift in zip(table.where(rule="preset").dicts(), _LABELS, strict=True):
        at = (row["net of the lens"], row["winners changed"])
        errorbars(left, at[:1], at[1:], [row["low"]], [row["high"]], 6, marker="*", markersize=8)
        left.annotate(row["setting"], at, xytext=shift, textcoords="offset points", fontsize=7,
                      ha="right" if shift[0] < 0 else "left")  # fmt: skip
    left.set_xlim(-20, 100)
    left.set_ylim(bottom=-9)
    left.set_xlabel("layers of verification saved, net of the lens [%]")
    left.set_ylabel("winners changed [%]")
    left.set_title("What a shortcut saves and changes")
    left.legend(fontsize=7, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.2))
    layers = table.also["layers"]
    layer = layers.column("layer")
    for i, (column, label) in enumerate((("decides", "decision"), ("winner", "winner"))):
        middle.plot(layer, layers.column(f"{column} as at the end"), label=f"{label} as at the end",
                    **style(i) | {"marker": ""})  # fmt: skip
        band(middle, layer, layers.column(f"{column} low"), layers.column(f"{column} high"), i)
    final = layers.column("says YES")[-1]
    middle.axhline(max(final, 100 - final), color="#777777", linewidth=0.8, linestyle=":",
                   label="one answer for all")  # fmt: skip
    entropy, quarter, rest = ([100 * h for h in layers.column(name)]
                          for name in ("answer entropy", "quarter", "three quarters"))  # fmt: skip
    middle.plot(layer, entropy, label="entropy [% of ln 2]", **style(2) | {"marker": ""})
    band(middle, layer, quarter, rest, 2)
    middle.set_xlabel("layer")
    middle.set_ylabel("branches or problems [%]")
    middle.set_ylim(0, 102)
    middle.set_title("What the answer lens sees")
    middle.legend(fontsize=7, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.2))
    risk = table.also["risk"]
    right.plot(risk.column("coverage"), risk.column("risk"), color=COLOURS[0])
    band(right, risk.column("coverage"), risk.column("low"), risk.column("high"), 0)
    right.set_xlabel("problems decided without verification [%]")
    right.set_ylabel("winners changed among these [%]")
    right.set_ylim(0, 102)
    right.set_title("Risk and coverage by the top lead")
