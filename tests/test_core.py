"""The session core: a random program against branches that live alone, and corners by name.

After every call the books must balance, every branch must have the tokens, score and confidence
that it should have, and what a call returned must be, bit for bit, what the same branch gives in
a session of its own. A call that fails (no blocks, an interruption) must have changed nothing.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
from support import corerig as rig
from support import native as N
from support.corerig import Core, Event, Failure, alone, cgee

MAY_FAIL = (N.RK_ECAPACITY, N.RK_EINTERRUPTED)
ANY_STEPS = 400  # more steps than any request here can need


def same(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))


def numbers(event: Event) -> tuple[Any, ...]:
    """What must be the same whatever ran beside it."""
    return event.token, event.logprob, event.top_prob, event.entropy


def bits(verdict: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(float(v).hex() for v in verdict)


# ---- the random program ------------------------------------------------------------------------


@dataclass
class Shadow:
    """What a branch should be."""

    handle: Any
    tokens: list[int]
    score: float = math.nan
    confidence: float = math.nan
    request: int = 0  # the active one

    def key(self) -> tuple[int, ...]:
        return tuple(self.tokens)

    def stream(self) -> int:
        return int(self.handle.contents.stream)


@dataclass
class Pending:
    """A submitted request and what it must bring."""

    id: int
    group: int
    shadow: Shadow | None
    n_before: int
    confidence_before: float
    expected: list[Event]
    seen: int = 0
    tops: float = 0.0
    n_new: int = 0
    ended: bool = False


@dataclass
class Program:
    """One session, its shadows, and a random sequence of calls."""

    random: random.Random
    core: Core
    shadows: list[Shadow] = field(default_factory=list)
    pending: dict[int, Pending] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)
    n_failed: int = 0

    # -- helpers

    def text(self, least: int, most: int) -> list[int]:
        """Few different tokens, so that prompts begin alike."""
        n = self.random.randint(least, most)
        return [self.random.randrange(2 if i < 12 else rig.VOCAB) for i in range(n)]

    def room(self, shadow: Shadow) -> int:
        return rig.POSITIONS - len(shadow.tokens)

    def idle(self) -> list[Shadow]:
        return [s for s in self.shadows if not s.request]

    def fits(self, n_tokens: int) -> bool:
        """Alone on the pool: nothing is pinned while no request is active."""
        pinned = any(s.handle.contents.pins for s in self.shadows)
        return not pinned and self.core.blocks_of(n_tokens) <= self.core.blocks

    def call(self, what: str, must: bool, function: Callable[[], Any]) -> Any:
        """The result, or None after a failure that may be; `must`: the blocks suffice."""
        look = self.random.choice((0, 0, 0, self.random.randint(1, 12)))
        self.log.append(f"{what} look={look}")
        try:
            with self.core.interrupted_at(look):
                return function()
        except Failure as failure:
            self.n_failed += 1
            self.log.append(f"  {failure}")
            assert failure.status in MAY_FAIL, failure
            assert not (failure.status == N.RK_ECAPACITY and must), failure
            assert failure.status != N.RK_EINTERRUPTED or look, failure
            return None

    # -- calls

    def prefill(self) -> None:
        tokens = self.text(1, 40)
        handle = self.call("prefill", self.fits(len(tokens)), lambda: self.core.prefill(tokens))
        if handle:
            self.shadows.append(Shadow(handle, tokens))

    def fork(self) -> None:
        parent = self.random.choice(self.shadows)
        at = self.random.choice((-1, self.random.randint(1, len(parent.tokens))))
        end = len(parent.tokens) if at < 0 else at
        most = min(9, rig.POSITIONS - end)
        if self.random.random() < 0.5:
            suffixes: Any = self.random.randint(1, 3)
            texts: list[list[int]] = [[]] * suffixes
        else:
            suffixes = texts = [self.text(0, most) for _ in range(self.random.randint(1, 3))]
        handles = self.call("fork", True, lambda: self.core.fork(parent.handle, suffixes, at))
        for handle, text in zip(handles or [], texts, strict=handles is not None):
            self.shadows.append(Shadow(handle, parent.tokens[:end] + text))

    def extend(self) -> None:
        shadow = self.random.choice(self.idle() or self.shadows)
        text = self.text(1, 6)
        if shadow.request:
            with pytest.raises(Failure, match="generating"):
                self.core.extend(shadow.handle, text)
        elif len(text) <= self.room(shadow):
            self.log.append(f"extend {shadow.handle.contents.id} by {len(text)}")
            self.core.extend(shadow.handle, text)
            shadow.tokens += text

    def drop(self) -> None:
        if len(self.shadows) > 2:
            shadow = self.shadows.pop(self.random.randrange(len(self.shadows)))
            for request in self.pending.values():
                if request.shadow is shadow:
                    request.shadow, request.ended = None, True
            self.log.append(f"drop {shadow.handle.contents.id}")
            self.core.drop(shadow.handle)

    def invalidate(self) -> None:
        if self.random.random() < 0.2:
            self.core.invalidate()

    def compute(self) -> None:
        n = self.random.randint(1, min(3, len(self.shadows)))
        some = self.random.sample(self.shadows, n)
        total = sum(self.core.blocks_of(len(s.tokens)) for s in some)
        must = self.fits(total * self.core.block_tokens)
        self.call("compute", must, lambda: self.core.compute([s.handle for s in some]))

    def logits(self) -> None:
        shadow = self.random.choice(self.shadows)
        must = self.fits(len(shadow.tokens))
        got = self.call("logits", must, lambda: self.core.logits(shadow.handle))
        assert got is None or got.tobytes() == alone.logits(shadow.key())

    def hidden(self) -> None:
        shadow = self.random.choice(self.shadows)
        must = self.fits(len(shadow.tokens))
        got = self.call("hidden", must, lambda: self.core.hidden(shadow.handle))
        assert got is None or got.tobytes() == alone.hidden(shadow.key())

    def score(self) -> None:
        if not self.idle():
            return
        shadow = self.random.choice(self.idle())
        texts = [self.text(0, min(10, self.room(shadow))) for _ in range(self.random.randint(0, 4))]
        texts += texts[:1]
        longest = len(shadow.tokens) + max([len(t) - 1 for t in texts if t], default=0)
        got = self.call("score", self.fits(longest), lambda: self.core.score(shadow.handle, texts))
        for text, logprobs in zip(texts, got or [], strict=got is not None):
            expected = alone.score(shadow.key(), tuple(text)) if text else b""
            assert logprobs.tobytes() == expected, text

    def verify(self) -> None:
        prompt = [5, 6, 7, 8, 9, 10, 11, 12, 13][: self.random.choice((1, 3, 9))]
        some = [s for s in self.idle() if self.room(s) >= len(prompt)]
        some = self.random.sample(some, min(len(some), self.random.randint(0, 4)))
        lens = self.random.choice((rig.LENS_NONE, rig.LENS_ANSWER, rig.LENS_FULL))
        theta = 0.97 if lens == rig.LENS_ANSWER else 3.0
        shortcuts = cgee(theta=theta, epsilon=1e9, verify_batch=3) if lens else None
        longest = max((len(s.tokens) for s in some), default=0) + len(prompt)
        got = self.call(
            "verify",
            self.fits(longest),
            lambda: self.core.verify(
                [s.handle for s in some], prompt, shortcuts=shortcuts, lens=lens
            ),
        )
        for shadow, verdict in zip(some, got or [], strict=got is not None):
            if verdict[0] == rig.VERIFIED:
                expected = alone.verdict(shadow.key(), tuple(prompt), lens, theta)
                assert bits(verdict) == bits(expected)
            shadow.score = verdict[1]

    def similar(self) -> None:
        if not self.idle():
            return
        root = self.random.choice(self.idle())
        tokens, suffix = list(root.tokens), self.text(0, 4)
        for _ in range(self.random.randint(0, 2)):
            tokens[self.random.randrange(len(tokens))] = self.random.randrange(rig.VOCAB)
        cut = self.random.randrange(len(tokens) + 1)
        tokens[cut:cut] = self.text(0, 2)
        if max(len(tokens), len(root.tokens)) + len(suffix) > rig.POSITIONS:
            return
        probe = rig.SUFFIX if suffix and self.random.random() < 0.5 else rig.PREFIX
        how = (probe, self.random.random() < 0.5, self.random.randint(1, rig.LAYERS), 0.6)
        both = self.core.blocks_of(len(root.tokens) + len(suffix)) + self.core.blocks_of(
            len(tokens) + len(suffix)
        )
        result = self.call(
            "similar",
            self.fits((both + 1) * self.core.block_tokens),
            lambda: self.core.prefill_similar(
                root.handle, tokens, suffix, probe=how[0], pool_mean=how[1], layers=how[2], tau=0.6
            ),
        )
        if result:
            handle, report = result
            assert report == alone.gate(root.key(), tuple(tokens), tuple(suffix), *how)
            base = root.tokens if report[0] == rig.ACCEPTED else tokens
            approximate = report[0] == rig.ACCEPTED and not report[1]
            approximate = approximate or (
                report[0] == rig.ACCEPTED and bool(root.handle.contents.approximate)
            )
            assert handle.contents.approximate == approximate
            self.shadows.append(Shadow(handle, base + suffix))

    # -- requests

    def submit(self) -> None:
        group = self.random.choice((0, self.random.randint(1, 3)))
        temperature, seed = self.random.choice((0.0, 1.0)), self.random.randrange(3)
        for shadow in self.random.sample(self.shadows, min(2, len(self.shadows))):
            n = self.random.randint(0, 8)
            stop = self.random.choice((((), ()), ((3, 9, 14), ()), ((), (b"><1", b"<2"))))
            if shadow.request:
                with pytest.raises(Failure, match="generating"):
                    self.core.submit(shadow.handle, n)
                continue
            expected = alone.generation(shadow.key(), shadow.stream(), n, temperature, seed, *stop)
            how: Any = {
                "temperature": temperature,
                "seed": seed,
                "stop_ids": stop[0],
                "stop": stop[1],
            }
            must = self.core.blocks_of(len(shadow.tokens)) <= self.core.blocks
            submit = partial(self.core.submit, shadow.handle, n, group=group, **how)
            request = self.call("submit", must, submit)
            if request is None:
                continue
            self.log.append(f"submit {request} on {shadow.handle.contents.id}, group {group}")
            self.pending[request] = Pending(
                request, group, shadow, len(shadow.tokens), shadow.confidence, expected
            )
            shadow.request = request

    def step(self) -> None:
        active = [r for r in self.pending.values() if not r.ended]
        must = len(active) <= 1 and all(
            self.core.blocks_of(len(r.shadow.tokens)) <= self.core.blocks
            for r in active
            if r.shadow
        )
        self.core.events = []
        self.call("step", must, self.core.step)
        for event in self.core.events:
            self.take(event)

    def take(self, event: Event) -> None:
        request = self.pending[event.request]
        assert not request.ended and request.shadow is not None
        expected = request.expected[request.seen]
        request.seen += 1
        assert event == Event(request.id, *list(vars(expected).values())[1:])
        shadow = request.shadow
        if event.token >= 0:
            shadow.tokens.append(event.token)
            request.n_new += 1
            request.tops += event.top_prob
            shadow_confidence = request.tops / request.n_new
        else:
            shadow_confidence = event.top_prob
        if event.finish:
            assert request.seen == len(request.expected)
            if event.finish == rig.EOS and request.n_new:
                shadow_confidence = request.tops / request.n_new
            if event.token >= 0 or event.finish == rig.EOS:
                shadow.confidence = shadow_confidence
            request.ended, shadow.request = True, 0

    def end(self, undo: bool) -> None:
        """Cancel or abort one of the requests, ended ones too."""
        if not self.pending:
            return
        request = self.random.choice(list(self.pending.values()))
        shadow, was_active = request.shadow, not request.ended
        self.log.append(f"{'abort' if undo else 'cancel'} {request.id} ended={request.ended}")
        if not undo:
            self.core.cancel(request.id)
            if was_active and shadow and request.n_new:
                shadow.confidence = request.tops / request.n_new
        else:
            self.core.abort(request.id)
            del self.pending[request.id]
            mine = shadow and len(shadow.tokens) == request.n_before + request.n_new
            if shadow and mine and shadow.request in (0, request.id):
                shadow.tokens[request.n_before :] = []
                shadow.confidence = request.confidence_before
        if was_active and shadow:
            shadow.request = 0
        request.ended = True

    # -- the program

    def check(self) -> None:
        self.core.check()
        for shadow in self.shadows:
            b = shadow.handle.contents
            assert rig.tokens_of(shadow.handle) == shadow.tokens
            assert same(b.score, shadow.score)
            if not shadow.request:
                assert same(b.confidence, shadow.confidence)
            assert b.busy == bool(shadow.request)
            assert b.pins == 0 or shadow.request

    def finish(self) -> None:
        for request in [r for r in self.pending.values() if not r.ended]:
            self.core.cancel(request.id)
            if request.shadow:
                request.shadow.request = 0
        self.core.step()
        for shadow in self.shadows:
            if self.fits(len(shadow.tokens)):
                assert self.core.logits(shadow.handle).tobytes() == alone.logits(shadow.key())
            self.core.check()
        for shadow in self.shadows:
            self.log.append(f"drop {shadow.handle.contents.id}")
            self.core.drop(shadow.handle)
            self.core.check()
        assert self.core.stats().used == 0

    def run(self, n_calls: int) -> None:
        calls: list[tuple[int, Callable[[], None]]] = [
            (4, self.prefill),
            (4, self.fork),
            (3, self.extend),
            (4, self.drop),
            (1, self.invalidate),
            (2, self.compute),
            (4, self.logits),
            (1, self.hidden),
            (3, self.score),
            (4, self.verify),
            (3, self.similar),
            (4, self.submit),
            (16, self.step),
            (2, lambda: self.end(False)),
            (2, lambda: self.end(True)),
        ]
        self.shadows.append(Shadow(self.core.prefill([1]), [1]))
        weights = [w for w, _ in calls]
        for _ in range(n_calls):
            self.random.choices(calls, weights)[0][1]()
            self.check()
        self.finish()


@pytest.mark.parametrize("seed", rig.seeds(60))
def test_any_program_gives_what_each_branch_gives_alone(seed: int) -> None:
    rng = random.Random(seed)
    block_tokens = rng.choice((1, 2, 4, 16))
    options: Any = {
        "block_tokens": block_tokens,
        "blocks": rng.choice((1, 2, 5, 12, 30, 120)) * (16 // block_tokens),
        "step_tokens": rng.choice((1, 2, 5, 16, 64)),
        "share": rng.random() < 0.8,
        "hash_bits": rng.choice((0, 64)),
    }
    if block_tokens == 16:
        options["blocks"] = max(options["blocks"], 3)
    with Core(**options) as core:
        program = Program(rng, core)
        try:
            program.run(120)
        except BaseException:
            print(f"seed {seed}, {options}")
            print("\n".join(program.log[-40:]))
            raise


# ---- blocks: exactly enough ----------------------------------------------------------------------

PROMPT = (5, 7, 9, 11, 13, 15, 17, 19, 21, 23)


def test_a_prompt_that_fills_the_pool() -> None:
    with Core(blocks=3, block_tokens=4) as core:
        branch = core.prefill((*PROMPT, 1, 2))
        assert core.logits(branch).tobytes() == alone.logits((*PROMPT, 1, 2))
        assert core.stats().used == 3
        core.extend(branch, [3])
        with pytest.raises(Failure, match="1 more KV blocks of 4 tokens"):
            core.logits(branch)
        core.check()


def test_what_cannot_fit_evicts_nothing() -> None:
    with Core(blocks=6, block_tokens=4) as core:
        branch = core.prefill(PROMPT)
        with pytest.raises(Failure, match="7 more KV blocks"):
            core.prefill([1] * 25)
        assert branch.contents.n_computed == len(PROMPT)
        assert core.stats().evictions == 0


@pytest.mark.parametrize("n_prompt", [2, 3, 4])
def test_a_fork_goes_on_in_a_pool_of_one_block(n_prompt: int) -> None:
    """Its parent gives the half-filled block up: no copy has room."""
    with Core(blocks=1, block_tokens=4, step_tokens=1) as core:
        root = core.prefill(PROMPT[:n_prompt])
        kid = core.fork(root, [PROMPT[n_prompt:4]] if n_prompt < 4 else 1)[0]
        assert core.logits(kid).tobytes() == alone.logits(PROMPT[:4])
        assert core.logits(root).tobytes() == alone.logits(PROMPT[:n_prompt])
        score = core.score(root, [PROMPT[n_prompt:4]])[0].tobytes()
        assert score == (
            alone.score(PROMPT[:n_prompt], PROMPT[n_prompt:4]) if n_prompt < 4 else b""
        )
        core.check()


def test_a_fork_inside_a_published_block_needs_no_other() -> None:
    """The block is full and in the index, and nobody but the fork wants it any more."""
    with Core(blocks=1, block_tokens=4) as core:
        root = core.prefill(PROMPT[:4])
        kid = core.fork(root, [[1]], at=2)[0]
        assert core.logits(kid).tobytes() == alone.logits((*PROMPT[:2], 1))
        assert core.logits(root).tobytes() == alone.logits(PROMPT[:4])
        core.check()


def test_verification_in_a_pool_that_holds_one_branch_at_a_time() -> None:
    prompt = (1, 2, 3)
    with Core(blocks=4, block_tokens=4) as core:
        texts = [PROMPT, (*PROMPT[:6], 2, 2), PROMPT[::-1]]
        branches = [core.prefill(text) for text in texts]
        for text, verdict in zip(texts, core.verify(branches, prompt), strict=True):
            assert bits(verdict) == bits(alone.verdict(text, prompt))
        core.check()


@pytest.mark.parametrize("step_tokens", [1, 4, 16])
@pytest.mark.parametrize("blocks", [5, 6, 8, 12])
def test_verified_branches_evict_each_other(blocks: int, step_tokens: int) -> None:
    """A child that was counted on must not lose its KV to the next one."""
    prompt = tuple(range(1, 9))
    with Core(blocks=blocks, block_tokens=4, step_tokens=step_tokens) as core:
        root = core.prefill(PROMPT)
        texts = [(*PROMPT[:at], at) for at in (10, 9, 7, 3, 2)]
        kids = [core.fork(root, [[at]], at=at)[0] for at in (10, 9, 7, 3, 2)]
        for text, verdict in zip(texts, core.verify(kids, prompt), strict=True):
            assert bits(verdict) == bits(alone.verdict(text, prompt))
        core.check()


# ---- equal rows ----------------------------------------------------------------------------------


def test_equal_branches_write_in_place() -> None:
    """n greedy samples are one row and one set of blocks until they differ."""
    with Core(blocks=5, block_tokens=4) as core:
        root = core.prefill(PROMPT)
        kids = core.fork(root, 6)
        core.drop(root)
        requests = [core.submit(kid, 10) for kid in kids]
        for _ in range(10):
            events, _ = core.step()
            assert [e.request for e in events] == requests
            assert {numbers(e) for e in events} == {numbers(events[0])}
        assert core.stats().used == 5 and core.stats().evictions == 0
        # The last token's KV is not there yet, and there is no block to spare.
        assert len(PROMPT) + 10 == 20 and core.stats().tokens_computed == len(PROMPT) + 9
        core.check()


def test_equal_rows_part_and_are_evicted() -> None:
    with Core(blocks=12, block_tokens=4) as core:
        root = core.prefill(PROMPT)
        kids = core.fork(root, 4)
        streams = [int(k.contents.stream) for k in kids]
        requests = [core.submit(k, 12, temperature=1.0, seed=3) for k in kids]
        found: dict[int, list[Event]] = {r: [] for r in requests}
        active = len(kids)
        for _ in range(ANY_STEPS):
            events, active = core.step()
            core.check()
            for event in events:
                found[event.request].append(event)
            if not active:
                break
        assert not active
        for stream, request in zip(streams, requests, strict=True):
            expected = alone.generation(PROMPT, stream, 12, 1.0, 3)
            assert [numbers(e) for e in found[request]] == [numbers(e) for e in expected]


def test_rows_that_end_alike_and_begin_apart_are_not_equal() -> None:
    """One branch was forked before the last token of their common half-filled block."""
    with Core(block_tokens=4) as core:
        root = core.prefill(PROMPT)
        kid = core.fork(root, [[1, 2]], at=9)[0]
        core.extend(root, [1])
        core.compute([kid, root])
        assert core.logits(kid).tobytes() == alone.logits((*PROMPT[:9], 1, 2))
        assert core.logits(root).tobytes() == alone.logits((*PROMPT, 1))


def test_the_same_prefix_computed_side_by_side_is_kept_once() -> None:
    with Core(block_tokens=2) as core:
        one = core.prefill([1])
        two = core.fork(one, [PROMPT])[0]
        core.extend(one, (*PROMPT, 3, 4))
        core.compute([one, two])  # in one step, so that the index knew nothing
        assert one.contents.blocks[:5] == two.contents.blocks[:5]
        assert core.stats().used == 7 + 1  # 13 tokens, and 1 that the other ends with
        core.check()


# ---- requests ------------------------------------------------------------------------------------


def test_abort_leaves_what_somebody_added() -> None:
    """A request of a group has ended, its branch goes on; then the group is undone."""
    with Core() as core:
        first, second = core.prefill(PROMPT), core.prefill(PROMPT[:4])
        requests = [core.submit(first, 1, group=7), core.submit(second, 9, group=7)]
        core.step()
        before = rig.tokens_of(first)
        assert len(before) == len(PROMPT) + 1
        core.extend(first, [1, 2])
        later = core.submit(first, 5)
        core.step()
        for request in reversed(requests):
            core.abort(request)
        assert rig.tokens_of(second) == list(PROMPT[:4])
        assert rig.tokens_of(first)[:-1] == [*before, 1, 2]
        core.abort(later)
        assert rig.tokens_of(first) == [*before, 1, 2]
        core.check()


def test_abort_undoes_a_whole_group_after_its_last_step() -> None:
    with Core() as core:
        branches = [core.prefill(PROMPT), core.prefill(PROMPT[:4])]
        requests = [core.submit(b, 1, group=7) for b in branches]
        _, active = core.step()
        assert active == 0
        for request in reversed(requests):
            core.abort(request)
        assert rig.tokens_of(branches[0]) == list(PROMPT)
        assert all(math.isnan(b.contents.confidence) for b in branches)
        core.check()


def test_a_request_without_room_is_named_and_others_go_on() -> None:
    with Core(blocks=4, block_tokens=4) as core:
        large, small = core.prefill(PROMPT), core.prefill([1, 2])
        requests = [core.submit(large, 50), core.submit(small, 4)]
        with pytest.raises(Failure, match="KV blocks"):
            for _ in range(ANY_STEPS):
                core.step()
        assert core.blamed() == requests[0]
        assert len(rig.tokens_of(large)) > 16
        core.cancel(requests[0])
        events = core.run(requests[1])
        assert core.blamed() == 0
        expected = alone.generation((1, 2), int(small.contents.stream), 4, 0.0, 0)
        assert [numbers(e) for e in events] == [numbers(e) for e in expected][-len(events) :]
        core.check()


@pytest.mark.parametrize("step_tokens", [1, 3])
def test_early_stop_looks_at_more_branches_than_a_step_has_rows(step_tokens: int) -> None:
    """The best of the group may be any of them."""
    texts = [PROMPT[:n] for n in range(1, 9)]
    expected = [alone.generation(t, 0, 1, 0.0, 0)[0].top_prob for t in texts]
    best = max(range(len(texts)), key=lambda i: expected[i])
    order = [i for i in range(len(texts)) if i != best] + [best]  # the best stands last
    early = cgee(stop_top=expected[best], stop_lead=0.0)
    with Core(step_tokens=step_tokens) as core:
        requests = [
            core.submit(core.prefill(texts[i]), 1 if i != best else 9, group=1, early=early)
            for i in order
        ]
        ends: dict[int, int] = {}
        for _ in range(ANY_STEPS):
            events, active = core.step()
            ends.update((e.request, e.finish) for e in events if e.finish)
            if not active:
                break
        assert ends == dict.fromkeys(requests[:-1], rig.LENGTH) | {requests[-1]: rig.EARLY}


def test_stop_strings_over_tokens() -> None:
    """The text is "<a><b>...": strings that begin in one token and end in another."""
    full = alone.generation(PROMPT, 0, 8, 0.0, 0)
    text = b"".join(b"<%d>" % e.token if e.token else b"" for e in full)
    for begin in range(len(text)):
        for length in (1, 2, 4, 9):
            stop = text[begin : begin + length]
            found = text.index(stop)
            with Core() as core:
                events = core.run(core.submit(core.prefill(PROMPT), 8, stop=[b"absent", stop]))
            made = b"".join(b"<%d>" % e.token if e.token else b"" for e in events)
            assert text.startswith(made) and len(made) >= found + len(stop)
            assert (events[-1].finish, events[-1].stop_index) == (rig.STOP, 1)
            assert made[: len(made) - events[-1].stop_bytes] == text[:found]


def test_stop_strings_may_spell_special_tokens() -> None:
    """The third token is special: it is spelled "<c>" and the text goes from "<b>" to "<d>"."""
    full = [e.token for e in alone.generation(PROMPT, 0, 8, 0.0, 0)]
    hidden = full[2]
    special = (np.arange(rig.VOCAB) == hidden).astype(np.uint8)

    def spell(tokens: list[int], shown: bool = False) -> bytes:
        return b"".join(b"<%d>" % t for t in tokens if t and not (shown and t == hidden))

    wanted = b"<%d>" % hidden
    cases = [(wanted, spell(full[:2])), (spell(full[1:3]), spell(full[:1]))]
    cases += [(spell(full[2:4]), spell(full[:2])), (wanted[1:], spell(full[:2]))]
    if full[3] != hidden != full[1]:  # what the text alone shows
        cases += [(spell([full[1], full[3]]), spell(full[:1]))]
    for stop, left in cases:
        with Core() as core:
            request = core.submit(core.prefill(PROMPT), 8, stop=[b"absent", stop], special=special)
            events = core.run(request)
        made = spell([e.token for e in events], shown=True)
        assert (events[-1].finish, events[-1].stop_index) == (rig.STOP, 1)
        assert made[: len(made) - events[-1].stop_bytes] == left


def test_the_last_position() -> None:
    tokens = tuple([1, 2, 3] * 32)[: rig.POSITIONS - 1]
    with Core(block_tokens=16) as core:
        branch = core.prefill(tokens)
        events = core.run(core.submit(branch, 9))
        assert [(e.token >= 0, e.finish) for e in events] == [(True, rig.LENGTH)]
        key = tuple(rig.tokens_of(branch))
        assert core.logits(branch).tobytes() == alone.logits(key)
        assert core.run(core.submit(branch, 9))[0].token == -1
        for call in (
            partial(core.extend, branch, [1]),
            partial(core.score, branch, [[1]]),
            partial(core.verify, [branch], [1]),
            partial(core.fork, branch, [[1]]),
        ):
            with pytest.raises(Failure, match="96 positions"):
                call()
        assert core.score(branch, [[]])[0].size == 0
        core.check()


# ---- judging -------------------------------------------------------------------------------------


def test_logits_that_are_nan_are_an_error_that_names_the_branch() -> None:
    with Core(model=rig.make_model(broken=True)) as core:
        branch = core.prefill(PROMPT)
        request = core.submit(branch, 3)
        for _ in range(2):
            with pytest.raises(Failure, match="logits of branch 1 at position 9 are NaN"):
                core.step()
            assert core.blamed() == request
        core.abort(request)
        for call in (
            partial(core.score, branch, [[1, 2]]),
            partial(core.verify, [branch], [1]),
            partial(core.verify, [branch], [1], lens=rig.LENS_ANSWER, shortcuts=sure()),
            partial(core.verify, [branch], [1], lens=rig.LENS_FULL, shortcuts=sure()),
        ):
            with pytest.raises(Failure, match="NaN"):
                call()
        assert math.isnan(branch.contents.score)
        assert rig.tokens_of(branch) == list(PROMPT)
        core.check()


def sure() -> rig.Cgee:
    """Everybody leaves at the first look that has one before it."""
    return cgee(theta=1e9, epsilon=1e9, verify_batch=8)


def test_nothing_to_do() -> None:
    with Core() as core:
        branch = core.prefill(PROMPT)
        assert core.score(branch, []) == []
        assert [s.size for s in core.score(branch, [[], []])] == [0, 0]
        assert core.verify([], [1]) == []
        assert core.step() == ([], 0)
        core.compute([])
        for n in (0, -1):
            with pytest.raises(Failure, match="children"):
                core.fork(branch, n)
        with pytest.raises(Failure, match="at least"):
            core.prefill([])
        for at in (0, 11):
            with pytest.raises(Failure, match="at: "):
                core.fork(branch, 1, at=at)
        core.cancel(99)
        core.abort(99)
        core.check()


@pytest.mark.parametrize("block_tokens", [1, 4])
def test_keys_and_values_of_another_type_than_products(block_tokens: int) -> None:
    """bf16 KV in a float32 session: half the bytes of a block, results near those of float32, and
    still the same bits after a fork, a copied block and an eviction as alone."""

    def logits(kv_type: int, *text: int) -> Any:
        with Core(kv_type=kv_type, block_tokens=block_tokens) as core:
            return core.logits(core.prefill(text))

    half = Core(kv_type=N.RK_BF16, blocks=16 // block_tokens, block_tokens=block_tokens)
    with half as core:
        assert core.stats().block_bytes == rig.block_bytes(block_tokens) // 2
        root = core.prefill(PROMPT)
        kids = core.fork(root, [[1, 2], [3]])
        for kid, tail in zip(kids, ((1, 2), (3,)), strict=True):
            assert core.logits(kid).tobytes() == logits(N.RK_BF16, *PROMPT, *tail).tobytes()
        core.prefill([11] * 13)
        assert core.stats().evictions > 0
        assert core.logits(root).tobytes() == logits(N.RK_BF16, *PROMPT).tobytes()
        core.check()
    near, exact = logits(N.RK_BF16, *PROMPT), logits(N.RK_F32, *PROMPT)
    assert 0 < np.abs(near - exact).max() < 2e-2 * np.abs(exact).max()


def test_a_type_that_keys_and_values_are_not_stored_in() -> None:
    for kv_type in (N.RK_F16, 7, -1):
        with pytest.raises(Failure, match=r"^EVALUE: kv_type: .* F32 or BF16"):
            Core(kv_type=kv_type)


@pytest.mark.parametrize("pool_mean", [True, False])
@pytest.mark.parametrize("layers", [1, rig.LAYERS])
@pytest.mark.parametrize(
    ("root", "own"),
    [
        ((1,), (2,)),  # no head, no tail
        ((1,), (1, 2)),  # insertion at the end
        ((1,), (2, 1)),  # at the beginning
        ((1, 3), (1, 2, 3)),  # in the middle
        ((1, 2, 3), (1, 3)),  # a deletion
        ((1, 2, 1), (1, 1)),  # head and tail would overlap
        ((1, 1, 1), (1, 1)),
        (PROMPT, (*PROMPT[:5], 1, *PROMPT[6:])),
    ],
)
def test_tiny_prompts_are_compared(
    root: tuple[int, ...], own: tuple[int, ...], layers: int, pool_mean: bool
) -> None:
    for tau in (-2.0, 2.0):
        with Core(block_tokens=2, step_tokens=2) as core:
            handle, report = core.prefill_similar(
                core.prefill(root), own, (4, 5), pool_mean=pool_mean, layers=layers, tau=tau
            )
            accepted = report[0] == rig.ACCEPTED
            assert accepted == (tau < 0)
            key = (root if accepted else own) + (4, 5)
            assert tuple(rig.tokens_of(handle)) == key
            assert core.logits(handle).tobytes() == alone.logits(key)
            core.check()


def test_a_root_that_was_undone_and_went_on_is_looked_at_again() -> None:
    own = (*PROMPT[:9], 1, 2)
    with Core() as core:
        root = core.prefill(PROMPT)
        request = core.submit(root, 1)
        core.run(request)
        core.prefill_similar(root, own, pool_mean=False)
        core.abort(request)
        core.extend(root, [3])
        _, report = core.prefill_similar(root, own, pool_mean=False)
        key = (*PROMPT, 3)
        assert report == alone.gate(key, own, (), rig.PREFIX, False, rig.LAYERS, 0.5)


def test_what_stands_for_another_wording_serves_nobody_else() -> None:
    """Not by the index, nor as the leader of equal rows."""
    suffix = tuple(range(1, 9))
    with Core(block_tokens=2) as core:
        root = core.prefill(PROMPT)
        other, report = core.prefill_similar(root, (*PROMPT[:9], 1), suffix, tau=-2.0)
        assert report[0] == rig.ACCEPTED and other.contents.approximate
        exact = core.fork(root, [suffix])[0]
        core.compute([other, exact])
        assert other.contents.blocks[:5] == exact.contents.blocks[:5]
        assert not {*other.contents.blocks[5:9]} & {*exact.contents.blocks[5:9]}
        core.drop(exact)
        core.compute([core.fork(other, [[1, 2]])[0]])
        before = core.stats().tokens_reused
        core.prefill((*PROMPT, *suffix, 1, 2, 3))
        assert core.stats().tokens_reused - before == len(PROMPT) + len(suffix)  # exact's
        core.check()


def test_a_suffix_without_a_position_on_the_root_is_computed_on_its_own() -> None:
    with Core() as core:
        root = core.prefill([1, 2, 3, 4] * 24)
        for probe in (rig.PREFIX, rig.SUFFIX):
            handle, report = core.prefill_similar(root, PROMPT, (1,), probe=probe, tau=-2.0)
            assert (report[0], rig.tokens_of(handle)) == (rig.OPEN, [*PROMPT, 1])
        core.check()


# ---- interruptions -------------------------------------------------------------------------------


def test_every_call_can_be_interrupted_at_every_look() -> None:
    """The call fails, nothing has changed, and the next one gives what it should."""

    def prepared() -> tuple[Core, Any, list[Any]]:
        core = Core(blocks=40, block_tokens=4, step_tokens=5)
        root = core.prefill(PROMPT)
        return core, root, core.fork(root, [[1], [1], [2, 3, 4, 5, 6, 7, 8]])

    def similar(core: Core, root: Any, probe: int, tau: float) -> Any:
        return core.prefill_similar(root, (*PROMPT[:6], 1, 1), (2, 3), probe=probe, tau=tau)[1]

    calls: dict[str, Callable[[Core, Any, list[Any]], Any]] = {
        "prefill": lambda core, root, kids: core.prefill(PROMPT[::-1]),
        "compute": lambda core, root, kids: core.compute(kids),
        "logits": lambda core, root, kids: core.logits(kids[2]).tobytes(),
        "hidden": lambda core, root, kids: core.hidden(kids[2]).tobytes(),
        "means": lambda core, root, kids: core.prompt_means(PROMPT[3:], 1, 7).tobytes(),
        "score": lambda core, root, kids: [
            s.tobytes() for s in core.score(root, [[1, 2], [], list(range(9)), [1, 2]])
        ],
        "verify": lambda core, root, kids: list(map(bits, core.verify(kids, range(1, 8)))),
        "exits": lambda core, root, kids: list(
            map(bits, core.verify(kids, [9], shortcuts=sure(), lens=rig.LENS_FULL))
        ),
        "prefix accepted": lambda core, root, kids: similar(core, root, rig.PREFIX, -2.0),
        "prefix rejected": lambda core, root, kids: similar(core, root, rig.PREFIX, 2.0),
        "suffix accepted": lambda core, root, kids: similar(core, root, rig.SUFFIX, -2.0),
        "suffix rejected": lambda core, root, kids: similar(core, root, rig.SUFFIX, 2.0),
    }
    for name, call in calls.items():
        core, root, kids = prepared()
        with core:
            core.looks = 0
            expected = call(core, root, kids)
            n_looks = core.looks
        assert n_looks >= rig.LAYERS, name
        for look in range(1, n_looks + 1):
            core, root, kids = prepared()
            with core:
                before = [(rig.tokens_of(b), b.contents.score) for b in (root, *kids)]
                n_branches = core.stats().n_branches
                with pytest.raises(Failure, match="INTERRUPTED"), core.interrupted_at(look):
                    call(core, root, kids)
                core.check()
                after = [(rig.tokens_of(b), b.contents.score) for b in (root, *kids)]
                assert str(after) == str(before), (name, look)
                assert core.stats().n_branches == n_branches, (name, look)
                again = call(core, root, kids)
                if name not in ("prefill", "compute"):
                    assert again == expected, (name, look)
                core.check()


def test_a_generation_interrupted_at_every_look_loses_nothing() -> None:
    texts = [PROMPT, PROMPT[:3], PROMPT[:3]]
    look, n_failed = 0, 1
    while n_failed:
        look, n_failed, active = look + 1, 0, len(texts)
        with Core(blocks=8, block_tokens=4, step_tokens=4) as core:
            branches = [core.prefill(text) for text in texts]
            streams = [int(b.contents.stream) for b in branches]
            requests = [core.submit(b, 5, temperature=1.0) for b in branches]
            found: dict[int, list[Event]] = {r: [] for r in requests}
            with core.interrupted_at(look):
                while active:
                    try:
                        _, active = core.step()
                    except Failure as failure:
                        assert failure.status == N.RK_EINTERRUPTED
                        n_failed += 1
                    for event in core.events:
                        found[event.request].append(event)
                    core.check()
            for text, stream, request in zip(texts, streams, requests, strict=True):
                expected = alone.generation(text, stream, 5, 1.0, 0)
                assert [numbers(e) for e in found[request]] == [numbers(e) for e in expected]
    assert look > 5 * rig.LAYERS
