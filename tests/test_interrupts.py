"""Ctrl-C at any moment of a call: it returned, or its branches are as they were before it.

Signals come before every instruction that Python executes in a call, one or many of them
(interrupting.py), and a last test lets them come at random times. What the engine itself does when
it is interrupted between two layers is in test_core.py and test_threads.py.
"""

from __future__ import annotations

import random
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from support.interrupting import Attempt, attempt, handled_by, moments
from support.letters import Letters
from support.models import T4
from support.sessions import DEVICE, assert_books

from rksc import ASKS, CGEE, Approach, Branch, BranchSession, Sampling, Solution, search, solve
from rksc.clients import LLM, OpenAI, SamplingParams
from rksc.clients._engine import Sample, copies
from rksc.engine.results import Generation, Token, Verdict
from rksc.text import template

Make = Callable[..., BranchSession]
Call = Callable[[], Any]
HOT = Sampling(temperature=1.5, seed=10)
SMALL: dict[str, Any] = {
    "instruction": "", "verify_prompt": "YES?", "sampling": HOT, "max_new_tokens": 3
}  # fmt: skip
STORM = [(1, 1), (2, 1), (40, 1), (3, 7)]  # how many signals, how many instructions apart

pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX"),
    pytest.mark.skipif(
        sys.version_info < (3, 11),
        reason="Python 3.10 looks for signals once more in the caller's line: docs/memory.md",
    ),
]


@pytest.fixture(autouse=True)
def interrupts() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt, also in processes that were started in the background."""
    with handled_by(signal.default_int_handler):
        yield


@pytest.fixture
def session(make_session: Make) -> BranchSession:
    return make_session("T4", tokenizer=Letters(chat=True), cgee=None, n_threads=1)


def state(session: BranchSession, branches: list[Branch]) -> Any:
    """What a call must not change unless it returns."""
    session.check()
    stats = session.stats()
    of_each = [
        (b.tokens.tolist(), b.n_prompt, b.confidence, b.score, b.verdict, b.gate, b.stream)
        for b in branches
    ]
    return session.n_requests, stats.branches, of_each


# ---- calls that are one piece ------------------------------------------------------------------


def plain(result: Any) -> Any:
    """A result as something that can be compared."""
    if isinstance(result, list):
        return [plain(item) for item in result]
    if isinstance(result, Generation):
        return (
            result.tokens.tolist(), result.logprobs.tolist(), result.confidence,
            result.finish_reason, result.text,
        )  # fmt: skip
    if isinstance(result, Verdict):
        return result.outcome, result.score, result.mass
    if isinstance(result, Branch):
        return result.tokens.tolist()
    if isinstance(result, Token):
        return result.token, result.text
    return result.tolist() if isinstance(result, np.ndarray) else result


def ignore(_: int) -> None:
    """A progress bar."""


CALLS: dict[str, Callable[[BranchSession, list[Branch]], Any]] = {
    "generate": lambda s, kids: s.generate(kids, 4, HOT, stop_ids=()),
    "generate one": lambda s, kids: s.generate(kids[0], 1, stop_ids=()),
    "generate to a stop": lambda s, kids: s.generate(kids, 9, HOT, stop=["e", "th"]),
    "generate nothing": lambda s, kids: s.generate(kids, 0),
    "progress": lambda s, kids: s.generate(kids, 4, HOT, stop_ids=(), progress=ignore),
    "verify": lambda s, kids: s.verify(kids, [5, 6], 1, 2, cgee=None),
    "verify fewer": lambda s, kids: s.verify(kids, "YES?", "YES", "NO", CGEE(lens="answer")),
    "prefill": lambda s, kids: s.prefill("abc th", suffix="e "),
    "prefill later": lambda s, kids: s.prefill([7, 8, 9], compute=False),
    "fork": lambda s, kids: kids[0].fork([[1, 2], [3]]),
    "fork many": lambda s, kids: kids[0].fork(5),
    "score": lambda s, kids: s.score(kids[1], [[5, 6, 7], [8]]),
    "logits": lambda s, kids: kids[1].logits,
    "hidden": lambda s, kids: kids[1].hidden,
    "compute": lambda s, kids: s.compute(kids),
    "layer_means": lambda s, kids: s.layer_means([[5, 6, 7], [5, 8, 7]]),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(("times", "gap"), STORM)
def test_a_call_returns_or_leaves_no_trace(
    session: BranchSession, name: str, times: int, gap: int
) -> None:
    root = session.prefill(T4.tokens(20))
    call = CALLS[name]
    expected = plain(call(session, root.fork(3)))
    kids: list[Branch] = []
    before: list[Any] = []
    raised = 0

    def prepare() -> Call:
        kids[:] = root.fork(3)
        before[:] = [state(session, kids)]
        return lambda: call(session, kids)

    every = 1 if times == 1 and DEVICE == "cpu" else 7
    for made in moments(prepare, every=every, times=times, gap=gap):
        if made.results:
            assert plain(made.results) == [expected]
            continue
        raised += 1
        assert [state(session, kids)] == before
        if raised % 16 == 0:
            assert plain(call(session, kids)) == expected
    assert raised


def test_a_similar_prompt_returns_or_leaves_no_trace(make_session: Make) -> None:
    asks = ASKS(guard=None, tau=-1.0, uncentered=True)
    session = make_session("T4", tokenizer=Letters(), asks=asks, n_threads=1)
    root = session.prefill(T4.tokens(20))
    own = T4.tokens(20, seed=1)
    before = state(session, [root])
    returned = 0
    for made in moments(
        lambda: lambda: session.prefill(own, similar_to=root, suffix=[5, 6]), every=2
    ):
        if made.results:
            (branch,) = made.results
            returned += 1
            assert branch.gate.accepted
            assert branch.prompt.tolist() == own
            branch.drop()
        assert state(session, [root]) == before
    assert returned


# ---- handlers ----------------------------------------------------------------------------------


def test_a_handler_may_raise_what_it_likes(session: BranchSession) -> None:
    class Stop(Exception):
        pass

    def handler(*_: object) -> None:
        raise Stop

    root = session.prefill(T4.tokens(20))
    kids: list[Branch] = []

    def prepare() -> Call:
        kids[:] = root.fork(2)
        return lambda: session.generate(kids, 3, HOT, stop_ids=())

    with handled_by(handler, signal.SIGUSR1):
        for made in moments(prepare, every=3, times=2, number=signal.SIGUSR1, raises=Stop):
            assert {k.n_tokens for k in kids} == ({23} if made.results else {20})


def test_a_handler_that_returns_changes_nothing(session: BranchSession) -> None:
    """Though it uses the session itself, where that is not in the middle of a step."""
    root = session.prefill(T4.tokens(20))
    seen: list[int] = []

    def handler(*_: object) -> None:
        seen.append(len(session.generate(root.fork(1), 2, stop_ids=())[0].tokens))

    def call() -> Any:
        return session.generate(root.fork(2), 3, HOT, stop_ids=())

    expected = plain(call())
    with handled_by(handler, signal.SIGUSR1):
        for made in moments(lambda: call, every=7, number=signal.SIGUSR1):
            assert plain(made.results) == [expected]
    assert set(seen) == {2}


def test_ctrl_c_in_progress_undoes_all(session: BranchSession) -> None:
    """Whether the handler raises in the callback or the callback itself does."""
    kids = session.prefill(T4.tokens(20)).fork(2)
    before = state(session, kids)

    def stop(_: int) -> None:
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        session.generate(kids, 30, HOT, stop_ids=(), progress=stop)
    assert state(session, kids) == before


def test_a_call_in_another_thread_is_not_interrupted(session: BranchSession) -> None:
    kid = session.prefill(T4.tokens(20)).fork(1)[0]
    made: list[Any] = []
    thread = threading.Thread(
        target=lambda: made.extend(session.generate(kid, 200, HOT, stop_ids=()))
    )
    with pytest.raises(KeyboardInterrupt):
        thread.start()
        signal.raise_signal(signal.SIGINT)
    thread.join(60)
    assert len(made[0].tokens) == 200


# ---- streams and requests ----------------------------------------------------------------------


def same_text(tokens: list[Token]) -> str:
    return "".join(token.text or "" for token in tokens)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in its close()
@pytest.mark.parametrize(("times", "gap"), STORM)
def test_a_stream_keeps_what_it_has_handed_out(
    session: BranchSession, times: int, gap: int
) -> None:
    root = session.prefill(T4.tokens(20))
    expected = [g.tokens.tolist() for g in session.generate(root.fork(2), 5, HOT, stop_ids=())]
    kids: list[Branch] = []
    got: list[Token] = []

    def consume() -> None:
        for token in session.stream(kids, 5, HOT, stop_ids=()):
            got.append(token)

    def prepare() -> Call:
        got.clear()
        kids[:] = root.fork(2)
        return consume

    lengths = set()
    for _ in moments(prepare, every=3, times=times, gap=gap):
        for kid, whole in zip(kids, expected, strict=True):
            mine = [t for t in got if t.branch is kid]
            lengths.add(len(mine))
            assert [t.token for t in mine] == whole[: len(mine)] == kid.tokens.tolist()[20:]
            tops = [t.top_prob for t in mine]
            assert kid.confidence == (sum(tops) / len(tops) if mine else None)
        assert session.n_requests == 0
        session.check()
        kids[0].extend([1])  # nobody holds it
    assert lengths == set(range(6))


@pytest.mark.parametrize(("times", "gap"), STORM)
def test_a_step_that_is_interrupted_loses_no_token(
    session: BranchSession, times: int, gap: int
) -> None:
    """The loop of a server: what the step made comes with the next one."""
    root = session.prefill(T4.tokens(20))
    stop = ["e", "th"]
    whole = session.generate(root.fork(2), 12, HOT, stop, ())
    kids: list[Branch] = []
    got: list[Token] = []
    numbers: list[int] = []

    def serve() -> None:
        while len(numbers) < len(kids):
            kid = kids[len(numbers)]
            numbers.append(session.submit(kid, 12, HOT, stop, ()))
        while session.n_requests:
            got.extend(session.step())

    def prepare() -> Call:
        got.clear(), numbers.clear()
        kids[:] = root.fork(2)
        return serve

    for _ in moments(prepare, every=37, times=times, gap=gap):
        assert session.n_requests <= len(numbers)
        serve()
        for kid, g in zip(kids, whole, strict=True):
            mine = [t for t in got if t.branch is kid]
            assert [t.token for t in mine if t.token >= 0] == g.tokens.tolist()
            assert kid.n_tokens == 20 + len(g.tokens)
            assert same_text(mine) == g.text
            assert [t.finish_reason for t in mine if t.finish_reason] == [g.finish_reason]
            assert kid.confidence == g.confidence
        session.check()


def test_a_cancellation_is_done_or_not(session: BranchSession) -> None:
    root = session.prefill(T4.tokens(20))
    kids: list[Branch] = []
    number: list[int] = []

    def prepare() -> Call:
        kids[:] = root.fork(1)
        number[:] = [session.submit(kids[0], 9, HOT, stop_ids=())]
        assert len(session.step()) == 1
        return lambda: session.cancel(number[0])

    done = set()
    for _ in moments(prepare):
        done.add(session.n_requests == 0)
        session.cancel(number[0])
        assert session.n_requests == 0
        assert len(session.generate(kids[0], 2, stop_ids=())[0].tokens) == 2
        assert kids[0].n_tokens == 23
    assert done == {True, False}


def test_another_stream_goes_on(session: BranchSession) -> None:
    """Steps that were interrupted in one iterator have brought tokens for another."""
    root = session.prefill(T4.tokens(20))
    expected = session.generate(root.fork(2)[1:], 30, HOT, stop_ids=())[0]
    for made in moments(lambda: partial_stream(session, root), every=11):
        other = partial_stream.other  # type: ignore[attr-defined]
        got = [*other.got, *other.rest]
        assert [t.token for t in got] == expected.tokens.tolist()
        assert same_text(got) == expected.text
        del made


class partial_stream:
    """A stream that has begun beside the one that is going to be interrupted."""

    other: Any

    def __init__(self, session: BranchSession, root: Branch) -> None:
        first, second = root.fork(2)
        self.rest = session.stream(second, 30, HOT, stop_ids=())
        self.got = [next(self.rest)]
        self.session, self.first = session, first
        type(self).other = self

    def __call__(self) -> None:
        for _ in self.session.stream(self.first, 4, HOT, stop_ids=()):
            pass


# ---- trees -------------------------------------------------------------------------------------

TREES: dict[str, Callable[[BranchSession], Solution]] = {
    "solve": lambda s: solve(s, "th 3 abc", 2, **SMALL),
    "solve otherwise": lambda s: solve(
        s, "th 3 abc", [Approach("abc 3"), "e ", Approach("3 th", "ab")], **SMALL
    ),
    "search": lambda s: search(s, "th 3 abc", expand=2, depth=2, beam=2, **SMALL),
}


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize(("times", "gap"), [STORM[0], STORM[-1]])
def test_a_tree_returns_or_leaves_no_branch(
    session: BranchSession, name: str, times: int, gap: int
) -> None:
    returned = 0
    for made in moments(lambda: lambda: TREES[name](session), every=809, times=times, gap=gap):
        if made.results:
            returned += 1
            made.results.pop().drop()
        assert session.stats().branches == 0  # though the error holds all frames
        assert session.n_requests == 0
        session.check()
    assert attempt(lambda: TREES[name](session), 1 << 40).results


def test_a_chat_template_gives_its_place_back() -> None:
    """There are few for all threads."""
    messages = [{"role": "user", "content": "abc"}]
    text = Letters(chat=True).chat(messages)
    for made in moments(lambda: lambda: Letters(chat=True).chat(messages), every=17):
        assert made.results in ([text], [])
        assert not any(place.locked() for place in template._pool._places)


# ---- clients -----------------------------------------------------------------------------------

ASKS_OF: dict[str, Callable[[OpenAI], Any]] = {
    "completions": lambda c: c.completions.create(
        prompt=["abc th", "th 3"], n=2, max_tokens=3, temperature=1.5, seed=3
    ),
    "alternatives": lambda c: c.completions.create(
        prompt="abc th", max_tokens=3, temperature=1.5, seed=3, logprobs=2, echo=True
    ),
    "a stream": lambda c: list(
        c.completions.create(
            prompt="abc th", n=2, max_tokens=3, temperature=1.5, seed=3, stream=True
        )
    ),
    "vllm": lambda c: LLM(c).generate(
        ["abc", "abc th"], SamplingParams(n=2, max_tokens=3, temperature=1.5, seed=3)
    ),
}


def texts_of(answer: Any) -> Any:
    if isinstance(answer, list):
        return [texts_of(item) for item in answer]
    parts = answer.outputs if hasattr(answer, "outputs") else answer.choices
    return [part.text for part in parts]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in a close()
@pytest.mark.parametrize("name", ASKS_OF)
@pytest.mark.parametrize(("times", "gap"), [STORM[0], STORM[2], STORM[3]])
def test_a_client_answers_or_leaves_no_branch(
    session: BranchSession, name: str, times: int, gap: int
) -> None:
    client = OpenAI(session)
    expected = texts_of(ASKS_OF[name](client))
    raised = 0
    for made in moments(lambda: lambda: ASKS_OF[name](client), every=53, times=times, gap=gap):
        assert session.stats().branches == 0
        session.check()
        if made.results:
            assert texts_of(made.results) == [expected]
            continue
        raised += 1
        if raised % 16 == 0:
            assert texts_of(ASKS_OF[name](client)) == expected
            assert session.n_requests == 0
            assert not client.engine.busy
    assert raised
    assert texts_of(ASKS_OF[name](client)) == expected


@pytest.mark.parametrize(("times", "gap"), STORM)
def test_samples_of_others_get_each_token_once(
    session: BranchSession, times: int, gap: int
) -> None:
    """A thread that is interrupted has stepped for all."""
    engine = OpenAI(session).engine
    like = Sample(engine.encode("abc th 3 ab"), 6, HOT, stop_ids=())
    (alone,) = copies(like, 1)
    engine.run([alone])
    others: list[Sample] = []

    def prepare() -> Call:
        (other,) = copies(like, 1)
        other.news = deque()
        others[:] = [other]
        engine.submit(others)
        return lambda: engine.run(copies(Sample(engine.encode("th 3"), 4, HOT, stop_ids=()), 2))

    for made in moments(prepare, every=23, times=times, gap=gap):
        while engine.busy:
            engine.step()
        (other,) = others
        assert other.news is not None
        assert other.tokens == alone.tokens == [t.token for _, t in other.news if t is not None]
        assert (other.text, other.logprobs) == (alone.text, alone.logprobs)
        assert other.finish_reason == "length"
        assert (session.stats().branches, session.n_requests) == (0, 0)
        assert made.fired


# ---- at any time -------------------------------------------------------------------------------


def test_signals_at_random_times(session: BranchSession) -> None:
    """Real ones, of a timer; which moments they hit does not decide whether this passes."""
    root = session.prefill(T4.tokens(20))
    rng = random.Random(5)
    calls = [CALLS[name] for name in ("generate", "progress", "verify", "prefill", "fork")]
    expected = [plain(call(session, root.fork(3))) for call in calls]
    with handled_by(signal.default_int_handler, signal.SIGALRM):
        for i in range(300):
            made = Attempt()
            kids, which = root.fork(3), i % len(calls)
            before = state(session, kids)
            try:
                try:
                    signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, 2e-3))
                    made.results.append(calls[which](session, kids))
                    time.sleep(1)  # it comes here
                except KeyboardInterrupt as error:
                    made.errors.append(error)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            assert made.errors
            if made.results:
                assert plain(made.results) == [expected[which]]
            else:
                assert state(session, kids) == before
            made.errors.clear()
    assert_books(session)
