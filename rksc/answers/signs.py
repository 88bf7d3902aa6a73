"""The sign of a number in a text: what stands before its digits.

A dash is a sign where nothing stands before it that could be subtracted from. Elsewhere it parts:
it subtracts (5-3, x - 3), makes a range (1990-1995) or a word (COVID-19). A dash and a space that
begin a line belong to a list, unless the number is all of the line. An em dash parts words, unless
it begins a line or follows an opening mark. Parentheses are no minus.
"""

from __future__ import annotations

import re
import unicodedata
from typing import NamedTuple

from .characters import LETTER, LOWERED, RAISED, SPACES, VULGAR


class Sign(NamedTuple):
    """start: where the number begins, with sign and currency. mark: "-", "±", "", or "bullet" for
    the dash of a list. dashed: a dash stands before that is no sign. joined: the digits go on a
    word or are an index. money: a currency stands before."""

    start: int
    mark: str
    dashed: bool
    joined: bool
    money: bool


_LETTER = re.compile(LETTER)
_LAST_WORD = re.compile(rf"{LETTER}+\Z")
_COMMAND = re.compile(r"\\([A-Za-z]+)\Z")
_SMALL = re.compile(f"[{RAISED}{LOWERED}]")
_VULGAR = re.compile(f"[{VULGAR}]")
# After these commands of LaTeX and these words a dash is a sign.
_OPERATORS = {
    *("times", "cdot", "div", "le", "leq", "ge", "geq", "lt", "gt", "ne", "neq", "to", "in"),
    *("mp", "approx", "equiv", "sim", "implies", "quad", "qquad", "left"),
}
_VERBS = {
    *("is", "are", "was", "were", "be", "been", "equals", "equal", "reach", "reaches", "gives"),
    *("get", "gets", "makes", "than", "to", "at", "of", "by", "from", "and", "or", "between"),
    *("about", "around", "only", "over", "under", "below", "above"),
}
# What most numbers follow, seen at one look: nothing that could be a sign, or join.
_NO_SIGN = re.compile(r"(?<=[A-DF-LN-RT-Za-df-ln-rt-z\d,.;:(\[] )|(?<=[(\[,:;=<>])")
_UNSIGNED = ("", False, False, False)
_CODES = {"usd", "eur", "gbp", "inr", "cad", "aud", "chf", "jpy", "cny", "rmb", "rs"}


def sign_of(text: str, at: int) -> Sign:
    """The sign of the number whose digits begin at a place of a folded text."""
    if _NO_SIGN.match(text, at):
        return Sign(at, *_UNSIGNED)
    start, money = _currency(text, at)
    end = _back(text, start)
    spaced = end != start
    before = text[end - 1 : end]
    for both in ("±", "+/-", r"\pm"):
        if text.endswith(both, 0, end):
            return Sign(end - len(both), "±", False, False, money)
    if before in ("-", "—", "⁻"):
        return _after_dash(text, start, end - 1, money)
    if before == "+" and not spaced and not _operand(text, end - 1):
        start = end - 1
    elif spaced or before == "\n":
        if before == "\n":
            end = _back(text, end - 1)
        word = _word_before(text, end)
        if word == "minus" and _is_term(text, _back(text, end - 5)):
            return Sign(start, "", True, False, money)
        if word in ("minus", "negative"):
            return Sign(end - len(word), "-", False, False, money)
    return Sign(start, "", False, start == at and _is_joined(text, at), money)


def _currency(text: str, at: int) -> tuple[int, bool]:
    """Where the currency before a place begins, and whether there is one. A currency after
    another number or letters (10$ 5, US$5) is not this number's."""
    gap = _back(text, at)
    if at - gap > 1 or text[gap - 1 : gap] != "$":
        return at, False
    start = gap - (2 if text.endswith("\\$", 0, gap) else 1)
    return (at, False) if text[start - 1 : start].isalnum() else (start, True)


def _after_dash(text: str, start: int, dash: int, money: bool) -> Sign:
    """Whether the dash is a sign of the number at `start`, or parts it from what stands before."""
    spaced, before = start > dash + 1, text[dash - 1 : dash]
    index = before == "^" or text.endswith(("^{", "_{"), 0, dash)
    end = _back(text, dash, SPACES + "$")
    twice = text[end - 1 : end] == "-"  # 9 - -5
    minus = Sign(dash, "-", twice, index, money)
    parted = Sign(start, "", True, False, money)
    if text[dash] == "⁻":
        return parted if spaced else minus._replace(joined=True)
    if text[dash] == "—":
        end = _back(text, dash)
        last = text[end - 1 : end]
        opens = last in ("", *"\n([{=:")
        return minus if opens and not spaced else parted._replace(dashed=last.isdecimal())
    if before == "-":
        end = dash
        while text[end - 1 : end] == "-":
            end -= 1
        words = spaced or _LETTER.match(text[end - 1 : end])  # two hyphens for an em dash
        return parted._replace(dashed=False) if words else minus
    if not spaced:
        parts = _operand(text, dash)
        return parted._replace(joined=_LETTER.match(before) is not None) if parts else minus
    end = _back(text, dash)
    if text[end - 1 : end] in ("", "\n"):
        return minus._replace(mark="bullet")
    return parted if _operand(text, end) and _word_before(text, end) not in _VERBS else minus


def _operand(text: str, end: int) -> bool:
    """Whether a dash that follows may part from, or subtract from, what ends here."""
    char = text[end - 1 : end]
    if not char:
        return False
    if _LETTER.match(char):
        command = _COMMAND.search(text, max(0, end - 12), end)
        return command is None or command[1] not in _OPERATORS
    if char in "$\"'|":
        inside = text[end - 2 : end - 1]
        return inside.isalnum() or inside in ("}", ")", "]")
    if char == "}":
        return not text[end - 2 : end - 1].isspace()
    return char.isdecimal() or char in ")]%°!" or unicodedata.category(char) == "No"


def _is_term(text: str, end: int) -> bool:
    """Whether "minus" after this place subtracts: from a number or a letter, not from a word."""
    return _operand(text, end) and len(_word_before(text, end)) <= 1


def _is_joined(text: str, at: int) -> bool:
    """Whether digits at this place go on a word or are an index."""
    before = text[at - 1 : at]
    if _LETTER.match(before):
        return _word_before(text, at) not in _CODES
    if before == "_":  # but not in _5_, which is emphasis
        return text[at - 2 : at - 1].isalnum() or text.endswith("}_", 0, at)
    return text.endswith(("^", "^{", "_{"), 0, at) or bool(_SMALL.match(text, at))


def _word_before(text: str, end: int) -> str:
    word = _LAST_WORD.search(text, max(0, end - 12), end)
    return word[0].lower() if word else ""


def _back(text: str, at: int, over: str = SPACES) -> int:
    """Where the spaces before a place begin."""
    while at and text[at - 1] in over:
        at -= 1
    return at
