"""All experiments as one page: findings first, those against the method before those for it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..calibration.runner import Lab
from .table import Table, show, shown

_ROWS = 40  # a longer table stays in its CSV file
_SAYS = {False: "What speaks against it", None: "What it leaves open", True: "What speaks for it"}


def report(tables: Mapping[str, Table], lab: Lab, command: str, plots: bool = True) -> Path:
    """Write tables, pictures and README.md to the lab's `out`; the path of the page."""
    if lab.out is None:
        raise ValueError("out: the lab has no folder to write a report to")
    folder = Path(lab.out)
    for table in tables.values():
        table.save(folder, plots)
    page = folder / "README.md"
    page.write_text("\n".join(_page(tables, lab, folder, command)) + "\n", "utf-8")
    return page


def _page(tables: Mapping[str, Table], lab: Lab, folder: Path, command: str) -> list[str]:
    meta = next(iter(tables.values())).meta
    lines = ["# Results", ""]
    wall, cpu = (sum(s[i] for s in lab.spent.values()) / 60 for i in (0, 1))
    lines += [
        f"Made by `{command}` with {meta['model']} ({meta['architecture']}) in {meta['dtype']} "
        f"on {meta['machine']} ({meta['isa']}, {meta['n_threads']} threads), rksc "
        f"{meta['rksc']}, seed {meta['seed']}. The measurements took {wall:.1f} minutes, "
        f"{cpu:.1f} minutes of processor time.", "",
    ]  # fmt: skip
    if meta["quick"]:
        lines += [
            "The quick set is small, and so is the model it is meant for. Brackets hold 95 % "
            "intervals. A sentence speaks for the method only where the interval does too; read "
            "none as a rate to expect of another model.", "",
        ]  # fmt: skip
    noise = lab.noise()
    if noise is not None:
        lines += [noise, ""]
    for good, title in _SAYS.items():
        lines += [f"## {title}", ""]
        for name, table in tables.items():
            lines += [f"- **{name}**: {f.text}" for f in table.findings if f.good is good]
        lines.append("")
    for name, table in tables.items():
        lines += [f"## {name}", "", f"{table.title}.", ""]
        if (folder / f"{name}.png").is_file():
            lines += [f"![{table.title}]({name}.png)", ""]
        for part in shown(table, _ROWS):
            lines += [part.markdown(), ""]
        files = [f"[{name}.csv]({name}.csv)", f"[{name}.json]({name}.json)"]
        files += [f"[{name}-{other}.csv]({name}-{other}.csv)" for other in table.also]
        settings = {k: v for k, v in table.meta.items() if k not in meta}
        lines += [", ".join(files) + _settings(settings), ""]
    return lines[:-1]


def _settings(settings: Mapping[str, Any]) -> str:
    parts = [
        f"{key} {show(v) if isinstance(v, (int, float, str)) else v}" for key, v in settings.items()
    ]
    return f" ({'; '.join(parts)})" if parts else ""
