"""A tokenizer in the shape of transformers', as far as clients of vLLM's class use it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from typing import Any

from ..scalars import as_int
from ..text.chat_tokens import encode_chat
from ..text.tokenizer import Tokenizer
from ._record import Record
from ._wire import read_messages

# What asks for nothing where transformers takes it.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "return_tensors": (None,), "padding": (None, False), "truncation": (None, False),
    "max_length": (None,), "clean_up_tokenization_spaces": (None, False),
}  # fmt: skip


class TransformersTokenizer:
    """encode, decode, calls and apply_chat_template over a `rksc.Tokenizer`; lists of ids come out.

    chat_template may be set: it is this object's own, the engine's tokenizer keeps its.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __len__(self) -> int:
        return self._tokenizer.vocab_size

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.vocab_size

    @property
    def bos_token_id(self) -> int | None:
        return self._tokenizer.bos_id

    @property
    def eos_token_id(self) -> int | None:
        return self._tokenizer.eos_id

    @property
    def bos_token(self) -> str | None:
        return self._spelling(self.bos_token_id)

    @property
    def eos_token(self) -> str | None:
        return self._spelling(self.eos_token_id)

    @property
    def chat_template(self) -> str | None:
        return self._tokenizer.chat_template

    @chat_template.setter
    def chat_template(self, template: str | None) -> None:
        self._tokenizer = copy(self._tokenizer)
        self._tokenizer.chat_template = template

    def encode(self, text: str, add_special_tokens: bool = True, **others: Any) -> list[int]:
        """The ids of a text, with the BOS that the model wants unless it is not to be added."""
        _refuse(others)
        return self._tokenizer.encode(text, bos=None if add_special_tokens else False)

    def __call__(
        self, text: str | Sequence[str], add_special_tokens: bool = True, **others: Any
    ) -> Record:
        """input_ids and attention_mask, of one text or of several."""
        if isinstance(text, str):
            return _encoding(self.encode(text, add_special_tokens, **others))
        return _encoding([self.encode(each, add_special_tokens, **others) for each in text])

    def decode(
        self,
        token_ids: int | Iterable[int],
        skip_special_tokens: bool = False,
        **others: Any,
    ) -> str:
        _refuse(others)
        one = as_int(token_ids)
        ids: Any = token_ids if one is None else [one]
        return self._tokenizer.decode(map(int, ids), special=not skip_special_tokens)

    def batch_decode(
        self,
        sequences: Iterable[Iterable[int]],
        skip_special_tokens: bool = False,
        **others: Any,
    ) -> list[str]:
        return [self.decode(ids, skip_special_tokens, **others) for ids in sequences]

    def apply_chat_template(
        self,
        conversation: Sequence[Any],
        tools: Any = None,
        documents: Any = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        return_dict: bool = False,
        **others: Any,
    ) -> Any:
        """A conversation, or a list of them, as text or (tokenize) as a list of ids, in which
        special tokens that a message spells are text. others: variables of the template."""
        tokenizer = self._tokenizer
        if chat_template is not None:
            tokenizer = tokenizer.with_template(chat_template)
        options = {
            "add_generation_prompt": add_generation_prompt, "tools": tools, "documents": documents,
            "continue_final": continue_final_message, **_without_neutral(others),
        }  # fmt: skip

        def render(messages: Any) -> Any:
            turns = read_messages(messages, "conversation")
            if tokenize:
                return encode_chat(tokenizer, turns, **options)
            return tokenizer.chat(turns, **options)

        single = len(conversation) == 0 or isinstance(conversation[0], Mapping)
        made = render(conversation) if single else [render(each) for each in conversation]
        return _encoding(made) if tokenize and return_dict else made

    def _spelling(self, token: int | None) -> str | None:
        return None if token is None else self._tokenizer.decode([token], special=True)


def _without_neutral(options: dict[str, Any]) -> dict[str, Any]:
    """ValueError names what is asked for and not there."""
    for name, values in _NEUTRAL.items():
        if options.get(name) not in values:
            said = f"{name}={options[name]!r} is not supported"
            raise ValueError(f"{said}: lists of ids, and texts as they are, come out")
    return {name: value for name, value in options.items() if name not in _NEUTRAL}


def _refuse(options: dict[str, Any]) -> None:
    for name in _without_neutral(options):
        raise ValueError(f"{name}={options[name]!r} is not supported")


def _encoding(ids: Any) -> Record:
    several = len(ids) > 0 and isinstance(ids[0], list)
    mask: Any = [[1] * len(row) for row in ids] if several else [1] * len(ids)
    return Record({"input_ids": ids, "attention_mask": mask})
