"""Between texts and bytes of tokens: whole characters only, never a part of a stop string.

A token's bytes may begin or end inside a character; a stop string may begin in one token and
end in another. Bytes that may still become either wait until that is decided.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def check_text(field: str, text: object) -> None:
    """TypeError for what is no str, ValueError for a text that has no bytes; both name `field`."""
    if not isinstance(text, str):
        raise TypeError(f"{field} must be a str, got {text!r}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"{text[error.start]!r} at {error.start}"
        raise ValueError(f"{field}: {half} is a lone surrogate, half a character") from None


def token_tables(tokenizer: Any, n: int) -> tuple[list[bytes] | None, dict[int, bytes]]:
    """The bytes that each of n tokens adds to a text, and the spellings of special tokens, which
    add none; without a tokenizer None. Tokenizers of others need not know of special tokens."""
    if tokenizer is None:
        return None, {}
    names: Mapping[int, str] = getattr(tokenizer, "special_tokens", {})
    return tokenizer.token_bytes(n), {i: name.encode() for i, name in names.items() if i < n}


def final_text(token_bytes: Sequence[bytes], tokens: Iterable[int], cut: int = 0) -> str:
    """Text of tokens without their last `cut` bytes; a half character at the end is left out,
    bytes that are no UTF-8 become U+FFFD."""
    data = b"".join(token_bytes[token] for token in tokens)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    return decoder.decode(data[: len(data) - cut])


class TextStream:
    """Text of one branch as its tokens come; the pieces together equal `final_text`.

    `special`: the bytes by which a stop string may spell special tokens, which have none in
    `token_bytes`.
    """

    def __init__(
        self,
        token_bytes: Sequence[bytes],
        stops: Sequence[bytes] = (),
        special: Mapping[int, bytes] | None = None,
    ) -> None:
        self._token_bytes = token_bytes
        self._special = special or {}
        self._text, self._spelled = _Tail(stops), _Tail(stops)
        self._held = b""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        """Text that has become final with this token."""
        piece, special = self._token_bytes[token], self._special.get(token, b"")
        self._held += piece
        undecided = self._text.add(piece, True)
        if self._special:
            undecided = max(undecided, self._spelled.add(special or piece, not special))
        sure = len(self._held) - undecided
        final, self._held = self._held[:sure], self._held[sure:]
        return self._decoder.decode(final)

    def finish(self, cut: int = 0) -> str:
        """The rest; cut: bytes at the end that belong to a stop string or follow it."""
        piece, self._held = self._held[: len(self._held) - cut], b""
        return self._decoder.decode(piece)


class _Tail:
    """The end of a text with which a stop string may begin (or does: then all from there)."""

    def __init__(self, stops: Sequence[bytes]) -> None:
        self._stops = stops
        self._longest = max((len(stop) for stop in stops), default=0)
        self._bytes = self._shown = b""

    def add(self, piece: bytes, shown: bool) -> int:
        """The text goes on with this piece; how many bytes of the tail are shown now."""
        self._bytes += piece
        self._shown += bytes([shown]) * len(piece)
        begin = len(self._bytes) - self._undecided()
        self._bytes, self._shown = self._bytes[begin:], self._shown[begin:]
        return sum(self._shown)

    def _undecided(self) -> int:
        tail = self._bytes
        whole = [at for at in (tail.find(stop) for stop in self._stops) if at >= 0]
        if whole:
            return len(tail) - min(whole)
        for size in range(min(self._longest, len(tail)), 0, -1):
            if any(stop.startswith(tail[-size:]) for stop in self._stops):
                return size
        return 0
