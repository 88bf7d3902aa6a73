"""A solution as a tree: for a terminal of any width, and as HTML for a notebook."""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Sequence
from html import escape
from itertools import groupby
from typing import TextIO

from ..engine.results import Gate
from .tree import Node, Phase, Tree

_BOLD, _DIM, _GREEN, _YELLOW, _CYAN = "1", "2", "32", "33", "36"
_EIGHTHS = " ▏▎▍▌▋▊▉█"


def wants_colour(file: TextIO) -> bool:
    """Colour belongs on a terminal, unless NO_COLOR is set."""
    return file.isatty() and "NO_COLOR" not in os.environ


def tree(solution: Tree, width: int = 100, colour: bool = False) -> str:
    """The tree in lines of at most `width` columns (40 at least)."""
    width = max(width, 40)
    paint = _Painter(colour)
    root = solution.nodes[0]
    lines = [
        *(paint(line, _BOLD) for line in wrap(solution.problem, width, 4)),
        paint(clip(f"│ {solution.prompt_tokens} tokens, computed once", width), _DIM),
    ]
    _branches(solution, root, "", lines, width, paint)
    lines.append("")
    chosen = " → ".join(str(node.id) for node in solution.path())
    lines.append(clip_painted([("answer  ", _DIM), (solution.answer, _BOLD),
                               (f"   branch {chosen}", _DIM)], width, paint))  # fmt: skip
    lines += [paint(clip(line, width), _DIM) for line in phase_table(solution.phases)]
    return "\n".join(lines)


def _branches(
    solution: Tree, parent: Node, indent: str, lines: list[str], width: int, paint: _Painter
) -> None:
    """All below a node; three or more evicted leaves in a row are one line."""
    siblings = solution.children(parent)

    def folds(node: Node) -> bool:
        return node.evicted and not (node.kept or solution.children(node))

    for folded, run in groupby(siblings, folds):
        nodes = list(run)
        if folded and len(nodes) > 2:
            lines.append(_folded(nodes, indent, nodes[-1] is siblings[-1], width, paint))
            continue
        for node in nodes:
            _branch(solution, node, indent, node is siblings[-1], lines, width, paint)


def _folded(nodes: Sequence[Node], indent: str, last: bool, width: int, paint: _Painter) -> str:
    marks = [node.mark for node in nodes if node.mark is not None]
    best = f", best mark {max(marks):.2f}" if marks else ""
    rail = indent + ("└─" if last else "├─")
    text = f" {nodes[0].id} … {nodes[-1].id}   {len(nodes)} evicted branches{best}"
    return clip_painted([(rail + text, _DIM)], width, paint)


def _branch(
    solution: Tree,
    node: Node,
    indent: str,
    last: bool,
    lines: list[str],
    width: int,
    paint: _Painter,
) -> None:
    children = solution.children(node)
    best = node is solution.best
    id_width = len(str(len(solution.nodes) - 1)) + 1
    head = [(indent + ("└─" if last else "├─"), _DIM), (f" {node.id:<{id_width}}", "")]
    head.append(("★ " if best else "· " if node.kept else "  ", _YELLOW))
    head += _marks(node)
    lines.append(clip_painted(head, width, paint))
    below = indent + ("   " if last else "│  ")
    text = " ".join((node.suffix + node.text).split())
    rail = below + ("│   " if children else "    ")
    room = max(width - len(rail), 1)
    shown = wrap(text, room, 4) if best else [clip_middle(text, room)]
    lines += [paint(rail, _DIM) + paint(line, "" if best else _DIM) for line in shown]
    _branches(solution, node, below, lines, width, paint)


def _marks(node: Node) -> list[tuple[str, str]]:
    """Confidence, verdict and whatever else is worth a word, as (text, colour)."""
    parts: list[tuple[str, str]] = []
    if node.confidence is not None:
        parts += [(bar(node.confidence), _CYAN), (f" {node.confidence:.2f}", "")]
    verdict = node.verdict
    if node.score is not None:
        parts.append((f"   YES {node.score:.2f}", _GREEN if node.score >= 0.5 else _YELLOW))
        parts.append((f"   mark {node.mark:.2f}", ""))
    elif verdict is not None:
        parts.append((f"   {verdict.outcome}", _DIM))
    if verdict is not None and verdict.score is not None and verdict.layers < verdict.n_layers:
        parts.append((f"   exit at layer {verdict.layers} of {verdict.n_layers}", _GREEN))
    parts.append((f"   {len(node.tokens)} tok {node.finish_reason or ''}".rstrip(), _DIM))
    if node.gate is not None:
        parts.append(("   " + gate_words(node.gate), _DIM))
    if node.evicted:
        parts.append(("   evicted", _DIM))
    return parts


def gate_words(gate: Gate) -> str:
    """ASKS' decision in a few words."""
    sigma = "" if gate.sigma is None else f", sigma {gate.sigma:.2f}"
    return f"{'shared' if gate.accepted else 'own'} prompt ({gate.reason}{sigma})"


def bar(value: float, cells: int = 8) -> str:
    """A share of one as a bar of block characters."""
    eighths = round(max(0.0, min(1.0, value)) * cells * 8)
    full, part = divmod(eighths, 8)
    return ("█" * full + (_EIGHTHS[part] if part else "")).ljust(cells)


_COLUMNS = (
    ("seconds", "seconds"), ("computed", "tokens_computed"), ("reused", "tokens_reused"),
    ("forked", "tokens_forked"), ("again", "tokens_recomputed"), ("layers saved", "layers_saved"),
    ("evicted", "evictions"),
)  # fmt: skip


def phase_table(phases: Sequence[Phase]) -> list[str]:
    """Lines of a table: a phase a row, tokens by where they came from; all-zero columns go."""
    rows: list[tuple[str, list[float]]] = [
        (phase.name, [getattr(phase, name) for _, name in _COLUMNS]) for phase in phases
    ]
    rows.append(("total", [sum(column) for column in zip(*(r for _, r in rows), strict=True)]))
    used = [i for i, total in enumerate(rows[-1][1]) if total or i == 0]
    lines = ["".ljust(10) + "".join(_COLUMNS[i][0].rjust(14) for i in used)]
    for name, values in rows:
        cells = [f"{values[i]:.2f}" if i == 0 else f"{values[i]:,}" for i in used]
        cells = ["-" if cell == "0" else cell for cell in cells]
        lines.append(name.ljust(10) + "".join(cell.rjust(14) for cell in cells))
    return lines


# ---- columns of a terminal -----------------------------------------------------------------


def columns(text: str) -> int:
    """Columns that a text takes: wide characters two, combining ones none."""
    return sum(_columns_of(character) for character in text)


def _columns_of(character: str) -> int:
    if unicodedata.combining(character) or unicodedata.category(character) in ("Cf", "Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def printable(text: str) -> str:
    """A text without control characters: a model's output must not steer the terminal."""
    return "".join(
        " "
        if character in "\n\t"
        else "�"
        if unicodedata.category(character) == "Cc"
        else character
        for character in text
    )


def clip(text: str, width: int) -> str:
    """At most `width` columns of a text on one line; "…" where something is left out."""
    text = printable(text)
    if columns(text) <= width:
        return text
    return _take(text, width - 1) + "…"


def wrap(text: str, width: int, most: int) -> list[str]:
    """A text's words on lines of at most `width` columns; the middle goes where more than `most`
    lines would be needed."""
    lines, line = [], ""
    for word in clip_middle(" ".join(printable(text).split()), width * most).split(" "):
        if line and columns(line) + 1 + columns(word) > width:
            lines.append(line)
            line = word
        else:
            line = f"{line} {word}" if line else word
    lines.append(line)
    if len(lines) > most:
        lines = [*lines[: most - 1], clip_middle(" ".join(lines[most - 1 :]), width)]
    return [clip(one, width) for one in lines]


def clip_middle(text: str, width: int) -> str:
    """Like `clip`, but what is left out is in the middle: a solution ends with its answer."""
    text = printable(text)
    if columns(text) <= width:
        return text
    tail = (width - 1) // 2
    return _take(text, width - 1 - tail) + "…" + _take(text[::-1], tail)[::-1]


def _take(text: str, width: int) -> str:
    used = 0
    for i, character in enumerate(text):
        used += _columns_of(character)
        if used > width:
            return text[:i]
    return text


class _Painter:
    def __init__(self, colour: bool) -> None:
        self._colour = colour

    def __call__(self, text: str, style: str) -> str:
        return f"\x1b[{style}m{text}\x1b[0m" if self._colour and style and text else text


def clip_painted(parts: Sequence[tuple[str, str]], width: int, paint: _Painter) -> str:
    """Parts in their styles on one line of at most `width` columns."""
    line, room = "", width
    for raw, style in parts:
        text = printable(raw)
        if columns(text) > room:
            return line + paint(clip(text, room), style) if room > 0 else line
        line += paint(text, style)
        room -= columns(text)
    return line


# ---- notebook ------------------------------------------------------------------------------

_CSS = """
.rksc{font:13px/1.5 system-ui,sans-serif;max-width:60em}
.rksc ul{list-style:none;margin:0;padding-left:1.1em;border-left:1px solid #8884}
.rksc li{margin:.25em 0}.rksc summary{cursor:pointer}
.rksc pre{white-space:pre-wrap;margin:.2em 0 .4em 1.2em;font-size:12px}
.rksc .bar{display:inline-block;width:5em;height:.6em;background:#8883;margin-right:.4em}
.rksc .bar i{display:block;height:100%;background:#2a8fbd}
.rksc .note{opacity:.65}.rksc .best>details>summary{font-weight:600}
.rksc table{border-collapse:collapse;font-size:12px}
.rksc td,.rksc th{padding:0 .7em;text-align:right}
"""


def html(solution: Tree) -> str:
    """The same tree for a notebook: self-contained, all text escaped, answers fold out."""
    header, *rows = [line.split("  ") for line in phase_table(solution.phases)]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in (header, *rows)]
    table = "<tr><th></th>" + "".join(f"<th>{escape(c)}</th>" for c in cells[0]) + "</tr>"
    table += "".join(
        "<tr>" + "".join(f"<td>{escape(c)}</td>" for c in row) + "</tr>" for row in cells[1:]
    )
    return (
        f'<div class="rksc"><style>{_CSS}</style>'
        f"<p><b>{escape(solution.problem)}</b></p>"
        f"{_html_children(solution, solution.nodes[0])}"
        f"<p>answer <b>{escape(solution.answer)}</b></p><table>{table}</table></div>"
    )


def _html_children(solution: Tree, node: Node) -> str:
    items = "".join(_html_node(solution, child) for child in solution.children(node))
    return f"<ul>{items}</ul>" if items else ""


def _html_node(solution: Tree, node: Node) -> str:
    best = node is solution.best
    share = 0.0 if node.confidence is None else 100 * node.confidence
    notes = "".join(text for text, style in _marks(node) if style != _CYAN)
    return (
        f'<li class="{"best" if best else ""}"><details{" open" if best else ""}><summary>'
        f'{node.id}{" ★" if best else ""} <span class="bar"><i style="width:{share:.0f}%"></i>'
        f'</span><span class="note">{escape(notes)}</span></summary>'
        f"<pre>{escape(node.suffix + node.text)}</pre></details>"
        f"{_html_children(solution, node)}</li>"
    )
