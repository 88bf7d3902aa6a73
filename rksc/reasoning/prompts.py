"""Wordings: how a problem is put to a model, and how the model is asked to judge an answer.

With a chat template the answer is the assistant's turn and the judgement a second question of
the user's; without one both are plain text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..engine.arguments import no_tokenizer
from ..engine.session import BranchSession
from ..engine.types import Tokens
from ..text.chat_tokens import encode_chat, spells_special
from ..text.decoding import check_text
from ..text.tokenizer import Tokenizer

INSTRUCTION = (
    "Think step by step. Then write the final answer on a line that begins with 'Answer:'."
)
VERIFY = "Is the answer above correct? Reply with one word, YES or NO."
VALUE = "Is the solution above correct as far as it goes? Reply with one word, YES or NO."

_CHAT_ANSWERS = (("YES", "NO"), ("Yes", "No"), ("yes", "no"))
_PLAIN_ANSWERS = tuple((f" {yes}", f" {no}") for yes, no in _CHAT_ANSWERS) + _CHAT_ANSWERS
_MARK = "\N{END OF TEXT}rksc-answer\N{END OF TEXT}"


@dataclass(frozen=True)
class Wordings:
    """How one call of solve or search speaks to its model.

    instruction follows the problem ("": nothing), system is the chat's system message (without a
    chat template: a text before all), verify_prompt asks for the judgement.
    """

    session: BranchSession
    instruction: str = INSTRUCTION
    system: str | None = None
    verify_prompt: str = VERIFY

    def __post_init__(self) -> None:
        if self.session.tokenizer is None:
            raise no_tokenizer("problem")
        check_text("instruction", self.instruction)
        check_text("verify_prompt", self.verify_prompt)
        if self.system is not None:
            check_text("system", self.system)

    @property
    def tokenizer(self) -> Tokenizer:
        assert self.session.tokenizer is not None
        return self.session.tokenizer

    def problem(self, problem: str) -> list[int]:
        """Tokens up to where the answer begins."""
        if self.tokenizer.chat_template is not None:
            return encode_chat(self.tokenizer, self._turns(problem))
        head = "Question: " if self.system is None else f"{self.system}\n\nQuestion: "
        tail = f"\n{self.instruction}\n\nSolution:"
        if not spells_special(self.tokenizer, problem):
            return self.tokenizer.encode(head + problem + tail)
        return (
            self.tokenizer.encode(head)
            + self.tokenizer.encode(problem, bos=False, special=False, start=False)
            + self.tokenizer.encode(tail, bos=False, start=False)
        )

    def verification(self) -> list[int]:
        """Tokens that follow an answer: the end of its turn, the question, and where the
        reply begins."""
        if self.tokenizer.chat_template is None:
            text = f"\n\n{self.verify_prompt}\nReply:"
            return self.tokenizer.encode(text, bos=False, start=False)
        turns = [
            *self._turns("-"),
            {"role": "assistant", "content": _MARK},
            {"role": "user", "content": self.verify_prompt},
        ]
        _, mark, tail = self.tokenizer.chat(turns).partition(_MARK)
        if not mark:
            raise ValueError("chat template: an assistant's message does not appear as it is")
        return self.tokenizer.encode(tail, bos=False, start=False)

    def answers(self, yes: int | str | None, no: int | str | None) -> tuple[int, int]:
        """Ids of YES and NO: those given, else the first usual pair of single tokens."""
        if (yes is None) != (no is None):
            raise ValueError("yes and no must be given both or neither")
        if yes is not None and no is not None:
            return self.session.token_id(yes, "yes"), self.session.token_id(no, "no")
        plain = self.tokenizer.chat_template is None
        pairs: Sequence[tuple[str, str]] = _PLAIN_ANSWERS if plain else _CHAT_ANSWERS
        for pair in pairs:
            ids = [self.tokenizer.encode(word, bos=False, start=not plain) for word in pair]
            if all(len(i) == 1 for i in ids):
                return ids[0][0], ids[1][0]
        raise ValueError(
            f"yes, no: none of {pairs} is one token each for this model: pass ids, or texts of "
            "one token"
        )

    def suffix(self, text: str) -> Tokens:
        """Tokens of what an answer is made to begin with."""
        return self.tokenizer.encode(text, bos=False, start=False)

    def _turns(self, problem: str) -> list[dict[str, str]]:
        content = f"{problem}\n\n{self.instruction}" if self.instruction else problem
        turns = [{"role": "user", "content": content}]
        if self.system is not None:
            turns.insert(0, {"role": "system", "content": self.system})
        return turns
