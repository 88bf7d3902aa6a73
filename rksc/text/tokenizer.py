"""Text to token ids and back.

A Hugging Face folder brings its tokenizer.json (tokenizer_folder.py), a GGUF describes its
tokenizer in a few keys (tokenizer_gguf.py). Either way a library makes ids of texts: an `Encoder`.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from .chat import Message, render
from .decoding import check_text
from .ends import END_TOKENS
from .template import ChatTemplate

_SAID = "\N{END OF TEXT}rksc-said\N{END OF TEXT}"
_LONGEST = 1000  # characters of a token


class Encoder(Protocol):
    """What makes ids of texts. Instances may be used from several threads."""

    user_tokens: tuple[str, ...]
    """Added tokens that are not special."""
    library_object: Any
    """What the library made, for those who go on with the library."""

    def encode(
        self, text: str, plain: frozenset[str] | None = None, start: bool = True
    ) -> list[int]:
        """Ids of a text, without BOS. plain: None, or special tokens and these others are text
        where they are spelled. start: does the text begin here, or go on?"""
        ...

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Where each token of `encode(text)` begins and ends in the text, in characters."""
        ...

    def token_id(self, token: str) -> int | None:
        """The id of a token by its spelling in the vocabulary."""
        ...


class Tokenizer:
    """A vocabulary with its rules. Made by `from_folder` and `from_gguf`.

    `bos_id` and `eos_id` are ids or None; `adds_bos` tells whether the model wants its BOS
    before a text. Instances do not change and may be used from several threads.
    """

    def __init__(
        self,
        encoder: Encoder,
        pieces: list[bytes],
        special: Mapping[int, str],
        *,
        bos_id: int | None = None,
        eos_id: int | None = None,
        adds_bos: bool = False,
        strips_space: bool = False,
        begins_after: Iterable[int] = (),
        ends: Iterable[int | None] = (),
        templates: Mapping[str, ChatTemplate] | None = None,
        names: Mapping[str, Any] | None = None,
    ) -> None:
        """`pieces` are the bytes that each id adds to a text, `special` ids and their texts, `ends`
        ids that end a turn besides eos_id (None: a token that is not there).

        `strips_space`: encoding puts a space before a text, which decoding takes away; a text
        also begins after tokens of `begins_after`.
        `templates` are chat templates by name, `names` their variables such as bos_token.
        """
        self._encoder, self._pipeline = encoder, encoder.library_object
        self._marks = tuple(token for token in encoder.user_tokens if _is_mark(token))
        self._pieces = pieces
        self._special = dict(special)
        self.bos_id, self.eos_id = bos_id, eos_id
        self._named_ends = tuple(i for i in (eos_id, *ends) if i is not None)
        self.adds_bos = adds_bos and bos_id is not None
        self._strips_space = strips_space
        self._begins_after = frozenset(begins_after)
        self._templates = dict(templates or {})
        self._names = dict(names or {})
        self._ends: tuple[int, ...] | None = None

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """Read tokenizer.json and what stands beside it: tokenizer_config.json,
        special_tokens_map.json, chat_template.jinja and additional_chat_templates."""
        from .tokenizer_folder import read_folder_tokenizer

        return cls(**read_folder_tokenizer(Path(folder)))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], file: str | Path = "") -> Tokenizer:
        """Build what the `tokenizer.ggml.` keys describe (gpt2 and llama models). file: where
        they are from, for errors of its chat template."""
        from .tokenizer_gguf import read_gguf_tokenizer

        return cls(**read_gguf_tokenizer(metadata, str(file)))

    def __repr__(self) -> str:
        return f"<rksc.Tokenizer of {len(self._pieces)} tokens>"

    @property
    def vocab_size(self) -> int:
        """One more than the highest id; a model's matrix may have more rows."""
        return len(self._pieces)

    def token_id(self, token: str) -> int | None:
        """The id of a token by its spelling in the vocabulary, or None."""
        return self._encoder.token_id(token)

    def encode(
        self, text: str, bos: bool | None = None, special: bool = True, start: bool = True
    ) -> list[int]:
        """The ids of `text`.

        bos: None puts the BOS first where the model wants one, True and False decide; a text
        that already begins with it gets no second one. special: are spellings of special
        tokens in the text (such as <|im_end|>) these tokens, or plain text? The chat template's
        own marks count as special, whatever the tokenizer calls them. start: does the text
        begin here? If it goes on after other tokens, there is no BOS unless bos=True, and
        none of the space that SentencePiece models put before a text.
        """
        check_text("text", text)
        plain = None if special else self.template_marks()
        ids = self._encoder.encode(text, plain, start or not self._strips_space)
        if bos and self.bos_id is None:
            raise ValueError("bos=True, but this tokenizer has no BOS token")
        wanted = self.adds_bos and start if bos is None else bos
        if wanted and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def offsets(self, text: str) -> list[int]:
        """Where each token of `encode(text, bos=False)` begins in the text, in characters; tokens
        inside one character begin with it. What lies between two tokens, such as a space that a
        special token takes with it, is the next one's."""
        begins, last = [], 0
        for begin, end in self._encoder.spans(text):
            begins.append(min(begin, last))
            last = max(last, end)
        return begins

    def begins_after(self, ids: Sequence[int]) -> bool:
        """Does a text that follows these ids begin there (`encode`'s start)?"""
        return len(ids) == 0 or int(ids[-1]) in self._begins_after

    def template_marks(self) -> frozenset[str]:
        """The added tokens that are not special to the tokenizer, but that the chat template
        writes: <｜User｜> of DeepSeek's, <think> of Qwen's."""
        return _written(self._marks, tuple(t.text for t in self._templates.values()))

    def decode(self, ids: Iterable[int], special: bool = False, start: bool = True) -> str:
        """The text of `ids`; bytes that are no UTF-8 become U+FFFD.

        special: write special tokens out? start: do the ids begin a text? Then the space
        that SentencePiece models put before it is dropped.
        """
        return b"".join(self.parts(ids, special, start)).decode(errors="replace")

    def parts(self, ids: Iterable[int], special: bool = False, start: bool = True) -> list[bytes]:
        """The bytes that each of the ids adds to `decode` of all."""
        if isinstance(ids, str) or not isinstance(ids, Iterable):
            raise TypeError(f"ids must be a sequence of token ids, got {ids!r}")
        parts, begins = [], start
        for token in ids:
            piece = self._bytes_of(token, special)
            if token in self._special:
                begins = token in self._begins_after if special else begins
            elif piece:
                if begins and self._strips_space:
                    piece = piece.removeprefix(b" ")
                begins = False
            parts.append(piece)
        return parts

    def _bytes_of(self, token: int, special: bool = False) -> bytes:
        if not 0 <= token < len(self._pieces):
            raise ValueError(f"token {token} is outside the vocabulary of {len(self._pieces)}")
        return (
            self._special[token].encode()
            if special and token in self._special
            else (self._pieces[token])
        )

    @property
    def special_tokens(self) -> dict[int, str]:
        """Special tokens by id, as a text spells them. They add nothing to a decoded text."""
        return dict(self._special)

    def token_bytes(self, vocab_size: int | None = None, special: bool = False) -> list[bytes]:
        """What each id adds to the bytes of a text: special tokens their spelling with
        special=True and nothing without, gaps nothing.

        With `vocab_size` exactly so many entries: a model may have more rows than tokens.
        """
        pieces = list(self._pieces)
        if special:
            for token, text in self._special.items():
                pieces[token] = text.encode()
        return pieces if vocab_size is None else (pieces + [b""] * vocab_size)[:vocab_size]

    def decoder(self) -> StreamDecoder:
        """A decoder for ids that come one by one."""
        return StreamDecoder(self)

    def chat(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        continue_final: bool = False,
        **template_kwargs: Any,
    ) -> str:
        """Render the model's chat template, in a sandbox; encode the result as any text.

        With `continue_final` the text ends inside the last message, to be gone on with.
        """
        named = self._templates
        use = (
            "tool_use"
            if template_kwargs.get("tools") is not None and "tool_use" in named
            else "default"
        )
        if use not in named:
            known = f", only {', '.join(sorted(named))}: with_template(name)" if named else ""
            raise ValueError(f"this tokenizer has no chat template{known}")
        defaults = {"tools": None, "documents": None} | self._names
        return render(
            named[use],
            messages,
            add_generation_prompt,
            continue_final,
            **(defaults | template_kwargs),
        )

    @property
    def chat_template(self) -> str | None:
        """The text of the chat template, or None. Where a model has several by name, of the one
        called default; `chat` takes tool_use where tools are given."""
        default = self._templates.get("default")
        return None if default is None else default.text

    @chat_template.setter
    def chat_template(self, text: str | None) -> None:
        self._templates = {} if text is None else {"default": ChatTemplate(text)}
        self._ends = None

    def with_template(self, template: str) -> Tokenizer:
        """This tokenizer with another chat template: a name of the model's own, or a text."""
        other = copy(self)
        other.chat_template = template
        if template in self._templates:
            other._templates = {"default": self._templates[template]}
        return other

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The tokens that end a turn as far as a tokenizer knows: those that its files name, those
        of well-known texts, and what the chat template writes after what the assistant says."""
        if self._ends is None:
            self._ends = tuple(dict.fromkeys((*self._named_ends, *_ends(self))))
        return self._ends


def _ends(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Tokens of END_TOKENS, and those that the chat template writes."""
    known = [i for i, text in tokenizer.special_tokens.items() if text in END_TOKENS]
    return (*known, *template_ends(tokenizer))


def template_ends(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The special tokens with which the chat template goes on after an assistant's message, one
    that is answered and one that is the last: the end of its turn, or the begin of the next.

    Found by rendering such a chat. () where plain text follows, where the template does not take
    the chat or is at fault (who asks for a chat hears of it), or where jinja2 is missing.
    """
    if tokenizer.chat_template is None:
        return ()
    said = [f"{_SAID}{i}{_SAID}" for i in (1, 2)]
    turns = [
        {"role": role, "content": text}
        for answer in said
        for role, text in (("user", "?"), ("assistant", answer))
    ]
    try:
        text = tokenizer.chat(turns, add_generation_prompt=False)
    except (ImportError, RuntimeError, ValueError):
        return ()
    marks = {tokenizer.token_id(mark) for mark in tokenizer.template_marks()}
    special = {*tokenizer.special_tokens, *marks}
    ends = []
    for answer in said:
        after = text.partition(answer)[2].lstrip()[:_LONGEST]
        ends += tokenizer.encode(after, bos=False, start=False)[:1]
    return tuple(i for i in dict.fromkeys(ends) if i in special)


@lru_cache(maxsize=16)
def _written(marks: tuple[str, ...], templates: tuple[str, ...]) -> frozenset[str]:
    return frozenset(mark for mark in marks if any(mark in text for text in templates))


def _is_mark(token: str) -> bool:
    """Is it neither a word nor white space nor signs alone?"""
    return bool(re.search(r"\w", token) and re.search(r"[^\w\s]", token))


class StreamDecoder:
    """Text from ids as they come; a character appears once all of its bytes are there."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._text = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, ids: int | Iterable[int]) -> str:
        """The characters that `ids` complete, maybe none."""
        ids = ids if isinstance(ids, Iterable) else (ids,)
        return self._text.decode(b"".join(self._tokenizer._bytes_of(int(i)) for i in ids))

    def finish(self) -> str:
        """What is left: U+FFFD where the ids ended inside a character. Starts anew."""
        rest = self._text.decode(b"", final=True)
        self._text.reset()
        return rest
