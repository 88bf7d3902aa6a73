"""Between texts and bytes of tokens: whole characters only, never a part of a stop string.

A token's bytes may begin or end inside a character; a stop string may begin in one token and
end in another. Bytes that may still become either wait until that is decided.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence


def check_text(field: str, text: object) -> None:
    """TypeError for what is no str, ValueError for a text that has no bytes; both name `field`."""
    if not isinstance(text, str):
        raise TypeError(f"{field} must be a str, got {text!r}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"{text[error.start]!r} at {error.start}"
        raise ValueError(f"{field}: {half} is half a character (a lone surrogate)") from None


def final_text(token_bytes: Sequence[bytes], tokens: Iterable[int], cut: int = 0) -> str:
    """Text of tokens without their last `cut` bytes; a half character at the end is left out,
    bytes that are no UTF-8 become U+FFFD."""
    data = b"".join(token_bytes[token] for token in tokens)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    return decoder.decode(data[: len(data) - cut])


class TextStream:
    """Text of one branch as its tokens come; the pieces together equal `final_text`."""

    def __init__(self, token_bytes: Sequence[bytes], stops: Sequence[bytes] = ()) -> None:
        self._token_bytes = token_bytes
        self._stops = stops
        self._longest = max((len(stop) for stop in stops), default=0)
        self._held = b""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        """Text that has become final with this token."""
        self._held += self._token_bytes[token]
        sure = len(self._held) - self._undecided()
        piece, self._held = self._held[:sure], self._held[sure:]
        return self._decoder.decode(piece)

    def finish(self, cut: int = 0) -> str:
        """The rest; cut: bytes at the end that belong to a stop string or follow it."""
        piece, self._held = self._held[: len(self._held) - cut], b""
        return self._decoder.decode(piece)

    def _undecided(self) -> int:
        """Bytes at the end with which a stop string may begin (or does: then all from there)."""
        held = self._held
        whole = [at for at in (held.find(stop) for stop in self._stops) if at >= 0]
        if whole:
            return len(held) - min(whole)
        for size in range(min(self._longest, len(held)), 0, -1):
            if any(stop.startswith(held[-size:]) for stop in self._stops):
                return size
        return 0
