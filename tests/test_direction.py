"""Calls go one way: every room of csrc calls those below it and nothing calls up or in a circle.

Who calls whom is read from the symbols of the objects, so a declaration by hand or a pointer to a
function hides nothing. Python modules import each other in one direction, too.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import runpy
import subprocess
import sysconfig
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
from support import native

ROOT, SOURCE = native.ROOT, native.SOURCE

# The rooms of csrc, lowest first, each with those that it calls. A file of the root is a room.
CALLS: dict[str, tuple[str, ...]] = {
    "error.c": (),
    "policy": (),
    "model": ("error.c",),
    "kv": ("error.c", "policy"),
    "cpu": ("error.c", "model"),
    "cuda": ("error.c",),  # a library of its own
    "backend.c": ("error.c", "cpu"),
    "engine": ("error.c", "policy", "model", "kv"),
    "session.c": ("error.c", "model", "kv", "backend.c", "engine"),
    "py": ("error.c", "policy", "model", "cpu", "backend.c", "engine", "session.c"),
}

Graph = Mapping[str, Mapping[str, Iterable[str]]]
"""{caller: {callee: by which symbols}}"""


# ---- circles -----------------------------------------------------------------------------------


def circles(graph: Graph) -> list[list[str]]:
    """Each largest set of nodes that reach one another, sorted."""

    def reached(start: str) -> set[str]:
        found: set[str] = set()
        waiting = [start]
        while waiting:
            for node in graph.get(waiting.pop(), ()):
                if node not in found:
                    found.add(node)
                    waiting.append(node)
        return found

    reach = {node: reached(node) for node in graph}
    rounds = {
        tuple(sorted(other for other in reach[node] if node in reach.get(other, ())))
        for node in graph
        if node in reach[node]
    }
    return sorted(map(list, rounds))


def calls_up(graph: Graph) -> list[str]:
    """Calls that CALLS does not have, between files named as below csrc."""
    return sorted(
        f"{caller} calls {callee}: {', '.join(sorted(symbols))}"
        for caller, callees in graph.items()
        for callee, symbols in callees.items()
        if room(caller) != room(callee) and room(callee) not in CALLS[room(caller)]
    )


def room(path: str) -> str:
    """The room of a file of csrc."""
    return path.partition("/")[0]


def test_the_table_is_an_order() -> None:
    names = list(CALLS)
    for i, name in enumerate(names):
        assert set(CALLS[name]) <= set(names[:i]), name
    assert set(names) == {room(str(p.relative_to(SOURCE))) for p in SOURCE.rglob("*.c")}


# ---- C -----------------------------------------------------------------------------------------


def symbols(object_file: Path) -> tuple[set[str], set[str]]:
    """The names that an object offers, and those that it wants."""
    done = subprocess.run(
        ["nm", "-P", "-g", str(object_file)], check=True, capture_output=True, text=True
    )
    rows = [line.split() for line in done.stdout.splitlines()]
    wanted = {row[0] for row in rows if row[1] == "U"}
    return {row[0] for row in rows} - wanted, wanted


def call_graph(objects: Mapping[str, Path]) -> dict[str, dict[str, set[str]]]:
    """Who calls whom, by symbols, from {name: object}."""
    tables = {name: symbols(path) for name, path in objects.items()}
    owner = {symbol: name for name, (offered, _) in tables.items() for symbol in offered}
    graph: dict[str, dict[str, set[str]]] = {name: defaultdict(set) for name in objects}
    for name, (_, wanted) in tables.items():
        for symbol in wanted & owner.keys():
            graph[name][owner[symbol]].add(symbol)
    return graph


def compiled(sources: list[Path], *flags: str) -> dict[str, Path]:
    """{path below csrc: object}"""
    made = native.objects(sources, *flags)
    return {str(s.relative_to(SOURCE)): o for s, o in zip(sources, made, strict=True)}


def python_flags() -> list[str]:
    """What csrc/py is compiled with; skips the test where a header is missing."""
    spec = importlib.util.find_spec("tvm_ffi")
    found = [Path(p) / "include" for p in (spec.submodule_search_locations or [])] if spec else []
    given = os.environ.get("RKSC_DLPACK_INCLUDE")
    folders = [Path(given)] if given else found
    dlpack = next((f for f in folders if (f / "dlpack" / "dlpack.h").is_file()), None)
    python = Path(sysconfig.get_path("include"))
    if dlpack is None:
        pytest.skip("no dlpack/dlpack.h (pip install apache-tvm-ffi, or RKSC_DLPACK_INCLUDE)")
    if not (python / "Python.h").is_file():
        pytest.skip(f"no Python.h in {python}")
    include = [f"-I{folder}" for folder in (python, np.get_include(), dlpack)]
    return ["-O0", "-Wno-missing-field-initializers", "-Wno-cast-function-type", *include]


def test_calls_go_down() -> None:
    """All but csrc/py and csrc/cuda."""
    graph = call_graph(compiled(native.sources()))
    assert len(graph) > 40
    assert calls_up(graph) == []
    assert circles(graph) == []


def test_calls_of_py_go_down() -> None:
    py = compiled(sorted((SOURCE / "py").glob("*.c")), *python_flags())
    graph = call_graph({**compiled(native.sources()), **py})
    assert "session.c" in graph["py/session.c"]
    assert calls_up(graph) == []
    assert circles(graph) == []


def test_calls_of_cuda_go_down() -> None:
    """Its .c files, against the headers of the host runtime."""
    build = runpy.run_path(str(ROOT / "tests" / "cuda_host" / "build.py"))
    sources = [p for p in build["sources"](ROOT) if p.suffix == ".c"]
    graph = call_graph({str(p.relative_to(SOURCE)): build["compiled"](p, ROOT) for p in sources})
    assert any(graph["cuda/device.c"])
    assert calls_up(graph) == []
    assert circles(graph) == []


def test_what_is_planted_is_found(tmp_path: Path) -> None:
    """A call up, by a pointer in a table, which closes a circle."""
    texts = {
        "kv/kv.c": "int step(void); int kv(void) { return 1; } int (*const up)(void) = step;",
        "engine/step.c": "int kv(void); int step(void) { return kv(); }",
        "engine/alone.c": "int kv(void); int alone(void) { return kv(); }",
    }
    objects = {}
    for name, text in texts.items():
        source = tmp_path / Path(name).name
        source.write_text(text)
        objects[name] = source.with_suffix(".o")
        command = ["cc", "-c", str(source), "-o", str(objects[name])]
        subprocess.run(command, check=True)
    graph = call_graph(objects)
    assert calls_up(graph) == ["kv/kv.c calls engine/step.c: step"]
    assert circles(graph) == [["engine/step.c", "kv/kv.c"]]
    assert circles({"a": {"b": ()}, "b": {"c": ()}, "c": {"b": ()}, "d": {"d": ()}}) == [
        ["b", "c"],
        ["d"],
    ]
    assert circles({"a": {"b": (), "c": ()}, "b": {"c": ()}}) == []


# ---- Python ------------------------------------------------------------------------------------

# The rooms of rksc, lowest first, each with those that it imports. A module of the root is a room;
# "rksc" is the package's own list of public names.
IMPORTS: dict[str, tuple[str, ...]] = {
    "_core": (),
    "cuda": (),
    "data": (),
    "moved": (),
    "scalars": (),
    "version": (),
    "formats": ("_core", "scalars"),
    "answers": ("formats",),
    "text": ("scalars", "formats"),
    "model": ("_core", "scalars", "formats", "text"),
    "engine": ("_core", "scalars", "formats", "answers", "text", "model"),
    "reasoning": ("_core", "answers", "text", "engine"),
    "testing": ("_core", "answers", "engine", "reasoning"),
    "clients": ("_core", "scalars", "text", "engine"),
    "server": ("engine", "clients"),
    "calibration": ("_core", "scalars", "version", "answers", "engine", "reasoning"),
    "experiments": ("_core", "answers", "model", "engine", "reasoning", "calibration"),
    "limits": ("_core", "model", "engine", "experiments"),
    "rksc": (
        *("_core", "moved", "version", "answers", "text", "model", "engine", "reasoning"),
        "calibration",
    ),
    "cli": (
        *("_core", "cuda", "data", "formats", "answers", "engine", "reasoning", "clients"),
        *("server", "calibration", "experiments", "limits", "rksc"),
    ),
}


def python_room(module: str) -> str:
    """Of rksc.engine.session: engine; of rksc itself: rksc."""
    return module.split(".")[min(1, module.count("."))]


def imports_up(graph: Graph) -> list[str]:
    """Imports between rooms that IMPORTS does not have."""
    pairs = ((a, b) for a, imported in graph.items() for b in imported)
    return sorted(
        f"{a} imports {b}"
        for a, b in pairs
        if python_room(a) != python_room(b) and python_room(b) not in IMPORTS[python_room(a)]
    )


def module_name(path: Path, root: Path = ROOT) -> str:
    """Of a file below the repository."""
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def statements(body: list[ast.stmt], late: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    """The imports of a module that run when it is imported; late: those in functions and those for
    types, too."""
    for node in body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node
        elif not late and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from statements(node.orelse, late)
        elif late or not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for field in ("body", "orelse", "finalbody"):
                yield from statements(getattr(node, field, []), late)
            for handler in getattr(node, "handlers", []):
                yield from statements(handler.body, late)


def imported(
    name: str, is_package: bool, text: str, modules: Iterable[str], late: bool = False
) -> set[str]:
    """Which of `modules` the module `name` imports."""
    known, found = set(modules), set()
    for node in statements(ast.parse(text).body, late):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
            continue
        parts = name.split(".") if is_package else name.split(".")[:-1]
        above = parts[: len(parts) - node.level + 1] if node.level else []
        base = ".".join([*above, *([node.module] if node.module else [])])
        for alias in node.names:
            inner = f"{base}.{alias.name}"
            found.add(inner if inner in known else base)
    return found & known - {name}


def import_graph(package: Path, late: bool, root: Path = ROOT) -> dict[str, dict[str, tuple[()]]]:
    """Who imports whom."""
    paths = {module_name(p, root): p for p in sorted(package.rglob("*.py"))}
    known = [*paths, *(module_name(p, root) for p in package.rglob("*.pyi"))]
    return {
        name: dict.fromkeys(
            imported(name, path.name == "__init__.py", path.read_text("utf-8"), known, late), ()
        )
        for name, path in paths.items()
    }


def test_the_rooms_of_python_are_an_order() -> None:
    names = list(IMPORTS)
    for i, name in enumerate(names):
        assert set(IMPORTS[name]) <= set(names[:i]), name
    graph = import_graph(ROOT / "rksc", late=True)
    assert set(names) == {"_core", *map(python_room, graph)}
    used = {(python_room(a), python_room(b)) for a in graph for b in graph[a]}
    assert {(a, b) for a in names for b in IMPORTS[a]} <= used, "IMPORTS has what nobody needs"


def test_imports_go_down() -> None:
    """Those in functions and those for types, too: a room knows none above it by any way."""
    graph = import_graph(ROOT / "rksc", late=True)
    assert len(graph) > 80
    assert "rksc._core" in graph["rksc.engine.session"]
    assert imports_up(graph) == []
    assert circles(graph) == []


def test_planted_imports_are_found(tmp_path: Path) -> None:
    """Upwards for a type and in a function, and a circle within a room."""
    texts = {
        "engine/session": "from ..text import decoding\n",
        "calibration/calibrate": "if TYPE_CHECKING:\n    from ..experiments import table\n",
        "text/decoding": "def late():\n    from rksc.text import chat\n    from .. import engine\n",
        "text/chat": "from .decoding import x\n",
        "experiments/table": "import rksc.calibration.calibrate\n",
    }
    for name, text in texts.items():
        path = tmp_path / "rksc" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        (path.parent / "__init__.py").touch()
        path.write_text(text)
    graph = import_graph(tmp_path / "rksc", late=True, root=tmp_path)
    assert imports_up(graph) == [
        "rksc.calibration.calibrate imports rksc.experiments.table",
        "rksc.text.decoding imports rksc.engine",
    ]
    assert circles(graph) == [
        ["rksc.calibration.calibrate", "rksc.experiments.table"],
        ["rksc.text.chat", "rksc.text.decoding"],
    ]


def test_imports_are_read() -> None:
    text = (
        "from __future__ import annotations\nimport p.b\nfrom . import c, name\nfrom .d import x\n"
        "if TYPE_CHECKING:\n    from .e import y\nelse:\n    from .f import z\n"
        "try:\n    from p import g\nexcept ImportError:\n    from p.h import w\n"
        "def f():\n    from .i import v\nclass A:\n    from .q import j\n"
    )
    known = ["p", *(f"p.{letter}" for letter in "abcdefghi"), "p.q", "p.q.j"]
    expected = {"p", *(f"p.{letter}" for letter in "bcdfgh"), "p.q.j"}
    assert imported("p.a", False, text, known) == expected
    assert imported("p.a", False, text, known, late=True) == expected | {"p.e", "p.i"}
    assert imported("p.q", True, "from . import j\nfrom .. import a\n", known) == {"p.q.j", "p.a"}
