"""transformers as the oracle of the oracle: its own classes against reference.py and the engine.

Needs torch and transformers, so these tests are a tier of their own (`pytest -m oracle`); models
are made in memory, nothing is downloaded.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conftest import Factory
from numpy.typing import NDArray
from support.models import ARCHITECTURES, Small

import rksc

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from support.as_transformers import as_transformers  # noqa: E402

pytestmark = pytest.mark.oracle
MODELS = [m for m in ARCHITECTURES if m.parsed is None]
each = pytest.mark.parametrize("model", MODELS, ids=[m.name for m in MODELS])


def run(model: Any, tokens: list[int]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Logits (n, vocab) and hidden states (layers, n, width); of the last layer after the norm."""
    with torch.no_grad():
        out = model(torch.tensor([tokens]), output_hidden_states=True)
    hidden = torch.stack(out.hidden_states[1:])[:, 0]
    return out.logits[0].float().numpy(), hidden.float().numpy()


def error(got: NDArray[Any], expected: NDArray[Any]) -> float:
    return float(np.abs(got - expected).max() / np.abs(expected).max())


@each
def test_the_definition(model: Small) -> None:
    """reference.py in float64 is transformers' forward pass, layer by layer."""
    tokens = model.tokens(130)
    logits, hidden = run(as_transformers(model, torch.float64), tokens)
    forward = model.reference.forward(tokens)
    assert error(forward.logits, logits) < 2e-6
    for layer in range(model.model_config.n_layers - 1):
        assert error(forward.hidden[layer], hidden[layer]) < 2e-6
    normed = model.reference.norm(forward.hidden[-1], "model.norm")
    assert error(normed, hidden[-1]) < 2e-6


@each
def test_lent_weights(model: Small, isa: str, make_session: Factory) -> None:
    """A running model lends its tensors: used in place, same logits."""
    lender = as_transformers(model)
    tokens = model.tokens(130)
    logits, _ = run(lender, tokens)
    session = rksc.BranchSession(
        lender.state_dict(), lender.config, kv_bytes="4MiB", n_threads=2, isa=isa, dtype="float32"
    )
    assert session.copied_bytes <= 64 * 1024  # vectors at most
    branch = session.prefill(tokens)
    assert error(branch.logits, logits[-1]) < 1e-4
    assert error(branch.fork(at=63)[0].logits, logits[62]) < 1e-4


@each
def test_lent_bfloat16(model: Small) -> None:
    """bf16 weights are used in place and choose bf16; logits to its rounding."""
    lender = as_transformers(model, torch.bfloat16)
    tokens = model.tokens(130)
    logits, _ = run(as_transformers(model.rounded), tokens)
    session = rksc.BranchSession(lender.state_dict(), lender.config, kv_bytes="4MiB", n_threads=2)
    assert session.dtype == "bfloat16"
    # norms and biases are float32 inside; matrices are not copied
    assert session.copied_bytes <= 64 * 1024
    assert error(session.prefill(tokens).logits, logits[-1]) < 2e-2


def test_training_in_place(make_session: Factory) -> None:
    """An optimiser's step on the lent tensors shows after invalidate()."""
    model = MODELS[0]
    lender = as_transformers(model)
    tokens = model.tokens(50)
    session = rksc.BranchSession(lender.state_dict(), lender.config, kv_bytes="4MiB", n_threads=2)
    branch = session.prefill(tokens)
    before = branch.logits
    with torch.no_grad():
        for parameter in lender.parameters():
            parameter.mul_(1.01)
    session.invalidate()
    logits, _ = run(lender, tokens)
    assert error(branch.logits, logits[-1]) < 1e-4
    assert error(before, logits[-1]) > 1e-3


def test_real_weights(smollm2: rksc.Model) -> None:
    """SmolLM2-135M from its GGUF, loaded by both: logits over a real text."""
    path = smollm2.path
    assert path is not None
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    session = smollm2.session(dtype="float32", kv_bytes="64MiB")
    text = (
        "Jorge and Giuliana each eat 7 croissants for breakfast, 18 cakes after school, and 30 "
        "pizzas before bedtime. What is the total number of them that the two consume in a day?"
    )
    branch = session.prefill(text)
    tokens = branch.tokens.tolist()
    logits, _ = run(theirs, tokens)
    for n in range(1, len(tokens) + 1, 5):
        assert error(branch.fork(at=n)[0].logits, logits[n - 1]) < 1e-4
    generated = session.generate(branch, 24, stop_ids=())[0].tokens.tolist()
    rows = run(theirs, tokens + generated[:-1])[0][len(tokens) - 1 :]
    sure = np.diff(np.sort(rows)[:, -2:])[:, 0] > 1e-3
    assert np.array_equal(rows.argmax(1)[sure], np.array(generated)[sure])
