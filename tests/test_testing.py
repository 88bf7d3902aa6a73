"""rksc.testing's assertions, and the pytest plugin in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.letters import Letters
from support.models import T4

from rksc import ASKS, BranchSession, Generation, Sampling, solve
from rksc.testing import assert_answer, assert_confidence, assert_fidelity, fidelity, normalised

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def session(make_session: Callable[..., BranchSession]) -> BranchSession:
    return make_session("T4", tokenizer=Letters(chat=True), cgee=None)


def generation(session: BranchSession) -> Generation:
    return session.generate(session.prefill("abc"), 6, stop_ids=())[0]


def test_answers(session: BranchSession) -> None:
    assert_answer("It is  PARIS.", "paris")
    assert_answer("12", ["13", "12"])
    with pytest.raises(AssertionError, match="answer 'It is Rome', expected 'Paris' or 'Lyon'"):
        assert_answer("It is Rome", ["Paris", "Lyon"])
    with pytest.raises(ValueError, match="expected must be non-empty"):
        assert_answer("It is Rome", "")
    with pytest.raises(ValueError, match="expected must be non-empty"):
        assert_answer("It is Rome", ["Rome", " . "])
    with pytest.raises(ValueError, match="expected must be non-empty"):
        assert_answer("It is Rome", [])
    made = generation(session)
    assert made.text
    assert_answer(made, made.text.upper())
    solution = solve(session, "th 3", 2, max_new_tokens=8, sampling=Sampling(seed=1))
    assert_answer(solution, solution.answer)
    with pytest.raises(AssertionError, match=r"expected .no such.*\n.*th 3"):
        assert_answer(solution, "no such")
    with pytest.raises(AssertionError):
        assert_answer(solution, solution.answer[:-1] + "~")


@pytest.mark.parametrize(
    "text, inside, outside",
    [
        ("The answer is 12", ["12", "answer is 12"], ["2", "1", "answer is 1", "ans"]),
        ("It is 2.5, or -3.", ["2.5", "-3"], ["2", "5", "3", "-2.5"]),
        ("12,200 in 1990-1995", ["12,200", "1990", "1995"], ["12", "200", "90"]),
        ("x=.5;y=7%", ["y=7", "7", ".5"], ["5"]),
        ("(Paris), the parish of Île-de-France", ["paris", "(paris)", "France"], ["pari", "le"]),
        ("答案是巴黎。", ["巴黎"], ["里昂"]),
        ("It costs US$12.", ["12", "US$12"], ["2", "us12"]),
        ("costs 10€ 20", ["10", "20", "10€"], ["1020", "1", "0"]),
        ("costs 10 €20 or 5,$30", ["10", "20", "30"], ["1020", "530", "5.30"]),
        ("costs 10 €", ["10", "10 €"], ["1"]),
    ],
)
def test_words_and_numbers_are_whole(text: str, inside: list[str], outside: list[str]) -> None:
    for expected in inside:
        assert_answer(text, expected)
    for expected in outside:
        with pytest.raises(AssertionError):
            assert_answer(text, expected)


@pytest.mark.parametrize(
    "one, other",
    [
        ("1,234", "1234"),
        ("$12.00", "12"),
        ("\u20ac 1,234,567.50", "1234567.5"),
        ("7.0", "7"),
        ("€10", "10"),
    ],
)
def test_numbers_are_compared_however_they_are_written(one: str, other: str) -> None:
    for text, expected in ((one, other), (other, one)):
        assert_answer(f"It costs {text}.", expected)
        assert_answer(f"({text})", f" {expected} ")
    with pytest.raises(AssertionError):
        assert_answer(f"It costs {one}5", other)


@pytest.mark.parametrize("text", ["1.2.30", "12,34", "1,2345", "12:00", "1.05", "100"])
def test_what_is_no_plain_number_stays(text: str) -> None:
    assert normalised(text) == text


def test_confidences(session: BranchSession) -> None:
    made = generation(session)
    assert made.confidence is not None
    assert_confidence(made, made.confidence)
    with pytest.raises(AssertionError, match=f"{made.confidence:.3f}; expected at least 1"):
        assert_confidence([made, made], 1)
    other = session.generate(session.prefill("12 th"), 6, stop_ids=())[0]
    assert other.confidence is not None
    between = (made.confidence + other.confidence) / 2
    assert_confidence([made, other], between, best=True)
    with pytest.raises(AssertionError):
        assert_confidence([made, other], between)
    with pytest.raises(ValueError, match="results"):
        assert_confidence([], 0.5)


def test_fidelity_is_kl_over_the_continuation(session: BranchSession) -> None:
    own, other, tail = T4.tokens(30), T4.tokens(30, seed=1), T4.tokens(7, seed=2)
    found = fidelity(session.prefill(other), session.prefill(own), tail)
    rows = []
    for tokens in (own, other):
        x = T4.reference.forward([*tokens, *tail]).logits[29:-1].astype(np.float64)
        rows.append(
            x
            - np.log(np.exp(x - x.max(1, keepdims=True)).sum(1, keepdims=True))
            - x.max(1, keepdims=True)
        )
    kl = (np.exp(rows[0]) * (rows[0] - rows[1])).sum(1)
    assert found.n == 7
    assert found.kl == pytest.approx(kl.mean(), rel=1e-3)
    assert found.worst_kl == pytest.approx(kl.max(), rel=1e-3)
    assert found.agreement == (rows[0].argmax(1) == rows[1].argmax(1)).mean()
    with pytest.raises(ValueError, match="continuation"):
        fidelity(session.prefill(own), session.prefill(own), [])
    text = fidelity(session.prefill(other), session.prefill(own), "th 3")
    ids = session.encode("th 3")
    assert text == fidelity(session.prefill(other), session.prefill(own), ids)


def test_shared_kv_is_less_faithful_than_own(session: BranchSession) -> None:
    root = session.prefill(T4.tokens(40))
    session.asks = ASKS.paper(tau=-1)
    shared = session.prefill(T4.tokens(40, seed=1), similar_to=root, suffix=[5, 6])
    own = session.prefill([*T4.tokens(40, seed=1), 5, 6])
    assert shared.approximate
    tail = T4.tokens(8, seed=3)
    assert assert_fidelity(own, own, tail).kl == pytest.approx(0, abs=1e-9)
    with pytest.raises(AssertionError, match=r"mean KL .* nats"):
        assert_fidelity(shared, own, tail)


TESTS = """
from rksc.testing import assert_answer

def test_right(branch_session):
    root = branch_session.prefill("The capital of France is")
    assert_answer(branch_session.generate(root.fork(1), 4)[0], "Paris")

def test_wrong(branch_session):
    root = branch_session.prefill("The capital of France is")
    assert_answer(branch_session.generate(root.fork(1), 4)[0], "Rome")

def test_settings_are_put_back(branch_session):
    assert branch_session.cgee is not None
    branch_session.cgee = None

def test_settings_were_put_back(branch_session):
    assert branch_session.cgee is not None
"""

UNUSED = """
import sys

def test_nothing_was_imported():
    assert not {name for name in sys.modules if name.split(".")[0] in ("rksc", "numpy")}
"""


def run(folder: Path, text: str, *arguments: str) -> str:
    (folder / "test_prompts.py").write_text(text)
    environment = os.environ | {
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": "",
    }  # fmt: skip
    command = [sys.executable, "-m", "pytest", "-q", "-p", "pytest_rksc", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *arguments, "test_prompts.py"], cwd=folder, env=environment,
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    return done.stdout + done.stderr


def test_plugin(tmp_path: Path, smollm2: object) -> None:
    said = run(tmp_path, TESTS, "--rksc-model", str(getattr(smollm2, "path", "")))
    assert "1 failed, 3 passed" in said, said
    assert "expected 'Rome'" in said
    assert "rksc/testing.py" not in said  # the failure is the test's own line
    assert len(said.splitlines()) < 25, said


def test_plugin_without_a_model_skips(tmp_path: Path) -> None:
    assert "4 skipped" in run(tmp_path, TESTS)


def test_plugin_imports_nothing_before_it_is_used(tmp_path: Path) -> None:
    said = run(tmp_path, UNUSED)
    assert "1 passed" in said, said
