"""Characters as the reader of numbers takes them: every kind of dash, space, digit and currency.

`tidy` gives the text that places refer to. `fold` maps each of its characters to one that the rules
of `numerals` and `signs` know, so that places stay the same.
"""

from __future__ import annotations

import re
import unicodedata
from html import unescape

# A letter of a script that parts words by spaces and joins no particles to them.
LETTER = r"[^\W\d_\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]"
THIN = "\u2009"  # for all spaces that part no words
SPACES = f" \t~{THIN}"
RAISED, LOWERED, VULGAR = "⁰¹²³⁴-⁹", "₀-₉", "¼-¾⅐-⅞"  # for the inside of [...]

_ENTITY = re.compile(r"&(?:#\d{1,6}|#x[\da-f]{1,5}|[a-z]{2,8}\d{0,2});", re.IGNORECASE)
_INVISIBLE = re.compile("[\xad\u061c\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufe00-\ufe0f\ufeff]")
_FOLDED = {
    "\u2010\u2011\u2012\u2013\u2212\u2796\u02d7\ufe63": "-",
    "\u2014\u2015\ufe31\ufe58": "—",
    "\xa0\u2005\u2006\u2007\u2008\u2009\u200a\u202f": THIN,
    "\u2018\u2019\u02bc": "'",
    "\u2044\u2215": "/",
    "\u2236": ":",
    "\u066a\ufe6a": "%",
    "\u066b": ".",
    "\u066c": ",",
    "\u2715\u2716\u2a2f": "×",
    "\u22c5\u2219": "·",
    "\x85\u2028\u2029": "\n",
}


def tidy(text: str) -> str:
    """Without invisible characters, and with HTML's &minus; and its like as what they stand for."""
    if "&" in text:
        text = _ENTITY.sub(lambda entity: unescape(entity[0]), text)
    return text if text.isascii() else _INVISIBLE.sub("", text)


def fold(text: str) -> str:
    """Digits, dashes, spaces, currencies, full-width forms as ASCII has them, place by place."""
    return text if text.isascii() else text.translate(_FOLD)


def full_size(small: str) -> str:
    """Raised or lowered digits, with their sign, as plain ones."""
    signs = {"⁺": "+", "⁻": "-"}
    return "".join(signs.get(char) or str(unicodedata.digit(char)) for char in small)


class _Fold(dict[int, str]):
    """What each character folds to, worked out when it is first met."""

    def __missing__(self, code: int) -> str:
        char = chr(code)
        digit = unicodedata.decimal(char, None)
        if code < 128:
            folded = char
        elif digit is not None:
            folded = str(digit)
        elif 0xFF01 <= code <= 0xFF5E:  # full width
            folded = chr(code - 0xFEE0)
        else:
            folded = {"Sc": "$", "Zs": " "}.get(unicodedata.category(char), char)
        self[code] = folded
        return folded


_FOLD = _Fold({ord(char): to for chars, to in _FOLDED.items() for char in chars})
