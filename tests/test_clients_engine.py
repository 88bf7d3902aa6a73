"""The engine under the clients: threads that share it, failures, cancelled samples, scores."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from support.asking import ASK, LONG, texts
from support.models import T4
from support.reference import log_softmax

from rksc import CapacityError
from rksc.clients import OpenAI
from rksc.clients._engine import Engine, Sample, copies

# ---- threads and failures ----------------------------------------------------------------------


def test_threads_are_batched_and_get_their_own(
    make_client: Callable[..., OpenAI], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six at once; steps take at least 10 ms, so that they overlap."""
    client, alone = make_client(), make_client()
    step = client.engine.session.step
    monkeypatch.setattr(client.engine.session, "step", lambda: (time.sleep(0.01), step())[1])

    def ask(client: OpenAI, i: int) -> list[str]:
        messages = [{"role": "user", "content": LONG * (1 + i % 2) + str(i)}]
        return texts(
            client.chat.completions.create(
                messages=messages, n=2, temperature=0.9, seed=i, max_tokens=20, ignore_eos=True
            )
        )

    found: dict[int, list[str]] = {}
    barrier = threading.Barrier(6)

    def run(i: int) -> None:
        barrier.wait()
        found[i] = ask(client, i)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {i: ask(alone, i) for i in range(6)}
    assert client.engine.session.stats().steps < alone.engine.session.stats().steps


def test_a_short_request_does_not_wait_for_a_long_one(
    client: OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two threads: while one brings 150 tokens to their end, the other gets its one and goes, and
    closes a stream that it has begun. Steps take at least 10 ms, so that they overlap."""
    engine, step = client.engine, client.engine.session.step
    begun = threading.Event()

    def slow() -> Any:
        time.sleep(0.01)
        return step()

    def begins(sample: Sample, token: Any) -> None:
        begun.set()

    monkeypatch.setattr(engine.session, "step", slow)
    long = Sample(engine.encode(LONG), 150, stop_ids=(), on_token=begins)
    thread = threading.Thread(target=engine.run, args=([long],))
    thread.start()
    assert begun.wait(60)
    short = client.completions.create(prompt="YES", max_tokens=1)
    with client.completions.create(prompt="NO", max_tokens=100, stream=True) as stream:
        next(stream)
    reached = len(long.tokens)
    thread.join(60)
    assert short.usage.completion_tokens == 1
    assert reached < 100
    assert len(long.tokens) == 150
    assert engine.session.stats().branches == 0


def test_a_listener_may_cancel(client: OpenAI) -> None:
    """From inside the step, its own sample and one that comes later in it."""
    engine = client.engine
    samples = copies(Sample(engine.encode(LONG), 20, stop_ids=()), 3)

    def enough(sample: Sample, token: Any) -> None:
        if len(sample.tokens) == 3:
            engine.cancel(samples[:2])

    samples[0].on_token = enough
    engine.run(samples)
    assert [sample.finish_reason for sample in samples] == ["cancelled", "cancelled", "length"]
    assert len(samples[2].tokens) == 20
    assert engine.session.stats().branches == 0


def test_a_failed_step_ends_what_runs_and_no_more(
    client: OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("no step today")

    with monkeypatch.context() as patch:
        patch.setattr(client.engine.session, "step", fail)
        with pytest.raises(RuntimeError, match="no step today"):
            client.chat.completions.create(messages=ASK, n=3)
        stream = client.completions.create(prompt=LONG, stream=True)
        with pytest.raises(RuntimeError, match="no step today"):
            list(stream)
    assert client.engine.session.stats().branches == 0
    assert client.chat.completions.create(messages=ASK, max_tokens=1).usage.completion_tokens == 1


def test_a_sample_that_cannot_begin_fails_alone(client: OpenAI) -> None:
    engine = client.engine
    prompt = engine.encode(LONG)
    good = Sample(prompt, 3)
    bad = [Sample(prompt, 3, stop=(stop,)) for stop in ("", "\ud800")]
    engine.submit([*bad, good])
    while engine.busy:
        engine.step()
    assert all(isinstance(sample.error, ValueError) for sample in bad)
    assert good.error is None
    assert len(good.tokens) == 3
    assert engine.session.stats().branches == 0


def test_a_sample_whose_listener_or_alternatives_fail_fails_alone(
    client: OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = client.engine

    def full(*_: Any) -> None:
        raise CapacityError("no room for the pass over the new tokens")

    def listen(sample: Sample, token: Any) -> None:
        if len(sample.tokens) == sample.index:
            raise RuntimeError(f"enough after {sample.index}")

    monkeypatch.setattr(engine, "_alternatives", full)
    like = Sample(engine.encode(LONG), 4, stop_ids=())
    good, early, late, scored = copies(like, 4)
    early.index, late.index, scored.n_alternatives = 2, 4, 3
    early.on_token = late.on_token = listen
    engine.submit([early, scored, good, late])
    while engine.busy:
        engine.step()
    assert good.error is None
    assert len(good.tokens) == 4
    assert [str(s.error) for s in (early, late)] == ["enough after 2", "enough after 4"]
    assert isinstance(scored.error, CapacityError)
    assert engine.session.stats().branches == 0
    with pytest.raises(CapacityError, match="no room"):
        client.chat.completions.create(messages=ASK, max_tokens=2, logprobs=True, top_logprobs=1)


def test_cancelled_samples_leave_the_queue(client: OpenAI) -> None:
    engine = client.engine
    engine.max_rows = 1
    running, waiting = copies(Sample(engine.encode(LONG), 50, stop_ids=()), 2)
    engine.submit([running, waiting])
    for _ in range(6):
        engine.step()
    engine.cancel([waiting])
    assert waiting.finish_reason == "cancelled"
    assert engine.n_waiting == 0
    assert len(running.tokens) > 0
    engine.cancel_all()
    assert not engine.busy
    assert engine.session.stats().branches == 0


# ---- scores ------------------------------------------------------------------------------------


def test_scores_are_those_of_each_pair_alone(make_client: Callable[..., OpenAI]) -> None:
    engine: Engine = make_client().engine
    contexts = [T4.tokens(40), T4.tokens(40)[:20], T4.tokens(12, seed=3)]
    pairs = [(c, T4.tokens(n, seed=n)) for c in contexts for n in (1, 5, 9)]
    pairs += [pairs[0], (contexts[0], pairs[1][1])]
    for (context, continuation), (logprobs, tops) in zip(pairs, engine.score(pairs), strict=True):
        rows = [T4.reference.forward([*context, *continuation]).logits[len(context) - 1 : -1]]
        expected = [log_softmax(row)[t] for row, t in zip(rows[0], continuation, strict=True)]
        assert logprobs == pytest.approx(expected, abs=1e-3)
        assert tops.tolist() == rows[0].argmax(1).tolist()
    assert engine.session.stats().branches == 0
