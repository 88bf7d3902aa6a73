"""Regular expressions of a tokenizer.json, checked before a library runs them over a text.

The library backtracks: "(a+)+$" takes exponential time. A pattern passes here when a match that
begins at one place takes steps in proportion to the rest of the text: at most one repetition
without a bound comes before a part that may fail, none is within another, and what else can be
chosen (optional parts, alternatives, short repetitions) has few combinations. All patterns of
models that we know pass. The grammar is Oniguruma's.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_LONGEST = 10_000  # characters
_CHOICES = 10_000
_SHORT = 32  # a repetition whose bounds are no further apart counts as so many choices

_ATOM = re.compile(
    r"\\[pP]\{[^}]*\}|\\x\{[0-9A-Fa-f ]*\}|\\x[0-9A-Fa-f]{1,2}|\\u[0-9A-Fa-f]{4}|\\[^1-9kgKQExX]",
    re.DOTALL,
)
_QUANTIFIER = re.compile(r"(?:[*+?]|\{(\d*)(,?)(\d*)\})[?+]?")
_GROUP = re.compile(r"\?(?:(=|!|<=|<!)|>|:|<[^\W\d]\w*>|[im-]*([:)]))")


class _Part(NamedTuple):
    """What matters of a part of a pattern."""

    loops: int = 0  # repetitions without a bound, one after the other
    choices: int = 1
    may_fail: bool = True
    fixed: bool = True  # matches in one way only


def check_pattern(pattern: str) -> None:
    """ValueError for a pattern that may take too long, or that is not understood."""
    if len(pattern) > _LONGEST:
        raise ValueError(f"a regular expression of {len(pattern)} characters")
    reader = _Reader(pattern)
    reader.alternatives(0)
    if reader.at < len(pattern):
        raise reader.wrong("an unmatched )")


class _Reader:
    def __init__(self, pattern: str) -> None:
        self.pattern, self.at = pattern, 0

    def wrong(self, what: str) -> ValueError:
        return ValueError(f"regular expression: {what} at {self.at} is not supported")

    def _next(self) -> str:
        return self.pattern[self.at : self.at + 1]

    def alternatives(self, depth: int) -> _Part:
        """Until the closing bracket or the end."""
        if depth > 20:
            raise self.wrong("a group nested so deep")
        parts = [self._sequence(depth)]
        while self._next() == "|":
            self.at += 1
            parts.append(self._sequence(depth))
        return _Part(
            max(part.loops for part in parts),
            sum(part.choices for part in parts),
            all(part.may_fail for part in parts),
            len(parts) == 1 and parts[0].fixed,
        )

    def _sequence(self, depth: int) -> _Part:
        loops, choices, may_fail, fixed = 0, 1, False, True
        while self._next() not in ("", "|", ")"):
            part = self._quantified(self._atom(depth))
            if part.may_fail and loops > 1:
                raise self.wrong("a part that may fail after two repetitions without a bound")
            if part.may_fail and loops and part.loops > 1:
                raise self.wrong("a repetition without a bound after another")
            loops += part.loops
            choices *= part.choices
            may_fail |= part.may_fail
            fixed &= part.fixed
            if choices > _CHOICES:
                raise self.wrong("so many choices")
        return _Part(loops, choices, may_fail, fixed)

    def _quantified(self, part: _Part) -> _Part:
        while found := _QUANTIFIER.match(self.pattern, self.at):
            least, most = _bounds(found)
            if found[0].startswith("{") and least is None:
                return part  # a bracket that stands for itself
            if (most is None or most > 1) and not part.fixed:
                raise self.wrong("a repetition of what can match in several ways")
            self.at = found.end()
            assert least is not None
            if most is None or most - least > _SHORT:
                part = _Part(1, 1, least > 0 and part.may_fail, False)
            else:
                ways = part.choices * (most - least + 1)
                part = _Part(part.loops, ways, least > 0 and part.may_fail, most == least)
        return part

    def _atom(self, depth: int) -> _Part:
        character = self._next()
        if character == "(":
            return self._group(depth)
        if character == "[":
            self._class()
            return _Part()
        if character == "\\":
            found = _ATOM.match(self.pattern, self.at)
            if found is None:
                raise self.wrong(f"{self.pattern[self.at : self.at + 2]}")
            self.at = found.end()
            return _Part()
        self.at += 1
        return _Part()

    def _group(self, depth: int) -> _Part:
        self.at += 1
        look = False
        if self._next() == "?":
            found = _GROUP.match(self.pattern, self.at)
            if found is None:
                raise self.wrong(f"({self.pattern[self.at : self.at + 3]}")
            self.at = found.end()
            look = found[1] is not None
            if found[2] == ")":  # settings for what follows
                return _Part(may_fail=False)
        part = self.alternatives(depth + 1)
        if self._next() != ")":
            raise self.wrong("an unclosed group")
        self.at += 1
        return part._replace(may_fail=True) if look else part

    def _class(self) -> None:
        """[...], where [ opens another, and ] is itself in the first place."""
        depth = 0
        while self.at < len(self.pattern):
            character = self._next()
            self.at += 1
            if character == "[":
                depth += 1
                self.at += self._next() == "^"
                self.at += self._next() == "]"
            elif character == "]":
                depth -= 1
                if depth == 0:
                    return
            elif character == "\\":
                self.at += 1
        raise self.wrong("an unclosed class")


def _bounds(quantifier: re.Match[str]) -> tuple[int | None, int | None]:
    """Least and most repetitions; most None: no bound. (None, None): no quantifier."""
    sign = quantifier[0][0]
    if sign != "{":
        return {"*": (0, None), "+": (1, None), "?": (0, 1)}[sign]
    least, comma, most = quantifier.groups()
    if not least and not most:
        return None, None
    if not comma:
        return int(least), int(least)
    return int(least or 0), int(most) if most else None
