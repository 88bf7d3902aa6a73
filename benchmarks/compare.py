"""What the rounds of a contest say: medians, spread, ratios, fractions of the machine's limits.

Pure functions from the JSON that branching.py writes to plain values and text.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import bounds
from machine import Rates

PHASES = ("prefill", "suffix", "decode", "verify")

# rksc's time / the other's: at most `must`, better `aim`; by workload, numbers, opponent.
GOALS: dict[tuple[str, str], dict[str, tuple[float, float | None]]] = {
    ("W1", "bfloat16"): {
        "vLLM": (0.70, 0.55),
        "llama.cpp": (0.55, 0.42),
        "transformers": (0.24, 0.18),
        "No-KV": (0.12, 0.11),
    },
    ("W2", "bfloat16"): {"vLLM": (0.60, 0.46), "llama.cpp": (0.33, 0.25)},
    ("W1", "float32"): {"llama.cpp": (0.75, None), "transformers": (0.50, None)},
    ("W1", "Q8_0"): {"llama.cpp": (0.45, None)},
    ("W1", "Q4_1"): {"llama.cpp": (0.35, None)},
}
# Fractions of the machine's limits: at least.
LIMITS = {"prefill": (0.70, 0.85), "decode step": (0.55, 0.75)}
_RATES = tuple(Rates.__dataclass_fields__)
_SMALLER_THAN = ("vLLM", "llama.cpp")  # in peak memory


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def total(run: Mapping[str, Any]) -> float:
    return float(sum(run["seconds"].values()))


def agreement(a: Sequence[Sequence[int]], b: Sequence[Sequence[int]]) -> float:
    """Fraction of the new tokens that come before the first difference of their branch."""
    equal = n = 0
    for ours, theirs in zip(a, b, strict=True):
        n += len(ours)
        for x, y in zip(ours, theirs, strict=True):
            if x != y:
                break
            equal += 1
    return equal / n


def summary(data: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that `table` prints, from a contest's JSON."""
    rounds = data["rounds"]
    names = list(rounds[0]["runs"])
    families = data["families"]
    ours = [name for name in names if families[name] == "rksc"]
    rows = {name: _row([r["runs"][name] for r in rounds]) for name in names}
    for name in names:
        rows[name]["agreement"] = min(
            agreement(r["runs"][ours[0]]["chosen"], r["runs"][name]["chosen"]) for r in rounds
        )
    goals = GOALS.get((data["workload"], data["numbers"]), {})
    ratios = []
    for own in ours:
        for name in names:
            if families[name] == "rksc" or (families[name] == "No-KV" and own != ours[0]):
                continue  # No-KV runs with the first instruction set alone
            must, aim = goals.get(families[name], (None, None))
            each = [total(r["runs"][own]) / total(r["runs"][name]) for r in rounds]
            value = rows[own]["total"]["median"] / rows[name]["total"]["median"]
            ratios.append({
                "ours": own, "theirs": name, "value": value, "low": min(each),
                "high": max(each), "must": must, "aim": aim,
            })  # fmt: skip
    memory = [
        {
            "ours": own, "theirs": name, "must": 1.0 if name in _SMALLER_THAN else None,
            "value": rows[own]["peak_bytes"] / rows[name]["peak_bytes"],
        }
        for own in ours for name in names if families[name] not in ("rksc", "No-KV")
    ]  # fmt: skip
    return {
        "memory": memory,
        "rates": {k: spread([r["rates"][k] for r in rounds]) for k in _RATES},
        "rows": rows,
        "ratios": ratios,
        "limits": {own: _limits(data, own) for own in ours} if data.get("decode_ops") else {},
        "rounds": len(rounds),
        "exact": all(_exact(r["runs"], families) for r in rounds),
        "others_cpu": max(run["others_cpu"] for r in rounds for run in r["runs"].values()),
    }


def _row(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    phases = {
        phase: statistics.median(run["seconds"].get(phase, 0.0) for run in runs) for phase in PHASES
    }
    return {
        "phases": phases,
        "total": spread([total(run) for run in runs]),
        "tokens": runs[0]["tokens"],
        "peak_bytes": runs[0]["peak_bytes"],
    }


def _limits(data: Mapping[str, Any], own: str) -> dict[str, Any]:
    """Fractions of the best rates that any round measured."""
    rates = Rates(**{k: max(r["rates"][k] for r in data["rounds"]) for k in _RATES})
    products = rates.products(data["isas"][own], data["dtype"])
    least = bounds.seconds(bounds.from_rows(data["decode_ops"]), rates.read, products)
    seconds = [r["runs"][own]["seconds"] for r in data["rounds"]]
    achieved = {
        "prefill": [data["prefill_flop"] / s["prefill"] / products for s in seconds],
        "decode step": [least / s["decode"] for s in seconds],
    }
    return {
        what: spread([bounds.fraction(value, 1.0, f"{own}, {what}") for value in values])
        for what, values in achieved.items()
    }


def _exact(runs: Mapping[str, Any], families: Mapping[str, str]) -> bool:
    """The same tokens and scores, bit for bit, with and without sharing (one instruction set)."""
    own = [runs[name] for name in runs if families[name] in ("rksc", "No-KV")]
    first, others = own[0], [runs[name] for name in runs if families[name] == "No-KV"]
    return all(o["chosen"] == first["chosen"] and o["scores"] == first["scores"] for o in others)


# ---- text --------------------------------------------------------------------------------------


def verdict(value: float, must: float | None, aim: float | None, most: bool = True) -> str:
    """ "aim reached", "reached" or "MISSED"; nothing where there is no goal."""

    def reached(goal: float | None) -> bool:
        return goal is not None and (value <= goal if most else value >= goal)

    if must is None:
        return ""
    return "aim reached" if reached(aim) else "reached" if reached(must) else "MISSED"


def table(data: Mapping[str, Any]) -> str:
    """A contest as text."""
    made = summary(data)
    shape, rates = data["shape"], made["rates"]
    mib, width = 2**20, max(len(name) for name in made["rows"]) + 2
    lines = [
        f"{data['model']}, {data['numbers']}, {data['threads']} threads; {data['workload']}: "
        f"prefix {shape['prefix']}, {shape['branches']} branches, suffix {shape['suffix']}, "
        f"{shape['new']} new tokens, verification of {shape['verify']}",
        f"{data['machine']}; reads {rates['read']['high'] / 1e9:.1f} GB/s; products "
        + ", ".join(
            f"{name} {rates[key]['high'] / 1e9:.0f}"
            for key, name in (("fma", "float32"), ("bf16", "VDPBF16PS"), ("amx", "AMX"))
        )
        + " GFLOP/s",
        "",
        f"{'seconds':{width}}" + "".join(f"{phase:>9}" for phase in (*PHASES, "total"))
        + f"{'min .. max':>18}{'tokens':>9}{'peak MiB':>10}{'agree':>8}",
    ]  # fmt: skip
    for name, row in made["rows"].items():
        t, n = row["total"], row["tokens"]
        between = f"{t['low']:.3f} .. {t['high']:.3f}"
        lines.append(
            f"{name:{width}}"
            + "".join(
                f"{row['phases'][p]:>9.3f}" if row["phases"][p] else f"{'':9}" for p in PHASES
            )
            + f"{t['median']:>9.3f}{between:>18}{f'{n:,}' if n else '?':>9}"
            f"{row['peak_bytes'] / mib:>10.0f}{row['agreement']:>8.1%}"
        )
    lines += [
        "",
        f"{'time of rksc / of the other':38}{'ratio':>7}{'rounds':>16}{'must':>7}{'aim':>6}",
    ]
    for r in made["ratios"]:
        between = f"{r['low']:.3f} .. {r['high']:.3f}"
        lines.append(
            f"{r['ours'] + ' / ' + r['theirs']:38}{r['value']:>7.3f}{between:>16}"
            f"{_goal(r['must']):>7}{_goal(r['aim']):>6}  {verdict(r['value'], r['must'], r['aim'])}"
        )
    if made["memory"]:
        lines += ["", f"{'peak memory of rksc / of the other':38}{'ratio':>7}{'':16}{'must':>7}"]
    for m in made["memory"]:
        lines.append(
            f"{m['ours'] + ' / ' + m['theirs']:38}{m['value']:>7.3f}{'':16}{_goal(m['must']):>7}"
            f"{'':6}  {verdict(m['value'], m['must'], None)}"
        )
    if made["limits"]:
        lines += [
            "",
            f"{'fraction of the machine':38}{'value':>7}{'rounds':>16}{'must':>7}{'aim':>6}",
        ]
    for own, limits in made["limits"].items():
        for what, (must, aim) in LIMITS.items():
            v = limits[what]
            between = f"{v['low']:.3f} .. {v['high']:.3f}"
            lines.append(
                f"{own + ', ' + what:38}{v['median']:>7.3f}{between:>16}{must:>7.2f}{aim:>6.2f}"
                f"  {verdict(v['median'], must, aim, most=False)}"
            )
    lines += [
        "",
        f"medians of {made['rounds']} rounds; agree: new tokens before the first difference from "
        "rksc's, the worst round.",
        f"Contestants that should sleep took at most {made['others_cpu']:.1%} of a core.",
    ]
    if "No-KV" in data["families"].values():
        same = "the same, bit for bit" if made["exact"] else "DIFFERENT"
        lines.append(f"Tokens and scores of rksc with and without sharing: {same}.")
    return "\n".join(lines)


def _goal(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
