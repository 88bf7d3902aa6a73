"""Small valid models of every kind that rksc reads, for the loaders' fuzzer to damage."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import model_files
import numpy as np

Files = dict[str, bytes]

SMALL: dict[str, Any] = model_files.TINY | {
    "vocab_size": 64,
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
SPM = [*SPECIAL, *LETTERS, "\u2581", "<0x0A>", "<0xC3>", "he", "ll", "llo", "\u2581h", "\u2581he"]


def _padded(tokens: list[str]) -> list[str]:
    return tokens + [f"[{i}]" for i in range(len(tokens), SMALL["vocab_size"])]


def tokenizer_json(spm: bool) -> dict[str, Any]:
    """A tokenizer.json as the tokenizers library writes it."""
    tokens = _padded(SPM if spm else BYTE_LEVEL)
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    space = {
        "type": "Metaspace",
        "replacement": "\u2581",
        "prepend_scheme": "first",
        "split": False,
    }
    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": i, "content": text, **added, "special": True} for i, text in enumerate(SPECIAL)
        ],
        "normalizer": None if spm else {"type": "NFC"},
        "pre_tokenizer": space if spm else {**level, "use_regex": True},
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
        "decoder": space if spm else {**level, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>" if spm else None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": spm,
            "byte_fallback": spm,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": ["h e", "l l", "ll o"] if spm else BYTE_MERGES,
        },
    }  # fmt: skip


def gguf_keys(spm: bool, merges: bool) -> dict[str, Any]:
    """The tokenizer's keys of a GGUF; of SentencePiece without merges a unigram model."""
    tokens = _padded(SPM if spm else BYTE_LEVEL)
    kinds = np.ones(len(tokens), np.int32)
    kinds[:3] = [2, 3, 3]
    keys: dict[str, Any] = {
        "model": "llama" if spm else "gpt2",
        "tokens": tokens,
        "token_type": kinds,
        "unknown_token_id": 0,
        "add_bos_token": True,
    }
    if not spm:
        keys["pre"] = "llama-bpe" if merges else "smollm"
    if spm:
        keys["scores"] = -np.arange(len(tokens), dtype=np.float32) / (1 if merges else 7)
        keys["add_space_prefix"] = True
    else:
        keys["merges"] = BYTE_MERGES if merges else BYTE_MERGES[:2]
    keys = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    return {**keys, "tokenizer.chat_template": CHAT}


@dataclass(frozen=True)
class Seed:
    """A valid model; `entry` is what rksc.load is given, "" the folder itself."""

    name: str
    entry: str
    files: Files


def seeds() -> list[Seed]:
    """Every kind of file that rksc reads."""
    found = [
        _folder("hf-llama", {"rope_scaling": LLAMA3}, spm=False, dtype="F32"),
        _folder("hf-qwen2-tied", {**QWEN2, "tie_word_embeddings": True}, spm=False, dtype="BF16"),
        _folder("hf-mistral-shards", MISTRAL, spm=True, dtype="F16", shards=2),
        _gguf("gguf-llama", {}, gguf_keys(spm=True, merges=False), "F32"),
        _gguf("gguf-llama-merges", {"rope_scaling": LLAMA3}, gguf_keys(True, True), "Q8_0"),
        _gguf("gguf-gpt2", {}, gguf_keys(False, True), "Q4_0"),
        _gguf("gguf-qwen2", {**QWEN2, "tie_word_embeddings": True}, gguf_keys(False, False), "F16"),
        _gguf("gguf-split", {}, gguf_keys(True, True), "Q5_1", shards=2),
    ]  # fmt: skip
    wide = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 1}
    wide |= {"num_key_value_heads": 1, "vocab_size": 64, "head_dim": 8}
    types = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
    kinds = [_gguf(f"gguf-{kind}", wide, gguf_keys(True, False), kind) for kind in types]
    return found * 4 + kinds


def _read(folder: Path) -> Files:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def _folder(name: str, changes: dict[str, Any], *, spm: bool, dtype: str, shards: int = 1) -> Seed:
    config = SMALL | changes
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model_files.write_hf(folder, model_files.random_weights(config), config, dtype, shards)
        others: dict[str, Any] = {
            "generation_config.json": {"bos_token_id": 1, "eos_token_id": [2, 3], "top_k": 40},
            "tokenizer.json": tokenizer_json(spm),
            "tokenizer_config.json": {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "add_bos_token": True,
                "bos_token": {"content": SPECIAL[1], "special": True},
                "eos_token": SPECIAL[2],
                "unk_token": None,
                "added_tokens_decoder": {"1": {"content": SPECIAL[1], "special": True}},
                "chat_template": [{"name": "default", "template": CHAT}] if spm else CHAT,
            },
            "special_tokens_map.json": {
                "bos_token": SPECIAL[1],
                "eos_token": {"content": SPECIAL[2]},
            },
        }
        for file, value in others.items():
            (folder / file).write_text(json.dumps(value))
        if shards > 1:
            (folder / "chat_template.jinja").write_text(CHAT)
        return Seed(name, "", _read(folder))


def _gguf(
    name: str, changes: dict[str, Any], keys: dict[str, Any], type: str, shards: int = 1
) -> Seed:
    config = SMALL | changes
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / ("m.gguf" if shards == 1 else "m")
        weights = model_files.random_weights(config)
        model_files.write_gguf(path, weights, config, type, keys, shards)
        files = _read(Path(scratch))
        return Seed(name, min(files), files)
