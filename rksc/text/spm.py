"""SentencePiece vocabularies of GGUF files.

A GGUF of tokenizer model "llama" has the pieces of a SentencePiece model: spellings, scores and
types. The model is written again from them and run by the sentencepiece library, which made it, so
ids are those of the original: BPE and unigram, byte fallback, spaces at the edges. What a GGUF
leaves out is inferred from what sentencepiece's trainer and llama.cpp's converter write, or
refused.

SentencePiece finds no special tokens in a text. They are cut out before, and so are tokens that
were added to the model later. A text begins anew after a token that ends or begins texts.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..formats.files import reading
from .pipeline import SPACE

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # types of tokens in a GGUF
PADDING = 0  # rows of the model's matrix without a token

_UNIGRAM, _BPE = 1, 2
_PADDING = re.compile(r"\[PAD\d+\]")  # as the converter spells it
_SPACES = re.compile(" {2,}")


class SentencePiece:
    """A vocabulary that makes ids of texts (`tokenizer.Encoder`)."""

    def __init__(
        self,
        tokens: Sequence[str],
        scores: NDArray[np.float32],
        types: Sequence[int],
        *,
        space_before: bool = True,
        single_spaces: bool = False,
        begins_after: Iterable[int] = (),
    ) -> None:
        """space_before: a space is put before a text.
        single_spaces: runs of spaces become one, and none is left at the edges.
        begins_after: ids after which a text begins.

        ValueError where this is no SentencePiece model, or not all of one.
        """
        self._library = _sentencepiece()
        self._kind = _kind_of(tokens, scores, types)
        self.types = _original_types(tokens, scores, types, self._kind)
        self._n = len(tokens)
        self._ids = first_ids(tokens)
        self._space_before, self._single_spaces = space_before, single_spaces
        self._begins_after = frozenset(begins_after)
        named = [(token, i) for token, i in self._ids.items() if token]
        self._special = {t for t, i in named if self.types[i] in (UNKNOWN, CONTROL)}
        self.user_tokens = tuple(t for t, i in named if self.types[i] == USER)
        # sentencepiece's trainer gives its own user-defined symbols the score 0
        self._added = {t for t, i in named if self.types[i] == USER and scores[i] != 0}
        self._pieces = self._written(tokens, scores)
        self._processors: dict[tuple[frozenset[str], bool], Any] = {}
        self._cutters: dict[frozenset[str] | None, _Cutter] = {}
        self.library_object = self._processor(frozenset(), True)  # what is wrong is said now

    def token_id(self, token: str) -> int | None:
        return self._ids.get(token)

    def encode(
        self, text: str, plain: frozenset[str] | None = None, start: bool = True
    ) -> list[int]:
        """plain: None, or special tokens and these others are text where they are spelled."""
        ids: list[int] = []
        for part, token in self._parts(text, plain):
            if token is not None:
                ids.append(token)
                start = token in self._begins_after
            elif part:
                ids += self._segment(part, plain, start, int)
                start = False
        if ids and max(ids) >= self._n:
            raise ValueError("text: it has a character that this vocabulary cannot spell")
        return ids

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Where each token of `encode(text)` begins and ends in the text."""
        spans, at, start = [], 0, True
        for part, token in self._parts(text, None):
            if token is not None:
                spans.append((at, at + len(part)))
                start = token in self._begins_after
            elif part:
                spans += [(at + begin, at + end) for begin, end in self._places(part, start)]
                start = False
            at += len(part)
        return spans

    # ---- a text ----------------------------------------------------------------------------

    def _parts(self, text: str, plain: frozenset[str] | None) -> Iterator[tuple[str, int | None]]:
        """The text cut into tokens that are found whole, with their ids, and what is between."""
        if plain not in self._cutters:
            whole = self._special | self._added if plain is None else self._added - plain
            self._cutters[plain] = _Cutter(whole)
        for part, is_token in self._cutters[plain].cut(text):
            yield part, self._ids[part] if is_token else None

    def _segment(self, text: str, plain: frozenset[str] | None, start: bool, kind: type) -> Any:
        """Ids (kind int) or spellings (str) of the tokens of a text without special ones."""
        if self._single_spaces and not start:
            text = _SPACES.sub(" ", text)
        with reading("GGUF: the text cannot be split"):
            return self._processor(plain or frozenset(), start).encode(text, out_type=kind)

    def _places(self, text: str, start: bool) -> Iterator[tuple[int, int]]:
        spelled = self._segment(text, None, start, str)
        ids = self._segment(text, None, start, int)
        kept = [(i, c) for i, c in enumerate(text)]
        if self._single_spaces:
            edges = len(text) - len(text.lstrip(" ")), len(text.rstrip(" "))
            kept = kept[slice(*edges)] if start else kept
            kept = [x for n, x in enumerate(kept) if x[1] != " " or n == 0 or kept[n - 1][1] != " "]
        if start and self._space_before:
            kept.insert(0, (kept[0][0] if kept else 0, " "))
        places = [i for i, c in kept for _ in (SPACE if c == " " else c).encode()]  # of each byte
        at = 0
        for piece, token in zip(spelled, ids, strict=True):
            is_byte = token < self._n and self.types[token] == BYTE
            n = 1 if is_byte else len(piece.encode())
            own = places[at : at + n] or places[-1:]
            yield own[0], own[-1] + 1
            at += n

    # ---- the model -------------------------------------------------------------------------

    def _processor(self, plain: frozenset[str], start: bool) -> Any:
        """The library's object; without these user-defined tokens, and without what is done at a
        text's beginning."""
        if (plain, start) not in self._processors:
            pieces = list(self._pieces)
            for token in plain.intersection(self.user_tokens):
                i = self._ids[token]
                pieces[i] = _piece(token, 0.0, CONTROL)
            model = b"".join(pieces) + _settings(
                self._kind,
                byte_fallback=BYTE in self.types,
                space_before=start and self._space_before,
                single_spaces=start and self._single_spaces,
            )
            with reading("GGUF: tokenizer.ggml.tokens"):
                processor = self._library.SentencePieceProcessor()
                processor.LoadFromSerializedProto(model)
            self._processors[plain, start] = processor
        return self._processors[plain, start]

    def _written(self, tokens: Sequence[str], scores: NDArray[np.float32]) -> list[bytes]:
        """Each token as a piece of the model. What SentencePiece must not find is a control piece,
        and so are repeated and empty tokens, by names that no text has."""
        pieces, names = [], {token.replace(" ", SPACE) for token in tokens}
        taken: set[str] = set()
        for i, (token, kind) in enumerate(zip(tokens, self.types, strict=True)):
            name = token.replace(" ", SPACE) if kind == USER else token
            if token in self._added or kind == PADDING:
                kind = CONTROL
            if not name or name in taken:
                name, kind = _free_name(i, names), UNKNOWN if kind == UNKNOWN else CONTROL
            taken.add(name)
            pieces.append(_piece(name, float(scores[i]), kind))
        if UNKNOWN not in self.types:  # one that no complete vocabulary ever gives
            pieces.append(_piece(_free_name(len(tokens), names), 0.0, UNKNOWN))
        return pieces


def _sentencepiece() -> Any:
    try:
        import sentencepiece
    except ImportError:
        raise ImportError(
            "text needs the sentencepiece library for this model: pip install 'rksc[hf]' "
            "(token ids work without)"
        ) from None
    return sentencepiece


# ---- what a GGUF leaves out ---------------------------------------------------------------


def _kind_of(tokens: Sequence[str], scores: NDArray[np.float32], types: Sequence[int]) -> int:
    """BPE or unigram: the first has ranks for scores, the second logarithms of probabilities."""
    normal = scores[[i for i, kind in enumerate(types) if kind == NORMAL]]
    if not np.isfinite(normal).all():
        raise ValueError("GGUF: tokenizer.ggml.scores: a score is not finite")
    merged = {float(scores[i]) for i, t in enumerate(tokens) if len(t) > 1 and types[i] == NORMAL}
    n_merged = sum(len(t) > 1 and types[i] == NORMAL for i, t in enumerate(tokens))
    if n_merged > 1 and len(merged) == 1:
        raise ValueError(
            f"GGUF: tokenizer.ggml.scores are all {merged.pop():g}, so the order of merges is not "
            "in this file; pass the tokenizer of the model's Hugging Face folder"
        )
    return _BPE if (normal == np.rint(normal)).all() else _UNIGRAM


def _original_types(
    tokens: Sequence[str], scores: NDArray[np.float32], types: Sequence[int], kind_of_model: int
) -> list[int]:
    """Types as in the model that was converted.

    The converter writes user-defined symbols as normal pieces. They have the score 0 and stand
    before the bytes or, in a model without bytes, before the first piece that was learned; in BPE
    that has the score 0, too. Padding it writes as unused pieces.
    """
    known = list(types)
    scored = (i for i, kind in enumerate(types) if kind == NORMAL and scores[i] != 0)
    head = types.index(BYTE) if BYTE in types else next(scored, 0) - (kind_of_model == _BPE)
    for i in range(len(known)):
        if known[i] == NORMAL and i < head and scores[i] == 0:
            known[i] = USER
        if known[i] == UNUSED and _PADDING.fullmatch(tokens[i]):
            known[i] = PADDING
    return known


def first_ids(tokens: Sequence[str]) -> dict[str, int]:
    """Ids by token; the first of equal ones."""
    return dict(zip(reversed(tokens), reversed(range(len(tokens))), strict=True))


def _free_name(i: int, names: Collection[str]) -> str:
    name = f"<{i}>"
    while name in names:
        name += ">"
    return name


# ---- the model file: protocol buffers, as sentencepiece_model.proto numbers the fields -----


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _field(number: int, value: int | bytes | float) -> bytes:
    if isinstance(value, float):
        return _varint(number << 3 | 5) + struct.pack("<f", value)
    if isinstance(value, bytes):
        return _varint(number << 3 | 2) + _varint(len(value)) + value
    return _varint(number << 3) + _varint(value)


def _piece(name: str, score: float, kind: int) -> bytes:
    return _field(1, _field(1, name.encode()) + _field(2, score) + _field(3, kind))


def _settings(kind: int, byte_fallback: bool, space_before: bool, single_spaces: bool) -> bytes:
    trainer = _field(3, kind) + _field(35, int(byte_fallback))
    normalizer = _field(1, b"identity") + _field(3, int(space_before))
    normalizer += _field(4, int(single_spaces)) + _field(5, 1)  # spaces are spelled SPACE
    return _field(2, trainer) + _field(3, normalizer)


# ---- tokens that are found whole ----------------------------------------------------------


class _Cutter:
    """Finds tokens in a text: the leftmost first, there the longest."""

    def __init__(self, tokens: Collection[str]) -> None:
        self._tokens = frozenset(tokens)
        self._sizes: dict[str, list[int]] = {}  # by first character, longest first
        for size, first in sorted({(len(t), t[0]) for t in tokens}, reverse=True):
            self._sizes.setdefault(first, []).append(size)
        self._first = re.compile(f"[{re.escape(''.join(self._sizes))}]") if tokens else None

    def cut(self, text: str) -> Iterator[tuple[str, bool]]:
        """The parts of the text in order, maybe empty, and whether each is a token."""
        begin = at = 0
        while self._first is not None and (found := self._first.search(text, at)):
            at = found.start()
            for size in self._sizes[text[at]]:
                if text[at : at + size] in self._tokens:
                    yield text[begin:at], False
                    yield text[at : at + size], True
                    begin = at = at + size
                    break
            else:
                at += 1
        yield text[begin:], False
