"""All experiments as one page: findings first, those against the method before those for it."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .runner import time_of
from .table import Table, show

_ROWS = 40  # a longer table stays in its CSV file
_TIMED = ("arms", "shape_times", "search_tree")
_QUIET = 0.7  # of the threads' processors at least, when nobody else wants them


def report(tables: Mapping[str, Table], out: str | Path, command: str) -> Path:
    """Write tables, pictures and README.md to `out`; the path of the page."""
    folder = Path(out)
    for table in tables.values():
        table.save(folder)
    page = folder / "README.md"
    page.write_text("\n".join(_page(tables, folder, command)) + "\n", "utf-8")
    return page


def _page(tables: Mapping[str, Table], folder: Path, command: str) -> list[str]:
    meta = next(iter(tables.values())).meta
    lines = ["# Results", ""]
    wall, cpu = (seconds / 60 for seconds in time_of(folder))
    lines += [
        f"Made by `{command}` with {meta['model']} ({meta['architecture']}) in {meta['dtype']} "
        f"on {meta['machine']} ({meta['isa']}, {meta['n_threads']} threads), rksc "
        f"{meta['rksc']}, seed {meta['seed']}. The measurements took {wall:.1f} minutes, "
        f"{cpu:.1f} minutes of processor time.", "",
    ]  # fmt: skip
    if meta["quick"]:
        lines += [
            "The quick set is small, and so is the model it is meant for. Read every figure "
            "with its interval (95 %, in brackets), and none as a rate to expect of another "
            "model.", "",
        ]  # fmt: skip
    wall, cpu = time_of(folder, _TIMED)
    if wall and cpu / wall < _QUIET * meta["n_threads"]:
        lines += [
            f"The machine was not quiet: the timed measurements had {cpu / wall:.1f} of "
            f"{meta['n_threads']} processors. Tokens are counts and stand; times are rough.", "",
        ]  # fmt: skip
    for title, good in (("What speaks against it", False), ("What speaks for it", True)):
        lines += [f"## {title}", ""]
        for name, table in tables.items():
            lines += [f"- **{name}**: {f.text}" for f in table.findings if f.good is good]
        lines.append("")
    for name, table in tables.items():
        lines += [f"## {name}", "", f"{table.title}.", ""]
        if (folder / f"{name}.png").is_file():
            lines += [f"![{table.title}]({name}.png)", ""]
        for part in shown(table):
            lines += [part.markdown(), ""]
        files = [f"[{name}.csv]({name}.csv)", f"[{name}.json]({name}.json)"]
        files += [f"[{name}-{other}.csv]({name}-{other}.csv)" for other in table.also]
        settings = {k: v for k, v in table.meta.items() if k not in meta}
        lines += [", ".join(files) + _settings(settings), ""]
    return lines[:-1]


def shown(table: Table) -> list[Table]:
    """What a reader wants to see of an experiment: its module's choice, else the short tables."""
    module = importlib.import_module(f"{__package__}.{table.name}")
    choose = getattr(module, "shown", None)
    if choose is not None:
        return list(choose(table))
    return [t for t in (table, *table.also.values()) if len(t) <= _ROWS]


def _settings(settings: Mapping[str, Any]) -> str:
    parts = [
        f"{key} {show(v) if isinstance(v, (int, float, str)) else v}" for key, v in settings.items()
    ]
    return f" ({'; '.join(parts)})" if parts else ""
