"""The workload W1: one prefix, some branches, a verification; shared, and without sharing.

"No-KV" is what the paper compares with: every branch prefills its whole prompt, every
verification reads problem and answer again. Both are batched alike and give the same tokens,
bit for bit; only what is computed twice differs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .._core import Branch
from ..engine.load import Model
from ..engine.options import Sampling
from ..engine.results import Generation, Stats, Verdict
from ..engine.session import BranchSession
from ..model.config import ModelConfig

PHASES = ("prefill", "suffix", "decode", "verify")


@dataclass(frozen=True)
class Shape:
    """Tokens of the workload; W1 by default, W2 is Shape(prefix=4096, branches=32). verify=0:
    nothing is verified."""

    prefix: int = 1024
    branches: int = 8
    suffix: int = 16
    new: int = 32
    verify: int = 12

    @property
    def unique(self) -> int:
        """Tokens that differ: what a tree must hold."""
        return self.prefix + self.branches * (self.suffix + self.new)

    @property
    def sequence(self) -> int:
        """Tokens of one branch at its longest."""
        return self.prefix + self.suffix + self.new + self.verify


@dataclass(frozen=True)
class Cost:
    """Tokens through the model in a phase, and the floating-point operations they take."""

    tokens: int
    flop: int


@dataclass(frozen=True)
class Measured:
    """One phase of one run."""

    seconds: float
    tokens: int


@dataclass(frozen=True)
class Measurement:
    """One run: phases by name, KV bytes in use at most and of one token, what came out."""

    phases: dict[str, Measured]
    peak_bytes: int
    token_bytes: int
    chosen: list[list[int]]
    scores: list[float | None]

    @property
    def seconds(self) -> float:
        return sum(phase.seconds for phase in self.phases.values())


# ---- what the shapes ask for -----------------------------------------------------------------


def flop(config: ModelConfig, begin: int, end: int, outputs: int = 0) -> int:
    """Operations (a multiply and an add are two) for positions [begin, end) of a sequence.

    Matrix products of all layers, attention over the keys that each position sees, and
    `outputs` rows of the head.
    """
    c = config
    q, kv = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
    layer = c.width * (2 * q + 2 * kv) + 3 * c.width * c.ffn_width
    total = 0
    for window, n_layers in (
        (0, c.n_layers if not c.window else min(c.window_from, c.n_layers)),
        (c.window, c.n_layers - c.window_from if c.window else 0),
    ):
        keys = sum(min(p + 1, window) if window else p + 1 for p in range(begin, end))
        total += n_layers * (2 * layer * (end - begin) + 4 * q * keys)
    return total + 2 * outputs * c.vocab_size * c.width


def expected(config: ModelConfig, shape: Shape, shared: bool) -> dict[str, Cost]:
    """What each phase must compute, from the shapes alone.

    The last token before a generation is computed with its first step and the last token of a
    generation with the verification, so every new token is one row of one step.
    """
    n, s = shape.branches, shape
    body = s.prefix + s.suffix - 1  # before the step that gives the first new token
    full = body + s.new
    decode = Cost(n * s.new, n * flop(config, body, full, outputs=s.new))
    tail = (full, full + 1 + s.verify)
    if shared:
        prefill = Cost(s.prefix, flop(config, 0, s.prefix))
        suffix = Cost(n * (s.suffix - 1), n * flop(config, s.prefix, body))
        verify = Cost(n * (tail[1] - tail[0]), n * flop(config, *tail, outputs=1))
    else:
        one = flop(config, 0, 1)  # the branches have their first token in common
        prefill = Cost(1 + n * (body - 1), one + n * flop(config, 1, body))
        suffix = Cost(0, 0)
        verify = Cost(1 + n * (tail[1] - 1), one + n * flop(config, 1, tail[1], outputs=1))
    return {
        "prefill": prefill, "suffix": suffix, "decode": decode,
        "verify": verify if s.verify else Cost(0, 0),
    }  # fmt: skip


# ---- runs --------------------------------------------------------------------------------------


class Clock:
    """Seconds and tokens computed in each phase of a session."""

    def __init__(self, session: BranchSession) -> None:
        self.phases = {name: Measured(0.0, 0) for name in PHASES}
        self._session = session

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        before, start = self._computed(), time.perf_counter()
        yield
        seconds = time.perf_counter() - start
        old = self.phases[name]
        tokens = self._computed() - before
        self.phases[name] = Measured(old.seconds + seconds, old.tokens + tokens)

    def _computed(self) -> int:
        stats = self._session.stats()
        return stats.tokens_computed + stats.tokens_recomputed


@dataclass(frozen=True)
class Work:
    """The same work for both ways: a prompt, what follows it in each branch, a judgement.

    Without a question nothing is verified.
    """

    prefix: Sequence[int]
    suffixes: Sequence[Sequence[int]]
    question: Sequence[int]
    yes: int
    no: int
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop: Sequence[str] = ()
    stop_ids: Sequence[int] | None = None


def workload(vocab_size: int, shape: Shape, seed: int = 0) -> Work:
    """Random token ids, 100 .. 40000 where the vocabulary has them; length forced."""
    rng = np.random.default_rng(seed)
    low, high = (100, min(40000, vocab_size)) if vocab_size > 200 else (0, vocab_size)

    def draw(n: int) -> list[int]:
        ids: NDArray[np.int64] = rng.integers(low, high, n)
        return [int(i) for i in ids]

    suffixes = [draw(shape.suffix) for _ in range(shape.branches)]
    prefix, question = draw(shape.prefix), draw(shape.verify)
    return Work(prefix, suffixes, question, low, low + 1, shape.new, stop_ids=())


@dataclass(frozen=True)
class Outcome:
    """What a way of doing the work gave: branches in order, verdicts of those verified."""

    clock: Clock
    branches: list[Branch]
    generations: list[Generation]
    verdicts: list[Verdict]


def shared(session: BranchSession, work: Work) -> Outcome:
    """Prefix once, forks, one batch, a verification on each branch's own KV."""
    clock = Clock(session)
    with clock.phase("prefill"):
        root = session.prefill(work.prefix)
    kids = root.fork([suffix[:-1] for suffix in work.suffixes])
    with clock.phase("suffix"):
        session.compute(kids)
    for kid, suffix in zip(kids, work.suffixes, strict=True):
        kid.extend(suffix[-1:])
    with clock.phase("decode"):
        made = _generate(session, kids, work)
    with clock.phase("verify"):
        marks = _verify(session, kids, work)
    return Outcome(clock, kids, made, marks)


def alone(
    session: BranchSession,
    work: Work,
    streams: Sequence[int] | None = None,
    verified: Sequence[int] | None = None,
) -> Outcome:
    """Every branch computes its whole prompt, every verification problem and answer again.

    session: one with share=False. streams: the branches' random numbers; verified: indices of
    the branches to verify (None: all).
    """
    clock = Clock(session)
    with clock.phase("prefill"):
        kids = _apart(session, [[*work.prefix, *suffix] for suffix in work.suffixes])
    for kid, stream in zip(kids, streams or [], strict=streams is not None):
        kid.stream = stream
    with clock.phase("decode"):
        made = _generate(session, kids, work)
    texts = [kids[i].tokens.tolist() for i in (range(len(kids)) if verified is None else verified)]
    marks: list[Verdict] = []
    with clock.phase("verify"):
        if texts:
            marks = _verify(session, _apart(session, texts), work)
    return Outcome(clock, kids, made, marks)


def _apart(session: BranchSession, prompts: Sequence[Sequence[int]]) -> list[Branch]:
    """Branches that share nothing but their first token, computed in one batch up to their
    last one."""
    root = session.prefill(prompts[0][:1])
    kids = root.fork([prompt[1:-1] for prompt in prompts])
    session.compute(kids)
    for kid, prompt in zip(kids, prompts, strict=True):
        kid.extend(prompt[-1:])
    return kids


def _generate(session: BranchSession, kids: list[Branch], work: Work) -> list[Generation]:
    return session.generate(
        kids, work.max_new_tokens, work.sampling, work.stop, stop_ids=work.stop_ids
    )


def _verify(session: BranchSession, kids: list[Branch], work: Work) -> list[Verdict]:
    if not work.question:
        return []
    return session.verify(kids, work.question, work.yes, work.no, cgee=None)


def kv_bytes(config: ModelConfig, tokens: int) -> int:
    """Enough for so many tokens in float32 and the loose ends of blocks."""
    return (tokens + tokens // 4 + 1024) * token_bytes(config, 4)


def token_bytes(config: ModelConfig, item_bytes: int) -> int:
    """KV of one token in all layers."""
    return config.n_layers * 2 * config.n_kv_heads * config.head_dim * item_bytes


def measure(
    model: Model, shape: Shape, repeat: int = 3, seed: int = 0, **options: Any
) -> dict[str, list[Measurement]]:
    """`repeat` alternating runs of both ways, each in a fresh session in exact mode:
    {"shared": [...], "No-KV": [...]}."""
    if repeat < 1:
        raise ValueError(f"repeat must be at least 1, got {repeat}")
    options = {"tokenizer": None, "asks": None, "cgee": None, **options}
    options.setdefault("kv_bytes", kv_bytes(model.config, 2 * shape.branches * shape.sequence))
    work = workload(model.config.vocab_size, shape, seed)
    runs: dict[str, list[Measurement]] = {"shared": [], "No-KV": []}
    for _ in range(repeat):
        for name, way in (("shared", shared), ("No-KV", alone)):
            session = model.session(share=name == "shared", **options)
            outcome = way(session, work)
            runs[name].append(_measurement(outcome, session.stats()))
            del session, outcome
    return runs


def _measurement(outcome: Outcome, stats: Stats) -> Measurement:
    return Measurement(
        phases=outcome.clock.phases,
        peak_bytes=stats.bytes_peak,
        token_bytes=stats.block_bytes // stats.block_tokens,
        chosen=[generation.tokens.tolist() for generation in outcome.generations],
        scores=[verdict.score for verdict in outcome.verdicts],
    )


# ---- reports -----------------------------------------------------------------------------------


def report(config: ModelConfig, shape: Shape, runs: dict[str, list[Measurement]]) -> dict[str, Any]:
    """Medians by phase with tokens, expected tokens and GFLOP/s; ratios; peak bytes."""
    out: dict[str, Any] = {"shape": asdict(shape), "runs": len(runs["shared"])}
    for name, measured in runs.items():
        costs = expected(config, shape, shared=name == "shared")
        rows: dict[str, Any] = {}
        for phase in PHASES:
            seconds = statistics.median(run.phases[phase].seconds for run in measured)
            rows[phase] = {
                "seconds": seconds,
                "tokens": measured[0].phases[phase].tokens,
                "expected_tokens": costs[phase].tokens,
                "gflop_per_s": costs[phase].flop / seconds / 1e9 if seconds else 0.0,
            }
        total = statistics.median(run.seconds for run in measured)
        work = sum(costs[phase].flop for phase in PHASES)
        rows["total"] = {
            "seconds": total,
            "tokens": sum(rows[phase]["tokens"] for phase in PHASES),
            "expected_tokens": sum(costs[phase].tokens for phase in PHASES),
            "gflop_per_s": work / total / 1e9,
        }
        out[name] = {"phases": rows, "peak_bytes": max(run.peak_bytes for run in measured)}
    out["ratio"] = (
        out["No-KV"]["phases"]["total"]["seconds"] / out["shared"]["phases"]["total"]["seconds"]
    )
    first = runs["shared"][0]
    out["unique_bytes"] = shape.unique * first.token_bytes
    out["same_results"] = all(
        run.chosen == first.chosen and run.scores == first.scores
        for measured in runs.values()
        for run in measured
    )
    return out


def table(result: dict[str, Any]) -> str:
    """A report as text."""
    mib = 2**20
    lines = [f"{'':8}{'shared':>34}{'No-KV':>38}"]
    column = f"{'seconds':>10}{'tokens (expected)':>19}{'GFLOP/s':>9}"
    lines.append(f"{'':8}{column}{column}{'ratio':>8}")
    for phase in (*PHASES, "total"):
        line, seconds = f"{phase:8}", []
        for name in ("shared", "No-KV"):
            row = result[name]["phases"][phase]
            tokens = f"{row['tokens']:,} ({row['expected_tokens']:,})"
            line += f"{row['seconds']:>10.3f}{tokens:>19}{row['gflop_per_s']:>9.1f}"
            seconds.append(row["seconds"])
        lines.append(line + (f"{seconds[1] / seconds[0]:>8.2f}" if all(seconds) else ""))
    unique = result["unique_bytes"]
    peaks = [result[name]["peak_bytes"] for name in ("shared", "No-KV")]
    lines.append(
        f"peak KV  {peaks[0] / mib:.1f} MiB shared, {peaks[1] / mib:.1f} MiB No-KV; "
        f"unique tokens need {unique / mib:.1f} MiB"
    )
    same = "the same" if result["same_results"] else "DIFFERENT"
    lines.append(
        f"tokens and scores of both ways and all runs: {same}; medians of {result['runs']}"
    )
    return "\n".join(lines)
