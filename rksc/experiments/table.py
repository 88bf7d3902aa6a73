"""A table: what every experiment returns. Columns with units, rows, and where they come from."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from .plots import figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Value = str | int | float | bool | None


@dataclass(frozen=True)
class Column:
    """name: as in `row[name]`; unit: "s", "%", "tokens", "" for a name or a plain number."""

    name: str
    unit: str = ""


@dataclass(frozen=True)
class Finding:
    """One sentence that the numbers say. good: it speaks for the method, or against it; None:
    these numbers leave it open."""

    text: str
    good: bool | None

    def __str__(self) -> str:
        return f"{'?' if self.good is None else '+' if self.good else '-'} {self.text}"


@dataclass(frozen=True, eq=False)
class Table:
    """Rows under columns.

    meta: model, machine, versions, seed, settings. findings: sentences made from the rows.
    also: further tables of the same experiment, by name.
    """

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: list[tuple[Value, ...]]
    meta: dict[str, Any] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    also: dict[str, Table] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for i, row in enumerate(self.rows):
            if len(row) != len(self.columns):
                raise ValueError(
                    f"{self.name}: row {i} has {len(row)} values for {len(self.columns)} columns"
                )

    def __len__(self) -> int:
        return len(self.rows)

    def column(self, name: str) -> list[Any]:
        """All values of a column. KeyError names the columns that there are."""
        at = self._at(name)
        return [row[at] for row in self.rows]

    def where(self, **wanted: Value) -> Table:
        """The rows with these values."""
        at = {self._at(name): value for name, value in wanted.items()}
        rows = [row for row in self.rows if all(row[i] == value for i, value in at.items())]
        return replace(self, rows=rows)

    def dicts(self) -> list[dict[str, Any]]:
        """Each row by the names of the columns."""
        names = [column.name for column in self.columns]
        return [dict(zip(names, row, strict=True)) for row in self.rows]

    def _at(self, name: str) -> int:
        names = [column.name for column in self.columns]
        if name not in names:
            raise KeyError(f"{self.name} has no column {name!r}, but {', '.join(names)}")
        return names.index(name)

    # ---- files -----------------------------------------------------------------------------

    def to_csv(self, path: str | Path) -> None:
        """One line of names with units, one for each row; `# key: value` lines before."""
        with Path(path).open("w", encoding="utf-8", newline="") as file:
            for key, value in self.meta.items():
                file.write(f"# {key}: {json.dumps(value)}\n")
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow([_head(column) for column in self.columns])
            writer.writerows(self.rows)

    def to_json(self, path: str | Path) -> None:
        """Everything, with the further tables."""
        text = json.dumps(self._plain(), indent=1, ensure_ascii=False, allow_nan=False)
        Path(path).write_text(text + "\n", "utf-8")

    @classmethod
    def from_json(cls, path: str | Path) -> Table:
        """What `to_json` wrote."""
        return cls._of(json.loads(Path(path).read_text("utf-8")))

    def _plain(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "title": self.title,
            "meta": self.meta,
            "columns": [asdict(column) for column in self.columns],
            "rows": [[_finite(value) for value in row] for row in self.rows],
            "findings": [asdict(finding) for finding in self.findings],
            "also": {name: table._plain() for name, table in self.also.items()},
        }

    @classmethod
    def _of(cls, plain: dict[str, Any]) -> Table:
        return cls(
            plain["name"],
            plain["title"],
            tuple(Column(**column) for column in plain["columns"]),
            [tuple(row) for row in plain["rows"]],
            plain["meta"],
            [Finding(**finding) for finding in plain["findings"]],
            {name: cls._of(table) for name, table in plain["also"].items()},
        )

    def save(self, folder: str | Path, plots: bool = True) -> list[Path]:
        """CSV of every table, one JSON of all, the figure as PNG and PDF (extra [experiments]).
        What was written."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        made = [folder / f"{self.name}.json", folder / f"{self.name}.csv"]
        self.to_json(made[0])
        self.to_csv(made[1])
        for name, table in self.also.items():
            made.append(folder / f"{self.name}-{name}.csv")
            table.to_csv(made[-1])
        if not plots:
            return made
        figure = self.plot()
        pictures = [folder / f"{self.name}.png", folder / f"{self.name}.pdf"]
        figure.savefig(pictures[0])
        figure.savefig(pictures[1], metadata={"CreationDate": None})
        return made + pictures

    def plot(self, path: str | Path | None = None) -> Figure:
        """The experiment's figure (extra [experiments]); written to `path` where one is given."""
        caption = ", ".join(str(self.meta[k]) for k in ("model", "dtype") if k in self.meta)
        if self.name not in _DRAW:
            raise ValueError(f"{self.name!r} is no experiment that has a figure")
        made = figure(lambda empty: _DRAW[self.name](empty, self), caption)
        if path is not None:
            made.savefig(path)
        return made

    # ---- text ------------------------------------------------------------------------------

    def markdown(self) -> str:
        """The rows as a Markdown table."""
        lines = [[_head(column) for column in self.columns]]
        lines.append(["---"] * len(self.columns))
        lines += [[show(value) for value in row] for row in self.rows]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)

    def __str__(self) -> str:
        text = [[_head(column) for column in self.columns]]
        text += [[show(value) for value in row] for row in self.rows]
        widths = [max(len(line[i]) for line in text) for i in range(len(self.columns))]
        numeric = [
            any(isinstance(row[i], (int, float)) for row in self.rows) for i in range(len(widths))
        ]
        body = "\n".join(_line(line, widths, numeric) for line in text)
        parts = [self.title, body, *map(str, self.findings)]
        parts += [f"\n{table}" for table in self.also.values()]
        return "\n".join(parts)

    def _repr_html_(self) -> str:
        from html import escape

        def row(values: Iterable[str], tag: str) -> str:
            return "<tr>" + "".join(f"<{tag}>{escape(v)}</{tag}>" for v in values) + "</tr>"

        head = row((_head(column) for column in self.columns), "th")
        body = "".join(row((show(v) for v in values), "td") for values in self.rows)
        return f"<p>{escape(self.title)}</p><table>{head}{body}</table>"


# ---- how the tables of an experiment are shown -------------------------------------------------

Draw = TypeVar("Draw", bound="Callable[[Figure, Table], None]")
Show = TypeVar("Show", bound=Callable[[Table], Sequence[Table]])
_DRAW: dict[str, Callable[[Figure, Table], None]] = {}
_SHOW: dict[str, Callable[[Table], Sequence[Table]]] = {}


def draws(name: str) -> Callable[[Draw], Draw]:
    """The function below draws the figure of an experiment's table."""

    def keep(function: Draw) -> Draw:
        _DRAW[name] = function
        return function

    return keep


def shows(name: str) -> Callable[[Show], Show]:
    """The function below chooses the tables of an experiment that a reader wants to see."""

    def keep(function: Show) -> Show:
        _SHOW[name] = function
        return function

    return keep


def shown(table: Table, n_rows: int) -> list[Table]:
    """What a reader wants to see of an experiment: its own choice, else tables of few rows."""
    if table.name in _SHOW:
        return list(_SHOW[table.name](table))
    return [t for t in (table, *table.also.values()) if len(t) <= n_rows]


def show(value: Value) -> str:
    """A value as people read it: four digits, no NaN."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else value


def signed(value: float, digits: int = 1) -> str:
    """A difference as people read it: with its sign, and zero as +0."""
    return f"{round(value, digits) + 0.0:+.{digits}f}"


def _head(column: Column) -> str:
    return f"{column.name} [{column.unit}]" if column.unit else column.name


def _finite(value: Value) -> Value:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _line(values: Sequence[str], widths: Sequence[int], numeric: Sequence[bool]) -> str:
    cells = zip(values, widths, numeric, strict=True)
    return "  ".join(v.rjust(w) if right else v.ljust(w) for v, w, right in cells).rstrip()
