"""`branching.py --decode-table`: milliseconds a decode step, by branches and prefix.

All branches continue one prefix; nothing is verified. Pure functions from the JSON that
branching.py writes to plain values and text; a peer's best way of running counts in each cell.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import compare
from compare import Goals

from rksc.experiments.workload import Shape
from rksc.limits import bounds

BRANCHES = (1, 2, 4, 8, 16, 32)
PREFIXES = (128, 2048)
STEPS = 32

# rksc's time / the other's at a prefix of 128: at most, by numbers and branches.
_MANY: Goals = {"llama.cpp": (0.50, 0.40), "ik_llama.cpp": (0.65, 0.55)}
GOALS: dict[str, dict[int, Goals]] = {
    "Q4_K": {
        1: {"llama.cpp": (1.10, 0.90), "ik_llama.cpp": (1.20, 1.00)},
        2: {"llama.cpp": (0.65, 0.55), "ik_llama.cpp": (1.20, 1.00)},
        4: {"llama.cpp": (0.55, 0.42), "ik_llama.cpp": (0.90, 0.72)},
        8: {"llama.cpp": (0.42, 0.30), "ik_llama.cpp": (1.00, 0.70)},
        16: _MANY,
        32: _MANY,
    }
}
READ = (0.55, 0.75)  # of the machine's read rate, one branch: at least


def shapes(prefix: int | None, branches: int | None, new: int | None) -> list[Shape]:
    """The table's cells; a number keeps one prefix, one number of branches, other steps."""
    return [
        Shape(prefix=p, branches=n, suffix=1, new=new or STEPS, verify=0)
        for p in ([prefix] if prefix else PREFIXES)
        for n in ([branches] if branches else BRANCHES)
    ]


def largest(cells: Sequence[Shape]) -> Shape:
    """What contexts have to hold."""
    prefix, branches = (max(getattr(s, name) for s in cells) for name in ("prefix", "branches"))
    return Shape(prefix=prefix, branches=branches, suffix=1, new=cells[0].new, verify=0)


def decode(run: Mapping[str, Any]) -> float:
    return float(run["seconds"]["decode"])


def summary(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """For each cell: "ms" a step by contestant, "best" contestant by family, "ratios" of rksc's
    to the other families' best, and "read", rksc's fraction of the read rate at one branch."""
    families = data["families"]
    rates = compare.best_rates([r for cell in data["cells"] for r in cell["rounds"]])
    made = []
    for cell in data["cells"]:
        shape, rounds = cell["shape"], cell["rounds"]
        ms = {
            name: statistics.median(decode(r["runs"][name]) for r in rounds) / shape["new"] * 1e3
            for name in families
        }
        best = compare.best(ms, families)
        goals = GOALS.get(data["numbers"], {}) if shape["prefix"] == PREFIXES[0] else {}
        ours = [name for name in ms if families[name] == "rksc"]
        made.append({
            "shape": shape, "ms": ms, "best": best,
            "ratios": {
                f"{own} / {name}": compare.ratio(
                    rounds, own, name, decode,
                    _goal(goals, shape["branches"], family, own in data["activations"]),
                )
                for own in ours for family, name in best.items() if family not in ("rksc", "No-KV")
            },
            "read": {
                own: [_read(cell, r, own, rates.read) for r in rounds] for own in ours
            } if shape["branches"] == 1 else {},
        })  # fmt: skip
    return made


def _goal(
    goals: Mapping[int, Goals], branches: int, family: str, asked: bool
) -> tuple[float | None, float | None]:
    """asked: activations that were asked for have no goals here."""
    return (None, None) if asked else goals.get(branches, {}).get(family, (None, None))


def _read(cell: Mapping[str, Any], a_round: Mapping[str, Any], own: str, limit: float) -> float:
    seconds = decode(a_round["runs"][own]) / cell["shape"]["new"]
    return bounds.fraction(cell["read_bytes"] / seconds, limit, f"{own}, reads at one branch")


def table(data: Mapping[str, Any]) -> str:
    """The decode table as text: by prefix, engines down and branches across."""
    made, cells = summary(data), data["cells"]
    limits = compare.best_rates([r for cell in cells for r in cell["rounds"]])
    lines = [
        f"{data['model']}, {data['numbers']}, {data['threads']} threads; milliseconds a decode "
        f"step, {cells[0]['shape']['new']} steps, medians of {len(cells[0]['rounds'])} rounds",
        f"{data['machine']}; {compare.limits_line(limits)}",
    ]
    for prefix in dict.fromkeys(row["shape"]["prefix"] for row in made):
        rows = [row for row in made if row["shape"]["prefix"] == prefix]
        head = f"prefix {prefix}, branches"
        lines += ["", f"{head:24}" + "".join(f"{row['shape']['branches']:>8}" for row in rows)]
        for name in data["families"]:
            lines.append(f"{name:24}" + "".join(f"{row['ms'][name]:>8.1f}" for row in rows))
    if any(row["ratios"] for row in made):
        lines += ["", compare.RATIOS]
    for row in made:
        where = f"{row['shape']['prefix']} x {row['shape']['branches']}: "
        lines += [compare.ratio_line(where + what, r) for what, r in row["ratios"].items()]
    if any(row["read"] for row in made):
        lines += ["", "fraction of the machine's read rate, one branch"]
    for row in made:
        for own, read in row["read"].items():
            spread = compare.spread(read)
            must, aim = READ if own not in data["activations"] else (None, None)
            found = {**spread, "value": spread["median"], "must": must, "aim": aim}
            what = f"{own}, prefix {row['shape']['prefix']}"
            lines.append(compare.ratio_line(what, found, most=False))
    return "\n".join([*lines, *(["", *data["skipped"]] if data["skipped"] else [])])
