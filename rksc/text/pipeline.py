"""Pipelines of the tokenizers library: what a tokenizer.json describes, run with care.

The library panics where a regular expression runs wild; that is a ValueError here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..formats.files import reading

if TYPE_CHECKING:
    import tokenizers


SPACE = "\u2581"  # how SentencePiece spells a space

_LONG = 4096  # characters: what takes milliseconds
_NOWHERE = "\ufdd0" * 2  # noncharacters: in no text


def library() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise ImportError(
            "text needs the tokenizers library: pip install 'rksc[hf]' (token ids work without)"
        ) from None
    return tokenizers


class Pipeline:
    """A pipeline that makes ids of texts (`tokenizer.Encoder`). where: for messages, the file."""

    def __init__(self, pipeline: tokenizers.Tokenizer, where: str) -> None:
        self.library_object, self._where = pipeline, where
        self._variants: dict[tuple[frozenset[str] | None, bool], tokenizers.Tokenizer] = {}
        added = pipeline.get_added_tokens_decoder().values()
        self.user_tokens = tuple(token.content for token in added if not token.special)

    def token_id(self, token: str) -> int | None:
        found: int | None = self.library_object.token_to_id(token)
        return found

    def encode(
        self, text: str, plain: frozenset[str] | None = None, start: bool = True
    ) -> list[int]:
        """plain: None, or special tokens and these others are text where they are spelled."""
        with reading(f"{self._where}: the text cannot be split"):
            ids: list[int] = _encoded(self._variant(plain, start), text).ids
        return ids

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Where each token of `encode(text)` begins and ends in the text."""
        with reading(f"{self._where}: the text cannot be split"):
            spans: list[tuple[int, int]]
            spans = _encoded(self.library_object, text, offsets=True).offsets
        return spans

    def vocabulary(self) -> dict[str, int]:
        """Ids by token, those of added tokens, too."""
        found: dict[str, int] = self.library_object.get_vocab(with_added_tokens=True)
        return found

    def added(self) -> dict[int, Any]:
        """The library's added tokens by id: content, special, ..."""
        found: dict[int, Any] = self.library_object.get_added_tokens_decoder()
        return found

    def _variant(self, plain: frozenset[str] | None, start: bool) -> tokenizers.Tokenizer:
        """The pipeline, or a copy that differs in what the settings ask for."""
        if plain is None and start:
            return self.library_object
        if (plain, start) not in self._variants:
            described = json.loads(self.library_object.to_str())
            if not start:
                _drop_first_space(described)
            if plain is not None:
                _make_plain(described, plain)
            variant = library().Tokenizer.from_str(json.dumps(described))
            variant.encode_special_tokens = plain is not None
            self._variants[plain, start] = variant
        return self._variants[plain, start]


def _encoded(pipeline: tokenizers.Tokenizer, text: str, offsets: bool = False) -> Any:
    """A long text as a batch of one: the library holds the GIL for a single text."""
    if len(text) < _LONG:
        return pipeline.encode(text, add_special_tokens=False)
    encode = pipeline.encode_batch if offsets else pipeline.encode_batch_fast
    return encode([text], add_special_tokens=False)[0]


def _make_plain(described: dict[str, Any], others: frozenset[str]) -> None:
    """Edit a tokenizer.json so that no text becomes a special token or one of these others.

    The library finds none of what is special, but a word that is in the model's vocabulary could
    still become one. So what stands there gets a name that no text has.
    """
    model, added = described["model"], described["added_tokens"]
    for token in added:
        token["special"] |= token["content"] in others
    never = {token["content"] for token in added if token["special"]}
    if isinstance(model["vocab"], dict):
        known = never.intersection(model["vocab"])
        if model.get("unk_token") in known:
            model["unk_token"] += _NOWHERE
        model["vocab"] = {t + _NOWHERE * (t in known): i for t, i in model["vocab"].items()}
        pairs = (m.split(" ", 1) if isinstance(m, str) else m for m in model["merges"])
        model["merges"] = [pair for pair in pairs if not known & {*pair, "".join(pair)}]
    else:
        known = never.intersection(piece for piece, _ in model["vocab"])
        model["vocab"] = [[t + _NOWHERE * (t in known), score] for t, score in model["vocab"]]
    described["added_tokens"] = [token for token in added if token["content"] not in known]


def _drop_first_space(described: dict[str, Any]) -> None:
    """Edit a tokenizer.json so that no space is put before a text."""
    for part in ("normalizer", "pre_tokenizer"):
        step = described[part] or {}
        inner = step.get("normalizers", step.get("pretokenizers", [step]))
        for each in inner:
            if each.get("type") == "Metaspace":
                each["prepend_scheme"] = "never"
        if step.get("type") == "Prepend":
            described[part] = None
        inner[:] = [each for each in inner if each.get("type") != "Prepend"]


# ---- how tokens spell bytes ---------------------------------------------------------------


def byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable ones as themselves, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = sorted(set(range(256)) - set(printable))
    return alphabet | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def byte_level_table() -> dict[int, str]:
    """For str.translate: what spells a byte becomes the byte's character of Latin-1, and what
    does not becomes one that Latin-1 lacks (those above U+00FF are so already)."""
    spelled = {ord(character): chr(byte) for character, byte in byte_alphabet().items()}
    return dict.fromkeys(range(0x100), "\u0100") | spelled


def from_byte_level(token: str, table: Mapping[int, str]) -> bytes:
    try:
        return token.translate(table).encode("latin-1")
    except UnicodeEncodeError:  # spelled plainly
        return token.encode()


def from_sentencepiece(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return token.replace(SPACE, " ").encode()
