"""Draw what branching.py wrote: seconds of each phase, and rksc's share of the others' time.

    python benchmarks/plot.py FILE.json [FILE.json ...] [--out build/speed.svg]

One row of charts for each comparison in the files (those of --elsewhere too): stacked bars of the
phases' medians with the spread of the totals, and ratios with their goals. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import compare
import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

# Okabe and Ito's colours, told apart by colour-blind readers; hatches for print.
COLOURS = {"prefill": "#0072B2", "suffix": "#E69F00", "decode": "#009E73", "verify": "#CC79A7"}
HATCHES = {"prefill": "", "suffix": "//", "decode": "..", "verify": "xx"}
GOAL = "#D55E00"


def contests(data: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """All comparisons in one file's JSON."""
    own = [data] if "rounds" in data else []
    return own + list(data.get("elsewhere", {}).get("contests", []))


def draw_seconds(axes: Any, data: Mapping[str, Any], made: Mapping[str, Any]) -> None:
    names = list(made["rows"])
    left = [0.0] * len(names)
    for phase in compare.PHASES:
        widths = [made["rows"][name]["phases"][phase] for name in names]
        axes.barh(
            names, widths, left=left, color=COLOURS[phase], hatch=HATCHES[phase],
            edgecolor="white", linewidth=0.5, label=phase,
        )  # fmt: skip
        left = [a + b for a, b in zip(left, widths, strict=True)]
    totals = [made["rows"][name]["total"] for name in names]
    middle = [t["median"] for t in totals]
    below = [t["median"] - t["low"] for t in totals]
    above = [t["high"] - t["median"] for t in totals]
    axes.errorbar(middle, names, xerr=[below, above], fmt="none", ecolor="black", capsize=3)
    axes.invert_yaxis()
    axes.set_xlabel("time (s), median of each phase; bars: fastest and slowest total")
    isas = ", ".join(data["isas"].values())
    axes.set_title(f"{data['workload']}, {data['numbers']}, {isas}, {data['threads']} threads")
    axes.legend(frameon=False)


def draw_ratios(axes: Any, made: Mapping[str, Any]) -> None:
    names = [f"{r['ours']} / {r['theirs']}" for r in made["ratios"]]
    axes.barh(names, [r["value"] for r in made["ratios"]], color=COLOURS["prefill"])
    for i, r in enumerate(made["ratios"]):
        for goal, style in (("must", "-"), ("aim", ":")):
            if r[goal] is not None:
                axes.plot([r[goal]] * 2, [i - 0.45, i + 0.45], style, color=GOAL, lw=2)
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel("time of rksc / time of the other (goal: left of the line; dotted: aim)")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.json")
    parser.add_argument("--out", type=Path, default=Path("build/speed.svg"))
    args = parser.parse_args()
    found = [c for file in args.files for c in contests(json.loads(file.read_text()))]
    if not found:
        parser.error("no comparison in these files")
    figure, grid = plt.subplots(
        len(found), 2, figsize=(14, 3.6 * len(found)), squeeze=False, layout="constrained"
    )
    for (seconds, ratios), data in zip(grid, found, strict=True):
        made = compare.summary(data)
        draw_seconds(seconds, data, made)
        draw_ratios(ratios, made)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.out)
    print(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
