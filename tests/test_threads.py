"""Threads, signals, forks and the end of the process.

Calls on one session take turns, nobody waits while holding the GIL, Ctrl-C is heard everywhere.
Timed limits only keep a hang from lasting for ever.
"""

from __future__ import annotations

import _thread
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.model_files import TINY, random_weights

from rksc import CapacityError, _core
from rksc.engine.results import Verdict
from rksc.model.config import ModelConfig

ROOT = Path(__file__).resolve().parent.parent
CONFIG: dict[str, Any] = {**TINY, "max_position_embeddings": 1 << 17}
WEIGHTS = random_weights(CONFIG, seed=2)
LIMIT = 60.0  # seconds; nothing here takes a tenth of it
GREEDY: tuple[float, int, float, float, int, list[int], list[bytes], float, float, int] = (
    0.0,
    0,
    1.0,
    0.0,
    0,
    [],
    [],
    2.0,
    0.0,
    1,
)
"""temperature, top_k, top_p, min_p, seed, stop_ids, stop_strings, stop_top, stop_lead, min_steps"""


def session(**options: Any) -> _core.Session:
    options = {"kv_bytes": 64 << 20, "n_threads": 1, **options}
    return _core.Session(WEIGHTS, ModelConfig.of(CONFIG), **options)


def generate(s: _core.Session, branches: Sequence[_core.Branch], *settings: Any) -> list[Any]:
    return s._generate([_core.Request(branch) for branch in branches], *settings)


class Steps:
    """A request that is submitted and stepped; its events, and whether it goes on."""

    def __init__(self, s: _core.Session, branch: _core.Branch, n: int) -> None:
        self.session, self.request = s, _core.Request(branch)
        s._submit([self.request], n, *GREEDY)

    def step(self) -> list[Any]:
        events: list[Any] = []
        self.session._step([self.request], events)
        return events

    def end(self, *, undo: bool = False) -> None:
        self.session._end([self.request], [], undo)


class Background:
    """Runs a call in another thread; `join` gives its result or raises its exception."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.result: Any = None
        self.error: BaseException | None = None
        self._call = call
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.result = self._call()
        except BaseException as error:
            self.error = error

    @property
    def runs(self) -> bool:
        return self._thread.is_alive()

    def join(self) -> Any:
        self._thread.join(LIMIT)
        assert not self.runs, "the call hangs"
        if self.error is not None:
            raise self.error
        return self.result


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < end, "it never happens"
        time.sleep(0.001)


# ---- several threads ---------------------------------------------------------------------------


def test_threads_that_generate_at_once_get_what_they_get_alone() -> None:
    s = session()
    prompts = [[i + 1, 7, 2 * i + 3, 5] for i in range(6)]
    sampled: tuple[Any, ...] = (0.9, 0, 0.95, 0.0, 11, [], [], 2.0, 0.0, 1)

    def run(prompt: list[int]) -> tuple[Any, ...]:
        kids = s._prefill(prompt).fork([[8], [9, 10]])
        for i, kid in enumerate(kids):
            kid.stream = 1000 * prompt[0] + i
        rows = generate(s, kids, 24, *sampled)
        return tuple(np.concatenate([column.view(np.int32) for column in row[:4]]) for row in rows)

    alone = [run(prompt) for prompt in prompts]
    for _ in range(3):
        together = [Background(partial(run, prompt)) for prompt in prompts]
        for call, expected in zip(together, alone, strict=True):
            for got, want in zip(call.join(), expected, strict=True):
                assert np.array_equal(got, want)
    s.check()
    gc.collect()
    assert s._stats()["blocks_used"] == 0


def test_others_get_in_between_two_steps() -> None:
    """Reads, forks and calls come through while one call generates for ever."""
    s = session()
    endless, other = s._prefill([1, 2, 3]), s._prefill([4, 5, 6])
    call = Background(lambda: generate(s, [endless], 1 << 30, *GREEDY))
    wait_until(lambda: endless.n_tokens > 10)
    assert len(generate(s, [other], 5, *GREEDY)[0][0]) == 5
    assert other.fork(2)[1].n_tokens == other.n_tokens
    assert other.logits.shape == (97,)
    with pytest.raises(RuntimeError, match="generating"):
        endless.extend([1])
    assert call.runs
    endless.drop()  # returns at once; the step in progress ends first
    tokens, *_, reason, _, _ = call.join()[0]
    assert reason == "cancelled"
    assert len(tokens) > 7
    s.check()


def test_dropping_never_waits() -> None:
    """A drop during one long step returns while the step runs."""
    s = session(isa="portable", step_tokens=1 << 15)
    kids = s._prefill([1, 2, 3]).fork(4)
    prompt = np.resize(np.arange(1, 90), 3000)
    for _ in range(20):
        call = Background(lambda: s._prefill(prompt))
        time.sleep(0.02)
        kids.pop().drop()
        kids.extend(kids[0].fork(1) if not call.runs else [])
        if call.runs:
            break
    else:
        pytest.fail("the step was always over")
    del kids  # deallocation is a drop as well
    assert call.runs
    branch = call.join()
    assert s._stats()["branches"] == 1
    s.check()
    assert branch.n_computed == len(prompt)


def test_a_dropped_branch_says_so() -> None:
    s = session()
    branch = s._prefill([1, 2, 3])
    kid = branch.fork()[0]
    branch.drop()
    branch.drop()
    assert branch.dropped
    assert not kid.dropped
    assert (branch.id, branch.depth, branch.parent_id) == (1, 0, None)
    assert branch.session is s
    uses: list[Callable[[], Any]] = [
        lambda: branch.tokens,
        lambda: branch.n_tokens,
        lambda: branch.score,
        lambda: branch.logits,
        lambda: branch.hidden,
        branch.fork,
        lambda: branch.extend([1]),
        lambda: setattr(branch, "score", 0.5),
        lambda: setattr(branch, "stream", 5),
        lambda: s.compute([branch]),
        lambda: generate(s, [kid, branch], 3, *GREEDY),
        lambda: s._score(branch, [[1]]),
        lambda: s._verify([branch], [1], 2, 3, None),
    ]
    for use in uses:
        with pytest.raises(RuntimeError, match="branch 1 was dropped"):
            use()
    assert s._stats()["branches"] == 1
    s.check()


def test_many_threads_fork_drop_and_read() -> None:
    s = session(kv_bytes=8 << 20)
    root = s._prefill(list(range(1, 40)))
    stop = threading.Event()

    def churn(seed: int) -> int:
        rng = np.random.default_rng(seed)
        n = 0
        while not stop.is_set():
            kids = root.fork([[int(t)] for t in rng.integers(1, 97, 4)])
            generate(s, kids[:2], 3, *GREEDY)
            assert [kid.n_tokens for kid in kids] == [43, 43, 40, 40]
            kids[0].drop()
            assert kids[1].tokens[:39].tolist() == list(range(1, 40))
            n += 1
        return n

    calls = [Background(partial(churn, i)) for i in range(4)]
    time.sleep(1.0)
    stop.set()
    assert all(call.join() > 0 for call in calls)
    gc.collect()
    s.check()
    assert s._stats()["branches"] == 1
    assert s._stats()["blocks_used"] == 3


def test_the_gil_is_free_while_it_computes() -> None:
    s = session(isa="portable", step_tokens=1 << 15)
    prompt = np.resize(np.arange(1, 90), 2000)
    count = 0
    call = Background(lambda: s._prefill(prompt))
    while call.runs:
        count += 1
    call.join()
    assert count > 1000


def test_events_of_submitted_requests_find_their_way() -> None:
    """Steps of a `_generate` advance others' requests; `_step` hands their events out."""
    s = session()
    a, b, c = (s._prefill([i, 2, 3]) for i in (1, 4, 9))
    expected = generate(s, a.fork(1), 6, *GREEDY)[0][0].tolist()
    request = Steps(s, a, 6)
    generate(s, [b], 4, *GREEDY)
    events = request.step()
    generate(s, [b], 4, *GREEDY)
    while s._requests:
        events += request.step()
    assert {event[0] for event in events} == {request.request}
    assert [event[1] for event in events] == [0, 1, 2, 3, 4, 5]
    assert [event[2] for event in events] == expected
    assert [event[6] for event in events] == [None] * 5 + ["length"]
    assert request.step() == []

    request = Steps(s, c, 50)
    request.step()
    request.end()
    assert request.step() == []
    assert c.n_tokens == 4
    request = Steps(s, c, 50)
    request.step()
    request.end(undo=True)
    assert c.n_tokens == 4
    request = Steps(s, c, 50)
    c.drop()
    events = request.step()
    assert [(*event[:3], event[6]) for event in events] == [(request.request, 0, -1, "cancelled")]
    assert not s._requests
    s.check()


# ---- signals -----------------------------------------------------------------------------------


@contextmanager
def interrupt(seconds: float = 0.15) -> Iterator[None]:
    """Ctrl-C after a while; the block must raise KeyboardInterrupt, long before LIMIT."""
    # A process started in the background ignores SIGINT, and so would this one.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(seconds, _thread.interrupt_main)
    timer.start()
    begin = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
            time.sleep(1)  # a call that ended before the signal: it comes here
            pytest.fail("the call was too short to be interrupted")
    finally:
        timer.join()
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - begin < LIMIT / 3


def books(s: _core.Session) -> tuple[int, int]:
    s.check()
    stats = s._stats()
    return stats["branches"], stats["blocks_used"]


def test_ctrl_c_stops_generate_and_undoes_it() -> None:
    s = session()
    kids = s._prefill([1, 2, 3]).fork([[5], [6, 7]])
    expected = [row[0].tolist() for row in generate(s, [k.fork()[0] for k in kids], 9, *GREEDY)]
    before = books(s)
    with interrupt():
        generate(s, kids, 1 << 30, *GREEDY)
    assert [kid.tokens.tolist() for kid in kids] == [[1, 2, 3, 5], [1, 2, 3, 6, 7]]
    assert [kid.confidence for kid in kids] == [None, None]
    assert books(s)[0] == before[0]
    assert [row[0].tolist() for row in generate(s, kids, 9, *GREEDY)] == expected


LONG = np.resize(np.arange(1, 90), 40_000)


@pytest.mark.parametrize("what", ["prefill", "compute", "logits", "score", "verify", "means"])
def test_ctrl_c_stops_any_long_call(what: str) -> None:
    s = session(isa="portable")
    root = s._prefill([1, 2, 3])
    long = root.fork([LONG])[0]
    calls: dict[str, Callable[[], Any]] = {
        "prefill": lambda: s._prefill(LONG),
        "compute": lambda: s.compute([long]),
        "logits": lambda: long.logits,
        "score": lambda: s._score(root, [LONG]),
        "verify": lambda: s._verify([long], [5, 6], 1, 2, None),
        "means": lambda: s._prompt_means(LONG, 1, 50),
    }
    expected = root.logits
    with interrupt():
        calls[what]()
    assert books(s)[0] == 2
    assert long.n_tokens == len(LONG) + 3
    assert np.array_equal(root.logits, expected)
    long.drop()
    assert books(s)[0] == 1


def test_ctrl_c_while_waiting_for_another_thread() -> None:
    s = session(isa="portable")
    call = Background(lambda: s._prefill(LONG[:5_000]))
    time.sleep(0.05)
    with interrupt():
        s._prefill([1, 2, 3])
    assert call.runs, "the signal had to wait for the other thread"
    assert call.join().n_computed == 5_000
    s.check()


def test_handlers_run_in_the_middle_and_cannot_reenter() -> None:
    s = session()
    branch = s._prefill([1, 2, 3])
    errors: list[str] = []

    def handler(*_: object) -> None:
        with pytest.raises(RuntimeError) as info:
            s._stats()
        errors.append(str(info.value))
        kid.drop()  # this may be done anywhere
        if len(errors) == 2:
            raise LookupError("from the handler")

    kid = branch.fork()[0]
    old = signal.signal(signal.SIGUSR1, handler)
    pid = os.getpid()
    timers = [threading.Timer(t, os.kill, (pid, signal.SIGUSR1)) for t in (0.1, 0.4)]
    try:
        for timer in timers:
            timer.start()
        with pytest.raises(LookupError, match="from the handler"):
            generate(s, [branch], 1 << 30, *GREEDY)
    finally:
        for timer in timers:
            timer.join()
        signal.signal(signal.SIGUSR1, old)
    assert len(errors) == 2
    assert all("in this very thread" in error for error in errors)
    assert branch.tokens.tolist() == [1, 2, 3]
    assert books(s)[0] == 1


# ---- processes ---------------------------------------------------------------------------------


def python(code: str, *flags: str) -> subprocess.CompletedProcess[str]:
    """Run a script that begins with a session `s` and a branch `b`."""
    prelude = """
        import os, sys, gc, threading, time
        sys.path[:0] = [{root!r}, {tests!r}]
        from test_threads import CONFIG, GREEDY, LONG, WEIGHTS, Steps, generate, session
        s = session(n_threads=2)
        b = s._prefill([1, 2, 3])
    """
    text = textwrap.dedent(prelude).format(root=str(ROOT), tests=str(ROOT / "tests"))
    return subprocess.run(
        [sys.executable, *flags, "-c", text + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )


def test_a_forked_child_gets_an_error_and_ends() -> None:
    done = python("""
        import warnings
        warnings.simplefilter("ignore", DeprecationWarning)
        from support.sessions import open_session
        whole = open_session()
        background = threading.Thread(
            target=lambda: generate(s, [b.fork()[0]], 1 << 30, *GREEDY), daemon=True)
        background.start()  # the child inherits a lock that somebody holds
        time.sleep(0.05)
        pid = os.fork()
        if pid == 0:
            uses = [lambda: b.tokens, lambda: b.logits, lambda: b.fork(), lambda: b.extend([1]),
                    lambda: s._prefill([1]), lambda: s._stats(), lambda: s.check(),
                    lambda: generate(s, [b], 3, *GREEDY), lambda: s.invalidate(),
                    lambda: s.dtype, lambda: setattr(b, "score", 1.0)]
            uses += [whole.step, lambda: whole.cancel(1), lambda: whole.prefill([1])]
            for use in uses:
                try:
                    use()
                    print("no error")
                except RuntimeError as error:
                    assert "forked child" in str(error), error
            b.drop()
            kid = session()
            n = len(generate(kid, [kid._prefill([1, 2, 3])], 5, *GREEDY)[0][0])
            del b, s
            gc.collect()
            print("child", n, flush=True)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        print("parent", status, b.tokens.tolist(), flush=True)
        os._exit(0)
    """)
    assert done.stdout.splitlines() == ["child 5", "parent 0 [1, 2, 3]"], done.stderr


@pytest.mark.parametrize(
    "last",
    [
        "pass",
        "kids = b.fork(3); generate(s, kids, 4, *GREEDY)",
        "kept = Steps(s, b, 50); kept.step()",
        "b.verdict = [b]; s2 = session(); cycle = [s2]; cycle.append(cycle)",
        "import builtins; builtins.kept = (s, b)",
        "threading.Thread(target=lambda: generate(s, [b], 200, *GREEDY)).start()",
        "threading.Thread(target=lambda: generate(s, [b], 1 << 30, *GREEDY), daemon=True).start()"
        "; time.sleep(0.1)",
        "threading.Thread(target=lambda: globals().pop('s')).start(); del b",
    ],
)
def test_the_process_ends_quietly(last: str) -> None:
    done = python(last, "-X", "dev", "-W", "error")
    assert (done.returncode, done.stderr) == (0, "")


def test_the_last_reference_may_go_in_another_thread() -> None:
    holder = [session()]
    gone = weakref.ref(holder[0])
    holder.append(holder[0]._prefill([1, 2, 3]))  # type: ignore[arg-type]
    Background(holder.clear).join()
    gc.collect()
    assert gone() is None


def test_cycles_are_collected() -> None:
    s = session()
    branch = s._prefill([1, 2, 3])
    branch.verdict = {"branch": branch}
    branch.gate = [s]
    gone = weakref.ref(branch)
    del branch
    gc.collect()
    assert gone() is None
    assert books(s) == (0, 0)

    class Sub(_core.Session):
        own: Any

    sub = Sub(WEIGHTS, ModelConfig.of(CONFIG), kv_bytes=1 << 20)
    sub.own = sub._prefill([1, 2, 3])
    ended = weakref.ref(sub)
    Steps(sub, sub.own, 50).step()  # it goes on, and the session keeps it
    del sub
    gc.collect()
    assert ended() is None


CROWDED = 12 * 16384
"""kv_bytes of 12 blocks, 192 tokens"""


def test_a_submission_without_room_fails_in_its_own_step() -> None:
    """Though the step that found no block for it was a `_generate`'s; `_step` tells it once."""
    roomy, s = session(), session(kv_bytes=CROWDED)
    expected = generate(roomy, [roomy._prefill([1, 2, 3])], 40, *GREEDY)[0]
    large, small = s._prefill(list(range(90)) * 2), s._prefill([1, 2, 3])
    request = Steps(s, large, 1000)
    got = generate(s, [small], 40, *GREEDY)[0]
    assert [a.tobytes() for a in got[:4]] == [a.tobytes() for a in expected[:4]]
    events = request.step()
    *_, finish, _, _, error = events[-1]
    assert (events[-1][0], finish, type(error)) == (request.request, "failed", CapacityError)
    assert "KV blocks" in str(error)
    assert [event[6] for event in events[:-1]] == [None] * (len(events) - 1)
    assert (len(s._requests), large.n_tokens) == (0, 193)
    assert request.step() == []
    s.check()


@pytest.mark.parametrize("first", ["large", "small"])
def test_a_generation_without_room_fails_for_its_caller_alone(first: str) -> None:
    """Whichever thread runs the step that finds no block for it."""
    roomy, s = session(), session(kv_bytes=CROWDED)
    expected = generate(roomy, [roomy._prefill([1, 2, 3])], 40, *GREEDY)[0]
    large, small = s._prefill(list(range(90)) * 2), s._prefill([1, 2, 3])
    calls = {
        "large": partial(generate, s, [large], 1000, *GREEDY),
        "small": partial(generate, s, [small], 40, *GREEDY),
    }
    started = {name: Background(calls[name]) for name in sorted(calls, key=lambda n: n != first)}
    got = started["small"].join()[0]
    assert [a.tobytes() for a in got[:4]] == [a.tobytes() for a in expected[:4]]
    with pytest.raises(CapacityError, match="KV blocks"):
        started["large"].join()
    assert (large.n_tokens, small.n_tokens) == (180, 43)
    s.check()


def test_a_verdict_does_not_keep_its_branch_alive() -> None:
    """The last reference drops the branch at once, verified or not."""
    s = session()
    branch = s._prefill([1, 2, 3])
    verdict = Verdict(branch, "verified", 0.5, 0.25, 1.0, 1.0, 4, 4)
    branch.verdict = verdict
    assert branch.verdict == verdict
    assert branch.verdict.branch is branch
    del verdict
    gc.disable()
    try:
        del branch
        assert books(s) == (0, 0)
    finally:
        gc.enable()
    first, second = s._prefill([1]), s._prefill([2])
    for other in ("text", None, Verdict(second, "bound", None, None, 0.0, 0.0, 0, 4)):
        first.verdict = other
        assert first.verdict is other


@pytest.mark.skipif(sys.version_info < (3, 13), reason="test.support.interpreters' private module")
def test_sub_interpreters_are_refused() -> None:
    done = python("""
        import _interpreters
        number = _interpreters.create()
        error = _interpreters.run_string(
            number, f"import sys; sys.path[:0] = {sys.path!r}\\nimport rksc._core")
        print("ImportError" in str(error))
    """)
    assert done.stdout.strip() == "True", done.stderr
