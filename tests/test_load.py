"""Loaded models compute what transformers computes, whatever file they came from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support import model_files
from support.model_files import TINY

import rksc

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
QWEN2 = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
MISTRAL = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
WINDOWED = {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 2}

VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama3 scaling": {"rope_scaling": LLAMA3},
    "llama3 scaling, old spelling": {
        "rope_scaling": {"type": "llama3"} | {k: v for k, v in LLAMA3.items() if k != "rope_type"}
    },
    "linear scaling": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "other head_dim": {"hidden_size": 96, "num_attention_heads": 6, "head_dim": 24},
    "biases": {"attention_bias": True},
    "tied": {"tie_word_embeddings": True},
    "one KV head": {"num_key_value_heads": 1},
    "mistral": MISTRAL | {"sliding_window": 32},
    "mistral without a window": MISTRAL | {"sliding_window": None},
    "qwen2": QWEN2,
    "qwen2 with a window": QWEN2 | WINDOWED,
}
TOKENS = [int(i) for i in np.random.default_rng(0).integers(0, 97, 150)]  # beyond every window


def logits(path: Path, **options: Any) -> NDArray[np.float32]:
    """The next token's logits after TOKENS, in float32."""
    session = rksc.load(path, tokenizer=False).session(dtype="float32", n_threads=1, **options)
    return np.asarray(session.prefill(TOKENS).logits)


def close(a: NDArray[np.float32], b: NDArray[np.float32]) -> bool:
    return bool(np.abs(a - b).max() <= 1e-5 * np.abs(b).max())


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_as_transformers(tmp_path: Path, name: str) -> None:
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    config = TINY | VARIANTS[name]
    weights = model_files.random_weights(config)
    model_files.write_hf(tmp_path / "hf", weights, config)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        expected = model(torch.tensor([TOKENS])).logits[0, -1].numpy()
    assert close(logits(tmp_path / "hf"), expected)
    if "use_sliding_window" not in config:  # no GGUF key says where windows begin
        model_files.write_gguf(tmp_path / "x.gguf", weights, config)
        assert close(logits(tmp_path / "x.gguf"), expected)


@pytest.mark.parametrize("type", model_files.ENCODINGS)
def test_quantised_files_compute_with_their_values(tmp_path: Path, type: str) -> None:
    """As a folder of the dequantised values does, in float32."""
    config = TINY | {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
    weights = model_files.random_weights(config)
    seen = model_files.write_gguf(tmp_path / "x.gguf", weights, config, type)
    model_files.write_hf(tmp_path / "hf", seen, config)
    assert close(logits(tmp_path / "x.gguf"), logits(tmp_path / "hf"))


def test_lent_weights_are_the_same_model(tmp_path: Path) -> None:
    """A running transformers model lends its tensors; loading the folder gives the same."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    for name in ("llama", "tied", "qwen2"):
        config = TINY | VARIANTS[name]
        folder = tmp_path / name
        model_files.write_hf(folder, model_files.random_weights(config), config)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        session = rksc.BranchSession(
            model.state_dict(), model.config, dtype="float32", n_threads=1, tokenizer=None
        )
        assert close(np.asarray(session.prefill(TOKENS).logits), logits(folder))
