"""Which tokens end a turn: everything that a model's files and its chat template say, together.

Files disagree: a base model that was tuned for chats often keeps the end of texts in config.json
and has the end of turns in tokenizer_config.json alone. So every source counts:

    config.json, generation_config.json    eos_token_id, one or several
    tokenizer_config.json, special_tokens_map.json    eos_token of each, by its text
    added tokens (of a GGUF: control and user-defined ones)    those spelled as in END_TOKENS
    GGUF    tokenizer.ggml.eos_token_id, eot_token_id, eom_token_id
    chat template    the special token that it writes where an assistant's message ends

`rksc.load` reads the files (ModelConfig.eos); a session with a tokenizer adds what the tokenizer
knows, the template's token included (BranchSession.config.eos). Every generation ends at any of
them, chat or not: within a text a base model does not write the end of a turn, as no text that it
was trained on has one. `stop_ids` and the clients' ignore_eos ask for something else.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from ..formats.fields import Fields, token_ids
from ..formats.files import parse_json, read_bytes, read_json, reading, shown
from ..scalars import as_int
from .special import eos_tokens, read_tokenizer_config

END_TOKENS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")
"""Tokens of these texts end a turn or a text, whatever the files call them."""

_CONTROL, _USER = 3, 4  # types of a GGUF's tokens
_TOKENIZER_LIMIT = 64 << 20  # bytes of tokenizer.json


def all_ends(eos: Sequence[int], vocab_size: int, tokenizer: Any) -> tuple[int, ...]:
    """The ids at which a model's turn ends: what its files say (eos) first, then its tokenizer,
    which may be another library's or None."""
    last = getattr(tokenizer, "eos_id", None)
    if last is not None and last >= vocab_size:
        raise ValueError(
            f"tokenizer: eos_id {last} is outside the model's vocabulary of {vocab_size}"
        )
    own = getattr(tokenizer, "end_ids", ())
    return tuple(dict.fromkeys((*eos, *(i for i in own if i < vocab_size))))


# ---- a folder ----------------------------------------------------------------------------------


def folder_ends(folder: Path, eos: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    """Of a Hugging Face folder whose config.json says eos. No tokenizer is made for it.

    ValueError names file and field of an id that is outside the vocabulary.
    """
    n, ids = vocab_size, list(eos)
    path = folder / "generation_config.json"
    if path.exists():
        with reading(path):
            ids += token_ids(read_json(path).get("eos_token_id"), "eos_token_id", n)
    config_json = read_tokenizer_config(folder)
    named = eos_tokens(folder, config_json)
    added, described = _listed_tokens(config_json), {}
    if not added or any(end.value not in added for end in named):
        described = _tokenizer_json(folder)
        added = _added_tokens(described) | added
    for end in named:
        found = added.get(end.value, _vocabulary_id(described, end.value))
        if found is not None and not 0 <= found < n:
            raise ValueError(
                f"{end.file}: eos_token {shown(end.value)} is token {found}, outside the "
                f"vocabulary of {n}"
            )
        if found is not None:
            ids.append(found)
        elif described:
            warnings.warn(
                f"{end.file}: eos_token {shown(end.value)} is not in tokenizer.json: it will "
                "not end a turn",
                stacklevel=5,
            )
    ids += [added[text] for text in END_TOKENS if text in added and 0 <= added[text] < n]
    return tuple(dict.fromkeys(ids))


def _listed_tokens(config: Mapping[str, Any]) -> dict[str, int]:
    """Added tokens by text, of tokenizer_config.json's added_tokens_decoder."""
    listed = config.get("added_tokens_decoder")
    tokens = listed if isinstance(listed, dict) else {}
    return _by_text((int(i) if re.fullmatch("[0-9]{1,9}", i) else None, tokens[i]) for i in tokens)


def _tokenizer_json(folder: Path) -> dict[str, Any]:
    """tokenizer.json; {} where there is none, or none that can be read: Tokenizer says why."""
    with suppress(ValueError):
        return parse_json(read_bytes(folder / "tokenizer.json", _TOKENIZER_LIMIT))
    return {}


def _added_tokens(described: Mapping[str, Any]) -> dict[str, int]:
    """Added tokens by text, of tokenizer.json."""
    tokens = described.get("added_tokens")
    tokens = tokens if isinstance(tokens, list) else []
    return _by_text((token.get("id"), token) for token in tokens if isinstance(token, dict))


def _by_text(tokens: Iterable[tuple[Any, Any]]) -> dict[str, int]:
    """{content: id}; what has no such form is left to Tokenizer to complain about."""
    pairs = [(t.get("content"), as_int(i)) for i, t in tokens if isinstance(t, dict)]
    return {text: i for text, i in pairs if isinstance(text, str) and i is not None}


def _vocabulary_id(described: Mapping[str, Any], text: str) -> int | None:
    """Of a token that was not added but is one of the model's own."""
    model = described.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, list):  # of Unigram: rows of [text, score]
        rows = (row[:1] if isinstance(row, list) else [] for row in vocabulary)
        return next((i for i, row in enumerate(rows) if row == [text]), None)
    return as_int(vocabulary.get(text)) if isinstance(vocabulary, dict) else None


# ---- a GGUF ------------------------------------------------------------------------------------


def gguf_ends(metadata: Mapping[str, Any], vocab_size: int) -> tuple[int, ...]:
    """Of a GGUF's keys. ValueError names the key of an id that is outside the vocabulary."""
    ids: list[int] = []
    for key in ("eos", "eot", "eom"):
        field = f"tokenizer.ggml.{key}_token_id"
        ids += token_ids(metadata.get(field), field, vocab_size)
    tokens, fields = metadata.get("tokenizer.ggml.tokens"), Fields(metadata)
    if tokens is not None and fields.get("tokenizer.ggml.token_type") is not None:
        kinds = fields.integers("tokenizer.ggml.token_type", len(tokens))
        marks = np.flatnonzero((kinds == _CONTROL) | (kinds == _USER))
        ids += [int(i) for i in marks if tokens[i] in END_TOKENS]
    return tuple(dict.fromkeys(ids))
