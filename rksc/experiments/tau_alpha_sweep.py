"""The gate's own settings: acceptance, tokens saved and fidelity over tau, alpha, probe and layers.

The cosine of every layer was measured once for each pair; every setting is replayed over them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..calibration.fitting import GUARDS
from ..calibration.replay import sigma
from ..calibration.runner import Lab
from ..calibration.stats import below, higher, rate
from ..calibration.tasks import REWORDING, TURNED_REWORDING, UNRELATED
from ..engine.load import Model
from .plots import band, style
from .rewording import PAPER_ALPHA, PAPER_TAU, Wording, measured_wordings
from .table import Column, Finding, Table, draws, shows, signed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TAUS = tuple(sorted([PAPER_TAU, *(round(0.05 * i, 2) for i in range(-4, 21))]))
ALPHAS = (0.0, PAPER_ALPHA, 3.0)
PROBES = {
    "prefix, centred mean": "mean",
    "prefix, last token": "last uncentred",
    "suffix (the paper's)": "suffix",
}
_NEAR = "near-duplicate"
_KINDS = {"rewordings": REWORDING, "near-duplicates": _NEAR, "unrelated": UNRELATED}


def tau_alpha_sweep(model: Model | str | Path | Lab, **options: Any) -> Table:
    """Every gate on the questions of which all pairs were probed."""
    lab = Lab.of(model, options)
    measured = measured_wordings(lab)
    skipped = {w.pair.group for w in measured if w.seen.cosines is None}
    rows_of = [w for w in measured if w.pair.group not in skipped]
    n_layers = lab.bench.model.config.n_layers
    depths = sorted({max(1, n_layers // part) for part in (8, 2, 1)})
    kinds = np.array([_kind(w) for w in rows_of])
    groups = np.unique([w.pair.group for w in rows_of], return_inverse=True)[1]
    tokens, exact = (np.array([getattr(w, name) for w in rows_of]) for name in ("tokens", "common"))
    rows: list[tuple[Any, ...]] = []
    for probe, pool in PROBES.items():
        for depth in depths if pool == "mean" else [n_layers]:
            for alpha in ALPHAS:
                cosines = np.array(
                    [w.seen.cosines[pool][:depth] for w in rows_of if w.seen.cosines]
                )
                seen = sigma(cosines, alpha)
                for guard in (None, "numbers", "reworded"):
                    passed = np.array([guard in w.seen.passes for w in rows_of])
                    for tau in TAUS:
                        accepted = passed & (seen >= tau)
                        rows.append((probe, depth, alpha, guard or "none", tau,
                                     *_row(kinds, groups, tokens, exact, accepted)))  # fmt: skip
    columns = (
        Column("probe"), Column("layers"), Column("alpha"), Column("guard"), Column("tau"),
        Column("rewordings", "%"), Column("low", "%"), Column("high", "%"),
        Column("near-duplicates", "%"), Column("near low", "%"), Column("near high", "%"),
        Column("unrelated", "%"), Column("unrelated low", "%"), Column("unrelated high", "%"),
        Column("tokens reused", "%"), Column("over exact", "points"), Column("fidelity", "%"),
        Column("pairs"),
    )  # fmt: skip
    meta = lab.meta(
        questions=len({w.pair.group for w in rows_of}), guards=[g or "none" for g in GUARDS],
        pairs={name: int((kinds == kind).sum()) for name, kind in _KINDS.items()},
    )  # fmt: skip
    table = Table(
        "tau_alpha_sweep", "The gate over tau, alpha, probe and layers", columns, rows, meta
    )
    table.findings.extend(_findings(table))
    return table


def _row(kinds: Any, groups: Any, tokens: Any, exact: Any, accepted: Any) -> tuple[Any, ...]:
    """Acceptance by kind; tokens reused on rewordings, and over exact caching; fidelity: how many
    of the accepted pairs mean the same, when rewordings and others come equally often."""
    good, near, unrelated = (
        rate(accepted[kinds == kind], groups[kinds == kind]) for kind in _KINDS.values()
    )
    mine = kinds == REWORDING
    total = tokens[mine].sum()
    over = (tokens - exact)[mine & accepted].sum() / total
    bad = (near.value + unrelated.value) / 2
    fidelity = good.value / (good.value + bad) if good.k or bad else None
    return (
        100 * good.value, 100 * good.low, 100 * good.high, 100 * near.value, 100 * near.low,
        100 * near.high, 100 * unrelated.value, 100 * unrelated.low, 100 * unrelated.high,
        100 * float(exact[mine].sum() / total + over),
        100 * float(over), None if fidelity is None else 100 * fidelity, len(kinds),
    )  # fmt: skip


def _kind(w: Wording) -> str:
    if w.pair.kind in (REWORDING, UNRELATED, TURNED_REWORDING):
        return w.pair.kind
    return _NEAR if w.pair.same is False else w.pair.kind


def _findings(table: Table) -> list[Finding]:
    n, questions = table.meta["pairs"], table.meta["questions"]
    paper = table.where(probe="prefix, last token", alpha=PAPER_ALPHA, guard="none", tau=PAPER_TAU)
    found = [Finding(
        f"At the paper's tau ({PAPER_TAU}, alpha {PAPER_ALPHA}) the uncentred last token accepts "
        f"{_said(paper.dicts()[0], n)}.", _stops(paper.dicts()[0], n, questions, "unrelated", 5),
    )]  # fmt: skip
    depth = min(table.where(probe="prefix, centred mean").column("layers"))
    centred = table.where(probe="prefix, centred mean", layers=depth)
    best = _best(centred.where(guard="none", alpha=PAPER_ALPHA))
    if best is None:
        return found
    found.append(Finding(
        f"Centred, {depth} layers, tau {best['tau']:g}, no guard: {_said(best, n)} are accepted.",
        _stops(best, n, questions, "near-duplicates", 5),
    ))  # fmt: skip
    for guard in ("numbers", "reworded"):
        (same,) = centred.where(guard=guard, alpha=PAPER_ALPHA, tau=best["tau"]).dicts()
        found.append(Finding(
            f"With guard={guard!r} at the same tau: {_said(same, n)}; "
            f"{signed(same['over exact'], 0)} points of tokens reused over exact caching.",
            _stops(same, n, questions, "near-duplicates", 5),
        ))  # fmt: skip
    plain, weighted = (_best(centred.where(guard="none", alpha=a)) for a in (0.0, PAPER_ALPHA))
    if plain is not None and weighted is not None:
        found.append(Finding(
            f"Layers weighted by alpha {PAPER_ALPHA} or alike (0), each with its best tau over "
            f"{depth} layers: {_rate(weighted, 'rewordings')} or {_rate(plain, 'rewordings')} of "
            f"rewordings at no more than 1 % of unrelated questions, n = {n['rewordings']}.",
            higher(weighted["rewordings"], weighted["low"], plain["rewordings"], plain["high"],
                   min(n["rewordings"], questions)),
        ))  # fmt: skip
    return found


def _best(table: Table) -> dict[str, Any] | None:
    """The tau that accepts most rewordings and at most 1 % of unrelated questions."""
    rows = [row for row in table.dicts() if row["unrelated"] <= 1]
    return max(rows, key=lambda row: row["rewordings"], default=None)


_ENDS = {"rewordings": "", "near-duplicates": "near ", "unrelated": "unrelated "}


def _rate(row: dict[str, Any], name: str) -> str:
    low, high = row[f"{_ENDS[name]}low"], row[f"{_ENDS[name]}high"]
    return f"{row[name]:.1f} % [{low:.1f}, {high:.1f}]"


def _said(row: dict[str, Any], n: dict[str, int]) -> str:
    """Who is accepted, by kind."""
    names = {"rewordings": "rewordings", "near-duplicates": "near-duplicates with another answer",
             "unrelated": "unrelated questions"}  # fmt: skip
    return ", ".join(f"{_rate(row, k)} of {n[k]} {name}" for k, name in names.items())


def _stops(
    row: dict[str, Any], n: dict[str, int], questions: int, name: str, limit: float
) -> bool | None:
    """Pairs of one question count once."""
    return below(row[name], row[f"{_ENDS[name]}high"], min(n[name], questions), limit)


@shows("tau_alpha_sweep")
def shown(table: Table) -> list[Table]:
    """Some taus of three gates."""
    depth = min(table.where(probe="prefix, centred mean").column("layers"))
    centred = table.where(probe="prefix, centred mean", layers=depth, alpha=1.5)
    parts = [table.where(probe="prefix, last token", alpha=1.5, guard="none"),
             *(centred.where(guard=guard) for guard in ("none", "reworded"))]  # fmt: skip
    taus = (*TAUS[::4][:6], PAPER_TAU, TAUS[-1])
    return [
        replace(part, rows=[row for row, tau in zip(part.rows, part.column("tau"), strict=True)
                            if tau in taus])
        for part in parts
    ]  # fmt: skip


@draws("tau_alpha_sweep")
def draw(figure: Figure, table: Table) -> None:
    """Acceptance against tau: the paper's measure, the centred one, with the guard."""
    figure.set_size_inches(10.0, 3.5)
    depth = min(table.where(probe="prefix, centred mean").column("layers"))
    panels = (
        ("Last token, uncentred (the paper's formula)", "prefix, last token", "none"),
        (f"Centred mean, {depth} layers", "prefix, centred mean", "none"),
        (f"Centred mean, {depth} layers, near-copy guard", "prefix, centred mean", "reworded"),
    )
    axes_of = figure.subplots(1, 3, sharey=True)
    for axes, (title, probe, guard) in zip(axes_of, panels, strict=True):
        part = table.where(probe=probe, alpha=1.5, guard=guard)
        part = part.where(layers=min(part.column("layers")))
        x = part.column("tau")
        for i, name in enumerate(("rewordings", "near-duplicates", "unrelated")):
            axes.plot(x, part.column(name), label=name, **style(i) | {"markersize": 3})
        band(axes, x, part.column("low"), part.column("high"), 0)
        band(axes, x, part.column("near low"), part.column("near high"), 1)
        band(axes, x, part.column("unrelated low"), part.column("unrelated high"), 2)
        axes.plot(x, part.column("over exact"), label="tokens reused over exact [points]",
                  color="#777777", linestyle=":")  # fmt: skip
        axes.axvline(PAPER_TAU, color="#999999", linewidth=0.8)
        axes.set_xlabel("tau")
        axes.set_title(title, fontsize=8.5)
    axes_of[0].annotate(
        "paper's tau", (PAPER_TAU, 50), xytext=(-4, 0), textcoords="offset points", rotation=90,
        ha="right", va="center", fontsize=7, color="#777777",
    )  # fmt: skip
    axes_of[0].set_ylabel("pairs accepted [%]")
    axes_of[0].legend(loc="lower left")
