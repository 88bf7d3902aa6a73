"""The plain guards of ASKS: two wordings may share KV only if they name the same numbers.

Hidden states cannot do this: two questions that differ in one number look *more* alike than
two wordings of one question. Numbers are read as values, so "three" equals "3", "half"
equals "50%" and "two dozen" equals "24". What it cannot see is a word turned round ("more"
for "fewer") with all numbers kept. `is_rewording` also refuses near-copies: a text that differs in
a few words only was seldom written to say the same.
"""

from __future__ import annotations

import re
from collections import Counter

from .number_words import named


def same_numbers(a: str, b: str) -> bool:
    """True when both texts name the same multiset of numbers.

    Stricter than equal `numbers`: 7:30 is not 7 and 30, and a number after a dash that may
    subtract it, or after "minus", is another than without: "5 - 3" and "5 + 3" differ.
    """
    return _compared(a) == _compared(b)


def _compared(text: str) -> Counter[object]:
    return Counter((number.key, number.dashed) for number in named(text))


_WORD = re.compile(r"[^\W\d_]+")
_NEAR_COPY = 0.9


def is_rewording(a: str, b: str) -> bool:
    """True when both texts name the same numbers and neither is a near-copy of the other.

    A near-copy holds at least 9 of 10 words of the shorter text. Lines that both texts begin or
    end with (instructions, worked examples) do not count. One sentence more, a clause less or
    one word turned round in an otherwise equal text make a near-copy; so does a misprint, which
    costs reuse and no answer. A word turned round *within* a rewording goes unnoticed.
    """
    return same_numbers(a, b) and _common_words(a, b) < _NEAR_COPY


def _common_words(a: str, b: str) -> float:
    """Words in common, relative to the shorter text, where the texts' lines differ; 1 where
    one of them has no words left."""
    rows_a, rows_b = a.lower().splitlines(), b.lower().splitlines()
    while rows_a and rows_b and rows_a[0] == rows_b[0]:
        del rows_a[0], rows_b[0]
    while rows_a and rows_b and rows_a[-1] == rows_b[-1]:
        del rows_a[-1], rows_b[-1]
    words_a, words_b = (Counter(_WORD.findall(" ".join(rows))) for rows in (rows_a, rows_b))
    shorter = min(words_a.total(), words_b.total())
    return (words_a & words_b).total() / shorter if shorter else 1.0
