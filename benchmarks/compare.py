"""What the rounds of a contest say: medians, spread, ratios, fractions of the machine's limits.

Pure functions from the JSON that branching.py writes to plain values and text.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rksc.limits import bounds
from rksc.limits.rates import Rates

PHASES = ("prefill", "suffix", "decode", "verify")

# rksc's time / the other's: at most `must`, better `aim`; by workload, numbers (or activations,
# where they were asked for), opponent.
Goals = dict[str, tuple[float, float | None]]
GOALS: dict[tuple[str, str], Goals] = {
    ("W1", "bfloat16"): {
        "vLLM": (0.50, 0.42),
        "llama.cpp": (0.40, 0.35),
        "transformers": (0.24, 0.18),
        "No-KV": (0.12, 0.11),
    },
    ("W2", "bfloat16"): {"vLLM": (0.52, 0.45), "llama.cpp": (0.33, 0.25)},
    ("W1", "float32"): {"llama.cpp": (0.75, None), "transformers": (0.50, None)},
    ("W1", "Q8_0"): {"llama.cpp": (0.45, 0.35)},
    ("W1", "Q4_1"): {"llama.cpp": (0.35, 0.25)},
    ("W3", "Q4_K"): {"llama.cpp": (0.62, 0.52), "ik_llama.cpp": (0.90, 0.75)},
    ("W3", "int8"): {"llama.cpp": (0.42, 0.36), "ik_llama.cpp": (0.60, 0.50)},
}
# Fractions of the machine's limits: at least.
LIMITS = {"prefill": (0.72, 0.82), "decode step": (0.65, 0.80)}
_RATES = tuple(Rates.__dataclass_fields__)
_SMALLER_THAN = ("vLLM", "llama.cpp")  # in peak memory
_IN_PLACE = (1.15, 1.05)  # peak memory / bytes of a quantised file and of the workload's KV


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def total(run: Mapping[str, Any]) -> float:
    return float(sum(run["seconds"].values()))


def best(seconds: Mapping[str, float], families: Mapping[str, str]) -> dict[str, str]:
    """By family, the fastest of its ways of running."""
    return {
        family: min((n for n in seconds if families[n] == family), key=lambda n: seconds[n])
        for family in dict.fromkeys(families[n] for n in seconds)
    }


def agreement(a: Sequence[Sequence[int]], b: Sequence[Sequence[int]] | None) -> float | None:
    """Fraction of the new tokens that come before the first difference of their branch; None
    for an engine that draws its own."""
    if b is None:
        return None
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
        each = [agreement(r["runs"][ours[0]]["chosen"], r["runs"][name]["chosen"]) for r in rounds]
        rows[name]["agreement"] = min((a for a in each if a is not None), default=None)
    fastest = best({name: row["total"]["median"] for name, row in rows.items()}, families)
    others = {family: name for family, name in fastest.items() if family != "rksc"}
    ratios = []
    for own in ours:
        numbers = data.get("activations", {}).get(own, data["numbers"])
        goals = GOALS.get((data["workload"], numbers), {})
        for family, name in others.items():
            if family == "No-KV" and own != ours[0]:
                continue  # No-KV runs with the first instruction set alone
            ratios.append({
                "ours": own, "theirs": name,
                **ratio(rounds, own, name, total, goals.get(family, (None, None))),
            })  # fmt: skip
    memory = [
        {
            "ours": own, "theirs": name, "aim": None,
            "must": 1.0 if family in _SMALLER_THAN else None,
            "value": rows[own]["peak_bytes"] / rows[name]["peak_bytes"],
        }
        for own in ours for family, name in others.items() if family != "No-KV"
    ]  # fmt: skip
    if data.get("in_place_bytes"):
        must, aim = _IN_PLACE
        memory += [
            {
                "ours": own, "theirs": "file and KV", "must": must, "aim": aim,
                "value": rows[own]["peak_bytes"] / data["in_place_bytes"],
            }
            for own in ours
        ]  # fmt: skip
    return {
        "memory": memory,
        "rates": {k: spread([r["rates"].get(k, 0.0) for r in rounds]) for k in _RATES},
        "rows": rows,
        "ratios": ratios,
        "limits": {own: _limits(data, own) for own in ours} if data.get("decode_ops") else {},
        "rounds": len(rounds),
        "exact": all(_exact(r["runs"], families) for r in rounds),
        "others_cpu": max(run["others_cpu"] for r in rounds for run in r["runs"].values()),
    }


def ratio(
    rounds: Sequence[Mapping[str, Any]], own: str, name: str,
    seconds: Callable[[Mapping[str, Any]], float], goal: tuple[float | None, float | None],
) -> dict[str, Any]:  # fmt: skip
    """Of the medians of two contestants' seconds, with its range over the rounds."""
    ours, theirs = ([seconds(r["runs"][n]) for r in rounds] for n in (own, name))
    each = [a / b for a, b in zip(ours, theirs, strict=True)]
    value = statistics.median(ours) / statistics.median(theirs)
    must, aim = goal
    return {"value": value, "low": min(each), "high": max(each), "must": must, "aim": aim}


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


def best_rates(rounds: Sequence[Mapping[str, Any]]) -> Rates:
    return Rates(**{k: max(r["rates"].get(k, 0.0) for r in rounds) for k in _RATES})


def _limits(data: Mapping[str, Any], own: str) -> dict[str, Any]:
    """Fractions of the best rates that any round measured."""
    rates = best_rates(data["rounds"])
    arithmetic = data["rounds"][0]["runs"][own].get("arithmetic", data["dtype"])
    products = rates.products(data["isas"][own], arithmetic)
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
    shape = data["shape"]
    mib, width = 2**20, max(len(name) for name in made["rows"]) + 2
    lines = [
        f"{data['model']}, {data['numbers']}, {data['threads']} threads; {data['workload']}: "
        f"prefix {shape['prefix']}, {shape['branches']} branches, suffix {shape['suffix']}, "
        f"{shape['new']} new tokens, verification of {shape['verify']}",
        f"{data['machine']}; {limits_line(best_rates(data['rounds']))}",
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
            f"{row['peak_bytes'] / mib:>10.0f}"
            + (f"{row['agreement']:>8.1%}" if row["agreement"] is not None else "")
        )
    lines += ["", RATIOS, *(ratio_line(f"{r['ours']} / {r['theirs']}", r) for r in made["ratios"])]
    if made["memory"]:
        lines += ["", f"{'peak memory of rksc / of the other':38}{'ratio':>7}{'':16}{'must':>7}"]
    for m in made["memory"]:
        lines.append(
            f"{m['ours'] + ' / ' + m['theirs']:38}{m['value']:>7.3f}{'':16}{_goal(m['must']):>7}"
            f"{_goal(m['aim']):>6}  {verdict(m['value'], m['must'], m['aim'])}"
        )
    if made["limits"]:
        lines += [
            "",
            f"{'fraction of the machine':38}{'value':>7}{'rounds':>16}{'must':>7}{'aim':>6}",
        ]
    for own, limits in made["limits"].items():
        for what, (must, aim) in LIMITS.items():
            v = limits[what]
            found = {**v, "value": v["median"], "must": must, "aim": aim}
            lines.append(ratio_line(f"{own}, {what}", found, most=False))
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


RATIOS = f"{'time of rksc / of the other':38}{'ratio':>7}{'rounds':>16}{'must':>7}{'aim':>6}"


def ratio_line(what: str, r: Mapping[str, Any], most: bool = True) -> str:
    """A line below RATIOS."""
    between = f"{r['low']:.3f} .. {r['high']:.3f}"
    return (
        f"{what:38}{r['value']:>7.3f}{between:>16}{_goal(r['must']):>7}{_goal(r['aim']):>6}"
        f"  {verdict(r['value'], r['must'], r['aim'], most)}"
    ).rstrip()


def limits_line(rates: Rates) -> str:
    products = {
        "float32": rates.fma, "VDPBF16PS": rates.bf16, "AMX": rates.amx, "int16": rates.int16,
        "int8": rates.int8,
    }  # fmt: skip
    shown = ", ".join(f"{name} {rate / 1e9:.0f}" for name, rate in products.items() if rate)
    return f"reads {rates.read / 1e9:.1f} GB/s; products {shown} GFLOP/s"


def _goal(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
