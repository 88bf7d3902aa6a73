"""Small valid models of every kind that rksc reads, for the loaders' fuzzer to damage."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from support import model_files

Files = dict[str, bytes]

SMALL: dict[str, Any] = model_files.TINY | {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
QWEN2 = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
MISTRAL = {
    "model_type": "mistral",
    "architectures": ["MistralForCausalLM"],
    "sliding_window": 8,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

CHAT = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] | trim }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<unk>", "<|im_start|>", "<|im_end|>"]
LETTERS = "abcdefghijklmnopqrstuvwxyz.,!?0123456789"
BYTE_LEVEL = [*SPECIAL, *LETTERS, "\u0120", "\u010a", "ab", "he", "\u0120h", "llo", "ll", "lo"]
BYTE_MERGES = ["a b", "h e", "\u0120 h", "l l", "l o", "ll o"]
BYTES = [f"<0x{i:02X}>" for i in range(256)]
SPM = [*SPECIAL, *BYTES, *LETTERS, "\u2581", "he", "ll", "llo", "\u2581h", "\u2581he"]
SPM_MERGES = ["h e", "l l", "ll o", "\u2581 h", "\u2581h e"]


LONG = 20_000
"""Tokens of a large vocabulary; with its embedding it stays below 1 MB."""


def _padded(tokens: list[str]) -> list[str]:
    return tokens + [f"[{i}]" for i in range(len(tokens), 64 if len(tokens) <= 64 else 320)]


def tokenizer_json(kind: str, more: Sequence[str] = ()) -> dict[str, Any]:
    """A tokenizer.json as the tokenizers library writes it: byte-level, "split" by a pattern first,
    as of SentencePiece by a "metaspace" or a "legacy" normalizer, or a "unigram" model."""
    byte_level = kind in ("bytes", "split")
    tokens = [*_padded(BYTE_LEVEL if byte_level else SPM), *more]
    tokens = list(dict.fromkeys(tokens))
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    space = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first"}
    space |= {"split": False}
    split = {"type": "Split", "pattern": {"Regex": "\\p{N}{1,3}| ?\\p{L}+|\\s+"}, "invert": False}
    split |= {"behavior": "Isolated"}
    to_space = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
    from_space = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    legacy = [to_space, {"type": "ByteFallback"}, {"type": "Fuse"}, strip]
    prepend = {"type": "Prepend", "prepend": "\u2581"}
    pre, decoder = space, space
    if byte_level:
        decoder = level | {"use_regex": True}
        steps = [split, level | {"use_regex": False}]
        pre = {"type": "Sequence", "pretokenizers": steps} if kind == "split" else decoder
    normalizers: dict[str, Any] = {
        "bytes": {"type": "NFC"},
        "legacy": {"type": "Sequence", "normalizers": [prepend, from_space]},
    }
    model: dict[str, Any] = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None if byte_level else "<unk>",
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": not byte_level,
        "byte_fallback": not byte_level,
        "ignore_merges": False,
        "vocab": {token: i for i, token in enumerate(tokens)},
        "merges": [*(BYTE_MERGES if byte_level else SPM_MERGES), *_merges(tokens, more)],
    }
    if kind == "unigram":
        scores = [[token, -float(i)] for i, token in enumerate(tokens)]
        model = {"type": "Unigram", "unk_id": 0, "vocab": scores, "byte_fallback": True}
    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": i, "content": text, **added, "special": True} for i, text in enumerate(SPECIAL)
        ],
        "normalizer": normalizers.get(kind),
        "pre_tokenizer": None if kind == "legacy" else pre,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": SPECIAL[1], "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
            ],
            "pair": [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"],
            "special_tokens": {
                SPECIAL[1]: {"id": SPECIAL[1], "ids": [1], "tokens": [SPECIAL[1]]}
            },
        },
        "decoder": {"type": "Sequence", "decoders": legacy} if kind == "legacy" else decoder,
        "model": model,
    }  # fmt: skip


def _merges(tokens: Sequence[str], more: Sequence[str]) -> list[str]:
    """Of each further token the halves, or its beginning and its last letter."""
    known = set(tokens)
    found = []
    for token in more:
        for cut in (len(token) // 2, len(token) - 1):
            if {token[:cut], token[cut:]} <= known:
                found.append(f"{token[:cut]} {token[cut:]}")
                break
    return found


def gguf_keys(pre: str, more: Sequence[str] = ()) -> dict[str, Any]:
    """The tokenizer's keys of a GGUF: byte-level by the rule `pre`, or of SentencePiece, where
    scores that are ranks say "bpe", others "unigram"."""
    spm = pre in ("bpe", "unigram")
    tokens = list(dict.fromkeys([*_padded(SPM if spm else BYTE_LEVEL), *more]))
    kinds = np.ones(len(tokens), np.int32)
    kinds[:3] = [2, 3, 3]
    keys: dict[str, Any] = {
        "model": "llama" if spm else "gpt2",
        "tokens": tokens,
        "token_type": kinds,
        "unknown_token_id": 0,
        "add_bos_token": True,
    }
    if spm:
        kinds[3 : 3 + len(BYTES)] = 6
        keys["scores"] = -np.arange(len(tokens), dtype=np.float32) / (1 if pre == "bpe" else 7)
        keys["add_space_prefix"] = True
    else:
        keys |= {"pre": pre, "merges": [*BYTE_MERGES, *_merges(tokens, more)]}
    keys = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    return {**keys, "tokenizer.chat_template": CHAT}


@dataclass(frozen=True)
class Seed:
    """A valid model; `entry` is what rksc.load is given, "" the folder itself."""

    name: str
    entry: str
    files: Files


@lru_cache(maxsize=1)
def seeds() -> list[Seed]:
    """Every kind of file that rksc reads; those of more than 100 kB are rarer."""
    tied = QWEN2 | {"tie_word_embeddings": True}
    small = [
        _folder("hf-llama", {"rope_scaling": LLAMA3}, "split", "F32"),
        _folder("hf-qwen2-tied", tied, "bytes", "BF16"),
        _folder("hf-mistral-shards", MISTRAL, "metaspace", "F16", shards=2),
        _folder("hf-llama-legacy", {"attention_bias": True}, "legacy", "BF16"),
        _folder("hf-unigram", {}, "unigram", "F16"),
        _gguf("gguf-llama", {}, "bpe", "Q8_0"),
        _gguf("gguf-gpt2", {"rope_scaling": LLAMA3}, "llama-bpe", "Q4_0"),
        _gguf("gguf-qwen2", tied, "qwen2", "F16"),
        _gguf("gguf-smollm", {}, "smollm", "F32"),
        _gguf("gguf-split", {}, "unigram", "Q5_1", shards=2),
    ]
    wide = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 1}
    wide |= {"num_key_value_heads": 1}
    types = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
    return small * 4 + [_gguf(f"gguf-{kind}", wide, "tekken", kind) for kind in types]


@lru_cache(maxsize=1)
def heavy() -> list[Seed]:
    """Files of just below 1 MB that make what is quadratic slow, and what is copied large."""
    prefixes = ["a" * i for i in range(1, 900)]
    pairs = [a + b for a in LETTERS for b in LETTERS]
    words = [a + b for a in pairs for b in pairs[: LONG // len(pairs)]]
    found = [
        _gguf("gguf-prefixes", {}, "bpe", "Q4_0", more=prefixes),
        _gguf("gguf-words", {}, "unigram", "Q4_0", more=words),
        _gguf("gguf-one-token", {}, "bpe", "Q4_0", more=["x" * 600_000]),
        _gguf("gguf-many-merges", {}, "qwen2", "Q4_0", more=[*pairs, *words[:8000]]),
    ]
    for kind, more in (("metaspace", words), ("unigram", words), ("split", prefixes)):
        found.append(_folder(f"hf-large-{kind}", {}, kind, "BF16", more=more))
    return found


def _read(folder: Path) -> Files:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def _folder(
    name: str, changes: dict[str, Any], kind: str, dtype: str, shards: int = 1,
    more: Sequence[str] = (),
) -> Seed:  # fmt: skip
    described = tokenizer_json(kind, more)
    n = len(described["model"]["vocab"])
    # More ids than rows are no fault before one of them is used.
    config = SMALL | {"vocab_size": n if not more else 320} | changes
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model_files.write_hf(folder, model_files.random_weights(config), config, dtype, shards)
        others: dict[str, Any] = {
            "generation_config.json": {"bos_token_id": 1, "eos_token_id": [2, 3], "top_k": 40},
            "tokenizer.json": described,
            "tokenizer_config.json": {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "add_bos_token": True,
                "bos_token": {"content": SPECIAL[1], "special": True},
                "eos_token": SPECIAL[2],
                "unk_token": None,
                "added_tokens_decoder": {"1": {"content": SPECIAL[1], "special": True}},
                "chat_template": [{"name": "default", "template": CHAT}] if shards > 1 else CHAT,
            },
            "special_tokens_map.json": {
                "bos_token": SPECIAL[1],
                "eos_token": {"content": SPECIAL[2]},
            },
        }
        for file, value in others.items():
            (folder / file).write_text(json.dumps(value))
        if kind == "legacy":
            (folder / "chat_template.jinja").write_text(CHAT)
        return Seed(name, "", _read(folder))


def _gguf(
    name: str, changes: dict[str, Any], pre: str, type: str, shards: int = 1,
    more: Sequence[str] = (),
) -> Seed:  # fmt: skip
    keys = gguf_keys(pre, more)
    config = SMALL | {"vocab_size": len(keys["tokenizer.ggml.tokens"])} | changes
    if more:  # the embedding alone is large enough
        config |= {"tie_word_embeddings": True}
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / ("m.gguf" if shards == 1 else "m")
        weights = model_files.random_weights(config)
        model_files.write_gguf(path, weights, config, type, keys, shards)
        files = _read(Path(scratch))
        return Seed(name, min(files), files)
