"""The C source keeps to the rules of the house, file by file.

Who may include whom, where Python and floats may appear, no state outside of objects, no way out
of the process, wide arithmetic for addresses. Every rule is also shown a piece of code that breaks
it (and one that does not), so that a rule which no longer finds anything fails here.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from support import native

SOURCE = native.SOURCE
FILES = sorted(str(p.relative_to(SOURCE)) for p in SOURCE.rglob("*.[ch]"))
CUDA = sorted(str(p.relative_to(SOURCE)) for p in SOURCE.rglob("*.cu*"))
PYTHON = sorted(str(p.relative_to(native.ROOT)) for p in (native.ROOT / "rksc").rglob("*.py"))

# The limits of a file and of a function, in C, CUDA and Python. CONTRIBUTING.md asks for a little
# less than that.
MAX_LINES = 700
MAX_FUNCTION_LINES = 80

Rule = Callable[[str, str], list[str]]


# ---- reading C ---------------------------------------------------------------------------------

_NOISE = re.compile(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.DOTALL)


def code(text: str) -> str:
    """The text without comments and with empty strings; lines stay where they are."""

    def blank(match: re.Match[str]) -> str:
        kept = '""' if match[0][0] in "\"'" else ""
        return kept + "\n" * match[0].count("\n")

    return _NOISE.sub(blank, text)


def line_of(text: str, at: int) -> int:
    return text.count("\n", 0, at) + 1


def statements(text: str) -> list[tuple[int, str]]:
    """(line, text up to its `{`, `=` or `;`) of everything that stands outside of functions."""
    text = re.sub(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", "", text, flags=re.MULTILINE)
    text = text.replace('extern "" {', "")
    found, begin, depth, head = [], 0, 0, ""
    for at, character in enumerate(text):
        if depth == 0 and character in "{=;" and not head:
            head = text[begin:at].strip()
            line = line_of(text, begin + len(text[begin:at]) - len(text[begin:at].lstrip()))
        depth += (character == "{") - (character == "}")
        depth = max(depth, 0)
        body = character == "}" and depth == 0 and head.endswith(")")
        if depth == 0 and (character == ";" or body):
            if head:
                found.append((line, head))
            begin, head = at + 1, ""
    return found


# ---- rules -------------------------------------------------------------------------------------

# What a file may include, own folder and own header aside. The first pattern that fits counts.
INCLUDES: dict[str, tuple[str, ...]] = {
    "rksc.h": (),
    "error.c": ("rksc.h",),
    "backend.[ch]": ("rksc.h",),
    "policy/*": ("rksc.h",),
    "model/quant.[ch]": ("rksc.h", "model/unpack.h"),
    "model/unpack.h": ("model/quant.h",),
    "model/dense.[ch]": ("rksc.h", "model/quant.h"),
    "model/layout.[ch]": ("rksc.h",),
    "model/place.[ch]": ("backend.h", "model/layout.h", "model/quant.h"),
    "kv/kv.[ch]": ("rksc.h",),
    "kv/tree.[ch]": ("rksc.h", "kv/kv.h", "policy/rsbcm.h"),
    "kv/plan.[ch]": ("rksc.h", "backend.h"),
    "engine/forward.[ch]": ("rksc.h", "backend.h"),
    "engine/options.h": ("backend.h", "kv/kv.h"),
    "engine/state.h": (
        "engine/forward.h", "engine/requests.h", "kv/plan.h", "kv/tree.h", "model/place.h",
    ),
    "engine/step.[ch]": ("engine/state.h",),
    "engine/requests.h": ("engine/options.h", "kv/tree.h", "policy/cgee.h"),
    "engine/stops.[ch]": ("engine/requests.h",),
    "engine/scheduler.[ch]": ("engine/step.h", "engine/stops.h", "engine/branches.h"),
    "engine/turns.c": ("engine/scheduler.h", "policy/shares.h"),
    "engine/*.h": ("engine/options.h", "kv/tree.h", "policy/*.h"),
    "engine/branches.c": ("engine/step.h",),
    "engine/score.c": ("engine/step.h", "engine/branches.h", "engine/peek.h"),
    "engine/*.c": ("engine/step.h", "engine/branches.h"),
    "session.h": ("engine/*.h",),
    "session.c": ("engine/scheduler.h",),
    "cpu/*": ("rksc.h", "backend.h", "model/quant.h", "model/unpack.h"),
    "cuda/*": ("rksc.h", "backend.h", "model/quant.h"),
    "py/*": (
        *("rksc.h", "backend.h", "session.h"),
        *("model/dense.h", "model/layout.h", "model/quant.h"),
    ),
}  # fmt: skip
# Rooms whose files may all include each other.
OPEN_ROOMS = ("policy", "cpu", "cuda", "py")


def include_direction(path: str, text: str) -> list[str]:
    """Data flows one way: py -> session -> engine -> kv, model; forward -> backend <- cpu."""
    allowed = next((names for fits, names in INCLUDES.items() if fnmatchcase(path, fits)), None)
    if allowed is None:
        return ["has no place in the order of includes (INCLUDES in this test)"]
    folder, own = str(Path(path).parent), str(Path(path).with_suffix(".h"))
    complaints = []
    for name in re.findall(r'^\s*#\s*include\s*"([^"]+)"', text, re.MULTILINE):
        near = str(Path(path).parent / name)  # where a compiler looks first
        target = near if near in FILES else name.replace("../", "")
        same_room = folder in OPEN_ROOMS and str(Path(target).parent) == folder
        if not (same_room or target == own or any(fnmatchcase(target, fits) for fits in allowed)):
            complaints.append(f"includes {target}")
    return complaints


_PYTHON = re.compile(
    r'#\s*include\s*[<"](?:Python\.h|structmember\.h|numpy/|dlpack/)|\bPy(?:Object|_|Err_|Mem_)'
)


def python_only_in_py(path: str, text: str) -> list[str]:
    """Only csrc/py talks Python, NumPy and DLPack."""
    if path.startswith("py/"):
        return []
    found = {*_PYTHON.findall(code(text)), *_PYTHON.findall(re.sub(r"/\*.*?\*/", "", text))}
    return [f"speaks of {word}" for word in sorted(found)]


def integers_only(path: str, text: str) -> list[str]:
    """The books of blocks and the plan of a step never see a floating-point number."""
    if not fnmatchcase(path, "kv/kv.[ch]") and path != "kv/plan.c":
        return []
    return [f"uses {word}" for word in sorted(set(re.findall(r"\b(?:float|double)\b", code(text))))]


# Tables that CPython takes without const.
_PY_TABLES = (
    "PyMethodDef", "PyGetSetDef", "PyMemberDef", "PyType_Slot", "PyType_Spec", "PyModuleDef",
    "PyModuleDef_Slot",
)  # fmt: skip
# A child of fork() must know that it is one, whichever device it meets.
_PROCESS_WIDE = {("cpu/threads.c", "n_forks"), ("cpu/threads.c", "watch_once")}


def _is_constant(declaration: str) -> bool:
    before, star, after = declaration.rpartition("*")
    return bool(re.search(r"\bconst\b", after if star else before or declaration))


def no_global_state(path: str, text: str) -> list[str]:
    """State belongs to the module, a session or a device, never to a file or a function."""
    plain, complaints = code(text), []
    for line, head in statements(plain):
        if re.match(r"(?:typedef|extern|struct \w+$|union \w+$|enum\b|_Static_assert)", head):
            continue
        if "(" in head.partition("[")[0]:  # a function
            continue
        words = head.partition("[")[0].split()
        name = words[-1].lstrip("*")
        if len(words) < 2 or _is_constant(head) or (path, name) in _PROCESS_WIDE:
            continue
        if path.startswith("py/") and any(word in _PY_TABLES for word in words):
            continue
        complaints.append(f"line {line}: {name} is a variable of the whole process")
    inner = r"^[ \t]+static\b(?!\s+inline\b)([^;={(]*)[;=]"
    for match in re.finditer(inner, plain, re.MULTILINE):
        keywords = path.startswith("py/") and re.search(r"\bkeywords\[", match[1])
        if not keywords and not _is_constant(match[1].partition("[")[0]):
            line = line_of(plain, match.start())
            complaints.append(f"line {line}: a static variable in a function")
    return complaints


_WAY_OUT = re.compile(
    r"(?<![\w.>])(_?_?exit|_Exit|quick_exit|abort|assert|longjmp|setjmp|raise|kill|system|popen"
    r"|v?f?printf|puts|fputs|putchar|perror|sprintf|vsprintf|strcpy|strcat|gets|alloca)\s*\("
)


def no_way_out(path: str, text: str) -> list[str]:
    """No call that ends the process, prints, jumps or writes without a bound."""
    plain = code(text)
    return [f"line {line_of(plain, m.start())}: {m[1]}()" for m in _WAY_OUT.finditer(plain)]


_OPERAND = r"[\w.>\-]+(?:\[(?:[^\[\]]|\[[^\[\]]*\])*\])?(?:\s*>>\s*[\w.>\-]+)?|\([^()]*\)"
_PRODUCT = re.compile(
    rf"(\((?:int64_t|size_t|ptrdiff_t)\)\s*)?({_OPERAND})\s\*\s"
    rf"(\((?:int64_t|size_t|ptrdiff_t)\)\s*)?({_OPERAND})"
)
_BLOCK_ID = re.compile(r"\bblocks?(?:_id)?(?:\[|$|\))|\bslots?\[|>>\s*[\w.>\-]*block_shift")
WIDE = ("block_bytes", "layer_bytes", "kv_bytes")


def wide_addresses(path: str, text: str) -> list[str]:
    """The number of a block times anything is computed in 64 bits: a pool may be that large."""
    if not path.startswith(("cpu/", "cuda/")) and path != "kv/plan.c":
        return []
    plain, complaints = code(text), []
    for match in _PRODUCT.finditer(plain):
        left, right = match[2], match[4]
        if not (_BLOCK_ID.search(left) or _BLOCK_ID.search(right)):
            continue
        wide = match[1] or match[3] or left.endswith(WIDE) or right.endswith(WIDE)
        if not wide:
            line = line_of(plain, match.start())
            complaints.append(f"line {line}: {' '.join(match[0].split())} in 32 bits")
    return complaints


def strict_arithmetic(path: str, text: str) -> list[str]:
    """Nothing may reorder or contract floating-point operations behind our back."""
    found = re.findall(
        r"fast-math|associative-math|FP_CONTRACT\s+ON|#\s*pragma\s+omp|\boptimize\s*\(", text
    )
    return [f"asks for {word}" for word in found]


def short_enough(path: str, text: str) -> list[str]:
    """A file is a room, not a hall."""
    n = text.count("\n")
    return [f"has {n} lines, at most {MAX_LINES} are wanted"] if n > MAX_LINES else []


def functions(text: str) -> list[tuple[int, str, int]]:
    """(line, first line of the head, lines) of every function; `{` and `}` begin their lines."""
    lines, found = code(text).split("\n"), []
    for start in (i for i, line in enumerate(lines) if line == "{"):
        first = start
        while first > 0 and re.match(r"[^#}\s]|\s+\S", lines[first - 1]):
            first -= 1
        end = lines.index("}", start)
        found.append((first + 1, lines[first], end - first + 1))
    return found


def short_functions(path: str, text: str) -> list[str]:
    """A function does one thing."""
    return [
        f"line {line}: {head} has {n} lines, at most {MAX_FUNCTION_LINES} are wanted"
        for line, head, n in functions(text)
        if n > MAX_FUNCTION_LINES
    ]


def short_in_python(path: str, text: str) -> list[str]:
    """The same limits for a module and its functions."""
    nodes = (n for n in ast.walk(ast.parse(text)) if isinstance(n, _DEFINITIONS))
    sizes = [(n.lineno, n.name, (n.end_lineno or n.lineno) - n.lineno + 1) for n in nodes]
    return short_enough(path, text) + [
        f"line {line}: {name} has {n} lines, at most {MAX_FUNCTION_LINES} are wanted"
        for line, name, n in sizes
        if n > MAX_FUNCTION_LINES
    ]


_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef)

LENGTHS: tuple[Rule, ...] = (short_enough, short_functions)
RULES: tuple[Rule, ...] = (
    include_direction, python_only_in_py, integers_only, no_global_state, no_way_out,
    wide_addresses, strict_arithmetic, *LENGTHS,
)  # fmt: skip


@pytest.mark.parametrize("path", FILES)
def test_source(path: str) -> None:
    text = (SOURCE / path).read_text("utf-8")
    complaints = [f"{rule.__name__}: {c}" for rule in RULES for c in rule(path, text)]
    assert not complaints, f"csrc/{path}: " + "; ".join(complaints)


@pytest.mark.parametrize("path", CUDA)
def test_length_in_cuda(path: str) -> None:
    text = (SOURCE / path).read_text("utf-8")
    assert [c for rule in LENGTHS for c in rule(path, text)] == []


@pytest.mark.parametrize("path", PYTHON)
def test_length_in_python(path: str) -> None:
    assert short_in_python(path, (native.ROOT / path).read_text("utf-8")) == []


# ---- the rules find what they are for ----------------------------------------------------------

LONG = "    f();\n" * (MAX_FUNCTION_LINES - 2)

BAD: list[tuple[Rule, str, str]] = [
    (include_direction, "kv/kv.c", '#include "kv/tree.h"\n'),
    (include_direction, "kv/kv.c", '#include "plan.h"\n'),
    (include_direction, "engine/verify.c", '#include "session.h"\n'),
    (include_direction, "engine/peek.c", '#include "scheduler.h"\n'),
    (include_direction, "engine/forward.c", '#include "cpu/cpu.h"\n'),
    (include_direction, "cpu/rows.c", '#include "../session.h"\n'),
    (include_direction, "policy/cgee.c", '#include "../backend.h"\n'),
    (include_direction, "session.h", '#include "py/py.h"\n'),
    (include_direction, "py/lock.c", '#include "kv/kv.h"\n'),
    (include_direction, "engine/scheduler.c", '#include "cpu/cpu.h"\n'),
    (include_direction, "somewhere.c", "\n"),
    (python_only_in_py, "session.c", "#include <Python.h>\n"),
    (python_only_in_py, "cpu/rows.c", "#include <numpy/arrayobject.h>\n"),
    (python_only_in_py, "model/quant.c", "#include <dlpack/dlpack.h>\n"),
    (python_only_in_py, "session.h", "void f(PyObject *o);\n"),
    (integers_only, "kv/kv.c", "static double age;\n"),
    (integers_only, "kv/plan.c", "float share = 0.5f;\n"),
    (no_global_state, "py/module.c", "static PyObject *cached_type;\n"),
    (no_global_state, "py/module.c", "static PyObject *cached[4] = {0};\n"),
    (no_global_state, "py/py.h", "int n_sessions;\n"),
    (no_global_state, "py/module.c", "int f(void)\n{\n    static int calls;\n}\n"),
    (no_global_state, "py/module.c", "int f(void)\n{\n    static char *names[] = {0};\n}\n"),
    (no_global_state, "session.c", "static const char *last_error = 0;\n"),
    (no_global_state, "session.c", "int f(int x)\n{\n    return x;\n}\n\nstatic long n = 1;\n"),
    (no_global_state, "cpu/isa.c", "static _Atomic int best = -1;\n"),
    (no_way_out, "session.c", "void f(void)\n{\n    exit(1);\n}\n"),
    (no_way_out, "kv/kv.c", "    abort();\n"),
    (no_way_out, "cpu/pick.c", '    fprintf(stderr, "x");\n'),
    (no_way_out, "py/tensor.c", '    printf("%d", 3);\n'),
    (no_way_out, "kv/tree.c", "    assert(n > 0);\n"),
    (no_way_out, "error.c", '    sprintf(text, "%s", name);\n'),
    (wide_addresses, "cpu/device.c", "    return dev->kv + block * dev->stride;\n"),
    (wide_addresses, "cpu/rows.c", "    p += keys->blocks[p / bt] * n;\n"),
    (wide_addresses, "cpu/rows.c", "    p += blocks[key >> keys->block_shift] * stride;\n"),
    (wide_addresses, "cpu/rows.c", "    p += bt * blocks[i];\n"),
    (wide_addresses, "cpu/rows.c", "    at = (slot >> dev->block_shift) * width;\n"),
    (wide_addresses, "kv/plan.c", "    slot = span->blocks[p / bt] * bt + p % bt;\n"),
    (strict_arithmetic, "cpu/rows.c", "#pragma STDC FP_CONTRACT ON\n"),
    (strict_arithmetic, "cpu/rows.c", '__attribute__((optimize("fast-math")))\n'),
    (strict_arithmetic, "cpu/rows.c", "#pragma omp parallel for\n"),
    (short_enough, "kv/kv.c", "\n" * (MAX_LINES + 1)),
    (short_functions, "kv/kv.c", "int f(int a,\n      int b)\n{\n" + LONG + "}\n"),
    (short_functions, "cuda/rows.cu", "int a;\n\ntemplate <class T>\nvoid f()\n{\n" + LONG + "}\n"),
    (
        short_in_python,
        "rksc/a.py",
        "class A:\n    def f(self):\n" + "        pass\n" * MAX_FUNCTION_LINES,
    ),
    (short_in_python, "rksc/a.py", "\n" * (MAX_LINES + 1)),
]

GOOD: list[tuple[Rule, str, str]] = [
    (include_direction, "py/branch.c", '#include "py.h"\n#include "session.h"\n'),
    (include_direction, "policy/cgee.h", '#include "../rksc.h"\n'),
    (include_direction, "engine/probe.h", '#include "policy/asks.h"\n'),
    (include_direction, "engine/step.c", '#include "step.h"\n'),
    (include_direction, "kv/tree.h", '#include "kv.h"\n'),
    (python_only_in_py, "session.c", "/* a PyObject keeps it alive */\n"),
    (python_only_in_py, "py/py.h", "#include <Python.h>\n"),
    (integers_only, "kv/kv.c", "/* never sees a float */ int32_t n;\n"),
    (no_global_state, "py/module.c", "static PyMethodDef METHODS[] = {{0}};\n"),
    (no_global_state, "py/session.c", 'int f(void)\n{\n    static char *keywords[] = {"a"};\n}\n'),
    (no_global_state, "model/quant.c", "static const rk_type_info TYPES[] = {{0}};\n"),
    (no_global_state, "cpu/isa.c", "int f(void)\n{\n    static const char *const a[] = {0};\n}\n"),
    (
        no_global_state,
        "kv/tree.h",
        "typedef struct a {\n    int x;\n} a;\nstruct b;\nint f(int x);\n",
    ),
    (no_global_state, "cpu/cpu.h", "extern const cpu_kernels cpu_kernels_amx;\n"),
    (no_global_state, "kv/kv.c", "static int f(int a)\n{\n    int b = a;\n    return b;\n}\n"),
    (no_way_out, "error.c", '    vsnprintf(text, n, "exit(1)", args); /* abort() */\n'),
    (no_way_out, "cpu/threads.c", "    ops->abort(x); retire(x); pthread_exit(0);\n"),
    (wide_addresses, "cpu/device.c", "    return dev->kv + block * dev->block_bytes;\n"),
    (wide_addresses, "cpu/device.c", "    return (int64_t)blocks[i] * bt;\n"),
    (wide_addresses, "cpu/rows.c", "static void f(char *block, int32_t block_tokens);\n"),
    (wide_addresses, "cpu/rows.c", "    size = n_blocks * 2;\n"),
    (short_enough, "kv/kv.c", "\n" * MAX_LINES),
    (short_functions, "kv/kv.c", 2 * ("/* a\n */\nint f(int a)\n{\n" + LONG[:-9] + "}\n\n")),
    (short_in_python, "rksc/a.py", "def f():\n" + "    pass\n" * (MAX_FUNCTION_LINES - 1)),
]


def _names(cases: list[tuple[Rule, str, str]]) -> list[str]:
    return [f"{rule.__name__}-{i}" for i, (rule, _, _) in enumerate(cases)]


@pytest.mark.parametrize(("rule", "path", "text"), BAD, ids=_names(BAD))
def test_rules_find_what_is_planted(rule: Rule, path: str, text: str) -> None:
    assert rule(path, text)


@pytest.mark.parametrize(("rule", "path", "text"), GOOD, ids=_names(GOOD))
def test_rules_let_good_code_pass(rule: Rule, path: str, text: str) -> None:
    assert rule(path, text) == []


def test_every_rule_is_shown_something() -> None:
    assert {rule for rule, _, _ in BAD} == {*RULES, short_in_python}
    assert len(FILES) > 40, "the sources were not found"
    assert len(CUDA) > 5
    assert len(PYTHON) > 30
    assert sum(len(functions((SOURCE / path).read_text("utf-8"))) for path in FILES) > 1000


# ---- what the rules rest on --------------------------------------------------------------------


def test_strides_of_blocks_are_wide_and_slots_too() -> None:
    """`wide_addresses` trusts these names, so they must be 64 bits wherever they are declared."""
    header = code((SOURCE / "cpu" / "cpu.h").read_text("utf-8"))
    for name in WIDE:
        types = re.findall(rf"^\s*(\w+)\s+(?:\w+, )*{name}\b[^;(]*;", header, re.MULTILINE)
        assert types, f"{name} is not declared in cpu.h"
        assert set(types) <= {"int64_t", "size_t"}, f"{name}: {types}"
    contract = code((SOURCE / "backend.h").read_text("utf-8"))
    assert re.search(r"const int64_t \*slots;", contract)


def _assigned(path: Path, name: str) -> list[str] | dict[str, list[str]]:
    """A constant of flags in a Python file; starred names are looked up there."""
    tree = ast.parse(path.read_text("utf-8"))
    values = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }

    def read(node: ast.expr) -> list[str]:
        if isinstance(node, ast.Constant):
            return [str(node.value)]
        if isinstance(node, ast.Starred):
            return read(node.value)
        if isinstance(node, ast.Name):
            return read(values[node.id])
        assert isinstance(node, (ast.List, ast.Tuple)), ast.dump(node)
        return [flag for item in node.elts for flag in read(item)]

    value = values[name]
    if isinstance(value, ast.Dict):
        return {read(k)[0]: read(v) for k, v in zip(value.keys, value.values, strict=True) if k}
    return read(value)


def test_the_build_keeps_arithmetic_as_written() -> None:
    """The same flags for the extension and for what the tests load; none that reorders."""
    setup = native.ROOT / "setup.py"
    flags = _assigned(setup, "FLAGS")
    assert "-ffp-contract=off" in flags
    assert "-ffp-contract=off" in native.FLAGS
    assert _assigned(setup, "ISA_FLAGS") == native.ISA_FLAGS
    assert not re.search(r"-Ofast|fast-math|march=native", setup.read_text("utf-8"))
