"""Runs a notebook in its own folder and compares what it prints with what is saved in it.

python .ci/notebook.py NOTEBOOK. Numbers may differ, as between instruction sets; words may not: a
notebook whose saved outputs are those of older code fails. `--save` keeps the new outputs.
`--in FOLDER` runs it there, on whatever data it finds, and compares nothing.
"""

from __future__ import annotations

import difflib
import re
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

NUMBER = re.compile(r"[-+]?\d[\d.,]*")


def printed(notebook: nbformat.NotebookNode) -> list[str]:
    """Lines of text that its cells print or show, each number as #."""
    texts = [
        output.get("text") or output.get("data", {}).get("text/plain", "")
        for cell in notebook.cells
        for output in cell.get("outputs", ())
        if output.get("name") != "stderr"  # progress, with its times
    ]
    return NUMBER.sub("#", "\n".join(text.rstrip("\n") for text in texts)).splitlines()


def main() -> None:
    path = Path(sys.argv[1])
    elsewhere = Path(sys.argv[3]) if sys.argv[2:3] == ["--in"] else None
    notebook = nbformat.read(path, as_version=4)
    saved = printed(notebook)
    NotebookClient(
        notebook, timeout=900, record_timing=False,
        resources={"metadata": {"path": elsewhere or path.parent}},
    ).execute()  # fmt: skip
    if elsewhere is not None:
        return
    if "--save" in sys.argv:
        nbformat.write(notebook, path)
        return
    differences = list(difflib.unified_diff(saved, printed(notebook), "saved", "made", lineterm=""))
    if differences:
        raise SystemExit("\n".join([*differences, f"save it again: .ci/notebook.py {path} --save"]))


if __name__ == "__main__":
    main()
