"""The numbers that a text writes in digits: where they stand and what they are worth, exactly.

One reader for all who look for numbers: answers, votes, assertions, the guards of ASKS. A run of
digits and of what may part them is found first, then it is decided what the run is:

    1,000  9{,}500  9\\,500  1'000  1_000  1 000  1,00,000  1.000.000     one number
    $9 500  9 500 dollars                                              one, and two without money
    3/4  1 3/4  1½  \\frac34  .5  2.5e-3  1.5×10^3  $5M  5 million  40 %   one number
    1,2,3  [0,5]                                                       several
    12:30  3:5  1.2.3  12/25/2024  12,34                               one, and none of its parts

The last kind has no value: it equals only what is written in the same way. "12,34" is among them
because nothing says whether it is a decimal or a pair. A dash is a sign where nothing stands before
it that could be subtracted from: not in 5-3, x - 3, 1990-1995, COVID-19. Parentheses are no minus.
Digits of every script count; words do not, `number_words` reads those. All of it takes time in
proportion to the text.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Container, Hashable, Iterator
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple, TypeAlias

from .characters import LOWERED, RAISED, SPACES, THIN, VULGAR, fold, full_size
from .signs import Sign, sign_of

Value: TypeAlias = "Fraction | str"  # a str: too long to calculate with, in one spelling
_LONGEST = 100  # digits of a Fraction, or zeros that an exponent stands for


class Numeral(NamedTuple):
    """A number in a tidy text, at [start, end) with its sign and currency.

    written: in plain digits, without groups and currency: "-1234.50", "3/4", "50%", "12:30 pm"; ""
    where it takes calculating, as for 5k. values: what it is worth; of 12:30 its parts. key: equal
    where the numbers are equal, as 50% and 0.5. bare: the key without the unit, which is "%", "‰",
    "dozen", "am", "pm" or "". dashed: a dash stands before it that is no sign. joined: part of a
    word or an index, as in H2O and x^2.
    """

    start: int
    end: int
    written: str
    values: tuple[Value, ...]
    key: Hashable
    bare: Hashable
    unit: str
    dashed: bool
    joined: bool

    @property
    def text(self) -> str:
        """The number as it is written, or else spelled."""
        return self.written or self.spelling

    @property
    def spelling(self) -> str:
        """One text for all numerals that are equal as they stand: 4 for 4.00 and for $4."""
        sign, number = self.bare if isinstance(self.bare, tuple) else ("", self.bare)
        if isinstance(number, Fraction) or not self.written:
            return _with(sign + spell(number), self.unit)
        return self.written


def read(text: str, alone: Container[int] = ()) -> list[Numeral]:
    """The numerals of a tidy text, in order. alone: where a number that begins, with its sign, is
    the only thing said: there a blank parts thousands, as it does in money."""
    text = fold(text)
    found: list[Numeral] = []
    begin = _BEGIN.search(text)
    while begin:
        at, end = begin.start(), begin.end()
        for start, draft in _drafts(text, at, alone):
            whole = found[-1] if found and _takes_part(text, found[-1], start, draft) else None
            if whole is not None:
                found.pop()
            found.append(_numeral(text, start, draft, whole))
            end = max(end, found[-1].end)
        begin = _BEGIN.search(text, end)
    return found


def spell(value: Value) -> str:
    """A value's one spelling: 1000, 0.75, 1/3."""
    if isinstance(value, str):
        return value
    top, bottom = value.numerator, value.denominator
    if bottom == 1:
        return str(top)
    twos = (bottom & -bottom).bit_length() - 1
    fives = round(math.log(bottom >> twos, 5))
    if bottom != 2**twos * 5**fives:
        return f"{top}/{bottom}"
    places = max(twos, fives)
    digits = str(abs(top) * 10**places // bottom).zfill(places + 1)
    return f"{'-' * (top < 0)}{digits[:-places]}.{digits[-places:]}"


# ---- runs of digits ------------------------------------------------------------------------------

_BEGIN = re.compile(
    rf"\d|(?<![\w.])\.\d|[{RAISED}{LOWERED}{VULGAR}]"
    r"|\\(?:[dtc]?frac|nicefrac|sfrac)(?![A-Za-z])"
)
# Between two digits of a run. {,} and \, are LaTeX's; a space and _ only before three digits.
_BETWEEN = (
    rf"[,.:/'{THIN}](?=\d)|(?:\{{,\}}|,\\!)(?=\d)|\{{?\\[,;:! ]\}}?(?=\d)"
    r"|[ _](?=\d\d\d(?!\d))"
)
_RUN = re.compile(rf"\d+(?:-\d+){{2,}}|(?:\d+|\.\d+)(?:(?:{_BETWEEN})\d+)*")
_PIECE = re.compile(rf"({_BETWEEN}|-|\.)?(\d+)")
_SURE = ";"  # for {,}: a comma inside a number
_MARKS = {"{,}": _SURE, ",\\!": _SURE}

# How a number may be written; the groups are what stands before and after the decimal point.
_NUMBERS = [
    re.compile(r"(?P<whole>\d*)(?:\.(?P<part>\d+))?"),
    re.compile(rf"(?P<whole>[1-9]\d{{0,2}}(?P<by>[,;'_{THIN} ])\d{{3}}(?:(?P=by)\d{{3}})*)"
               r"(?:\.(?P<part>\d+))?"),
    re.compile(r"(?P<whole>[1-9]\d{0,2}(?:\.\d{3}){2,})(?:,(?P<part>\d+))?"),
    re.compile(r"(?P<whole>\d+);(?P<part>\d+)"),
    re.compile(rf"(?P<whole>\d+)\.(?P<part>\d{{3}}(?:{THIN}\d{{3}})*{THIN}\d{{1,3}})"),
]  # fmt: skip
# The same, where no bracket says that it is a list, or 05 that it is none: decimal commas, and
# groups of two digits.
_UNLISTED = [
    re.compile(rf"(?P<whole>[1-9]\d{{0,2}}(?P<by>['{THIN} ])\d{{3}}(?:(?P=by)\d{{3}})*)"
               r",(?P<part>\d+)"),
    re.compile(r"(?P<whole>[1-9]\d{0,2}\.\d{3}),(?P<part>\d{1,2})"),
    re.compile(r"(?P<whole>[1-9]\d?(?:,\d\d)+,\d{3})(?:\.(?P<part>\d+))?"),
]  # fmt: skip
_GROUP = re.compile(r",0\d")
_CURRENCY = re.compile(
    rf"[ {THIN}~]?(?:[€£¥₹]|\\?\$(?! ?\d)"
    r"|(?:dollars|euros?|pounds|cents|rupees|yen|yuan|francs|USD|EUR|GBP|CHF|INR)\b)"
)
_OPENS, _CLOSES = set("([{,"), set(")]},")  # a list's
_NO_DIGITS = re.compile(r"\D+")


class _Draft(NamedTuple):
    """What a run is, before its sign and what follows it are looked at. whole, part: the digits
    of a number that may have an exponent; of anything else empty."""

    end: int
    written: str
    values: tuple[Value, ...]
    key: Hashable
    whole: str = ""
    part: str = ""


class _Piece(NamedTuple):
    mark: str  # what parts it from the piece before: one character
    digits: str
    start: int
    end: int


def _drafts(text: str, at: int, alone: Container[int]) -> list[tuple[int, _Draft]]:
    """What begins at a match of _BEGIN: mostly one number, of a list several, of LaTeX's \\frac
    with no numbers in it none."""
    char = text[at]
    if char == "\\":
        draft = _latex_fraction(text, at)
        return [] if draft is None else [(at, draft)]
    if not (char.isdecimal() or char == "."):
        return [(at, _small(text, at))]
    run = _RUN.match(text, at)
    assert run is not None  # _BEGIN saw a digit
    if run[0].isdecimal():
        return [(at, _number(run.end(), run[0]))]
    pieces = [_Piece(_mark(m[1] or ""), m[2], m.start(2), m.end()) for m in _PIECE.finditer(run[0])]
    after = text[run.end() : run.end() + 2]
    blanks = any(piece.mark == " " for piece in pieces)
    if blanks and (_is_money(text, at, run.end()) or _is_alone(text, at, run.end(), alone)):
        pieces = [p._replace(mark=THIN) if p.mark == " " else p for p in pieces]
    listed = text[at - 1 : at] in _OPENS and (after[:1] in _CLOSES or after == "\\}")
    parts = [pieces[:1], pieces[1:]] if _is_pair(text, at, after, pieces) else None
    made = []
    for part in parts or _parted(pieces, listed):
        start = at if part is pieces else at + part[0].start
        made.append((start, _draft(part, at, listed)))
    return made


def _is_money(text: str, at: int, end: int) -> bool:
    """Whether a currency stands before a run or after it: 9 500 dollars are no two numbers."""
    return bool(_CURRENCY.match(text, end)) or sign_of(text, at).money


def _is_pair(text: str, at: int, after: str, pieces: list[_Piece]) -> bool:
    """Whether a run is the ends of a half-open interval: [1,500) is no 1500, though (1,500) is."""
    opened = sign_of(text, at).start - 1
    comma = len(pieces) == 2 and pieces[1].mark == ","
    return comma and opened >= 0 and text[opened] + after[:1] in ("[)", "(]")


_GOES_ON = re.compile(r"\s?(?:and|or|to|[,;&-])?\s?\d")


def _is_alone(text: str, at: int, end: int, alone: Container[int]) -> bool:
    """Whether a run is the one number of a place: 9 500, but not 100 200 and no 1 100 or 200."""
    few = not text[at : at + 3].isdecimal()
    return few and sign_of(text, at).start in alone and not _GOES_ON.match(text, end)


def _mark(between: str) -> str:
    return _MARKS.get(between) or (THIN if "\\" in between else between)


def _parted(pieces: list[_Piece], listed: bool) -> Iterator[list[_Piece]]:
    """The pieces as runs that are one thing each."""
    marks = {piece.mark for piece in pieces[1:]}
    if _digits(_joined(pieces), listed) is not None:
        yield pieces
    elif marks & {THIN, " "}:
        for part in _cut(pieces, {THIN, " "}):
            yield from _parted(part, listed)
    elif "," in marks:
        parts = _cut(pieces, {","})
        pair = len(pieces) == 2 and not listed  # 12,34: a decimal or a pair
        if pair or any(len(p.digits) > 1 and p.digits[0] == "0" for p in pieces):
            yield pieces
        else:
            yield from parts
    else:
        yield pieces


def _cut(pieces: list[_Piece], marks: set[str]) -> list[list[_Piece]]:
    parts = [pieces[:1]]
    for piece in pieces[1:]:
        if piece.mark in marks:
            parts.append([piece])
        else:
            parts[-1].append(piece)
    return parts


def _joined(pieces: list[_Piece]) -> str:
    first = pieces[0].digits if pieces[0].mark != "." else "." + pieces[0].digits
    return first + "".join(piece.mark + piece.digits for piece in pieces[1:])


def _digits(run: str, listed: bool) -> tuple[str, str] | None:
    """The digits before and after the decimal point of a run that is one number."""
    for pattern in (*_NUMBERS, *_UNLISTED) if not listed or _GROUP.search(run) else _NUMBERS:
        match = pattern.fullmatch(run)
        # 100 200 300 are three numbers, 1 000 and 12 050 are one
        if match and (" " not in run or " 0" in run):
            return _NO_DIGITS.sub("", match["whole"]), _NO_DIGITS.sub("", match["part"] or "")
    return None


def _draft(pieces: list[_Piece], offset: int, listed: bool) -> _Draft:
    run, end = _joined(pieces), offset + pieces[-1].end
    digits = _digits(run, listed)
    if digits is not None:
        return _number(end, *digits)
    if run.count("/") == 1:
        sides = [_digits(side, listed) for side in run.split("/")]
        if sides[0] is not None and sides[1] is not None:
            return _fraction(_number(end, *sides[0]), _number(end, *sides[1]))
    text = run.replace(_SURE, ",").replace(THIN, " ")
    values = tuple(_decimal(piece.digits) for piece in pieces)
    return _Draft(end, text, values, text.lstrip("0") if ":" in text else text)


def _number(end: int, whole: str, part: str = "") -> _Draft:
    shown = (whole.lstrip("0") or "0") + (f".{part}" if part.strip("0") else "")
    value = _decimal(whole, part)
    return _Draft(end, shown, (value,), value, whole or "0", part)


def _fraction(top: _Draft, bottom: _Draft) -> _Draft:
    text = f"{top.written}/{bottom.written}"
    above, below = top.values[0], bottom.values[0]
    if isinstance(above, str) or isinstance(below, str) or not below:
        return _Draft(bottom.end, text, (above,), text)
    value = above / below
    return _Draft(bottom.end, text, (value,), value)


def _decimal(whole: str, part: str = "", exponent: int = 0) -> Value:
    """The value of whole.part × 10^exponent."""
    digits = whole + part
    short = digits.rstrip("0")
    exponent += len(whole) - len(short)
    short = short.lstrip("0")
    if not short:
        return Fraction(0)
    if len(short) + abs(exponent) > _LONGEST:
        return f"{short}e{exponent}"
    if exponent >= 0:
        return Fraction(int(short) * 10**exponent)
    return Fraction(int(short), 10**-exponent)


_ARGUMENT = r"(?:\{((?:[^{}\\]|\{,\}|\\[,;:! ]){1,2000})\}|(\d))"
_FRAC = re.compile(rf"\\(?:[dtc]?frac|nicefrac|sfrac) {{0,2}}{_ARGUMENT} {{0,2}}{_ARGUMENT}")


def _latex_fraction(text: str, at: int) -> _Draft | None:
    match = _FRAC.match(text, at)
    if match is None:
        return None
    sides = []
    for argument in (match[1] or match[2], match[3] or match[4]):
        read_in = read(argument)
        if len(read_in) != 1 or read_in[0].end - read_in[0].start != len(argument.strip()):
            return None
        side = read_in[0]
        sides.append(_Draft(match.end(), side.text, side.values, side.key))
    if any(len(side.values) != 1 or side.values[0] != side.key for side in sides):
        return None
    return _fraction(*sides)


_SMALL_RUN = re.compile(f"[{RAISED}]+|[{LOWERED}]+")


def _small(text: str, at: int) -> _Draft:
    """½, and raised or lowered digits that are no exponent of a number: m², x₁."""
    run = _SMALL_RUN.match(text, at)
    if run:
        return _number(run.end(), full_size(run[0]))._replace(whole="")
    return _vulgar(text[at])._replace(end=at + 1)


@lru_cache
def _vulgar(char: str) -> _Draft:
    top, _, bottom = unicodedata.normalize("NFKC", char).partition("\N{FRACTION SLASH}")
    return _fraction(_number(0, top), _number(0, bottom))


# ---- what follows a number -----------------------------------------------------------------------

_GAP = rf"(?:[ {THIN}~]|\\[,;:! ]|\{{\}}){{0,3}}"
_POWER = re.compile(
    r" ?\^ ?(?:\{ ?([+-]? ?\d{1,18}) ?\}|\(([+-]?\d{1,18})\)|([+-]?\d{1,18})(?!\d|\.\d))"
    rf"|\*\*([+-]?\d{{1,18}})(?!\d|\.\d)|([⁺⁻]?[{RAISED}]{{1,18}})"
)
_TIMES_TEN = re.compile(rf"{_GAP}(?:[xX×*·]|\\times|\\cdot){_GAP}10(?= ?\^|\*\*|[{RAISED}⁺⁻])")
_EXPONENT = re.compile(r"[eE]([+-]?\d{1,18})(?!\w|\.\d)")
_REPEATING = re.compile(r"(\.?)\\overline\{(\d{1,300})\}")
_OVER = re.compile(r" ?/ ?(?=\d)")
_AND_PART = re.compile(r" and (?:a|one)[ -](half|quarter|third)\b", re.IGNORECASE)
_PARTS = {"half": 2, "quarter": 4, "third": 3}

# 5M, 5 M and 5bn, but 5 m only after a currency, and neither 5 M&Ms nor 5 B-52s.
_SCALE = re.compile(
    rf"([kKMBT])(?![\w&])|[ {THIN}]?(bn|mn)(?!\w)|[ {THIN}]([MB])(?![\w&'-])"
    rf"|[ {THIN}-]{{1,2}}(?i:(hundred|thousand|[mb]illion|(?:t|quad)rillion|lakh|crore)s?)\b"
)
_MONEY_SCALE = re.compile(rf"[ {THIN}]?([kmbt])n?(?!\w)", re.IGNORECASE)
SCALES = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9}
SCALES |= {"trillion": 10**12, "quadrillion": 10**15, "dozen": 12, "lakh": 10**5, "crore": 10**7}
_LETTERS = {"k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_COUNTED = re.compile(
    rf"[ {THIN}~-]{{0,2}}(?:\\?(%|‰)|(percent(?:s|age)?|per ?cent|pct|dozens?)\b)", re.IGNORECASE
)
_UNITS = {"%": "%", "p": "%", "d": "dozen"}
_FACTORS = {"%": Fraction(1, 100), "‰": Fraction(1, 1000), "dozen": Fraction(12)}
_HALF_DAY = re.compile(rf"[ {THIN}~]{{0,2}}([ap])(?:\.m\.|m)(?!\w)", re.IGNORECASE)
_MONEY_AFTER = re.compile(rf"\\?\$(?!\d)|[ {THIN}]\\?\$(?! ?[\d.-])")
_LINE_ENDS = re.compile(rf"[{SPACES}.]*(?:\n|\Z)")
_SOMETHING = re.compile(  # one look where mostly nothing of all this follows
    rf"{_GAP}(?:[-^*·×xX⁺⁻{RAISED}/eE%‰$kKmMbBtT]|\\(?:times|cdot|overline|%|\$)|\.\\o"
    r"|(?i:and|a\.?m|p\.?m|hundred|quadrillion|dozen|lakh|crore|per|pct))"
)


def _takes_part(text: str, whole: Numeral, start: int, draft: _Draft) -> bool:
    """Whether the number before is the whole of a mixed one: 1 3/4, 1½, 1\\frac{3}{4}."""
    gap = text[whole.end : start]
    return (
        (gap in ("", " ", THIN, "~", "\\,", "\\ "))
        and not draft.whole
        and isinstance(draft.key, Fraction)
        and 0 < draft.key < 1
        and isinstance(whole.key, Fraction)
        and whole.written.lstrip("-").isdecimal()
        and text[whole.end - 1].isdecimal()
        and not whole.joined
    )


def _numeral(text: str, start: int, draft: _Draft, whole: Numeral | None) -> Numeral:
    """A draft with its sign and what follows. whole: the number that it is the fraction of."""
    sign = sign_of(text, start)
    if whole is not None:
        assert isinstance(whole.key, Fraction) and isinstance(draft.key, Fraction)
        minus = whole.written.startswith("-")
        value = abs(whole.key) + draft.key
        shown = f"{whole.written.lstrip('-')} {draft.written}"
        draft = draft._replace(written=shown, values=(value,), key=value)
        sign = Sign(whole.start, "-" if minus else "", whole.dashed, whole.joined, sign.money)
    unit, end = "", draft.end
    hour = end  # where one ends before its am or pm
    if _SOMETHING.match(text, end):
        draft, unit = _with_unit(text, _scaled(text, _calculated(text, draft), sign.money))
        money = _MONEY_AFTER.match(text, draft.end)
        end = money.end() if money else draft.end
    if sign.mark == "bullet":  # a dash that begins a line is a list's, unless nothing follows
        alone = _LINE_ENDS.match(text, end) is not None
        sign = sign._replace(mark="-" if alone else "", dashed=not alone)
        if not alone:
            sign = sign._replace(start=start)
    values, key, bare, shown = draft.values, draft.key, draft.key, draft.written
    if sign.mark == "-":
        values = (_times(values[0], Fraction(-1)), *values[1:])
        key = bare = _times(key, Fraction(-1)) if isinstance(key, Fraction) else f"-{key}"
        shown = f"-{shown}" if shown and values[0] else shown
    elif sign.mark == "±":
        key = bare = (sign.mark, key)
        shown = shown and f"±{shown}"
    if unit in _FACTORS:
        values = (_times(values[0], _FACTORS[unit]), *values[1:])
        key = _times(key, _FACTORS[unit]) if isinstance(key, (Fraction, str)) else (key, unit)
        shown = shown and _with(shown, unit)
    elif unit:
        key = (f"{draft.written}:00" if draft.whole else bare, unit)
        shown += f" {text[hour : draft.end].strip(SPACES)}"
    return Numeral(sign.start, end, shown, values, key, bare, unit, sign.dashed, sign.joined)


def _with(number: str, unit: str) -> str:
    return f"{number} {unit}" if unit.isalpha() else number + unit


def _times(value: Value, factor: Fraction) -> Value:
    if isinstance(value, Fraction):
        return value * factor
    if factor == -1:
        return value[1:] if value.startswith("-") else f"-{value}"
    return f"{value}*{factor}"


def _valued(draft: _Draft, end: int, value: Value) -> _Draft:
    return _Draft(end, "", (value,), value)


def _calculated(text: str, draft: _Draft) -> _Draft:
    """A number with its exponent, its denominator or "and a half"."""
    end = draft.end
    if draft.whole:
        made = _repeating(text, draft) or _powered(text, draft) or _divided(text, draft)
        draft = made or draft
    part = _AND_PART.match(text, end)
    if part and isinstance(draft.key, Fraction) and draft.end == end:
        value = draft.key + Fraction(1, _PARTS[part[1].lower()])
        return _valued(draft, part.end(), value)
    return draft


def _repeating(text: str, draft: _Draft) -> _Draft | None:
    """0.1\\overline{6} is 1/6."""
    match = _REPEATING.match(text, draft.end)
    if match is None or bool(match[1]) == bool(draft.part) or len(draft.part) > _LONGEST:
        return None
    base, period = draft.values[0], match[2]
    if isinstance(base, str):
        return None
    rest = Fraction(int(period), (10 ** len(period) - 1) * 10 ** len(draft.part))
    return _valued(draft, match.end(), base + rest)


def _powered(text: str, draft: _Draft) -> _Draft | None:
    """1.5e-3, 1.5 × 10^3, 10^{-3}, 2^10."""
    match = _EXPONENT.match(text, draft.end)
    if match:
        return _valued(draft, match.end(), _decimal(draft.whole, draft.part, int(match[1])))
    ten = _TIMES_TEN.match(text, draft.end)
    match = _POWER.match(text, ten.end() if ten else draft.end)
    if match is None:
        return None
    written = match[match.lastindex or 0].replace(" ", "")
    exponent = int(written if written.lstrip("+-").isascii() else full_size(written))
    if ten:
        value = _decimal(draft.whole, draft.part, exponent)
    elif draft.key == 10:
        value = _decimal("1", "", exponent)
    else:
        value = _power(draft.values[0], exponent)
    return _valued(draft, match.end(), value)


def _power(base: Value, exponent: int) -> Value:
    if isinstance(base, Fraction) and (base or exponent > 0):
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        if bits * abs(exponent) <= 3 * _LONGEST or bits == 1:
            return base**exponent
    return f"{spell(base)}^{exponent}"


def _divided(text: str, draft: _Draft) -> _Draft | None:
    """3 / 4 with spaces, and 8 / 2 / 2."""
    made = draft
    for _ in range(4):
        over = _OVER.match(text, made.end)
        run = _RUN.match(text, over.end()) if over else None
        digits = _digits(run[0], listed=False) if run else None
        if run is None or digits is None or not isinstance(made.key, Fraction):
            break
        made = _fraction(made, _number(run.end(), *digits))
    return made if made is not draft else None


def _scaled(text: str, draft: _Draft, money: bool) -> _Draft:
    """5M, $5m, 5 million, 2 hundred thousand."""
    for _ in range(2):
        match = _SCALE.match(text, draft.end) or (money and _MONEY_SCALE.match(text, draft.end))
        if not match or draft.values != (draft.key,):
            break
        name = match[match.lastindex or 0].lower()
        factor = SCALES.get(name) or _LETTERS[name[0]]
        draft = _valued(draft, match.end(), _times(draft.values[0], Fraction(factor)))
    return draft


def _with_unit(text: str, draft: _Draft) -> tuple[_Draft, str]:
    """A percent sign, a dozen or half of the day, and the draft that ends after it."""
    match = _COUNTED.match(text, draft.end)
    if match:
        unit = match[match.lastindex or 0]
        return draft._replace(end=match.end()), unit if unit == "‰" else _UNITS[unit[0].lower()]
    hour = ":" in draft.written or (not draft.part and 0 < len(draft.whole) <= 2)
    match = _HALF_DAY.match(text, draft.end) if hour else None
    if match:
        return draft._replace(end=match.end()), f"{match[1].lower()}m"
    return draft, ""
