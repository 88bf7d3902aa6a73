"""A tokenizer for the small test models (97 ids): pieces of text, some of half a character.

No library needed; what it cannot spell is a ValueError.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rksc.text.chat import render

CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)

BOS, END, USER, ASSISTANT, SYSTEM = 0, 1, 2, 3, 4
SPECIAL = {0: "<s>", 1: "</s>", 2: "<user>", 3: "<assistant>", 4: "<system>"}
_PIECES = [
    *(b"YES", b"NO", b" YES", b" NO", b"ab", b"abc", b"\n\n", b"\n", b" ", b"! ", b"th", b"e "),
    *("é".encode()[:1], "é".encode()[1:], "😀".encode()[:2], "😀".encode()[2:], "漢".encode()),
    *(bytes([c]) for c in b"abcdefghijklmnopqrstuvwxyz"),
    *(bytes([c]) for c in b"0123456789"),
    *(bytes([c]) for c in b"ABCDEFGHIJKLMNOPQRSTUVWXYZ"),
    *(bytes([c]) for c in b"?.:,'-#*"),
]
PIECES = [*(b"" for _ in SPECIAL), *_PIECES]
PIECES += [b"~%d~" % i for i in range(97 - len(PIECES))]


class Letters:
    """What BranchSession, Wordings and clients ask of a rksc.Tokenizer."""

    bos_id, eos_id = BOS, END
    special_tokens = SPECIAL
    vocab_size = len(PIECES)

    def __init__(self, *, adds_bos: bool = True, chat: bool = False) -> None:
        self.adds_bos = adds_bos
        self.chat_template = CHAT if chat else None

    def token_bytes(self, vocab_size: int | None = None) -> list[bytes]:
        size = len(PIECES) if vocab_size is None else vocab_size
        return PIECES[:size] + [b""] * (size - len(PIECES))

    def begins_after(self, ids: Sequence[int]) -> bool:
        return len(ids) == 0

    def template_marks(self) -> frozenset[str]:
        return frozenset()

    def encode(
        self, text: str, bos: bool | None = None, special: bool = True, start: bool = True
    ) -> list[int]:
        data = text.encode()
        names = {name.encode(): i for i, name in SPECIAL.items()} if special else {}
        ids: list[int] = []
        while data:
            known = [(name, i) for name, i in names.items() if data.startswith(name)]
            known += [(p, i) for i, p in enumerate(PIECES) if p and data.startswith(p)]
            if not known:
                known = [(data[:1], PIECES.index(b"?"))]  # what it has no letter for
            piece, i = max(known, key=lambda item: len(item[0]))
            ids.append(i)
            data = data[len(piece) :]
        wanted = self.adds_bos and start if bos is None else bos
        return [BOS, *ids] if wanted and ids[:1] != [BOS] else ids

    def offsets(self, text: str) -> list[int]:
        begins, data = [], b""
        for i in self.encode(text, bos=False):
            begins.append(len(data.decode(errors="ignore")))
            data += SPECIAL[i].encode() if i in SPECIAL else PIECES[i]
        return begins

    def decode(self, ids: Iterable[int], special: bool = False, start: bool = True) -> str:
        return b"".join(self.parts(ids, special)).decode(errors="replace")

    def parts(self, ids: Iterable[int], special: bool = False, start: bool = True) -> list[bytes]:
        names = {i: name.encode() for i, name in SPECIAL.items()} if special else {}
        return [names.get(i, PIECES[i]) for i in ids]

    def chat(self, messages: Sequence[Any], **options: Any) -> str:
        return render(self.chat_template or CHAT, messages, **options)
