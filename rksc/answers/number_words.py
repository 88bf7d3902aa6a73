"""The numbers that an English text names, in digits or in words.

`numerals` reads what stands in digits; here are "twenty-five", "two thirds", "half a dozen".
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Hashable
from fractions import Fraction
from typing import NamedTuple

from .characters import fold, tidy
from .numerals import SCALES, Numeral, Value, read

_UNITS = [
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
    *("eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen"),
    *("eighteen", "nineteen"),
]
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_CARDINALS = {word: i for i, word in enumerate(_UNITS)}
_CARDINALS |= {word: 20 + 10 * i for i, word in enumerate(_TENS)}
_CARDINALS |= {"fourty": 40, "ninty": 90}  # as people write them
_SCALES = SCALES | {"score": 20}
_SCALES |= {word + "s": value for word, value in _SCALES.items()}
# "score" means 20 only after a number word ("three score"); a game's score is a word
_BARE_SCALES = {word for word in _SCALES if not word.startswith("score")}
_LARGEST = 10**30  # that a scale may still follow

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


class Named(NamedTuple):
    """A number that a text names. values: what it is worth; of 12:30 its parts. key: equal where
    the numbers are equal. dashed: subtracted, the end of a range, or after a dash of another kind.
    """

    values: tuple[Value, ...]
    key: Hashable
    dashed: bool = False


class _Item(NamedTuple):
    text: str  # of a word or mark, in small letters; "" for a number
    numeral: Numeral | None = None

    @property
    def value(self) -> Fraction | None:
        """Of a number in digits that words may go on with: "2 thirds"."""
        if self.numeral is None or self.numeral.unit:
            return None
        return self.numeral.key if isinstance(self.numeral.key, Fraction) else None


_NOTHING = _Item("")


def numbers(text: str) -> Counter[Value]:
    """The multiset of numbers that an English text names, by value.

    Digits (1,000, 2.5, -3, 3/4, 1 1/2, ½, 40%, 5k, 1e-5, 1.5×10^3; both of 7:30), number words
    ("twenty-five", "two hundred and ten"; not a lone "one"), fractions ("two thirds", "half"),
    factors ("twice", "double", "dozen") and ordinals from "third" on. Units are not converted. A
    number of more than 100 digits is a str.
    """
    return Counter(value for number in named(text) for value in number.values)


def named(text: str) -> list[Named]:
    """The numbers that an English text names, in order."""
    items = _items(tidy(text))
    found: list[Named] = []
    i = 0
    while i < len(items):
        number, end = _read(items, i)
        if number is not None:
            found.append(number)
        i = end
    return found


def cardinal(text: str) -> Fraction | None:
    """The number that the words are when they are nothing else: "twelve", "two and a half"."""
    items = _items(tidy(text))
    below = _at(items, 0).text in ("minus", "negative")
    start = int(below)
    if _at(items, start).text == "a" and _at(items, start + 1).text in _BARE_SCALES:
        start += 1
    word = _at(items, start).text
    if not (word in _CARDINALS or word in _BARE_SCALES):
        return None
    value, end = _cardinal(items, start)
    value, end = _finish(items, end, value)
    return (-value if below else value) if end == len(items) else None


_WORD = re.compile(r"[^\W\d_]+|\d+|\S")
_MINUS = re.compile(r"(?<=[^\w)\]}])- ?(?=[^\W\d_])")  # that joins nothing: -five, [-five, 5]
_DASH = "–"  # that stands between spaces: what follows is subtracted, it is no "twenty-five"


def _items(text: str) -> list[_Item]:
    items: list[_Item] = []
    at = 0
    text = f" {text}"  # so that a sign may be the first
    for numeral in read(text):
        items += map(_Item, _words(text[at : numeral.start]))
        items.append(_Item("", numeral))
        at = numeral.end
    return [*items, *map(_Item, _words(text[at:]))]


def _words(text: str) -> list[str]:
    if not text.isascii():
        text = "".join(map(_plain, fold(text)))
    text = text.lower().replace(" - ", f" {_DASH} ")
    return _WORD.findall(_MINUS.sub(" negative ", text))


def _plain(char: str) -> str:
    """A character as letters of the alphabet; Ⅳ and ⑫ as the numbers that they are."""
    if unicodedata.category(char) in ("Nl", "No"):
        return f" {Fraction(unicodedata.numeric(char)).limit_denominator(1000)} "
    return unicodedata.normalize("NFKC", char)


def _at(items: list[_Item], i: int) -> _Item:
    return items[i] if 0 <= i < len(items) else _NOTHING


def _read(items: list[_Item], i: int) -> tuple[Named | None, int]:
    """The number that starts at item i (None: none does) and the index after it."""
    item = items[i]
    word = item.text
    if item.numeral is not None:
        dashed = item.numeral.dashed
        if item.value is None:
            return Named(item.numeral.values, item.numeral.key, dashed), i + 1
        value, end = _finish(items, i + 1, item.value)
        return Named((value,), value, dashed), end
    if word.isdecimal():  # of a compatibility character
        number = Fraction(int(word)) if len(word) < 100 else word
        return Named((number,), number), i + 1
    if word in _FACTORS:
        return _signed(items, i, Fraction(_FACTORS[word])), i + 1
    if word in _CARDINALS or word in _BARE_SCALES:
        value, end = _cardinal(items, i)
        after, finished = _finish(items, end, value)
        named = _signed(items, i, after)
        if word == "one" and finished == i + 1 and named == Named((after,), after):
            return None, finished
        return named, finished
    if word in _PARTS:
        value, end = _part(items, i)
        return _signed(items, i, value), end
    return None, i + 1


def _signed(items: list[_Item], i: int, value: Fraction) -> Named:
    """A number in words after "minus", "negative" or a dash: below zero, or subtracted."""
    i -= _at(items, i - 1).text in ("a", "an")
    word, before = _at(items, i - 1).text, _at(items, i - 2)
    term = before.numeral or before.text in _CARDINALS or before.text in _SCALES
    if word == _DASH:
        return Named((value,), value, dashed=True)
    if word == "minus" and (term or (len(before.text) == 1 and before.text.isalpha())):
        return Named((value,), value, dashed=True)
    below = word in ("minus", "negative")
    return Named((-value,), -value) if below else Named((value,), value)


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
        elif word in _SCALES and (end > i or word in _BARE_SCALES) and current < _LARGEST:
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
    while _at(items, end).text in _SCALES and abs(value) < _LARGEST:
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
        return value / 100, end + 1
    if _at(items, end).text == "per" and _at(items, end + 1).text == "cent":
        return value / 100, end + 2
    return value, end
