"""The definition: a Llama-family forward pass in plain float64 NumPy.

No cache, no batch, no blocks; one sequence from position 0. Everything that rksc computes in
float32 is compared with this, and this is compared with transformers (test_transformers.py).

    h = embedding[tokens]
    for each layer:
        a = rms_norm(h, attention_norm)
        q, k, v = a Wq' + bq, a Wk' + bk, a Wv' + bv          heads of head_dim
        q, k = rotate(q), rotate(k)                           RoPE at absolute positions
        h += softmax(q k' / sqrt(head_dim) + mask) v Wo'      a kv head serves n_heads / n_kv_heads
        b = rms_norm(h, ffn_norm)
        h += (silu(b Wg') * (b Wu')) Wd'
    logits = rms_norm(h, norm) head'
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rksc.model.config import ModelConfig

Array = NDArray[np.float64]


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis."""
    out: Array = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight
    return out


def softmax(x: Array) -> Array:
    """Over the last axis; -inf has no share."""
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    out: Array = e / e.sum(axis=-1, keepdims=True)
    return out


def log_softmax(x: Array) -> Array:
    x = np.asarray(x, np.float64)
    x = x - x.max(axis=-1, keepdims=True)
    out: Array = x - np.log(np.exp(x).sum(axis=-1, keepdims=True))
    return out


def silu(x: Array) -> Array:
    out: Array = x / (1 + np.exp(-x))
    return out


def rotate(x: Array, positions: Array, inv_freq: Array, interleaved: bool) -> Array:
    """RoPE. x: (n, heads, head_dim). Pairs are (i, i + head_dim / 2), or (2i, 2i + 1)."""
    angles = (positions[:, None] * inv_freq)[:, None, :]
    cos, sin = np.cos(angles), np.sin(angles)
    out = np.empty_like(x)
    half = x.shape[-1] // 2
    first, second = (
        (slice(0, None, 2), slice(1, None, 2)) if interleaved else (slice(half), slice(half, None))
    )
    a, b = x[..., first], x[..., second]
    out[..., first] = a * cos - b * sin
    out[..., second] = b * cos + a * sin
    return out


def philox(seed: int, stream: int, position: int) -> float:
    """Philox4x32-10, from its definition."""
    low = 0xFFFFFFFF
    x = [position & low, position >> 32 & low, stream & low, stream >> 32]
    k = [seed & low, seed >> 32]
    for _ in range(10):
        a, b = 0xD2511F53 * x[0], 0xCD9E8D57 * x[2]
        x = [(b >> 32) ^ x[1] ^ k[0], b & low, (a >> 32) ^ x[3] ^ k[1], a & low]
        k = [(k[0] + 0x9E3779B9) & low, (k[1] + 0xBB67AE85) & low]
    return ((x[1] << 32 | x[0]) >> 11) * 2.0**-53


def visible(n: int, window: int) -> NDArray[np.bool_]:
    """(n, n): may query i use key j? j <= i, and i - j < window where there is one."""
    i, j = np.arange(n)[:, None], np.arange(n)[None, :]
    seen: NDArray[np.bool_] = j <= i
    return seen & (i - j < window) if window else seen


@dataclass(frozen=True, eq=False)
class Forward:
    """hidden: (layers, n, width), the residual stream after each layer; logits: (n, vocab)."""

    hidden: Array
    logits: Array


class Reference:
    """Weights by Hugging Face name (any float arrays) and their ModelConfig."""

    def __init__(self, weights: Mapping[str, Any], config: ModelConfig) -> None:
        self.weights = {name: np.asarray(w, np.float64) for name, w in weights.items()}
        self.config = config
        self._known: dict[tuple[int, ...], Forward] = {}

    @property
    def head(self) -> Array:
        """(vocab, width)"""
        tied = self.config.tied
        return self.weights["model.embed_tokens.weight" if tied else "lm_head.weight"]

    def linear(self, x: Array, name: str) -> Array:
        """x W' + bias, where there is one."""
        out: Array = x @ self.weights[name + ".weight"].T
        bias = self.weights.get(name + ".bias")
        return out if bias is None else out + bias

    def norm(self, x: Array, name: str) -> Array:
        return rms_norm(x, self.weights[name + ".weight"], self.config.norm_eps)

    def attention(self, a: Array, layer: int) -> Array:
        c, name = self.config, f"model.layers.{layer}.self_attn."
        n = len(a)
        q, k, v = (
            self.linear(a, f"{name}{which}_proj").reshape(n, heads, c.head_dim)
            for which, heads in (("q", c.n_heads), ("k", c.n_kv_heads), ("v", c.n_kv_heads))
        )
        positions, inv_freq = np.arange(n, dtype=np.float64), np.array(c.inv_freq)
        q = rotate(q, positions, inv_freq, c.rope_interleaved)
        k = rotate(k, positions, inv_freq, c.rope_interleaved)
        group = c.n_heads // c.n_kv_heads
        k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
        scores = np.einsum("ihd,jhd->hij", q, k) / np.sqrt(c.head_dim)
        mask = visible(n, c.window if layer >= c.window_from else 0)
        weights = softmax(np.where(mask, scores, -np.inf))
        out = np.einsum("hij,jhd->ihd", weights, v).reshape(n, -1)
        return self.linear(out, name + "o_proj")

    def forward(self, tokens: Sequence[int] | NDArray[Any]) -> Forward:
        """The whole pass; one text's result is remembered."""
        key = tuple(int(t) for t in tokens)
        if key not in self._known:
            self._known = {key: self._forward(np.array(key))}
        return self._known[key]

    def _forward(self, tokens: NDArray[np.int64]) -> Forward:
        h = self.weights["model.embed_tokens.weight"][tokens]
        hidden = []
        for layer in range(self.config.n_layers):
            name = f"model.layers.{layer}."
            h = h + self.attention(self.norm(h, name + "input_layernorm"), layer)
            b = self.norm(h, name + "post_attention_layernorm")
            gate, up = self.linear(b, name + "mlp.gate_proj"), self.linear(b, name + "mlp.up_proj")
            h = h + self.linear(silu(gate) * up, name + "mlp.down_proj")
            hidden.append(h)
        return Forward(np.array(hidden), self.lens(h))

    def lens(self, h: Array, norm: bool = True) -> Array:
        """Logits from a residual stream (..., width): the head's, or an early lens'."""
        out: Array = (self.norm(h, "model.norm") if norm else h) @ self.head.T
        return out

    def logits(self, tokens: Sequence[int] | NDArray[Any]) -> Array:
        """(vocab,): the next token's."""
        out: Array = self.forward(tokens).logits[-1]
        return out

    def hidden(self, tokens: Sequence[int] | NDArray[Any]) -> Array:
        """(layers, width): the last token's."""
        out: Array = self.forward(tokens).hidden[:, -1]
        return out

    def score(self, tokens: Sequence[int], continuation: Sequence[int]) -> Array:
        """Natural log-probabilities of the continuation's tokens, teacher-forced."""
        whole = np.concatenate([np.asarray(tokens), np.asarray(continuation)]).astype(int)
        rows = log_softmax(self.forward(whole[:-1]).logits[len(tokens) - 1 :])
        out: Array = rows[np.arange(len(rows)), whole[len(tokens) :]]
        return out

    def greedy(self, tokens: Sequence[int], n: int) -> tuple[list[int], list[float]]:
        """n greedy tokens (the lowest id on a tie) and the gap to the second best at each."""
        whole, gaps = [int(t) for t in tokens], []
        for _ in range(n):
            logits = self.logits(whole)
            second, first = np.sort(logits)[-2:]
            gaps.append(float(first - second))
            whole.append(int(np.argmax(logits)))
        return whole[len(tokens) :], gaps

    def answer(self, tokens: Sequence[int], yes: int, no: int) -> tuple[float, float]:
        """p(yes) / (p(yes) + p(no)) and p(yes) + p(no) of the next token."""
        p = softmax(self.logits(tokens))
        return float(p[yes] / (p[yes] + p[no])), float(p[yes] + p[no])
