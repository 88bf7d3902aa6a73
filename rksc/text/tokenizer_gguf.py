"""The tokenizer that a GGUF describes, as that of the model's own folder.

A GGUF has the vocabulary, merges or scores, and a name for the rule that splits text. The rest is
known here for each name (`_RULES`), as the models' own tokenizer.json has it. What is not known is
refused: another rule would give other ids, and nobody would notice. (Of falcon3 and pixtral we have
seen no original; transformers and llama.cpp agree on them.)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ..formats.fields import Fields
from ..formats.files import reading, shown
from ..scalars import as_int
from .ends import gguf_ends
from .pipeline import SPACE, Pipeline, byte_level_table, from_byte_level, library
from .special import gguf_named_tokens, gguf_templates
from .spm import BYTE, CONTROL, NORMAL, PADDING, UNKNOWN, UNUSED, USER, SentencePiece, first_ids

_FOLDER = "pass the tokenizer of the model's Hugging Face folder, rksc.Tokenizer.from_folder(...)"

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class _Rule(NamedTuple):
    """What a name in tokenizer.ggml.pre stands for."""

    split: str | None = None  # the regular expression that cuts text into words; None: GPT-2's
    digits: bool = False  # every digit is cut off before
    nfc: bool = False  # text is normalised first
    whole_words: bool = False  # a word that is a token is taken whole, whatever the merges say
    adds_bos: bool = False  # unless the file says otherwise


_RULES = {
    "gpt-2": _Rule(),
    "smollm": _Rule(digits=True),
    "smaug-bpe": _Rule(_LLAMA3),
    "qwen2": _Rule(_QWEN2, nfc=True),
    "deepseek-r1-qwen": _Rule(_QWEN2, nfc=True, adds_bos=True),
    "tekken": _Rule(_TEKKEN, whole_words=True, adds_bos=True),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"),
        _Rule(_LLAMA3, whole_words=True, adds_bos=True),
    ),
}


class _Keys:
    """The tokenizer keys of a GGUF, checked."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self.fields = Fields(metadata, "tokenizer.ggml.")
        tokens = self.fields.get("tokens")
        if not isinstance(tokens, list) or not tokens:
            raise ValueError("tokenizer.ggml.tokens is missing")
        self.tokens: list[str] = tokens
        for i, token in enumerate(tokens):
            if not isinstance(token, str):
                raise ValueError(f"tokenizer.ggml.tokens[{i}] must be a string, got {shown(token)}")
        self.types: list[int] = self._types()
        self.bos, self.eos = self._id("bos"), self._id("eos")
        self.unknown, self.padding = self._id("unknown"), self._id("padding")
        for named in (self.bos, self.eos, self.unknown, self.padding):
            if named is not None and self.types[named] == NORMAL:
                self.types[named] = CONTROL

    def _types(self) -> list[int]:
        n = len(self.tokens)
        if self.fields.get("token_type") is None:
            return [NORMAL] * n
        types = self.fields.integers("token_type", n)
        odd = np.flatnonzero((types < NORMAL) | (types > BYTE))
        if len(odd):
            raise ValueError(
                f"tokenizer.ggml.token_type[{odd[0]}] must be from 1 to 6, got {types[odd[0]]}"
            )
        return [int(kind) for kind in types]

    def _id(self, name: str) -> int | None:
        value = self.fields.get(f"{name}_token_id")
        found = as_int(value)
        if value is not None and (found is None or not 0 <= found < len(self.tokens)):
            raise ValueError(
                f"tokenizer.ggml.{name}_token_id {shown(value)} is outside the "
                f"{len(self.tokens)} tokens"
            )
        return found

    def flag(self, name: str, default: bool) -> bool:
        return default if self.fields.get(name) is None else self.fields.flag(name)


def read_gguf_tokenizer(metadata: Mapping[str, Any], file: str) -> dict[str, Any]:
    """The arguments of `Tokenizer`."""
    with reading("GGUF"):
        keys = _Keys(metadata)
        model = keys.fields.get("model")
        if model == "gpt2":
            made = _byte_level(keys)
        elif model == "llama":
            made = _sentencepiece(keys)
        else:
            raise ValueError(
                f"tokenizer.ggml.model {shown(model)} is not supported (gpt2, llama); {_FOLDER}"
            )
    return made | {
        "special": {i: t for i, t in enumerate(keys.tokens) if keys.types[i] in (UNKNOWN, CONTROL)},
        "bos_id": keys.bos,
        "eos_id": keys.eos,
        "ends": gguf_ends(metadata, len(keys.tokens)),
        "templates": gguf_templates(metadata, file),
        "names": gguf_named_tokens(metadata, keys.tokens),
    }


# ---- byte-level BPE -----------------------------------------------------------------------


def _byte_level(keys: _Keys) -> dict[str, Any]:
    pre = keys.fields.get("pre")
    rule = _RULES.get(pre) if isinstance(pre, str) else None
    if pre is None:
        raise ValueError(
            "tokenizer.ggml.pre is missing, so the file does not tell how text is split; convert "
            f"the model again, or {_FOLDER}"
        )
    if rule is None:
        raise ValueError(
            f"tokenizer.ggml.pre {shown(pre)} is not supported ({', '.join(_RULES)}); {_FOLDER}"
        )
    if keys.flag("add_space_prefix", False):
        raise ValueError(f"tokenizer.ggml.add_space_prefix is not supported here; {_FOLDER}")
    table = byte_level_table()
    return {
        "encoder": Pipeline(_byte_level_pipeline(keys, rule), "GGUF"),
        "pieces": [
            b""
            if kind in (UNKNOWN, CONTROL, UNUSED)
            else token.encode()
            if kind == USER
            else from_byte_level(token, table)
            for token, kind in zip(keys.tokens, keys.types, strict=True)
        ],
        "adds_bos": keys.flag("add_bos_token", rule.adds_bos),
    }


def _byte_level_pipeline(keys: _Keys, rule: _Rule) -> Any:
    tokenizers = library()
    vocabulary = first_ids(keys.tokens)
    vocabulary = {t: i for t, i in vocabulary.items() if keys.types[i] != UNUSED and t}
    with reading("tokenizer.ggml.merges"):
        model = tokenizers.models.BPE(
            vocab=vocabulary, merges=_merges(keys), ignore_merges=rule.whole_words
        )
    pipeline = tokenizers.Tokenizer(model)
    whole = [
        tokenizers.AddedToken(token, normalized=False, special=keys.types[i] != USER)
        for token, i in vocabulary.items()
        if keys.types[i] in (UNKNOWN, CONTROL, USER)
    ]
    pipeline.add_special_tokens([token for token in whole if token.special])
    pipeline.add_tokens([token for token in whole if not token.special])
    steps = tokenizers.pre_tokenizers
    before = [steps.Digits(individual_digits=True)] if rule.digits else []
    if rule.split is not None:
        before.append(steps.Split(tokenizers.Regex(rule.split), behavior="isolated"))
    level = steps.ByteLevel(add_prefix_space=False, use_regex=rule.split is None)
    pipeline.pre_tokenizer = steps.Sequence([*before, level])
    if rule.nfc:
        pipeline.normalizer = tokenizers.normalizers.NFC()
    pipeline.decoder = tokenizers.decoders.ByteLevel()
    return pipeline


def _merges(keys: _Keys) -> list[tuple[str, str]]:
    merges = keys.fields.get("merges")
    if merges is None:
        raise ValueError("tokenizer.ggml.merges is missing")
    if not isinstance(merges, list):
        raise ValueError(f"must be a list of strings, got {shown(merges)}")
    pairs = []
    for merge in merges:
        left, _, right = merge.partition(" ") if isinstance(merge, str) else ("", "", "")
        if not left or not right or " " in right:
            raise ValueError(f"{shown(merge)} is not a pair of tokens")
        pairs.append((left, right))
    return pairs


# ---- SentencePiece ------------------------------------------------------------------------


def _sentencepiece(keys: _Keys) -> dict[str, Any]:
    for key in ("precompiled_charsmap", "merges"):
        value = keys.fields.get(key)
        if value is not None and (not hasattr(value, "__len__") or len(value)):
            raise ValueError(
                f"tokenizer.ggml.{key} is not supported for the model llama; {_FOLDER}"
            )
    n, types = len(keys.tokens), list(keys.types)
    with reading("tokenizer.ggml.scores"):
        scores = np.array(keys.fields.get("scores"), np.float32)
    if scores.shape != (n,):
        raise ValueError(f"tokenizer.ggml.scores must have {n} entries, one for each token")
    if (
        keys.unknown is not None and UNKNOWN not in types
    ):  # later converters call it a control token
        types[keys.unknown] = UNKNOWN
    space_before = keys.flag("add_space_prefix", True)
    single_spaces = keys.flag("remove_extra_whitespaces", False)
    restarts = [i for i in (keys.bos, keys.eos) if i is not None]
    encoder = SentencePiece(
        keys.tokens,
        scores,
        types,
        space_before=space_before,
        single_spaces=single_spaces,
        begins_after=restarts,
    )
    return {
        "encoder": encoder,
        "pieces": [
            b""
            if kind in (UNKNOWN, CONTROL, PADDING)
            else bytes([int(token[1:-1], 16)])
            if kind == BYTE
            else token.replace(SPACE, " ").encode()
            for token, kind in zip(keys.tokens, encoder.types, strict=True)
        ],
        "adds_bos": keys.flag("add_bos_token", True),
        "strips_space": space_before or single_spaces,
        "begins_after": restarts,
    }
