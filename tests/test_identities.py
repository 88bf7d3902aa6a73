"""Results never depend on how the work was arranged, to the last bit (CPU).

Elsewhere they are the CPU's, to a tolerance; where a draw was a near tie another token may follow.

A branch gives the same numbers alone and in a batch, forked or prefilled, whole or in pieces,
with any block size, step size and number of threads, never evicted or recomputed. The yardstick
is `Alone`: a session of its own with one thread that sees nothing but this one branch.

RKSC_EXAMPLES=20 tries twenty times as many random cases, new ones on each run; without it the
cases are always the same. Failing ones are printed and can be replayed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.models import ALL, make
from support.sessions import (
    DEVICE,
    ISAS,
    assert_books,
    assert_same,
    block_bytes,
    is_near_tie,
    n_same_tokens,
    open_session,
)

from rksc import ASKS, Branch, BranchSession, CapacityError, Generation, Sampling

TIMES = int(os.environ.get("RKSC_EXAMPLES", "1"))
ALL["long"] = make("long", 40, num_hidden_layers=2, max_position_embeddings=2048)
ALL["long-window"] = make(
    "long-window", 41, num_hidden_layers=2, max_position_embeddings=2048, sliding_window=300,
    model_type="mistral", architectures=["MistralForCausalLM"],
)  # fmt: skip

# Odd sizes, windows, biases, one and many query heads for a key head.
NAMES = ("T1", "T4", "mistral-window", "qwen2-tied-window", "smollm2", "falcon3", "no-keys")
KINDS = [(isa, dtype) for isa in ISAS for dtype in ("float32", "bfloat16")]
kinds = pytest.mark.parametrize(("isa", "dtype"), KINDS)


def examples(n: int) -> Any:
    return settings(
        max_examples=n * TIMES,
        derandomize=TIMES == 1,
        deadline=None,
        print_blob=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


@dataclass(frozen=True)
class Alone:
    """What a branch gives in a fresh session on the CPU with nothing else."""

    model: str
    isa: str
    dtype: str

    def branch(self, tokens: Sequence[int], stream: int | None = None) -> Branch:
        session = open_session(
            self.model, isa=self.isa, dtype=self.dtype, n_threads=1, kv_bytes=32 << 20,
            device="cpu",
        )  # fmt: skip
        branch = session.prefill(list(tokens))
        if stream is not None:
            branch.stream = stream
        return branch

    def logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        return _alone_logits(self, tuple(int(t) for t in tokens))

    def generate(
        self, tokens: Sequence[int], n: int, sampling: Sampling | None, stream: int
    ) -> Generation:
        branch = self.branch(tokens, stream)
        return branch_session(branch).generate(branch, n, sampling, stop_ids=())[0]


@cache
def _alone_logits(alone: Alone, tokens: tuple[int, ...]) -> NDArray[np.float32]:
    return alone.branch(tokens).logits


def branch_session(branch: Branch) -> BranchSession:
    assert isinstance(branch.session, BranchSession)
    return branch.session


def assert_alone(
    alone: Alone,
    before: Sequence[int],
    got: Generation | list[int],
    sampling: Sampling | None = None,
    stream: int = 0,
) -> None:
    """The tokens (and numbers) of `got`, which follow `before`, are those of the branch alone.
    Off the CPU near ties may fall either way; the comparison goes on behind what was chosen."""
    tokens = got if isinstance(got, list) else got.tokens.tolist()
    at = 0
    while at < len(tokens):
        context = [*before, *tokens[:at]]
        expected = alone.generate(context, len(tokens) - at, sampling, stream)
        theirs = expected.tokens.tolist()
        n = next((i for i, t in enumerate(theirs) if t != tokens[at + i]), len(theirs))
        if n > 0 and not isinstance(got, list):
            for name in ("top_probs", "logprobs", "entropies"):
                numbers = getattr(got, name)[at : at + n]
                assert_same(numbers, getattr(expected, name)[:n], alone.dtype)
            if n == len(tokens):
                assert_same(got.confidence, expected.confidence, alone.dtype)
        at += n
        if at < len(tokens):
            assert DEVICE != "cpu", (tokens, theirs)
            logits = alone.logits([*before, *tokens[:at]])
            temperature = sampling.temperature if sampling else 0.0
            assert is_near_tie(logits, (theirs[n], tokens[at]), temperature, alone.dtype), (
                at, tokens, theirs,
            )  # fmt: skip
            at += 1


# ---- one property at a time -----------------------------------------------------------------


@kinds
@examples(4)
@given(
    name=st.sampled_from(NAMES),
    n_prefix=st.integers(1, 70),
    suffixes=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    seed=st.integers(0, 99),
)
def test_fork_is_own_prefill(
    isa: str, dtype: str, name: str, n_prefix: int, suffixes: list[int], seed: int
) -> None:
    """Children computed together on a shared prefix, and each as a prompt of its own."""
    model, alone = ALL[name], Alone(name, isa, dtype)
    prefix = model.tokens(n_prefix, seed)
    tails = [model.tokens(n, seed + 1 + i) for i, n in enumerate(suffixes)]
    session = open_session(model, isa=isa, dtype=dtype)
    kids = session.prefill(prefix).fork(tails)
    session.compute(kids)
    for kid, tail in zip(kids, tails, strict=True):
        assert_same(kid.logits, alone.logits(prefix + tail), dtype)
    assert_books(session)


@kinds
@examples(3)
@given(
    name=st.sampled_from(NAMES),
    lengths=st.lists(st.integers(1, 60), min_size=2, max_size=6),
    temperature=st.sampled_from([0.0, 0.7, 2.0]),
)
def test_row_alone_is_row_in_a_batch(
    isa: str, dtype: str, name: str, lengths: list[int], temperature: float
) -> None:
    """Generations of unequal prompts stepped together."""
    model, alone = ALL[name], Alone(name, isa, dtype)
    sampling = Sampling(temperature=temperature, seed=5)
    prompts = [model.tokens(n, seed=i) for i, n in enumerate(lengths)]
    session = open_session(model, isa=isa, dtype=dtype)
    branches = [session.prefill(prompt) for prompt in prompts]
    for got, branch, prompt in zip(
        session.generate(branches, 7, sampling, stop_ids=()), branches, prompts, strict=True
    ):
        assert (len(got.tokens), got.finish_reason) == (7, "length")
        assert_alone(alone, prompt, got, sampling, branch.stream)
    assert_books(session)


@kinds
@pytest.mark.parametrize("name", ["T4", "qwen2-tied-window", "falcon3"])
@pytest.mark.parametrize("step_tokens", [1, 7, 16, 64, 512])
def test_steps_of_any_size(name: str, step_tokens: int, isa: str, dtype: str) -> None:
    tokens = ALL[name].tokens(150)
    session = open_session(name, isa=isa, dtype=dtype, step_tokens=step_tokens)
    branch = session.prefill(tokens)
    alone = Alone(name, isa, dtype)
    assert_same(branch.logits, alone.logits(tokens), dtype)
    got = session.generate(branch, 5, stop_ids=())[0]
    assert (len(got.tokens), got.finish_reason) == (5, "length")
    assert_alone(alone, tokens, got)
    assert_books(session)


@kinds
@examples(3)
@given(name=st.sampled_from(NAMES), pieces=st.lists(st.integers(1, 40), min_size=1, max_size=6))
def test_text_in_pieces(isa: str, dtype: str, name: str, pieces: list[int]) -> None:
    """prefill, then extend, computing after every piece or only at the end."""
    tokens, alone = ALL[name].tokens(sum(pieces)), Alone(name, isa, dtype)
    session = open_session(name, isa=isa, dtype=dtype)
    eager, lazy = session.prefill(tokens[: pieces[0]]), session.prefill(tokens[: pieces[0]])
    at = pieces[0]
    for n in pieces[1:]:
        eager.extend(tokens[at : at + n])
        lazy.extend(tokens[at : at + n])
        at += n
        assert_same(eager.logits, alone.logits(tokens[:at]), dtype)
    assert_same(lazy.logits, alone.logits(tokens), dtype)
    assert_books(session)


@pytest.mark.parametrize("n_threads", [1, 2, 3] if DEVICE == "cpu" else [1])
@pytest.mark.parametrize("block_tokens", [1, 4, 16, 64, 256])
@kinds
def test_blocks_and_threads(block_tokens: int, n_threads: int, isa: str, dtype: str) -> None:
    """Prefill, fork, sampled generation, score and verdict."""
    model = ALL["T4"]
    sampling = Sampling(temperature=1.0, seed=3)
    prefix, tails = model.tokens(61), [model.tokens(n, seed=n) for n in (2, 9, 30)]
    results = []
    for options in ({"block_tokens": block_tokens, "n_threads": n_threads}, {"n_threads": 1}):
        session = open_session(model, isa=isa, dtype=dtype, kv_bytes=16 << 20, **options)
        kids = session.prefill(prefix).fork(tails)
        generations = session.generate(kids, 6, sampling, stop_ids=())
        verdicts = session.verify(kids, model.tokens(5, seed=9), 3, 4, cgee=None)
        scores = session.score(kids[0], tails)
        hidden = [kid.hidden for kid in kids]
        marks = [(v.score, v.mass) for v in verdicts]
        results.append((generations, marks, scores, hidden))
        assert_books(session)
    (generations, *numbers), (others, *expected) = results
    for got, other, tail in zip(generations, others, tails, strict=True):
        n = n_same_tokens(got.tokens, other.tokens, model, prefix + tail, sampling, dtype)
        for name in ("top_probs", "logprobs", "entropies"):
            assert_same(getattr(got, name)[:n], getattr(other, name)[:n], dtype)
        assert got.finish_reason == other.finish_reason
        if n < len(got.tokens):  # another text from here on
            return
        assert_same(got.confidence, other.confidence, dtype)
    assert_same(numbers, expected, dtype)


@kinds
@pytest.mark.parametrize("name", ["long", "long-window"])
def test_across_tiles(name: str, isa: str, dtype: str) -> None:
    """Forks on both sides of position 256 and 512, where attention cuts the keys; off the CPU,
    where a stand-in may be slow, fewer."""
    model, alone = ALL[name], Alone(name, isa, dtype)
    text = model.tokens(700)
    session = open_session(model, isa=isa, dtype=dtype, block_tokens=4, kv_bytes=32 << 20)
    root = session.prefill(text)
    kids = []
    for at in (255, 256, 257, 500, 512, 513, 700) if DEVICE == "cpu" else (257, 512):
        kids += [kid for n in (1, 33) for kid in root.fork([model.tokens(n, seed=at)], at=at)]
    session.compute(kids)
    for kid in kids:
        assert_same(kid.logits, alone.logits(kid.tokens.tolist()), dtype)
    assert_books(session)


@kinds
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_evicted_is_never_evicted(temperature: float, isa: str, dtype: str) -> None:
    """Branches that were pushed out of a small budget go on as if nothing had happened."""
    model, alone = ALL["T4"], Alone("T4", isa, dtype)
    sampling = Sampling(temperature=temperature, seed=11)
    session = open_session(
        model, isa=isa, dtype=dtype, kv_bytes=12 * block_bytes(model, dtype=dtype)
    )
    prompts = [model.tokens(60, seed=seed) for seed in range(5)]  # 4 blocks each
    branches = [session.prefill(prompt) for prompt in prompts]
    firsts = [session.generate(branch, 10, sampling, stop_ids=())[0] for branch in branches]
    assert_books(session)
    assert not all(branch.resident for branch in branches)
    assert session.stats().evictions > 0
    seconds = [session.generate(branch, 10, sampling, stop_ids=())[0] for branch in branches]
    assert session.stats().tokens_recomputed > 0
    assert_books(session)
    for prompt, branch, first, second in zip(prompts, branches, firsts, seconds, strict=True):
        assert len(first.tokens) == len(second.tokens) == 10
        assert_alone(alone, prompt, first, sampling, branch.stream)
        assert_alone(alone, prompt + first.tokens.tolist(), second, sampling, branch.stream)


# ---- everything at once ---------------------------------------------------------------------

Operation = tuple[str, int, int, int]
OPERATIONS = ("prefill", "fork", "fork_at", "extend", "generate", "sample", "verify", "score",
              "logits", "hidden", "drop", "stream", "cancel", "invalidate",
              "similar", "value", "queue")  # fmt: skip
operations = st.lists(
    st.tuples(
        st.sampled_from(OPERATIONS), st.integers(0, 63), st.integers(0, 63), st.integers(0, 63)
    ),
    min_size=10,
    max_size=30,
)


@dataclass
class Walk:
    """Runs operations on a session and keeps what each branch should hold."""

    alone: Alone
    session: BranchSession
    branches: list[Branch] = field(default_factory=list)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    streams: dict[int, int] = field(default_factory=dict)
    approximate: dict[int, bool] = field(default_factory=dict)

    def tell(self, branch: Branch, tokens: list[int], approximate: bool = False) -> None:
        self.branches.append(branch)
        self.tokens[branch.id] = tokens
        self.streams[branch.id] = branch.stream
        self.approximate[branch.id] = approximate

    def pick(self, i: int, n: int = 1) -> list[Branch]:
        """n different branches from the i-th on, or fewer."""
        count = len(self.branches)
        return [self.branches[(i + k) % count] for k in range(min(n, count))]

    def check_tokens(self) -> None:
        """Nothing but what we did changed any branch."""
        for branch in self.branches:
            assert list(branch.tokens) == self.tokens[branch.id]
            assert branch.stream == self.streams[branch.id]
            assert branch.approximate == self.approximate[branch.id]
        assert_books(self.session)

    def run(self, operation: Operation) -> None:
        name, a, b, c = operation
        if name != "prefill" and not self.branches:
            name = "prefill"
        if self.branches and max(len(self.tokens[x.id]) for x in self.branches) > 400:
            name = "drop"
        try:
            getattr(self, "_" + name)(a, b, c)
        except CapacityError as error:
            refusal = str(error)
            assert "blocks" in refusal  # how many were needed
        self.check_tokens()

    def _text(self, n: int, seed: int) -> list[int]:
        return ALL[self.alone.model].tokens(n, seed)

    def _prefill(self, a: int, b: int, c: int) -> None:
        base = self._text(64, c % 2)  # prompts that share beginnings, at any offset
        tokens = base[: max(1, a)] + self._text(b, c)
        self.tell(self.session.prefill(tokens), tokens)

    def _fork(self, a: int, b: int, c: int) -> None:
        parent = self.pick(a)[0]
        tails = [self._text((b + 5 * k) % 20, c + k) for k in range(1 + c % 4)]
        for kid, tail in zip(parent.fork(tails), tails, strict=True):
            self.tell(kid, self.tokens[parent.id] + tail, parent.approximate)

    def _fork_at(self, a: int, b: int, c: int) -> None:
        parent = self.pick(a)[0]
        at = 1 + b % len(self.tokens[parent.id])
        tail = self._text(c % 10, c)
        kid = parent.fork([tail], at=at)[0]
        self.tell(kid, self.tokens[parent.id][:at] + tail, parent.approximate)

    def _extend(self, a: int, b: int, c: int) -> None:
        branch = self.pick(a)[0]
        branch.extend(self._text(1 + b, c))
        self.tokens[branch.id] += self._text(1 + b, c)

    def _drop(self, a: int, b: int, c: int) -> None:
        branch = self.pick(a)[0]
        self.branches.remove(branch)
        branch.drop()

    def _stream(self, a: int, b: int, c: int) -> None:
        branch = self.pick(a)[0]
        branch.stream = self.streams[branch.id] = 2**64 - 1 - b

    def _value(self, a: int, b: int, c: int) -> None:
        """What RSBCM orders by."""
        branch = self.pick(a)[0]
        branch.score = None if b % 4 == 0 else b / 63
        branch.confidence = None if c % 4 == 0 else c / 63

    def _similar(self, a: int, b: int, c: int) -> None:
        """ASKS, with a gate that opens, one that stays shut, and one that may do either."""
        root, layers = self.pick(a)[0], self.session.config.n_layers
        probe: Any = ("prefix", "suffix")[c % 2]
        self.session.asks = ASKS(
            uncentered=True, guard=None, tau=(-2.0, 2.0, 0.7)[b % 3], probe=probe,
            pool="mean" if probe == "prefix" and c % 4 == 0 else "last",
            probe_layers=1 + b % layers,
        )  # fmt: skip
        text = self.tokens[root.id]
        own, suffix = text[: b % len(text)] + self._text(1 + c, b), self._text(1 + b % 9, c)
        branch = self.session.prefill(own, similar_to=root, suffix=suffix)
        if branch.gate.accepted:
            approximate = root.approximate or branch.gate.reason != "equal"
            self.tell(branch, text + suffix, approximate)
        else:
            self.tell(branch, own + suffix)
        assert branch.prompt.tolist() == own

    def _queue(self, a: int, b: int, c: int) -> None:
        """Requests that share steps; one branch is dropped in the middle."""
        chosen, n = self.pick(a, 3), 1 + b % 10
        sampling = Sampling(temperature=float(c % 2), seed=b)
        before = {branch.id: list(self.tokens[branch.id]) for branch in chosen}
        for branch in chosen:
            self.session.submit(branch, n, sampling, stop_ids=())
        made: dict[int, list[int]] = {branch.id: [] for branch in chosen}
        failed: set[int] = set()
        step = 0
        try:
            while self.session.n_requests:
                if step == c % 8 and len(chosen) == 3:
                    self.branches.remove(chosen[1])
                    chosen.pop(1).drop()
                for token in self.session.step():
                    made[token.branch.id] += [token.token] if token.token >= 0 else []
                    if token.finish_reason == "failed":
                        assert isinstance(token.error, CapacityError)
                        assert "blocks" in str(token.error)
                        failed.add(token.branch.id)
                step += 1
        finally:
            for request in list(self.session._requests):
                self.session.cancel(request)
            for branch in chosen:
                self.tokens[branch.id] += made[branch.id]
        for branch in chosen:
            if branch.id not in failed:  # no room for more: what came is a beginning
                assert len(made[branch.id]) == n
            assert_alone(self.alone, before[branch.id], made[branch.id], sampling, branch.stream)

    def _invalidate(self, a: int, b: int, c: int) -> None:
        self.session.invalidate()
        assert self.session.stats().blocks_used == 0

    def _logits(self, a: int, b: int, c: int) -> None:
        branch = self.pick(a)[0]
        assert_same(branch.logits, self.alone.logits(self.tokens[branch.id]), self.alone.dtype)

    def _hidden(self, a: int, b: int, c: int) -> None:
        branch = self.pick(a)[0]
        assert_same(
            branch.hidden, self.alone.branch(self.tokens[branch.id]).hidden, self.alone.dtype
        )

    def _generate(self, a: int, b: int, c: int, temperature: float = 0.0) -> None:
        chosen, n = self.pick(a, 1 + c % 4), 1 + b % 12
        sampling = Sampling(temperature=temperature, seed=c)
        for branch, got in zip(
            chosen, self.session.generate(chosen, n, sampling, stop_ids=()), strict=True
        ):
            before = self.tokens[branch.id]
            assert (len(got.tokens), got.finish_reason) == (n, "length")
            assert_alone(self.alone, before, got, sampling, self.streams[branch.id])
            before += map(int, got.tokens)

    def _sample(self, a: int, b: int, c: int) -> None:
        self._generate(a, b, c, 1.5)

    def _cancel(self, a: int, b: int, c: int) -> None:
        """Some steps of two requests, then both are cancelled; tokens so far stay."""
        chosen = self.pick(a, 2)
        requests = [self.session.submit(branch, 5 + b, stop_ids=()) for branch in chosen]
        made: dict[int, list[int]] = {branch.id: [] for branch in chosen}
        try:
            for _ in range(c % 8):
                for token in self.session.step():
                    made[token.branch.id] += [token.token] if token.token >= 0 else []
        finally:
            for request in requests:
                self.session.cancel(request)
            for branch in chosen:
                self.tokens[branch.id] += made[branch.id]
        for branch in chosen:
            before = self.tokens[branch.id][: -len(made[branch.id]) or None]
            assert_alone(self.alone, before, made[branch.id])

    def _score(self, a: int, b: int, c: int) -> None:
        branch = self.pick(a)[0]
        tails = [self._text(1 + (b + k) % 20, c + k) for k in range(1 + c % 3)]
        alone = self.alone.branch(self.tokens[branch.id])
        for got, tail in zip(self.session.score(branch, tails), tails, strict=True):
            assert_same(got, branch_session(alone).score(alone, [tail])[0], self.alone.dtype)

    def _verify(self, a: int, b: int, c: int) -> None:
        chosen, prompt = self.pick(a, 1 + c % 4), self._text(1 + b % 9, b)
        for branch, got in zip(
            chosen, self.session.verify(chosen, prompt, 1, 2, cgee=None), strict=True
        ):
            alone = self.alone.branch(self.tokens[branch.id])
            expected = branch_session(alone).verify(alone, prompt, 1, 2, cgee=None)[0]
            for name in ("score", "mass", "yes_logit", "no_logit"):
                assert_same(getattr(got, name), getattr(expected, name), self.alone.dtype)


@kinds
@examples(8)
@given(
    name=st.sampled_from(NAMES),
    positions=st.integers(80, 240),
    block_tokens=st.sampled_from([1, 4, 16, 64]),
    step_tokens=st.sampled_from([1, 5, 16, 64, 512]),
    n_threads=st.integers(1, 3),
    hash_bits=st.sampled_from([0, 64]),
    steps=operations,
)
def test_random_trees(
    isa: str,
    dtype: str,
    name: str,
    positions: int,
    block_tokens: int,
    step_tokens: int,
    n_threads: int,
    hash_bits: int,
    steps: list[Operation],
) -> None:
    """Forks, extensions, generations, drops and evictions in any order under a small budget."""
    model = ALL[name]
    session = open_session(
        model, isa=isa, dtype=dtype, block_tokens=block_tokens, step_tokens=step_tokens,
        n_threads=n_threads, hash_bits=hash_bits,
        kv_bytes=-(-positions // block_tokens) * block_bytes(model, block_tokens, dtype),
    )  # fmt: skip
    walk = Walk(Alone(name, isa, dtype), session)
    for step in steps:
        walk.run(step)
    walk.branches.clear()
    assert_books(session)
