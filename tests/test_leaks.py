"""Nothing is kept that nobody needs: blocks, branches, sessions, buffers, references.

Resident memory is read in processes of their own, where nothing else allocates: a part of what
each script repeats many times would be seen many times.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

PRELUDE = f"""
import gc, sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
import numpy as np
from support.model_files import TINY, random_weights
from support.producer import Producer
from rksc import _core
from rksc.model.config import ModelConfig

GREEDY = (0.0, 0, 1.0, 0.0, 0, [], [], 2.0, 0.0, 1)
CONFIG = ModelConfig.of(TINY)
WEIGHTS = random_weights(TINY, seed=1)
SHORTCUTS = dict(kappa=0.6, verify_batch=2, stop_top=None, stop_lead=0.1, min_steps=3,
                 skip_top=None, skip_lead=0.06, skip_top_relative=None, skip_lead_relative=0.08,
                 lens="answer", norm=True, theta=0.6, epsilon=0.5, min_layer=1, lens_every=1)

def session(weights=WEIGHTS, **options):
    return _core.Session(weights, CONFIG, **{{"kv_bytes": 1 << 20, "n_threads": 2, **options}})

def generate(s, branches, *settings):
    return s._generate([_core.Request(branch) for branch in branches], *settings)

def resident():
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

def grows(work, n, limit):
    \"\"\"Repeat; what the second half adds to resident memory must stay below the limit.\"\"\"
    for _ in range(n):
        work()
    before = resident()
    for _ in range(n):
        work()
    added = resident() - before
    assert added < limit, f"{{added}} bytes more after {{n}} repetitions"
"""


def run(code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", PRELUDE + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0 and not done.stderr, done.stderr


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/statm")


def test_forks_and_generations_at_a_fixed_budget() -> None:
    """1,000 times (fork 8, generate 4, drop or forget): the pool never runs dry."""
    run("""
        s = session(kv_bytes=256 << 10, token_bytes=[b"x"] * 97)
        root = s._prefill(list(range(1, 40)))
        used = s._stats()["blocks_used"]
        turn = 0
        def work():
            global turn
            turn += 1
            kids = root.fork([[turn % 97, k] for k in range(8)])
            generate(s, kids, 4, 0.5, 5, 0.9, 0.01, turn, [5], [b"xxx"], 0.9, 0.1, 2)
            for kid in kids[: turn % 9]:
                kid.drop()
        grows(work, 500, 1 << 20)
        s.check()
        stats = s._stats()
        assert (stats["blocks_used"], stats["branches"]) == (used, 1), stats
    """)


def test_every_other_call() -> None:
    run("""
        s = session(token_bytes=[b"x"] * 97)
        root = s._prefill(list(range(1, 30)))
        center = np.zeros((4, 64), np.float32)
        def work():
            kids = root.fork([[1, 2], [3]])
            s.compute(kids)
            s._score(root, [[1, 2, 3], [], [4]])
            for k in kids:
                k.confidence = 0.5
            s._verify(kids, [7, 8], 1, 2, SHORTCUTS)
            s._verify(kids, [7, 8], 1, 2, None)
            own = list(range(2, 31))
            for probe, pool in (("prefix", "mean"), ("suffix", "last")):
                for tau in (-1.0, 2.0):
                    other, report = s._prefill_similar(
                        root, own, [5], probe, pool, 2, tau, 1.5, center, True)
                    other.gate = report
            s._prefill_similar(root, own, [5], "prefix", "mean", 2, 0.5, 1.5, None, False)
            s._prompt_means([1, 2, 3], 0, 2)
            events = []
            requests = [_core.Request(kid) for kid in kids]
            s._submit(requests[:1], 9, *GREEDY)
            s._step(requests[:1], events); s._step(requests[:1], events)
            s._end([], events[1:])
            s._end(requests[:1], events[1:], True)
            s._submit(requests[1:], 9, *GREEDY)
            s._step(requests[1:], events)
            kids[0].logits, kids[0].hidden, kids[0].tokens, repr(kids[0])
            kids[0].verdict = kids
            kids[1].drop()
            s._step(requests[1:], events)
            s.check(); s._stats(); s.invalidate()
        grows(work, 150, 1 << 20)
        assert s._stats()["branches"] == 1
    """)


def test_calls_that_fail() -> None:
    """Each failure 1,000 times, and the arguments' reference counts are what they were."""
    run("""
        s = session(kv_bytes=96 << 10)
        root = s._prefill([1, 2, 3])
        other = session()._prefill([1])
        lanes = Producer(WEIGHTS["lm_head.weight"], lanes=2)
        bad = (-1, 97, 2**40, 2**70, 1.5, "x", None, True)
        def tokens(use):
            return [lambda x=x: use([1, x]) for x in bad] + [
                lambda: use(np.array([1, 99])), lambda: use(np.array([1.5])),
                lambda: use(np.zeros((2, 2), int)), lambda: use("text"), lambda: use(b"text"),
                lambda: use(np.array([2**64 - 1], np.uint64)), lambda: use(5)]
        with_greedy = lambda *a: generate(s, [root], *a)
        calls = [
            *tokens(s._prefill), *tokens(root.extend),
            *tokens(lambda t: root.fork([[1], t])), *tokens(lambda t: s._score(root, [t])),
            *tokens(lambda t: s._verify([root], t, 1, 2, None)),
            lambda: s._prefill([]), lambda: s._prefill(np.ones(600, int)),
            lambda: s._prefill(list(range(96)) * 5),
            lambda: root.fork(0), lambda: root.fork(-1), lambda: root.fork([]),
            lambda: root.fork(2**40), lambda: root.fork(1.5), lambda: root.fork(True),
            lambda: root.fork(at=0), lambda: root.fork(at=9), lambda: root.fork(at="x"),
            lambda: s.compute([other]), lambda: s.compute([root, None]), lambda: s.compute(5),
            lambda: generate(s, [root, root], 3, *GREEDY),
            lambda: with_greedy(-1, *GREEDY), lambda: with_greedy(3, *GREEDY[:-1]),
            lambda: with_greedy(3, float("nan"), *GREEDY[1:]),
            lambda: with_greedy(3, *GREEDY[:4], 2**64, *GREEDY[5:]),
            lambda: with_greedy(3, *GREEDY[:5], [1, 97], *GREEDY[6:]),
            lambda: with_greedy(3, *GREEDY[:6], [b"stop"], *GREEDY[7:]),
            lambda: with_greedy(3, *GREEDY[:6], [b""], *GREEDY[7:]),
            lambda: with_greedy(3, *GREEDY[:6], ["stop"], *GREEDY[7:]),
            lambda: s._submit([root], 3, *GREEDY), lambda: s._submit(None, 3, *GREEDY),
            lambda: s._submit([_core.Request(root)], 3, *GREEDY, 2**63),
            lambda: s._submit([_core.Request(root)] * 2, 3, *GREEDY), lambda: _core.Request(s),
            lambda: s._submit([_core.Request(other)], 3, *GREEDY),
            lambda: s._step([root], []), lambda: s._step([], ()), lambda: s._end([root], []),
            lambda: s._end([], [root]), lambda: s._end([], [(_core.Request(root), "x")]),
            lambda: s._verify([root], [], 1, 97, None), lambda: s._verify([root], [1], 1, 2, {}),
            lambda: s._verify([root], [1], 1, 2, {**SHORTCUTS, "lens": "x"}),
            lambda: s._prompt_means([1, 2], 1, 5),
            lambda: s._prefill_similar(root, [1], [], "x", "mean", 1, 0.5, 1.5, None, True),
            lambda: s._prefill_similar(root, [1], [], "prefix", "mean", 9, 0.5, 1.5, None, True),
            lambda: s._prefill_similar(
                root, [1], [], "prefix", "mean", 2, 0.5, 1.5, np.zeros((1, 64)), True),
            lambda: setattr(root, "score", "x"), lambda: setattr(root, "confidence", 2),
            lambda: setattr(root, "stream", -1), lambda: delattr(root, "score"),
            lambda: setattr(root, "tokens", []), lambda: setattr(root, "depth", 1),
            lambda: _core.Branch(), lambda: _core.Session({}, CONFIG),
            lambda: session({**WEIGHTS, "surplus": WEIGHTS}),
            lambda: session({**WEIGHTS, "lm_head.weight": lanes}),
        ]
        watched = [s, root, other, CONFIG, WEIGHTS, SHORTCUTS, *WEIGHTS.values()]
        def work():
            for call in calls:
                try:
                    call()
                except (ValueError, TypeError, RuntimeError, OverflowError, KeyError,
                        AttributeError, BufferError):
                    continue
                raise AssertionError(f"call {calls.index(call)} went through")
        work()
        counts = [sys.getrefcount(x) for x in watched]
        grows(work, 100, 1 << 20)
        assert [sys.getrefcount(x) for x in watched] == counts
        s.check()
        assert root.tokens.tolist() == [1, 2, 3]
        assert s._stats()["branches"] == 1
        assert lanes.exports == lanes.deleted > 200
    """)


def test_sessions_come_and_go() -> None:
    """A session with a pool and copies of its weights, many times."""
    run("""
        halves = {name: w.astype(np.float16) for name, w in WEIGHTS.items()}
        def work():
            s = session(halves, kv_bytes=32 << 20)
            kids = s._prefill(np.resize(np.arange(97), 500)).fork(20)
            generate(s, kids, 5, *GREEDY)
        work()
        grows(work, 20, 1 << 20)
    """)


def test_a_module_that_is_imported_again() -> None:
    """Its types and state go with the last reference: no copy of the module stays behind."""
    run("""
        import importlib, importlib.util, weakref
        gone = []
        for _ in range(3):
            spec = importlib.util.spec_from_file_location("rksc._core", _core.__file__)
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            s = module.Session(WEIGHTS, CONFIG, kv_bytes=1 << 20)
            assert type(s._prefill([1])) is module.Branch is not _core.Branch
            gone += [weakref.ref(module.Session), weakref.ref(module.CapacityError)]
            del spec, module, s
            gc.collect()
        assert all(ref() is None for ref in gone), gone
    """)


def test_every_allocation_may_fail() -> None:
    """Let the n-th allocation of Python's allocators fail, for every n: MemoryError, no change."""
    pytest.importorskip("_testcapi", reason="this Python has no allocation hooks")
    run("""
        from _testcapi import remove_mem_hooks, set_nomemory
        s = session(token_bytes=[b"x"] * 97, n_threads=1)
        root = s._prefill([1, 2, 3])
        kids = root.fork([[4], [5, 6]])
        for kid in kids:
            kid.confidence = 0.5
        center = np.zeros((4, 64), np.float32)
        halves = {name: w.astype(np.float16) for name, w in WEIGHTS.items()}
        ids = np.array([7, 8])
        stops = ([5, 96], [b"xxxx", b"yy"])
        calls = [
            lambda: session(halves, n_threads=1, token_bytes=[b"x"] * 97),
            lambda: s._prefill([7, 8]), lambda: s._prefill(ids),
            lambda: root.fork([[1], [2, 3]]), lambda: root.fork(3),
            lambda: s.compute(kids), lambda: root.logits, lambda: root.hidden,
            lambda: root.tokens, lambda: s._score(root, [[1, 2], [3]]),
            lambda: s._verify(kids, [7, 8], 1, 2, SHORTCUTS),
            lambda: s._prompt_means([1, 2, 3], 0, 2),
            lambda: s._prefill_similar(
                root, [2, 2, 3], [5], "prefix", "mean", 2, 0.0, 1.5, center, True),
            lambda: s._stats(), lambda: repr(root),
        ]
        for call in calls:
            call()
        branches = s._stats()["branches"]
        failures = 0
        for call in calls:
            for n in range(10_000):
                error = None
                set_nomemory(n, n + 1)
                try:
                    call()
                except MemoryError as e:
                    error = e
                finally:
                    remove_mem_hooks()
                gc.collect(0)
                s.check()
                assert s._stats()["branches"] == branches, n
                if error is None:
                    break
                failures += 1
        assert failures > 100, failures
        call = lambda: generate(s, kids, 40, *GREEDY[:5], *stops, *GREEDY[7:])
        before = [kid.tokens.tolist() for kid in kids]
        for n in range(10_000):
            error = None
            set_nomemory(n, n + 1)
            try:
                call()
            except MemoryError as e:
                error = e
            finally:
                remove_mem_hooks()
            s.check()
            if error is None:
                break
            assert [kid.tokens.tolist() for kid in kids] == before, n
        assert n > 10
    """)
