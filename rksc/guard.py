"""The plain guards of ASKS: two wordings may share KV only if they name the same numbers.

Hidden states cannot do this: two questions that differ in one number look *more* alike than
two wordings of one question. Numbers are read as values, so "three" equals "3", "half"
equals "50%" and "two dozen" equals "24". What it cannot see is a word turned round ("more"
for "fewer") with all numbers kept. `is_rewording` also refuses near-copies: a text that differs in
a few words only was seldom written to say the same.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from fractions import Fraction
from typing import NamedTuple

_UNITS = [
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
    *("eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen"),
    *("eighteen", "nineteen"),
]
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_CARDINALS = {word: i for i, word in enumerate(_UNITS)}
_CARDINALS |= {word: 20 + 10 * i for i, word in enumerate(_TENS)}
_CARDINALS |= {"fourty": 40, "ninty": 90}  # as people write them
_SCALES = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9}
_SCALES |= {"trillion": 10**12, "dozen": 12, "score": 20}
_SCALES |= {word + "s": value for word, value in _SCALES.items()}
# "score" means 20 only after a number word ("three score"); a game's score is a word
_BARE_SCALES = {word for word in _SCALES if not word.startswith("score")}

_PARTS = {"half": 2, "halve": 2, "quarter": 4, "third": 3, "fourth": 4, "fifth": 5, "sixth": 6}
_PARTS |= {"seventh": 7, "eighth": 8, "ninth": 9, "tenth": 10, "eleventh": 11, "twelfth": 12}
_PARTS |= {"fifteenth": 15, "sixteenth": 16, "twentieth": 20, "hundredth": 100}
_PARTS |= {"thousandth": 1000}
_ORDINALS = set(_PARTS) - {"half", "halve", "quarter"}
_PARTS |= {word + "s": value for word, value in _PARTS.items()}

_FACTORS: dict[str, int | Fraction] = {"twice": 2, "thrice": 3, "couple": 2}
_FACTORS |= {"halved": Fraction(1, 2), "halving": Fraction(1, 2)}
for _stem, _value in (("doubl", 2), ("tripl", 3), ("quadrupl", 4), ("quintupl", 5)):
    _FACTORS |= {_stem + end: _value for end in ("e", "es", "ed", "ing")}
_FACTORS |= {word + "fold": value for word, value in _CARDINALS.items() if 2 <= value <= 20}
_PERCENT = {"%", "percent", "percents", "percentage"}

# Runs of more than 999 digits are read in pieces: int() refuses very long ones.
_TOKEN = re.compile(
    r"(?P<fraction>\d{1,999}\s*/\s*\d{1,999}(?![\d/]))"
    r"|(?P<number>\d{1,3}(?:,\d{3})+(?:\.\d{1,999})?(?!\d)|\d{1,999}(?:\.\d{1,999})?|\.\d{1,999})"
    r"(?P<thousand>k(?!\w))?"
    r"|(?P<word>[^\W\d_]+)|(?P<mark>\S)",
)


class _Item(NamedTuple):
    text: str  # of a word or mark; "" for a number
    value: Fraction = Fraction(0)
    is_number: bool = False
    is_fraction: bool = False  # written as 3/4


_NOTHING = _Item("")


def numbers(text: str) -> Counter[Fraction]:
    """The multiset of numbers that an English text names, by value.

    Digits (1,000, 2.5, -3, 3/4, 1 1/2, ½, 40%, 5k), number words ("twenty-five", "two hundred
    and ten"; not a lone "one"), fractions ("two thirds", "half"), factors ("twice",
    "double", "dozen") and ordinals from "third" on. Units are not converted.
    """
    found: Counter[Fraction] = Counter()
    items = _items(text)
    i = 0
    while i < len(items):
        value, end = _read(items, i)
        if value is not None:
            found[value] += 1
        i = end
    return found


def same_numbers(a: str, b: str) -> bool:
    """True when both texts name the same multiset of numbers."""
    return numbers(a) == numbers(b)


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


def _items(text: str) -> list[_Item]:
    text = re.sub(r"(?<=\d)(?=[¼-¾⅐-⅞])", " ", text)  # 2½ is 2 1/2
    text = unicodedata.normalize("NFKC", text).lower()
    text = text.replace("\N{FRACTION SLASH}", "/").replace("\N{MINUS SIGN}", "-")
    text = re.sub(r"\bper cent\b", "percent", text)
    items: list[_Item] = []
    for match in _TOKEN.finditer(text):
        if match["fraction"]:
            top, bottom = (int(part) for part in match["fraction"].split("/"))
            value = Fraction(top, bottom) if bottom else Fraction(top)
            items.append(_Item("", value, is_number=True, is_fraction=True))
        elif match["number"]:
            value = Fraction(match["number"].replace(",", ""))
            if match["thousand"]:
                value *= 1000
            start = match.start()
            if text[:start].endswith("-") and (start == 1 or text[start - 2] in " (=+*/:$"):
                value = -value
            items.append(_Item("", value, is_number=True))
        else:
            items.append(_Item(match["word"] or match["mark"]))
    return items


def _at(items: list[_Item], i: int) -> _Item:
    return items[i] if 0 <= i < len(items) else _NOTHING


def _read(items: list[_Item], i: int) -> tuple[Fraction | None, int]:
    """The number that starts at item i (None: none does) and the index after it."""
    item = items[i]
    word = item.text
    if item.is_number:
        following = _at(items, i + 1)
        if following.is_fraction and not item.is_fraction and item.value.denominator == 1:
            return _finish(items, i + 2, item.value + following.value)
        return _finish(items, i + 1, item.value)
    if word in _FACTORS:
        return Fraction(_FACTORS[word]), i + 1
    if word in _CARDINALS or word in _BARE_SCALES:
        value, end = _cardinal(items, i)
        after, finished = _finish(items, end, value)
        return (None if word == "one" and finished == i + 1 else after), finished
    if word in _PARTS:
        return _part(items, i)
    return None, i + 1


def _cardinal(items: list[_Item], i: int) -> tuple[Fraction, int]:
    """The value of "two hundred and twenty-five" from item i, and the index after it."""
    total = current = last = 0  # last: the value of the word before
    end = i
    while True:
        j = end + 1 if end > i and _at(items, end).text == "-" else end
        if last >= 100 and _at(items, j).text == "and" and _at(items, j + 1).text in _CARDINALS:
            j += 1
        word = _at(items, j).text
        if word in _CARDINALS:
            value = _CARDINALS[word]
            if not (end == i or last >= 100 or (20 <= last < 100 and 0 < value < 10)):
                break
            current += value
            last = value
        elif word in _SCALES and (end > i or word in _BARE_SCALES):
            last = _SCALES[word]
            current = max(current, 1) * last
            if last >= 1000:
                total, current = total + current, 0
        else:
            break
        end = j + 1
    return Fraction(total + current), end


def _part(items: list[_Item], i: int) -> tuple[Fraction, int]:
    """ "half", "a third of", "half a dozen"; an ordinal ("the third day") is its number."""
    word = items[i].text
    fraction = word not in _ORDINALS or _at(items, i - 1).text in ("a", "an")
    fraction = fraction or _at(items, i + 1).text in ("of", "as")
    if not fraction:
        return Fraction(_PARTS[word]), i + 1
    end = i + 1
    if _at(items, end).text in ("a", "an") and _at(items, end + 1).text in _BARE_SCALES:
        end += 1
    return _finish(items, end, Fraction(1, _PARTS[word]))


def _finish(items: list[_Item], end: int, value: Fraction) -> tuple[Fraction, int]:
    """What may follow a value: a scale, "thirds", "and a half", percent."""
    while _at(items, end).text in _SCALES:
        value *= _SCALES[items[end].text]
        end += 1
    part = end + 1 if _at(items, end).text == "-" else end
    word = _at(items, part).text
    # "20 third graders": a singular ordinal divides nothing but one
    if word in _PARTS and (word not in _ORDINALS or value == 1):
        value /= _PARTS[word]
        end = part + 1
    elif word == "and":
        j = part + 1
        if _at(items, j).text in ("a", "an", "one"):
            j += 2 if _at(items, j + 1).text == "-" else 1
        word = _at(items, j).text
        if word in _PARTS and word not in _ORDINALS:
            value += Fraction(1, _PARTS[word])
            end = j + 1
    if _at(items, end).text in _PERCENT:
        value /= 100
        end += 1
    return value, end
