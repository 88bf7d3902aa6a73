"""Turns: shares of a step's rows, and what a small request waits beside large ones, in steps."""

from __future__ import annotations

import ctypes as c
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from conftest import Factory
from support import corerig as rig
from support import native
from support.asking import LONG
from support.corerig import Core, alone
from support.models import T4
from test_core import numbers

from rksc import Sampling
from rksc.clients import OpenAI
from rksc.clients._engine import Engine, Sample, copies

# ---- shares ------------------------------------------------------------------------------------


def divide(wanted: Sequence[int], room: int, first: int = 0) -> tuple[list[int], int]:
    n = len(wanted)
    granted = (c.c_int32 * max(n, 1))(*[-1] * n)
    wants = (c.c_int32 * max(n, 1))(*wanted)
    following = native.load("policy").rk_shares_divide(granted, wants, n, room, first)
    return list(granted[:n]), following


@pytest.mark.parametrize(
    ("wanted", "room", "first", "granted", "following"),
    [
        ([], 8, 0, [], 0),
        ([3], 8, 0, [3], 0),
        ([64, 1], 512, 0, [64, 1], 0),
        ([512, 1], 512, 0, [511, 1], 0),
        ([512, 512], 512, 1, [256, 256], 1),
        ([512, 512, 512], 512, 0, [171, 171, 170], 2),
        ([512, 512, 512], 512, 2, [171, 170, 171], 1),
        ([512, 7, 0, 512], 100, 0, [47, 7, 0, 46], 1),
        ([1, 1, 1, 1, 1], 2, 3, [0, 0, 0, 1, 1], 0),
        ([1, 0, 1, 1], 2, 1, [0, 0, 1, 1], 0),
    ],
)
def test_shares(
    wanted: list[int], room: int, first: int, granted: list[int], following: int
) -> None:
    assert divide(wanted, room, first) == (granted, following)


def test_shares_are_equal_and_whole() -> None:
    rng = random.Random(5)
    for _ in range(2000):
        n, room = rng.randrange(1, 9), rng.randrange(0, 40)
        wanted = [rng.choice((0, 1, 2, rng.randrange(40))) for _ in range(n)]
        granted, following = divide(wanted, room, rng.randrange(n))
        assert sum(granted) == min(room, sum(wanted))
        assert all(0 <= g <= w for g, w in zip(granted, wanted, strict=True))
        short = [g for g, w in zip(granted, wanted, strict=True) if g < w]
        assert not short or min(short) >= max(granted) - 1
        assert 0 <= following < n


@pytest.mark.parametrize("room", [1, 2, 3, 5])
def test_everybody_gets_a_turn(room: int) -> None:
    """More groups than rows: none waits longer than for a row of each other one."""
    n, first, last = 7, 0, [0] * 7
    for step in range(1, 60):
        granted, first = divide([9] * n, room, first)
        for i in range(n):
            last[i] = step if granted[i] else last[i]
            assert step - last[i] <= -(-n // room)


# ---- the scheduler -----------------------------------------------------------------------------

PROMPT = (5, 7, 9, 11, 13, 15, 17, 19, 21, 23)


def steps_until(core: Core, request: int) -> list[rig.Event]:
    """Its events in steps from now on: an item for each step, until it ends."""
    found: list[Any] = []
    for _ in range(2000):
        mine = [e for e in core.step()[0] if e.request == request]
        found.append(mine)
        core.check()
        if mine and mine[-1].finish:
            return found
    raise AssertionError("it does not end")


@pytest.mark.parametrize("step_tokens", [1, 2, 3, 8, 16, 64])
@pytest.mark.parametrize("n", [1, 5, 30])
def test_samples_of_one_group_take_one_turn(n: int, step_tokens: int) -> None:
    """A prompt of 6 tokens and 4 new ones beside n requests of one group: it takes the steps that
    it takes alone, or where a step has no row for it every second one."""
    with Core(step_tokens=step_tokens) as core:
        root = core.prefill(PROMPT)
        for kid in core.fork(root, n):
            core.submit(kid, 80, group=1, temperature=1.0)
        for _ in range(3):
            core.step()
        small = core.fork(root, [(1, 2, 3, 4, 5, 6)])[0]
        stream = int(small.contents.stream)
        request = core.submit(small, 4, temperature=1.0, group=2)
        found = steps_until(core, request)
        share = max(1, step_tokens // 2) if n > 1 else max(1, step_tokens - 1)
        every = 2 if step_tokens == 1 else 1
        assert len(found) <= every * (-(-6 // share) + 3)
        expected = alone.generation((*PROMPT, 1, 2, 3, 4, 5, 6), stream, 4, 1.0, 0)
        got = [numbers(e) for events in found for e in events]
        assert got == [numbers(e) for e in expected]


@pytest.mark.parametrize("step_tokens", [4, 8])
def test_a_long_prompt_holds_up_no_short_one(step_tokens: int) -> None:
    with Core(step_tokens=step_tokens) as core:
        root = core.prefill(PROMPT)
        long, short = core.fork(root, [[3] * 70, [4]])
        slow = core.submit(long, 1)
        assert core.step() == ([], 1)
        quick = core.submit(short, 3)
        assert len(steps_until(core, quick)) == 3
        assert long.contents.n_computed == len(PROMPT) + 4 * step_tokens - 3
        assert len(steps_until(core, slow)) <= -(-80 // (step_tokens // 2))


@pytest.mark.parametrize("n_groups", [3, 10])
def test_each_of_more_groups_than_rows_goes_on(n_groups: int) -> None:
    with Core(step_tokens=2) as core:
        root = core.prefill(PROMPT)
        requests = [core.submit(kid, 5) for kid in core.fork(root, n_groups)]
        counts = dict.fromkeys(requests, 0)
        for _ in range(-(-5 * n_groups // 2)):
            for event in core.step()[0]:
                counts[event.request] += 1
            assert max(counts.values()) - min(counts.values()) <= 1
        assert set(counts.values()) == {5}


@pytest.mark.parametrize("first", ["single", "many"])
@pytest.mark.parametrize(("n", "new"), [(3, 18), (6, 30), (6, 70), (20, 40)])
def test_where_blocks_are_short_a_group_gives_some_back(n: int, new: int, first: str) -> None:
    """A group has taken all blocks and sent some of its own back to wait. Whoever is there alone,
    or comes then, does not wait for its end, and all get what they get alone."""
    with Core(blocks=4 * n + 6, block_tokens=4, step_tokens=32) as core:
        root = core.prefill(PROMPT)
        kids = core.fork(root, n + 1)
        core.drop(root)
        wanted: dict[int, tuple[Any, tuple[int, ...], int]] = {}
        found: dict[int, list[rig.Event]] = {}

        def submit(branch: Any, tokens: tuple[int, ...], n_new: int, group: int) -> int:
            request = core.submit(branch, n_new, group=group, temperature=1.0)
            wanted[request] = branch, tokens, n_new
            found[request] = []
            return request

        def step() -> tuple[int, int]:
            made, left = core.step()
            assert core.stats().steps < 2000
            core.check()
            for event in made:
                found[event.request].append(event)
            return len(made), left

        single = submit(kids[0], PROMPT, new - 1, 3) if first == "single" else 0
        for kid in kids[1:]:
            submit(kid, PROMPT, new, 1)
        single = single or submit(kids[0], PROMPT, new - 1, 3)
        while step()[0] == n + 1:
            pass
        assert all(len(events) < new - 1 for events in found.values())
        small = submit(core.fork(kids[0], [[1, 2]], at=2)[0], (*PROMPT[:2], 1, 2), 4, 2)
        for _ in range(6):
            before = len(found[single])
            step()
            assert len(found[single]) == before + 1 or before == new - 1
        assert len(found[small]) == 4
        while step()[1]:
            pass
        for request, (branch, tokens, n_new) in wanted.items():
            expected = alone.generation(tokens, int(branch.contents.stream), n_new, 1.0, 0)
            assert [numbers(e) for e in found[request]] == [numbers(e) for e in expected]


def test_groups_of_submissions(make_session: Factory) -> None:
    session = make_session("T4", step_tokens=4)
    root = session.prefill(T4.tokens(9))
    for kid in root.fork(8):
        session.submit(kid, 50, stop_ids=(), group=7)
    session.step()
    session.submit(root.fork(1)[0], 3, stop_ids=())
    made = [len({token.branch.id for token in session.step()} & {root.id + 9}) for _ in range(3)]
    assert made == [1, 1, 1]
    for group in (0, -1, 2**62 + 1, 1.5, "a", True):
        with pytest.raises((ValueError, TypeError), match="group"):
            session.submit(root.fork(1)[0], 3, group=group)  # type: ignore[arg-type]
    while session.n_requests:
        session.step()


# ---- clients -----------------------------------------------------------------------------------


def steps_of(engine: Engine, sample: Sample) -> int:
    """Steps from its submission to its end."""
    engine.submit([sample])
    before = engine.session.stats().steps
    while not sample.ended:
        engine.step()
    assert sample.error is None
    return engine.session.stats().steps - before


def many(engine: Engine, prompt: str, n: int, new: int, **fields: Any) -> list[Sample]:
    like = Sample(engine.encode(prompt), new, Sampling(1.0, seed=9), stop_ids=(), **fields)
    return copies(like, n)


@pytest.mark.parametrize("max_rows", [1, 8, 64])
def test_a_small_chat_beside_many_samples(
    make_client: Callable[..., OpenAI], max_rows: int
) -> None:
    """As many steps beside a request of 64 samples as beside one of a single sample, and the same
    tokens; also where all rows are taken, and where others of its kind ask, too."""
    taken: dict[tuple[int, int], tuple[int, list[int]]] = {}
    for n in (1, 64):
        for others in (1, 20):
            engine = make_client(kv_bytes=32 << 20).engine
            engine.max_rows = max_rows
            engine.submit(many(engine, LONG, n, 400))
            for _ in range(4):
                engine.step()
            assert engine.n_running == min(n, max_rows)
            for i in range(others - 1):
                engine.submit(many(engine, f"{i} abc", 1, 300))
            (small,) = many(engine, "YES or NO", 1, 4)
            taken[n, others] = steps_of(engine, small), small.tokens
            engine.cancel_all()
    steps, tokens = taken[1, 1]
    for n, own in taken.values():
        assert own == tokens
        assert n < 3 * steps
    assert steps <= 5


def test_a_call_gets_its_share_of_the_rows(make_client: Callable[..., OpenAI]) -> None:
    engine = make_client(kv_bytes=32 << 20).engine
    engine.max_rows = 8
    first = many(engine, LONG, 8, 300)
    engine.submit(first)
    for _ in range(4):
        engine.step()
    second = many(engine, "abc", 20, 3)
    engine.submit(second)
    for _ in range(3):
        engine.step()
    assert sum(1 for sample in second if sample.tokens) >= 4
    assert all(len(sample.tokens) >= 5 for sample in first)
    engine.cancel_all()


def test_only_those_wait_for_a_prompt_that_begin_like_it(
    make_client: Callable[..., OpenAI],
) -> None:
    """The second sample of a long prompt waits for the first to compute it, and nobody else."""
    engine = make_client(kv_bytes=8 << 20, step_tokens=16).engine
    long = many(engine, LONG * 5, 2, 10)
    engine.submit(long)
    engine.step()
    alike = many(engine, LONG * 4, 1, 2)[0]
    engine.submit([alike])
    (small,) = many(engine, "YES", 1, 2)
    assert steps_of(engine, small) <= 3
    assert engine.n_waiting == 2
    assert not any(sample.tokens for sample in long)
    while engine.busy:
        engine.step()
    assert alike.cached_tokens > 0
    assert long[1].cached_tokens == len(long[1].prompt) - 1


def test_alternatives_hold_nobody_up(make_client: Callable[..., OpenAI]) -> None:
    """They are computed piece by piece, between the steps of others."""
    engine = make_client(kv_bytes=32 << 20).engine
    scored = many(engine, LONG, 4, 200, n_alternatives=3)
    engine.submit(scored)
    while not any(sample._last for sample in scored):
        engine.step()
    (small,) = many(engine, "YES", 1, 4)
    assert steps_of(engine, small) <= 3 * 5
    assert not all(sample.ended for sample in scored)
    while engine.busy:
        engine.step()
    for sample in scored:
        assert sample.finish_reason == "length"
        assert len(sample.alternatives) == 200
        for (ids, values), token, logprob in zip(
            sample.alternatives, sample.tokens, sample.logprobs, strict=True
        ):
            assert len(ids) == 3
            assert values[0] >= logprob
            assert token not in ids or values[list(ids).index(token)] == pytest.approx(logprob)
