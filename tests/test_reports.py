"""Faults that neighbouring projects had reported, each turned into a trial.

A trial is named after the project and what was reported there: a kind of fault, not one input.
docs/reports.md lists the reports with the trials that hold them; many stand in other files, and
the first test compares the list with what is here. p is the number of tokens of a block.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Factory
from numpy.typing import NDArray
from support.models import NO_KEYS, T1, T4, make
from support.sessions import assert_books, block_bytes, open_session

import rksc
from rksc import ASKS, Branch, BranchSession, Sampling, same_numbers

HERE = Path(__file__).parent
P = 16


def listed_trials(page: str) -> dict[str, set[str]]:
    """Trials of this file that a page's table names -> the projects of the reports they hold.

    Every row names reports, and trials or why there is none.
    """
    trials: dict[str, set[str]] = {}
    for row in re.findall(r"^\| \[.*$", page, re.MULTILINE):
        reports, _, held = (cell.strip() for cell in row.strip("| ").split(" | "))
        projects = {re.sub(r"\W", "_", name.lower()) for name in re.findall(r"\[(.+?)#\d", reports)}
        assert projects, row
        assert "::test_" in held or held.startswith("not run: "), row
        for trial in re.findall(r"test_reports\.py::(\w+)", held):
            trials.setdefault(trial, set()).update(projects)
    return trials


def test_the_list_of_reports_names_these_trials() -> None:
    listed = listed_trials((HERE.parent / "docs" / "reports.md").read_text("utf-8"))
    own = set(re.findall(r"^def (test_\w+)", Path(__file__).read_text("utf-8"), re.MULTILINE))
    assert set(listed) == own - {"test_the_list_of_reports_names_these_trials"}
    for trial, projects in listed.items():
        assert any(trial.startswith(f"test_{project}_") for project in projects), trial


# ---- oracles ------------------------------------------------------------------------------------


def assert_equal(got: NDArray[Any], expected: NDArray[Any]) -> None:
    """ "Equal" on the CPU in float32: 1e-4 of the largest logit."""
    assert np.isfinite(got).all()
    assert np.abs(got - expected).max() <= 1e-4 * np.abs(expected).max()


def assert_oracle(branch: Branch, tokens: list[int], model: Any = T4) -> None:
    """The branch holds these tokens, and its logits are the float64 definition's."""
    assert branch.tokens.tolist() == tokens
    assert_equal(branch.logits, model.reference.logits(tokens))


def alone(tokens: list[int], model: Any = T4, **options: Any) -> NDArray[Any]:
    """Logits from a session that sees nothing else."""
    return open_session(model, n_threads=1, kv_bytes=16 << 20, **options).prefill(tokens).logits


# ---- sharing between wordings -------------------------------------------------------------------

HEADER = "<|im_start|>user\n"
FOOTER = "<|im_end|>\n<|im_start|>assistant\n"

# Two wordings of one question, and the same with one number or one word turned round.
REWORDINGS = [
    (f"{who} has {a} {what}s and buys {b} more. How many {what}s does {who} have now?",
     f"After buying {b} {what}s, {who}, who had {a} of them before, counts all {what}s. How many?")
    for who, what, a, b in [
        ("Anna", "apple", 12, 7), ("Ben", "book", 30, 4), ("Carl", "coin", 9, 15),
        ("Dora", "doll", 5, 6), ("Emil", "egg", 24, 12), ("Fay", "flower", 18, 3),
        ("Gus", "game", 11, 2), ("Hana", "hat", 7, 9), ("Ivo", "icon", 40, 13),
        ("Jan", "jar", 6, 17), ("Kim", "kite", 21, 8), ("Lea", "lamp", 3, 14),
        ("Max", "map", 16, 5), ("Nora", "nut", 50, 25), ("Otto", "orange", 10, 19),
        ("Pia", "pen", 33, 22), ("Quin", "quilt", 4, 27), ("Rosa", "rose", 28, 31),
        ("Sam", "shell", 45, 26), ("Tom", "toy", 13, 29),
    ]
]  # fmt: skip
CHANGED = [
    (a, a.replace(f" buys {n} ", f" buys {n + 1} "))
    for a, n in ((a, int(a.split(" buys ")[1].split()[0])) for a, _ in REWORDINGS)
]
REVERSED = [
    (f"The {thing} is {a}. Is the {thing} {a}?", f"The {thing} is {b}. Is the {thing} {a}?")
    for thing, a, b in [
        ("light", "on", "off"), ("door", "open", "closed"), ("glass", "full", "empty"),
        ("road", "wet", "dry"), ("answer", "right", "wrong"), ("shop", "near", "far"),
    ]
]  # fmt: skip


def questions() -> list[str]:
    """Forty questions that have nothing to do with each other."""
    path = Path(rksc.__file__).parent / "data" / "gsm8k_test_40.jsonl"
    return [json.loads(row)["question"] for row in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def calibrated(smollm2: rksc.Model) -> BranchSession:
    """A real model with ASKS at its defaults, centred on ten questions of their own."""
    session = smollm2.session(kv_bytes="64MiB", dtype="float32")
    prompts = [HEADER + q + FOOTER for q in questions()[30:]]
    session.asks = ASKS(center=session.layer_means(prompts))
    return session


def test_semantic_router_another_number_is_a_hit(
    calibrated: BranchSession, record_property: Callable[[str, object], None]
) -> None:
    """Every question with a changed number has the logits of its own prefill; rates of
    rewordings and one-word reversals are reported, not asserted (docs/method.md)."""
    accepted: dict[str, int] = {}
    gated = []
    for kind, pairs in (
        ("rewordings", REWORDINGS[:8]),
        ("changed", CHANGED),
        ("reversed", REVERSED),
    ):
        accepted[kind] = 0
        for a, b in pairs:
            root = calibrated.prefill(HEADER + a + FOOTER)
            other = calibrated.prefill(HEADER + b + FOOTER, similar_to=root)
            accepted[kind] += other.gate.accepted
            if kind == "changed":
                assert not same_numbers(a, b)
                assert other.gate.reason == "guard"
                assert not other.approximate
                assert np.array_equal(other.tokens, other.prompt)
                gated.append(other.logits)
    calibrated.invalidate()  # nothing is left of what the gate saw
    for (_, b), logits in zip(CHANGED, gated, strict=True):
        assert np.array_equal(logits, calibrated.prefill(HEADER + b + FOOTER).logits), b
    print(f"shared: {accepted}")
    record_property("shared", str(accepted))
    assert accepted["changed"] == 0


SIGNS = [
    ("How many integers lie in the interval [-5, 3]?",
     "Count the integers that lie in the interval [5, 3]."),
    ("The points are (3,-5) and (0,0). What is the slope of the line?",
     "Find the slope of the line through the points (3,5) and (0,0)."),
    ("A firm earns $5M a year. What does it earn in 3 years?",
     "What does a firm with earnings of $5B a year earn in 3 years?"),
    ("At \u20135 degrees, how far is it to 3 degrees?",
     "How far is it from 5 degrees to 3 degrees?"),
]  # fmt: skip


def test_semantic_router_a_lost_sign_is_a_hit(smollm2: rksc.Model) -> None:
    """The numbers that differ in a sign or scale alone are told apart, in a session with all
    defaults; without the guard hidden states take some of these pairs for rewordings."""
    session = smollm2.session(kv_bytes="64MiB", dtype="float32")
    ask = "\nThink step by step, then write the final answer.\n"
    base = ["Solve the inequality.", "A farmer has cows and hens.", "How do I boil an egg?",
            "Compute the integral of x squared.", "What is the capital of France?",
            "Name three colours of the rainbow."]  # fmt: skip
    center = session.layer_means([text + ask for text in base])
    accepted = 0
    for a, b in SIGNS:
        session.asks = ASKS(center=center)
        root = session.prefill(a + ask)
        other = session.prefill(b + ask, similar_to=root)
        assert other.gate.reason == "guard" and not other.approximate
        assert np.array_equal(other.tokens, other.prompt)
        session.asks = ASKS(center=center, guard=None)
        accepted += session.prefill(b + ask + "\n", similar_to=root).gate.accepted
    assert accepted > 0, "no pair was near enough to need a guard"


@pytest.mark.parametrize("shift", [1, 4, P, P + 3])
@pytest.mark.parametrize("tau", [-2.0, 2.0], ids=["accept", "reject"])
def test_memos_kv_moves_to_another_position(tau: float, shift: int, make_session: Factory) -> None:
    """The same 32 tokens after 5 and after 5 + shift others: each at its own angles."""
    x = T1.tokens(2 * P, seed=1)
    donor = T1.tokens(5, seed=2) + x
    recipient = T1.tokens(5 + shift, seed=3) + x
    session = make_session(T1)
    session.asks = ASKS(uncentered=True, guard=None, tau=tau, probe_layers=1)
    root = session.prefill(donor)
    exact = session.prefill(recipient)
    assert session.stats().tokens_reused == 0
    assert_oracle(exact, recipient, T1)
    shared = session.prefill(recipient + x, similar_to=root, suffix=[1, 2])
    assert shared.approximate == (tau < 0)
    # accepted: it stands on the root's KV, at the root's positions, and says so
    expected = donor if tau < 0 else recipient + x
    assert_oracle(shared, [*expected, 1, 2], T1)


def test_gptcache_unrelated_questions_hit(calibrated: BranchSession) -> None:
    """30 questions in one chat format, with and without the guard: nothing is shared by default;
    tau 1 lets only equal prompts through, more than 1 nothing else either."""
    default = calibrated.asks
    assert default is not None
    assert default.tau == 0.5
    prompts = [HEADER + q + FOOTER for q in questions()[:30]]
    root = calibrated.prefill(prompts[0])
    sigmas = []
    for guard in ("numbers", None):
        calibrated.asks = ASKS(center=default.center, guard=guard)
        for prompt in prompts[1:] if guard is None else prompts[1:6]:
            gate = calibrated.prefill(prompt, similar_to=root).gate
            assert not gate.accepted
            sigmas.append(gate.sigma)
    reworded = prompts[0].replace(" ", "  ", 1)
    for tau in (1.0, 1.5):
        calibrated.asks = ASKS(center=default.center, tau=tau)
        assert not calibrated.prefill(reworded, similar_to=root).gate.accepted
        assert calibrated.prefill(prompts[0], similar_to=root).gate.reason == "equal"
    calibrated.asks = default
    assert "larger* tau shares less" in (ASKS.__doc__ or "")
    print(f"largest sigma so far seen: {max(s for s in sigmas if s is not None):.2f}")


# ---- the index ----------------------------------------------------------------------------------


@pytest.mark.parametrize("hash_bits", [64, 0])
def test_openvino_genai_hashes_collide(hash_bits: int, make_session: Factory) -> None:
    """Equal second blocks after different first ones, look-alike tokens, every hash the same."""
    session = make_session(hash_bits=hash_bits)
    a, b, c = (T4.tokens(P, seed=seed) for seed in range(3))
    kept = [session.prefill(a + c)]
    for tokens, reused in (
        (b + c, 0),
        (a + c + b, 2 * P),
        (a + b, P),
        (c, 0),
        (a[:-1] + b + c, 0),
        ([1, 23] * (P // 2) + c, 0),
        ([12, 3] * (P // 2) + c, 0),
        ([1, 23] * (P // 2) + c + a, 2 * P),
    ):
        before = session.stats().tokens_reused
        kept.append(session.prefill(tokens))
        assert session.stats().tokens_reused - before == reused, tokens
        assert_oracle(kept[-1], tokens)
        assert np.array_equal(kept[-1].logits, alone(tokens))


def test_vllm_keys_of_two_models_collide(make_session: Factory) -> None:
    """Two models, and one model with two RoPE settings, side by side in a process."""
    slow = make("slow", 4, rope_theta=1e6)
    tokens = T4.tokens(3 * P)
    sessions = [make_session(T4), make_session(slow), make_session(T1)]
    branches = [session.prefill(tokens) for session in sessions]
    for branch, model in zip(branches, (T4, slow, T1), strict=True):
        assert_oracle(branch, tokens, model)
    assert [session.stats().tokens_reused for session in sessions] == [0, 0, 0]
    foreign = sessions[1]
    for call in (
        lambda: foreign.generate(branches[0], 1),
        lambda: foreign.verify([branches[0]], [1], 1, 2),
        lambda: foreign.score(branches[0], [[1]]),
        lambda: foreign.compute([branches[0]]),
    ):
        with pytest.raises(ValueError, match="session"):
            call()


# ---- counting blocks ----------------------------------------------------------------------------


def test_sglang_shared_blocks_count_twice(make_session: Factory) -> None:
    session = make_session(block_tokens=P, kv_bytes=64 * block_bytes(T4, P))
    root = session.prefill(T4.tokens(10 * P))
    kids = root.fork(16)
    session.compute(kids)
    assert session.stats().blocks_used == 10
    for token, kid in enumerate(kids):
        kid.extend([token])
    session.compute(kids)
    stats = session.stats()
    assert stats.blocks_used == 26
    assert stats.blocks_shared == 10
    assert stats.blocks_total == 64
    assert stats.block_bytes == block_bytes(T4, P)
    assert stats.bytes_used == 26 * block_bytes(T4, P)
    assert stats.bytes_used <= stats.bytes_total <= 64 * block_bytes(T4, P)
    for branch in (*kids, root):
        branch.drop()
        assert_books(session)
    assert session.stats().blocks_used == 0
    assert session.stats().blocks_free == 64


def test_sglang_half_blocks_count_twice(make_session: Factory) -> None:
    """Nine full blocks and one token: 9 shared, and 17 of their own (the parent has one too)."""
    session = make_session(block_tokens=P)
    root = session.prefill(T4.tokens(9 * P + 1))
    kids = root.fork(16)
    session.compute(kids)
    assert session.stats().blocks_used == 10
    for token, kid in enumerate(kids):
        kid.extend([token])
    session.compute(kids)
    stats = session.stats()
    assert (stats.blocks_used, stats.blocks_shared) == (26, 9)
    for token, kid in enumerate(kids):
        assert_oracle(kid, [*T4.tokens(9 * P + 1), token])
    del root, kids, kid
    assert session.stats().blocks_used == 0
    assert_books(session)


def test_vllm_recomputed_tokens_count_as_hits(make_session: Factory) -> None:
    """computed + reused is the prompt; what an eviction makes us compute again is no hit."""
    session = make_session(block_tokens=P, kv_bytes=6 * block_bytes(T4, P))
    first = session.prefill(T4.tokens(3 * P, seed=1))
    assert (session.stats().tokens_computed, session.stats().tokens_reused) == (3 * P, 0)
    session.prefill(T4.tokens(3 * P, seed=1) + [5] * P).drop()
    assert (session.stats().tokens_computed, session.stats().tokens_reused) == (4 * P, 3 * P)
    other = session.prefill(T4.tokens(6 * P, seed=2))
    assert not first.resident
    stats = session.stats()
    session.compute([first])
    after = session.stats()
    assert after.tokens_recomputed - stats.tokens_recomputed == 3 * P
    assert after.tokens_computed == stats.tokens_computed
    assert after.tokens_reused == stats.tokens_reused
    assert other.n_tokens == 6 * P


# ---- what lies in blocks ------------------------------------------------------------------------


@pytest.mark.parametrize("n", [P - 1, P, P + 1, 3 * P + 5])
def test_vllm_unwritten_places_are_read(n: int, isa: str, make_session: Factory) -> None:
    """Blocks are full of NaN before they are handed out, and of other texts before that."""
    tokens = T4.tokens(n)
    expected = alone(tokens, isa=isa)
    assert_equal(expected, T4.reference.logits(tokens))
    for history in range(3):
        session = make_session(isa=isa, kv_bytes=8 * block_bytes(T4))
        for seed in range(history):
            session.prefill(T4.tokens(7 * P - history, seed=50 + seed)).drop()
        branch = session.prefill(tokens)
        assert np.array_equal(branch.logits, expected)
        generation = session.generate(branch, P + 2, stop_ids=())[0]
        assert np.isfinite(generation.logprobs).all()
        assert np.array_equal(branch.logits, alone(branch.tokens.tolist(), isa=isa))


def test_llama_cpp_garbage_after_others_were_closed(make_session: Factory) -> None:
    session = make_session(kv_bytes=40 * block_bytes(T4))
    root = session.prefill(T4.tokens(2 * P + 3))
    kids = root.fork([T4.tokens(5 + i, seed=i) for i in range(8)])
    session.generate(kids, 6, stop_ids=())
    before = [kid.tokens.tolist() for kid in kids]
    for kid in kids[::2]:
        kid.drop()
    new = [session.prefill(T4.tokens(P + i, seed=90 + i)) for i in range(4)]
    generations = session.generate(kids[1::2], 20, stop_ids=())
    for kid, generation, tokens in zip(kids[1::2], generations, before[1::2], strict=True):
        whole = tokens + generation.tokens.tolist()
        assert kid.tokens.tolist() == whole
        assert np.array_equal(kid.logits, alone(whole))
        assert_equal(kid.logits, T4.reference.logits(whole))
    assert all(branch.resident for branch in new)


# ---- threads ------------------------------------------------------------------------------------

COUNT = "import rksc; print(rksc._core.default_threads())"


def run_python(code: str, **environment: str) -> Any:
    """What a fresh process prints, read as JSON."""
    known = {k: v for k, v in os.environ.items() if not k.endswith("_NUM_THREADS")}
    out = subprocess.run(
        [sys.executable, "-c", code], env=known | environment, check=True, timeout=120,
        capture_output=True, text=True, cwd=HERE.parent,
    )  # fmt: skip
    return json.loads(out.stdout)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no CPU affinity here")
def test_ollama_more_threads_than_allowed() -> None:
    allowed = len(os.sched_getaffinity(0))
    assert 1 <= run_python(COUNT) <= allowed
    one = f"import os; os.sched_setaffinity(0, {{{min(os.sched_getaffinity(0))}}}); {COUNT}"
    assert run_python(one) == 1
    assert run_python(COUNT, OMP_NUM_THREADS="1") == 1
    assert run_python(COUNT, RKSC_NUM_THREADS="1") == 1
    assert open_session("T1", n_threads=None).n_threads <= allowed
    assert open_session("T1", n_threads=3).n_threads == 3


BESIDE_TORCH = """
import json, os, sys
sys.path.insert(0, "tests")
{first}
import rksc
from support.models import T4
n_threads = lambda: len(os.listdir("/proc/self/task"))
session = rksc.BranchSession(T4.weights, T4.config, kv_bytes="1MiB", n_threads=3)
alone = session.prefill([1, 2, 3]).logits
maps = open("/proc/self/maps").read()
import torch
torch_threads = torch.get_num_threads()
square = torch.ones(300, 300)
product = square @ square
before = n_threads()
session.invalidate()
again = session.prefill([1, 2, 3]).logits
print(json.dumps({{
    "logits": [row.tobytes().hex() for row in (alone, again)], "product": product.mean().item(),
    "openmp": "libgomp" in maps or "libomp" in maps or "libiomp" in maps,
    "torch_threads": torch_threads, "added": n_threads() - before,
}}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_pytorch_two_openmp_runtimes() -> None:
    """rksc brings no OpenMP runtime, leaves torch's threads alone and adds none of its own
    while it runs beside them; the numbers are the same whichever came first."""
    pytest.importorskip("torch")
    own = run_python("import torch; print(torch.get_num_threads())", OMP_NUM_THREADS="2")
    rows = [
        run_python(BESIDE_TORCH.format(first=first), OMP_NUM_THREADS="2")
        for first in ("", "import torch; torch.ones(300, 300) @ torch.ones(300, 300)")
    ]
    assert [row["openmp"] for row in rows] == [False, True]  # the second one is torch's
    expected = alone([1, 2, 3]).tobytes().hex()
    for row in rows:
        assert row["logits"] == [expected] * 2
        assert row["product"] == 300
        assert row["torch_threads"] == own == 2
        assert row["added"] == 0


# ---- batches and forks --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_transformers_unequal_lengths_in_one_batch(
    dtype: str, isa: str, make_session: Factory
) -> None:
    """1, p and 3p + 1 tokens after three prefixes, one branch already ended, ten steps."""
    session = make_session(isa=isa, dtype=dtype)
    prefixes = [T4.tokens(n, seed=n) for n in (2, P, 2 * P + 5)]
    roots = [session.prefill(prefix) for prefix in prefixes]
    branches = [
        root.fork([T4.tokens(n, seed=7 + i)])[0]
        for i, (root, n) in enumerate(
            [(roots[0], 1), (roots[1], P), (roots[2], 3 * P + 1), (roots[1], 1), (roots[0], P)]
        )
    ]
    first = int(branches[3].logits.argmax())
    texts = [branch.tokens.tolist() for branch in branches]
    requests = [
        session.submit(branch, 10, stop_ids=[first] if branch is branches[3] else ())
        for branch in branches
    ]
    made: dict[int, list[int]] = {branch.id: [] for branch in branches}
    for _ in range(10 + 2):
        for token in session.step():
            assert np.isfinite([token.logprob, token.top_prob, token.entropy]).all()
            if token.token >= 0:
                made[token.branch.id].append(token.token)
    assert session.n_requests == 0
    assert branches[3].tokens.tolist() == texts[3]  # ended, frozen
    assert made[branches[3].id] == []
    for branch, text in zip(branches, texts, strict=True):
        if branch is branches[3]:
            continue
        own = open_session(isa=isa, dtype=dtype, n_threads=1)
        expected = own.generate(own.prefill(text), 10, stop_ids=())[0].tokens.tolist()
        assert made[branch.id] == expected
        assert branch.tokens.tolist() == text + expected
        assert np.array_equal(branch.logits, alone(text + expected, isa=isa, dtype=dtype))
    del requests


@pytest.mark.parametrize("model", [T4, NO_KEYS], ids=["T4", "no keys"])
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_vllm_writers_of_one_half_block(
    order: tuple[int, ...], model: Any, make_session: Factory
) -> None:
    """Child 1, the parent and child 2 write into the block that they share, in any order."""
    session = make_session(model)
    prefix = model.tokens(2 * P + 7)
    parent = session.prefill(prefix)
    kids = parent.fork(3)
    writers = [kids[0], parent, kids[1]]
    for which in order:
        tokens = model.tokens(4 + which, seed=70 + which)
        for i in (slice(0, 2), slice(2, None)):  # in two writes
            writers[which].extend(tokens[i])
            session.compute([writers[which]])
    for which, writer in enumerate(writers):
        assert_oracle(writer, prefix + model.tokens(4 + which, seed=70 + which), model)
    assert_oracle(kids[2], prefix, model)
    together = open_session(model)
    batch = together.prefill(prefix).fork([w.tokens[len(prefix) :] for w in writers])
    together.compute(batch)
    for a, b in zip(batch, writers, strict=True):
        assert np.array_equal(a.logits, b.logits)


def test_llamaj_cpp_a_part_of_a_sequence(make_session: Factory) -> None:
    """Only the beginning of a sequence goes on, at every offset within a block."""
    session = make_session()
    text = T4.tokens(3 * P)
    root = session.prefill(text)
    for at in range(1, 3 * P + 1):
        kid = root.fork([[at % 97, 7]], at=at)[0]
        assert_oracle(kid, [*text[:at], at % 97, 7])
    assert_oracle(root, text)


# ---- bad arguments ------------------------------------------------------------------------------

BAD_TOKENS: list[Any] = [
    [], [-1], [97], [2**31], [2**40], [2**80], [1.0], [1, 2.5], ["a"], [None], [[1, 2]], 5, None,
    np.array([1.5]), np.array([[1, 2]]), np.array([1, 200]), np.array([-1]), [True, "x"], b"\x01",
    np.array([2**40]), {1: 2}, object(),
]  # fmt: skip


@pytest.mark.parametrize("tokens", BAD_TOKENS, ids=repr)
def test_llama_cpp_bad_tokens(tokens: Any, make_session: Factory) -> None:
    session = make_session()
    root = session.prefill([1, 2, 3])
    before = session.stats()
    calls: list[Callable[[], object]] = [lambda: session.prefill(tokens)]
    if not (isinstance(tokens, list) and not tokens):  # an empty suffix is a fork
        calls += [
            lambda: root.fork([tokens]),
            lambda: root.fork([[1], tokens]),
            lambda: root.extend(tokens),
            lambda: session.score(root, [[1], tokens]),
            lambda: session.verify([root], tokens, 1, 2),
        ]
    for call in calls:
        with pytest.raises((ValueError, TypeError, OverflowError)):
            call()
        assert root.tokens.tolist() == [1, 2, 3]
        assert session.stats().branches == before.branches
        assert_books(session)
    assert_oracle(root, [1, 2, 3])


@pytest.mark.parametrize(
    "tokens",
    [
        [np.int64(5), np.int32(6), np.uint8(7)], np.array([5, 6, 7], np.uint8), (5, 6, 7),
        np.array([5, 6, 7], np.int64)[::1], np.array([7, 6, 5])[::-1], range(5, 8),
        np.array([5, 0, 6, 0, 7, 0], np.uint64)[::2], np.array([5, 6, 7], ">i4"),
    ],
    ids=repr,
)  # fmt: skip
def test_llama_cpp_all_kinds_of_integers(tokens: Any, make_session: Factory) -> None:
    assert make_session().prefill(tokens).tokens.tolist() == [5, 6, 7]


def test_llama_cpp_bad_counts(make_session: Factory) -> None:
    session = make_session()
    root = session.prefill(T4.tokens(20))
    bad: list[Callable[[], object]] = [
        lambda: root.fork(0),
        lambda: root.fork(-1),
        lambda: root.fork([]),
        lambda: root.fork(2**40),
        lambda: root.fork(1.5),  # type: ignore[arg-type]
        lambda: root.fork(1, at=0),
        lambda: root.fork(1, at=-1),
        lambda: root.fork(1, at=21),
        lambda: root.fork(1, at=2**40),
        lambda: session.generate(root, -1),
        lambda: session.generate(root, 2**40),
        lambda: session.generate(root, 1.5),  # type: ignore[arg-type]
        lambda: session.generate(root, 4, stop_ids=[97]),
        lambda: session.generate(root, 4, stop_ids=[-1]),
        lambda: session.generate([root, None], 4),  # type: ignore[list-item]
        lambda: session.verify([root], [1], 97, 1),
        lambda: session.verify([root], [1], 1, -1),
        lambda: session.score(root, [[]] * 0 + [[97]]),
        lambda: session.select([]),
        lambda: root.extend(T4.tokens(493)),
        lambda: root.fork([T4.tokens(493)]),
        lambda: session.prefill(T4.tokens(513)),
        lambda: session.verify([root], T4.tokens(493), 1, 2),
        lambda: session.score(root, [T4.tokens(494)]),
    ]
    for i, call in enumerate(bad):
        with pytest.raises((ValueError, TypeError, OverflowError)):
            call()
        assert root.tokens.tolist() == T4.tokens(20), i
        assert session.stats().branches == 1, i
        assert_books(session)
    assert len(session.generate(root, 4, stop_ids=())[0].tokens) == 4
    assert_oracle(root, root.tokens.tolist())


def test_llama_cpp_dropped_branches(make_session: Factory) -> None:
    session = make_session()
    root = session.prefill(T4.tokens(20))
    kid = root.fork()[0]
    root.drop()
    root.drop()
    assert root.dropped
    for call in (
        root.fork,
        lambda: root.extend([1]),
        lambda: root.logits,
        lambda: session.generate(root, 1),
        lambda: session.generate([kid, root], 1),
        lambda: session.verify([root], [1], 1, 2),
        lambda: session.score(root, [[1]]),
    ):
        with pytest.raises(RuntimeError, match="dropped"):
            call()
    assert_oracle(kid, T4.tokens(20))


# ---- import -------------------------------------------------------------------------------------


def test_llama_cpp_python_import_without_cuda() -> None:
    """No torch, no CUDA, none of the optional libraries; cuda is a clear error."""
    code = """
import sys
for name in ("torch", "transformers", "tokenizers", "jinja2", "cupy", "gguf", "safetensors",
             "matplotlib", "tqdm", "hypothesis"):
    sys.modules[name] = None
sys.path.insert(0, "tests")
import rksc
from support.models import T4
s = rksc.BranchSession(T4.weights, T4.config, kv_bytes="1MiB")
assert len(s.generate(s.prefill([1, 2, 3]), 4, stop_ids=())[0].tokens) == 4
try:
    rksc.BranchSession(T4.weights, T4.config, device="cuda")
except (ValueError, RuntimeError) as error:
    assert "cuda" in str(error).lower(), error
    print(1)
"""
    assert run_python(code) == 1


# ---- chunks and warmth --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("pieces", [[64], [1, 7, 16, 17, 23], [1] * 64], ids=["one", "5", "64"])
def test_llama_pieces_of_a_prompt(
    pieces: list[int], dtype: str, isa: str, make_session: Factory
) -> None:
    tokens, session, at = T4.tokens(64), make_session(isa=isa, dtype=dtype), pieces[0]
    branch = session.prefill(tokens[:at])
    for n in pieces[1:]:
        branch.extend(tokens[at : at + n])
        session.compute([branch])
        at += n
    assert np.array_equal(branch.logits, alone(tokens, isa=isa, dtype=dtype))
    if dtype == "float32":
        assert_oracle(branch, tokens)


def test_vllm_warm_runs_differ(make_session: Factory) -> None:
    """16 prompts, then again when the index knows them."""
    session = make_session(kv_bytes=8 << 20)
    base = T4.tokens(50)
    prompts = [base[: 10 + 2 * i] + T4.tokens(10 + i, seed=i) for i in range(16)]
    cold = [session.prefill(prompt).logits for prompt in prompts]
    reused = session.stats().tokens_reused
    warm = [session.prefill(prompt).logits for prompt in prompts]
    assert session.stats().tokens_reused > reused
    for a, b, prompt in zip(cold, warm, prompts, strict=True):
        assert np.array_equal(a, b)
        assert_equal(a, T4.reference.logits(prompt))


# ---- ends and beginnings ------------------------------------------------------------------------


@pytest.mark.parametrize("end", [2, 5, 9])
def test_vllm_one_of_several_end_tokens(end: int, make_session: Factory) -> None:
    """eos_token_id [2, 5, 9] in the configuration; the head is tilted towards one of them."""

    def tilt(weights: dict[str, Any]) -> None:
        weights["lm_head.weight"][[2, 5, 9]] = 0
        weights["lm_head.weight"][end] = weights["model.norm.weight"] * 0 + 9

    model = make("ends", 4, eos_token_id=[2, 5, 9]).changed("ends", tilt)
    session = make_session(model)
    assert session.config.eos == (2, 5, 9)
    ended = []
    for seed in range(12):
        branch = session.prefill(model.tokens(10, seed=seed))
        generation = session.generate(branch, 40)[0]
        assert not set(generation.tokens.tolist()) & {2, 5, 9}
        if generation.finish_reason == "eos":
            ended.append(generation.stop)
            if not len(generation.tokens):
                assert generation.confidence is not None
                assert 0 < generation.confidence <= 1
    assert end in ended


def test_llama_cpp_python_doubled_bos(make_session: Factory) -> None:
    session = make_session()
    assert session.config.bos == 1
    root = session.prefill([5, 6])
    assert root.tokens.tolist() == [5, 6]
    assert root.fork([[7]])[0].tokens.tolist() == [5, 6, 7]


# ---- seen elsewhere, one line each --------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 2, P, P + 1])
def test_vllm_windows_off_by_one(window: int, isa: str, make_session: Factory) -> None:
    """A window of n: the query itself and n - 1 keys before it, in one go and step by step."""
    model = make("window", 4, sliding_window=window, model_type="mistral",
                 architectures=["MistralForCausalLM"])  # fmt: skip
    session = make_session(model, isa=isa)
    tokens = model.tokens(2 * P + 5)
    branch = session.prefill(tokens)
    assert_oracle(branch, tokens, model)
    generated = session.generate(branch, P + 3, stop_ids=())[0].tokens.tolist()
    assert_oracle(branch, tokens + generated, model)


def test_transformers_large_hidden_states_overflow(isa: str, make_session: Factory) -> None:
    """The sum of squares of 4,096 values of 3e4 is beyond half precision and fits in float32."""

    def enlarge(weights: dict[str, Any]) -> None:
        weights["model.embed_tokens.weight"] *= np.float32(3e4)

    model = T4.changed("large", enlarge)
    tokens = model.tokens(20)
    for dtype in ("float32", "bfloat16"):
        logits = make_session(model, isa=isa, dtype=dtype).prefill(tokens).logits
        expected = (model if dtype == "float32" else model.rounded).reference.logits(tokens)
        limit = 1e-4 if dtype == "float32" else 2e-2
        assert np.abs(logits - expected).max() <= limit * np.abs(expected).max()


def test_llama_cpp_parallel_sequences(isa: str, make_session: Factory) -> None:
    """More than one sequence in a step: 33 of them, more rows than a chunk of attention has."""
    session = make_session(isa=isa, kv_bytes=16 << 20)
    root = session.prefill(T4.tokens(40))
    kids = root.fork([T4.tokens(1 + i % 7, seed=i) for i in range(33)])
    made = session.generate(kids, 5, Sampling(1.0, seed=2), stop_ids=())
    for kid, generation in zip(kids[::4], made[::4], strict=True):
        whole = kid.tokens.tolist()
        rows = T4.reference.score(
            whole[: -len(generation.tokens)], whole[-len(generation.tokens) :]
        )
        assert np.abs(rows - generation.logprobs).max() < 1e-4
