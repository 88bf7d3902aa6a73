"""Small random models with fixed seeds: float32 arrays by Hugging Face name, and a config.json.

T1 and T4 are the fixtures of most tests; ARCHITECTURES has one model for each way in which a
supported architecture computes differently. Nothing here is written to disk.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from rksc.model.config import ModelConfig
from support.model_files import TINY, Weights, encode, random_weights
from support.reference import Reference


@dataclass(frozen=True, eq=False)
class Small:
    """A model of a few kilobytes. `config` is a config.json's dict."""

    name: str
    config: Mapping[str, Any]
    weights: Weights = field(repr=False)
    parsed: ModelConfig | None = field(default=None, repr=False)

    @cached_property
    def model_config(self) -> ModelConfig:
        return self.parsed or ModelConfig.of(self.config)

    @cached_property
    def reference(self) -> Reference:
        return Reference(self.weights, self.model_config)

    @property
    def vocab(self) -> int:
        return self.model_config.vocab_size

    def tokens(self, n: int, seed: int = 0) -> list[int]:
        """n random tokens; another seed, another text."""
        rng = np.random.default_rng([seed, n, 20260])
        return [int(t) for t in rng.integers(0, self.vocab, n)]

    @cached_property
    def rounded(self) -> Small:
        """The model that a bf16 session computes: its matrices rounded to bfloat16."""

        def bf16(weights: Weights) -> None:
            for key, w in weights.items():
                if w.ndim == 2:
                    weights[key] = encode(w, "BF16")[1]

        return self.changed(f"{self.name}-bf16", bf16)

    def changed(self, name: str, change: Callable[[Weights], None]) -> Small:
        """A copy whose weights `change` has edited in place."""
        weights = {key: array.copy() for key, array in self.weights.items()}
        change(weights)
        return replace(self, name=name, weights=weights)


def make(name: str, seed: int = 0, **changes: Any) -> Small:
    """A random model of TINY's configuration with these changes."""
    config = {**TINY, **changes}
    return Small(name, config, random_weights(config, seed))


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_MISTRAL = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
_QWEN2 = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "head_dim": None}

T1 = make("T1", seed=1, num_hidden_layers=1)
T4 = make("T4", seed=4)


def interleaved(model: Small) -> Small:
    """The same function with q and k rows in pairs, as llama-architecture GGUF files have them."""
    config = model.model_config

    def pairs(weights: Weights) -> None:
        for name, w in weights.items():
            if ".q_proj." in name or ".k_proj." in name:
                heads = w.reshape(-1, 2, config.head_dim // 2, *w.shape[1:])
                weights[name] = np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(w.shape)

    return replace(
        model.changed("interleaved", pairs), parsed=replace(config, rope_interleaved=True)
    )


ARCHITECTURES = (
    T4,
    make("llama2", 11, num_key_value_heads=4, head_dim=None, rms_norm_eps=1e-6),
    make("smollm2", 12, hidden_size=72, num_attention_heads=9, num_key_value_heads=3, head_dim=8,
         rope_theta=1e5, tie_word_embeddings=True),
    make("llama3", 13, rope_theta=5e5, rope_scaling=LLAMA3),
    make("llama3-tied", 14, rope_scaling=LLAMA3, tie_word_embeddings=True),
    make("linear-rope", 15, rope_scaling={"rope_type": "linear", "factor": 4.0}),
    make("attention-bias", 16, attention_bias=True),
    make("falcon3", 17, hidden_size=96, num_attention_heads=3, num_key_value_heads=1, head_dim=32,
         rope_theta=1000042.0, rms_norm_eps=1e-6),
    make("explicit-head-dim", 18, num_attention_heads=6, num_key_value_heads=2, head_dim=16),
    make("mistral-window", 19, sliding_window=24, **_MISTRAL),
    make("mistral-no-window", 20, sliding_window=None, **_MISTRAL),
    make("qwen2", 21, rms_norm_eps=1e-6, rope_theta=1e6, **_QWEN2),
    make("qwen2-tied-window", 22, tie_word_embeddings=True, use_sliding_window=True,
         sliding_window=24, max_window_layers=2, **_QWEN2),
    interleaved(T4),
)  # fmt: skip


# ---- models with one property that a test needs -------------------------------------------


def _grow(weights: Weights) -> None:
    for name, w in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name] = w * np.float32(10.0 ** (int(name.split(".")[2]) + 1))


def _no_keys(weights: Weights) -> None:
    for name, w in weights.items():
        if ".k_proj." in name:
            w[:] = 0


def _twins(weights: Weights) -> None:
    head = weights["lm_head.weight"]
    head[48:96] = head[:48]
    head[96] = head[0]


def _sharp(weights: Weights) -> None:
    weights["lm_head.weight"] *= np.float32(8)


def _keen(weights: Weights) -> None:
    weights["lm_head.weight"] *= np.float32(2)


GROWING = T4.changed("growing", _grow)
"""The residual stream grows tenfold from layer to layer: an early lens needs its own RMS."""
NO_KEYS = T4.changed("no-keys", _no_keys)
"""W_k = 0: attention is uniform, so that every wrong or missing V shows."""
TWINS = T4.changed("twins", _twins)
"""Token i and i + 48 have equal head rows (0, 48 and 96 too): every argmax is a tie."""
KEEN = T4.changed("keen", _keen)
"""Logits twice as large: a few tokens are much likelier than the rest."""
SHARP = T4.changed("sharp", _sharp)
"""Logits eight times as large: confidences well above 1 / vocabulary."""

WIDE = make("wide", 30, hidden_size=256, intermediate_size=512, num_attention_heads=8, head_dim=32)
"""Hidden 256: rows of whole K-quant blocks, and more than one step of every inner loop."""

ALL = {m.name: m for m in (T1, *ARCHITECTURES, GROWING, NO_KEYS, TWINS, KEEN, SHARP, WIDE)}
