"""pytest plugin: prompts under test. `pytest --rksc-model PATH`, or `rksc_model` in the ini file.

    def test_capital(branch_session):
        root = branch_session.prefill("The capital of France is")
        assert_answer(branch_session.generate(root, 4)[0], "Paris")

`rksc.testing` has the assertions. Nothing of rksc is imported before a test asks for a fixture.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from rksc import BranchSession, Model


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("rksc", "language models on rksc")
    group.addoption("--rksc-model", metavar="PATH", help="a Hugging Face folder or a GGUF file")
    group.addoption("--rksc-dtype", help="float32 or bfloat16 (default: the weights')")
    group.addoption("--rksc-kv", metavar="BYTES", default="1GiB", help="budget of KV")
    parser.addini("rksc_model", "model of the rksc fixtures, where --rksc-model is not given")


@pytest.fixture(scope="session")
def rksc_model(request: pytest.FixtureRequest) -> Model:
    """The `rksc.Model` of --rksc-model; without one the test is skipped."""
    path = request.config.getoption("--rksc-model") or request.config.getini("rksc_model")
    if not path:
        pytest.skip("no model: pytest --rksc-model PATH")
    import rksc

    return rksc.load(path)


@pytest.fixture(scope="session")
def _rksc_session(rksc_model: Model, request: pytest.FixtureRequest) -> BranchSession:
    return rksc_model.session(
        dtype=request.config.getoption("--rksc-dtype"),
        kv_bytes=request.config.getoption("--rksc-kv"),
    )


@pytest.fixture
def branch_session(_rksc_session: BranchSession) -> Iterator[BranchSession]:
    """A `rksc.BranchSession` on the model. All tests use the same one, so that prompts which
    begin alike are computed once (results do not depend on that); its settings asks and cgee
    are put back after each test."""
    asks, cgee = _rksc_session.asks, _rksc_session.cgee
    yield _rksc_session
    _rksc_session.asks, _rksc_session.cgee = asks, cgee
