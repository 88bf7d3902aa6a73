r"""The answer that a text ends with, and when two answers are the same.

An answer is stated: after "####", "Answer:" or "the answer is", or in \boxed{}. Where none is, what
the last equation gives, or else the last number, is taken for it. What is said beside it is not it:
"5 apples (Tom had 7 at first)" is 5. Where no single number is the answer, the text is: a pair, a
range, a term, 2 hours and 30 minutes.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from ..formats.files import shown
from .characters import LETTER, tidy
from .number_words import cardinal
from .numerals import Numeral, read


def final_answer(text: str) -> str:
    r"""The answer that a worked solution ends with.

    What follows the last "####", "Answer:" or "answer is" or stands in the last \boxed{}; else what
    an equation in the last sentence gives; else the last number; else the last line.
    A number comes without thousands separators, currency and unit, but with its % or am and pm:
    "1,250 apples" is "1250", \frac{3}{4} is "3/4", $12.00 is "12", 5k is "5000". A pair, a range or
    a term comes as it stands. `same_answer` compares two answers.
    """
    lines = [line.strip() for line in _text("text", text).splitlines() if line.strip()]
    lines = [line for line in lines if not _UNANSWERED.fullmatch(line)]
    text = _plain(text)
    statements = _statements(text)
    openings = [_OPENING.match(text, stated.start) for stated in statements]
    begins = {opening.end() for opening in openings if opening}
    numbers = [number for number in read(text, begins) if not number.joined]
    words = None
    for stated in reversed(statements):
        said = _said(text, stated, numbers)
        if said is None:
            continue
        if said.counts or stated.sure:
            return said.text
        words = words or said.text
    if words is None:
        words = _last(text, numbers)
    return words or (lines[-1] if lines else "")


def same_answer(a: str, b: str) -> bool:
    r"""Whether two answers are one: equal numbers however they are written (4.00 and $4, 3/4 and
    0.75, 50% and 0.5, 12 and twelve), in equal words, boxed or not. 12:30 is not 30, 5 M not 5 B,
    50% not 50."""
    return answer_key(_text("a", a)) == answer_key(_text("b", b))


def _text(field: str, value: str) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{field} must be a str, got {shown(value)}")
    return value


def answer_key(answer: str) -> Hashable:
    """Equal for the same answers, for votes."""
    value = cardinal(_trimmed(_bare(answer)))
    return (value,) if value is not None else tuple(token.key for token in _inner(answer))


def is_answer(answer: str, expected: str) -> bool:
    """Whether an answer is the expected one. Where that names no unit, any will do: 50% is 50."""
    mine, wanted = _inner(answer), _inner(expected)
    equal = len(mine) == len(wanted) and all(map(_matches, mine, wanted))
    return equal or same_answer(answer, expected)


def holds_answer(text: str, expected: str) -> bool:
    """Whether a text contains the expected words and numbers, cutting none of its own."""
    mine, wanted = tokens(text), _inner(expected) or tokens(expected)
    return any(_stands(mine, i, wanted) for i in range(len(mine) - len(wanted) + 1))


class Token(NamedTuple):
    """A word in small letters, a mark, or a number. bare: the number's key without its unit.
    joined: it goes on the word or number before, with nothing between them."""

    key: Hashable
    bare: Hashable
    joined: bool


_TOKEN = re.compile(rf"(?:{LETTER}|_)+|\S")
_AROUND = set("*$`_\"'“”‘’.")
_PARENTHESES = set("()[]")
_WORDLIKE = re.compile(rf"{LETTER}|[_\d]")


def tokens(text: str) -> list[Token]:
    """The words, marks and numbers of a text. Scripts that put no spaces between words give
    each character as a word of its own."""
    text = tidy(text)
    found: list[Token] = []
    at = 0
    for number in read(text):
        found += _words(text, at, number.start)
        joined = number.joined or _joins(text, number.start)
        found.append(Token(number.key, number.bare, joined))
        at = number.end
    return [*found, *_words(text, at, len(text))]


def _stands(mine: list[Token], at: int, wanted: list[Token]) -> bool:
    """Whether the wanted tokens stand at a place, and begin and end where words do."""
    end = at + len(wanted)
    if mine[at].joined or (end < len(mine) and mine[end].joined):
        return False
    pairs = list(zip(mine[at:end], wanted, strict=True))
    inside = all(a.joined == b.joined for a, b in pairs[1:])
    return inside and all(_matches(a, b) for a, b in pairs)


def _inner(answer: str) -> list[Token]:
    """The tokens of an answer without quotes, emphasis and the full stop around it, and of a single
    one, like the letter of a choice, without parentheses."""
    found = tokens(_bare(answer))
    around = [i for i, token in enumerate(found) if token.key not in _AROUND]
    found = found[around[0] : around[-1] + 1] if around else []
    single = [token for token in found if token.key not in _PARENTHESES]
    return single if len(single) == 1 and len(found) <= 3 else found


def _bare(answer: str) -> str:
    r"""An answer as plain text, without the \boxed{} that is all of it."""
    text = _plain(answer)
    boxes = _boxes(text)
    if len(boxes) == 1:
        (box,) = boxes
        around = text[: box.start].rpartition("\\")[0] + text[box.end :]
        if not _CONTENT.search(around):
            return text[box.start : box.end]
    return text


def _words(text: str, start: int, end: int) -> list[Token]:
    made = []
    for match in _TOKEN.finditer(text, start, end):
        word = match[0].casefold()
        made.append(Token(word, word, _joins(text, match.start())))
    return made


def _joins(text: str, at: int) -> bool:
    """Whether what begins here goes on a word or number."""
    return bool(_WORDLIKE.match(text, at) and at and _WORDLIKE.match(text, at - 1))


def _matches(token: Token, wanted: Token) -> bool:
    return wanted.key in (token.key, token.bare)


# ---- what a text states --------------------------------------------------------------------------


class _Statement(NamedTuple):
    """Where a text says its answer. sure: with a mark that is used for nothing else."""

    start: int
    end: int
    boxed: bool
    sure: bool


class _Said(NamedTuple):
    text: str
    counts: bool  # numbers are in it


_WRAPPED = re.compile(
    r"\\(?:text(?:bf|it|rm|tt|sf)?|math(?:bf|rm|it|sf)|mbox|operatorname)\*? ?\{([^{}]*)\}"
)
_UNSEEN = re.compile(r"\\(?:left|right|displaystyle)(?![A-Za-z])|\\[()\[\]]|</?[A-Za-z]{1,12}>")
_MARK = re.compile(
    r"(####|answers?[*_`'\"]{0,3}\s{0,3}[:=]|^[ \t#*_]*(?:the |my )?(?:final )?answers?[ \t*_.]*$)"
    r"|answers?(?:\s(?:to|for|of)\b[^\n.?!:=]{0,60}?)?[\s*_]{1,8}"
    r"(?:is|are|equals|(?:would|should|must|will) be)\b",
    re.IGNORECASE | re.MULTILINE,
)
_UNANSWERED = re.compile(
    r"[#*_]*\s?(?:the |my )?(?:final )?answers?[\s*_]*[:=][\s*_]*|####", re.IGNORECASE
)
_NEXT_PROBLEM = re.compile(
    r"^[ \t#*_]*(?:question|problem|q)[*_]{0,3}:", re.IGNORECASE | re.MULTILINE
)
_LEAD = re.compile(r"[\s*:=_`]*")
_OPENING = re.compile(r"[\s*_(]*")
_CONTENT = re.compile(r"[^\W_]")
_BRACE = re.compile(r"\\(?:boxed|fbox) ?\{|\\[{}]|[{}]")


def _plain(text: str) -> str:
    r"""The text without LaTeX's \text{}, \left and \( and without tags."""
    text = tidy(text)
    if "\\" in text or "<" in text:
        text = _WRAPPED.sub(r"\1", _WRAPPED.sub(r"\1", text))
        text = _UNSEEN.sub(" ", text)
    return text


def _statements(text: str) -> list[_Statement]:
    """In the order in which they begin. A mark's is the rest of its line, or the next line that
    has a letter or digit. What a model goes on to ask itself after its answer does not count."""
    found = _boxes(text)
    marks = list(_MARK.finditer(text))
    limits = [mark.start() for mark in marks[1:]] + [len(text)]
    for mark, limit in zip(marks, limits, strict=False):
        lead = _LEAD.match(text, mark.end())
        start = min(lead.end() if lead else mark.end(), limit)
        content = _CONTENT.search(text, start, limit)
        if content:
            start = max(start, text.rfind("\n", start, content.start()) + 1)
            line = text.find("\n", content.start(), limit)
            end = line if line >= 0 else limit
            # or cut off by another mark: "Answer: The answer is 5"
            whole = line >= 0 or limit == len(text)
            found.append(_Statement(start, end, False, whole and mark[1] is not None))
    found.sort()
    answered = next((stated.end for stated in found if stated.sure), len(text))
    again = _NEXT_PROBLEM.search(text, answered)
    return [stated for stated in found if not again or stated.start < again.start()]


def _boxes(text: str) -> list[_Statement]:
    found: list[_Statement] = []
    opened: list[int | None] = []  # where the contents of boxes begin; None for another brace
    for brace in _BRACE.finditer(text) if "\\boxed" in text or "\\fbox" in text else ():
        if brace[0].startswith(("\\boxed", "\\fbox")):
            opened.append(brace.end())
        elif brace[0] == "{":
            opened.append(None)
        elif brace[0] == "}" and opened:
            start = opened.pop()
            if start is not None and not (found and found[-1].start > start):  # an inner box counts
                found.append(_Statement(start, brace.start(), True, True))
    unclosed = [start for start in opened if start is not None]
    if unclosed:
        line = text.find("\n", unclosed[-1])
        found.append(_Statement(unclosed[-1], len(text) if line < 0 else line, True, True))
    return found


def _said(text: str, stated: _Statement, numbers: Sequence[Numeral]) -> _Said | None:
    """The answer in a statement; None where it says nothing."""
    whole = text[stated.start : stated.end]
    first = bisect_left(numbers, stated.start, key=lambda n: n.start)
    last = bisect_left(numbers, stated.end, key=lambda n: n.start)
    within = [_Number(n.start - stated.start, n.end - stated.start, n) for n in numbers[first:last]]
    if not within:
        words = _trimmed(whole)
        return _Said(words, False) if _CONTENT.search(words) else None
    clean = _ASIDE.sub(_blanked, whole)
    outside = [n for n in within if not clean[n.start].isspace()]
    if outside:
        whole, within = clean, outside
    return _Said(_chosen(whole, within, stated.boxed), True)


class _Number(NamedTuple):
    """A numeral at its place in a statement."""

    start: int
    end: int
    numeral: Numeral


_ASIDE = re.compile(r"(?<=\s)\([^()\n]*\)")
_EQUALS = re.compile(r"(?<![<>!=])=(?![=>])|≈|\\approx(?![A-Za-z])")
_COPULA = re.compile(r"\b(?:is|are|was|were|be|equals|totals)\b|:(?=\s)", re.IGNORECASE)
_RECKONS = re.compile(r"\s(?:of|plus|minus|times|divided by|multiplied by)\b")
_COMMAND = re.compile(r"\\[A-Za-z]+")
# Several equations (x = 2, y = 3) and bounds (x < 5) are answers as a whole.
_UNKNOWN = re.compile(r"(?:^|[,;]|\b(?:and|or))[\s$]{0,3}[A-Za-z]\s{0,3}=")
_BOUND = re.compile(r"[\w)}]\s?(?:[<>≤≥≠]=?|!=|\\(?:leq?|geq?|neq?|lt|gt)(?![A-Za-z]))\s?[-\d.$x]")
# With a mark for each number: (3, -5), 5 to 10, 3 and 4; 2 hours and 30 minutes.
_LIST = re.compile(r"[\s(\[{\\$*]*\0(?:[\s,;&$*\\{}()\[\]|-]|and\b|or\b|to\b|\0)*\.?")
_UNIT = (
    r"(?!(?:because|since|for|in|of|per|after|each|left|more|less|fewer|than|as|so|is|are|was|that"
    r"|which|when|if|with|from|at|by|on|out|total|remaining|to|and|or|an?|the)\b)[A-Za-z]+"
)
_MEASURE = (
    r"(?:hours?|hrs?|h|minutes?|mins?|seconds?|secs?|days?|weeks?|months?|years?|feet|foot|ft|inch(?:es)?"
    r"|in|yards?|miles?|pounds?|lbs?|ounces?|oz|dollars?|cents?|km|m|cm|kg|g)\b"
)
_MEASURES = re.compile(
    rf"[\s$*]*(?:\0 ?{_UNIT}(?: {_UNIT})?(?:(?:,? and|,| &) \0 ?{_UNIT}(?: {_UNIT})?)+"
    rf"|\0 ?{_MEASURE}(?: \0 ?{_MEASURE})+)"
)
_VARIABLE = r"(?:[b-hj-zB-HJ-Zπ√]|\\(?:pi|sqrt|theta|alpha|ln|log))(?![A-Za-z])"
_GOES_ON = re.compile(
    rf"\s?(?:[-+×·÷/*]|\\(?:times|cdot|div|pm|mp)(?![A-Za-z])|(?<=\s)[xX](?=\s?\d))\s?"
    rf"(?:[\d.(√]|\\(?:frac|sqrt|pi)|{_VARIABLE})"
    rf"|(?:[abdefijnopqrtuvwxyzπ√](?![A-Za-z'’])|\s?\\(?:pi|sqrt|theta|alpha|ln|log)(?![A-Za-z]))"
    r"|\((?=[-\d.\\xyz])|\^(?!\{?\\circ)|\s(?:plus|minus|times|divided by|multiplied by)\s"
    r"|\sout of\s\d"
)
_COMES_FROM = re.compile(
    r"(?:[+×·÷√^]|[\w)}]\s?\*|[\w)}]\s?/|[\w)}\]]\s?-|\\(?:times|cdot|div|pi|ln|log|sin|cos|tan)"
    r"|\\sqrt(?:\[\d\])?\{?|(?<=\d\s)[xX])\s?\Z"
)
_BENIGN = re.compile(
    r"(?:[\s\w$(){}\[\]*.:;'’\"°/%~-]|\\(?:circ|quad|qquad|degree)|\\[%$,;:! ]"
    r"|\^\{?(?:\\circ|[23])\}?)*"
)
_SPACE = re.compile(r"[ \t\r\n]+")
_NEXT_SENTENCE = re.compile(r"[.!?][\"'’”)*]{0,3}\s+\w|\n\s*\w")
_BEFORE = re.compile(r"[ \t$*\\({[]{0,8}")
_NUMBERED = re.compile(  # or the last one, of a text that was cut off there
    r"^[ \t*_#]{0,9}(?:step (\d{1,9})[.:)]|(\d{1,9})[.)])(?=[*_]{0,3}(?:\s|\Z))",
    re.MULTILINE | re.IGNORECASE,
)
_NO_NUMBER = re.compile(
    r"(?:\\sqrt(?:\[\d\])?\s?\{?|√\s?\(?|\bbetween\s\S{1,20}\sand\s)\Z", re.IGNORECASE
)


def _trimmed(text: str) -> str:
    text = _SPACE.sub(" ", text)  # and no thin space, which may stand in a number
    text = text.lstrip("*`_\"'“‘ ").rstrip("*`_\"'”’ .,;:!")
    in_math = text[:1] == "$" == text[-1:]
    return text.strip("$ .") if in_math else text


def _blanked(aside: re.Match[str]) -> str:
    """Spaces for what is said in parentheses: words, or anything after a number. Elsewhere they
    are a pair or a term: the point (3, 4), 2 * (3 + 4)."""
    beside = aside.string[aside.start() - 2 : aside.start() - 1]
    said = beside.isdecimal() or beside == "%" or re.search(r"[^\W\d_]{2}|=", aside[0])
    return " " * len(aside[0]) if said else aside[0]


def _chosen(said: str, numbers: Sequence[_Number], boxed: bool) -> str:
    """The number of a statement that is its answer, or all of it."""
    if len(_UNKNOWN.findall(said)) > 1 or _BOUND.search(said):
        return _trimmed(said)
    start, end = _side(said, numbers)
    chosen = 0
    if (start, end) == (0, len(said)) and not boxed:
        words = re.search(LETTER, _COMMAND.sub("", said[: numbers[0].start])) is not None
        if words or _RECKONS.match(said, numbers[0].end):
            links = [link.end() for link in _COPULA.finditer(said, 0, numbers[-1].start)]
            start = links[-1] if links else 0
            chosen = 0 if links or not words else -1
    numbers = [n for n in numbers if start <= n.start < end]
    part = said[start:end]
    number = numbers[chosen]
    if len(numbers) > 1:
        several = part if boxed else _several(said, start, end, numbers)
        if several:
            return _trimmed(several)
    goes_on = _GOES_ON.match(said, number.end, end)
    comes_from = _COMES_FROM.search(said, max(start, number.start - 12), number.start)
    rest = said[start : number.start] + said[number.end : end]
    if goes_on or comes_from or (boxed and not _BENIGN.fullmatch(rest)):
        return _trimmed(part)
    return number.numeral.text


def _side(said: str, numbers: Sequence[_Number]) -> tuple[int, int]:
    """The side of an equation that is one number, the last of them; else the last with numbers."""
    signs = list(_EQUALS.finditer(said))
    starts = [0, *(sign.end() for sign in signs)]
    ends = [*(sign.start() for sign in signs), len(said)]
    sides = []
    at = 0
    for start, end in zip(starts, ends, strict=True):
        first = at
        while at < len(numbers) and numbers[at].start < end:
            at += 1
        if at > first:
            sides.append((at - first, start, end))
    single = [side for side in sides if side[0] == 1]
    return (single or sides)[-1][1:]


def _several(said: str, start: int, end: int, numbers: Sequence[_Number]) -> str:
    """A list or measures that hold all the numbers of a part: (3, -5), 5 to 10, 2 hours and 30
    minutes; "" where they are not of one."""
    lead = said[start : numbers[0].start].rstrip(" ([{\\$*")
    start += len(lead)
    marked, at = [], start
    for number in numbers:
        marked += [said[at : number.start], "\0"]
        at = number.end
    text = "".join([*marked, said[at:end]])
    measures = _MEASURES.match(text)
    all_of_it = measures is not None and "\0" not in text[measures.end() :]
    return said[start:end] if all_of_it or _LIST.fullmatch(text) else ""


def _last(text: str, numbers: Sequence[Numeral]) -> str | None:
    """Of a text that states nothing: what its last equation gives if it is in the last sentence or
    said again, or else the last number, or the term or range that it is a part of. Asides and the
    numbers of items count only if nothing else does, a list's 1, 2, 3 never."""
    clean = _ASIDE.sub(_blanked, text)
    items, listed, next_item = set(), set(), "1"
    for match in _NUMBERED.finditer(text):
        items.add(match.end())
        number = match[1] or match[2]
        if number in ("1", next_item):
            listed.add(match.end())
            next_item = str(int(number) + 1)
    plain = [n for n in numbers if not clean[n.start].isspace() and n.end + 1 not in items]
    numbers = plain or [n for n in numbers if n.end + 1 not in listed]
    if not numbers:
        return None
    starts = [n.start for n in numbers]
    for sign in reversed(list(_EQUALS.finditer(clean))):
        at = bisect_left(starts, sign.end())
        if at == len(numbers) or not _BEFORE.fullmatch(clean, sign.end(), starts[at]):
            continue
        result, later = numbers[at], numbers[at + 1 :]
        term = _GOES_ON.match(clean, result.end)
        closed = later and _NEXT_SENTENCE.search(clean, result.end)
        if not term and (not closed or any(n.key == result.key for n in later)):
            return result.text
        break
    last = numbers[-1]
    if not _NO_NUMBER.search(clean, max(0, last.start - 40), last.start):
        return last.text
    start = max((m.end() - 1 for m in _NEXT_SENTENCE.finditer(clean, 0, last.start)), default=0)
    end = clean.find("\n", last.end)
    whole = clean[start : end if end >= 0 else len(clean)]
    within = [_Number(n.start - start, n.end - start, n) for n in numbers if n.start >= start]
    return _chosen(whole, [n for n in within if n.end <= len(whole)], False)
