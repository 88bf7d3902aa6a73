"""The `rksc` command on the small real model: output, exit status, errors."""

from __future__ import annotations

import argparse
import ctypes
import io
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import rksc
from rksc import Model, Node, Solution, cuda, data
from rksc.answers.guard import same_numbers
from rksc.cli import demo as demo_module
from rksc.cli import selftest as module
from rksc.cli.command import _parser, main
from rksc.cli.selftest import OTHER_NUMBERS, REWORDED, UNRELATED, WORDING, Finding, selftest
from rksc.cli.values import problem
from rksc.clients import OpenAI
from rksc.clients.vllm import LLM
from rksc.engine.defaults import best_dtype, find_model
from rksc.limits import rates


@pytest.fixture
def path(smollm2: Model) -> str:
    return str(smollm2.path)


@pytest.mark.parametrize(
    ("option", "near"),
    [("threads", "n_threads"), ("kv", "kv_bytes"), ("dtyp", "dtype"), ("cge", "cgee")],
)
def test_a_misspelt_option_of_a_session_is_answered(smollm2: Model, option: str, near: str) -> None:
    calls: dict[str, Callable[..., Any]] = {
        "a session": smollm2.session,
        r"OpenAI\(\)": partial(OpenAI, smollm2),
        r"LLM\(\)": partial(LLM, smollm2),
    }
    for call, make in calls.items():
        with pytest.raises(TypeError, match=f"^{call} has no option '{option}'; .* '{near}'\\?$"):
            make(**{option: 1})
    with pytest.raises(TypeError, match=r"^a session has no option 'x': it has device, dtype, kv"):
        rksc.BranchSession(smollm2.weights, smollm2.config, x=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^OpenAI\(\) has no option 'api_key': there is no conn"):
        OpenAI(smollm2, api_key="x")
    for name in ("n", "temperature", "max_tokens", "logit_bias"):
        with pytest.raises(TypeError, match=f"'{name}': it is a setting of a request$"):
            OpenAI(smollm2, **{name: 1})


def test_a_name_for_a_model_is_answered_with_the_call_that_loads_it() -> None:
    way_out = r"^model must be .*, got 'smollm2': rksc.load\('smollm2'\) makes one$"
    for call in (OpenAI, LLM, partial(rksc.solve, problem="?"), partial(rksc.search, problem="?")):
        with pytest.raises(TypeError, match=way_out):
            call(model="smollm2")


def test_doctor_lists_the_extras_of_the_project(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    project = Path(__file__).parent.parent / "pyproject.toml"
    block = project.read_text("utf-8").partition("[project.optional-dependencies]")[2]
    rows = re.findall(r"^([\w-]+) = \[(.*)\]$", block.partition("\n[")[0], re.MULTILINE)
    requires = [
        f'{package}; extra == "{extra}"'
        for extra, packages in rows
        for package in re.findall(r'"([^"]+)"', packages)
    ]
    monkeypatch.setattr("importlib.metadata.requires", lambda name: requires)
    monkeypatch.setattr("rksc.cli.command._version", lambda name: None)
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    for package, extra in (("tokenizers", "hf"), ("sentencepiece", "hf"), ("uvicorn", "serve"),
                           ("matplotlib", "experiments"), ("lm-eval", "lm-eval")):  # fmt: skip
        assert re.search(
            rf"^{package} +not installed \(pip install 'rksc\[{extra}\]'\)$", printed, re.M
        )
    assert "their packages are not listed: pip has not installed rksc here" in printed
    assert "torch " in printed and "rksc[hf" not in printed.replace("'rksc[hf]'", "")


def test_version(capsys: Any) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out.startswith("rksc 0.")


def test_errors_are_one_line_and_status_2(capsys: Any, tmp_path: Path) -> None:
    for arguments in (
        ["solve", str(tmp_path / "none.gguf"), "x"],
        ["doctor", str(tmp_path)],
        ["demo", "--number", "40"],
    ):
        assert main(arguments) == 2
        said = capsys.readouterr()
        assert said.err.startswith("rksc: ")
        assert said.err.count("\n") == 1
        assert "Traceback" not in said.err


def test_a_closed_pipe_is_no_error() -> None:
    root = str(Path(__file__).resolve().parent.parent)
    with subprocess.Popen(
        [sys.executable, "-m", "rksc.cli", "doctor"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=root,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == ""
        assert process.wait(60) == 141


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--branches", "0"], "--branches: must be a whole number, at least 1"),
        (["--depth", "0"], "--depth: must be"),
        (["--depth", "many"], "--depth: must be"),
        (["--max-new-tokens", "-3"], "--max-new-tokens: must be"),
        (["--html", "/no/such/folder/x"], "--html: cannot write '/no/such/folder/x'"),
        (["--html", "/"], "--html: cannot write"),
        (["--cgee", "turbo"], "--cgee: invalid choice: 'turbo' (choose from"),
        (["--threads", "9999"], "--threads: must be in 1 .. 1024, got '9999'"),
        (["--seed", "-5"], "--seed: must be in 0 .. 2**64 - 1, got '-5'"),
        (["--temperature", "-1"], "--temperature: must be a number >= 0, got '-1'"),
        (["--temperature", "nan"], "--temperature: must be a number >= 0, got 'nan'"),
        (["--temprature", "1"], "unknown arguments: --temprature 1; did you mean '--temperature'?"),
        (["--frobnicate"], "usage: rksc solve"),
        (["--dtype", "float16"], "--dtype: must be float32 or bfloat16, got 'float16'"),
        (["--kv", "2 apples"], "--kv: must be like 512MiB or 2GiB, got '2 apples'"),
    ],
)
def test_bad_options_are_refused_before_any_work(
    capsys: Any, options: list[str], said: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["solve", "no-such-model.gguf", "x", *options])
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("problem", "said"),
    [
        ("/nope.txt", "'/nope.txt': no such file"),
        ("./nope", "'./nope': no such file"),
        ("nope.txt", "'nope.txt': no such file"),
        ("/", "'/' is a folder"),
        ("", "the problem is empty"),
        (" \n", "the problem is empty"),
    ],
)
def test_a_bad_problem_is_refused_before_any_work(capsys: Any, problem: str, said: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["solve", "no-such-model.gguf", problem])
    assert stopped.value.code == 2
    assert f"PROBLEM: {said}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--port", "99999999"], "--port: must be in 0 .. 65535, got '99999999'"),
        (["--port", "-1"], "--port: must be in 0 .. 65535"),
        (["--max-rows", "0"], "--max-rows: must be a whole number, at least 1"),
    ],
)
def test_bad_options_of_serve(capsys: Any, options: list[str], said: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["serve", "no-such-model.gguf", *options])
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


def test_a_problem_is_a_text_or_a_file(tmp_path: Path) -> None:
    file = tmp_path / "p"
    file.write_text(" 2 + 2? \n", "utf-8")
    assert problem(str(file)) == "2 + 2?"
    for text in ("1/2+1/3=?", "What is in /etc/hosts.txt ?", "x" * 5000, "a\0b"):
        assert problem(text) == text
    file.write_bytes(b"\xff")
    with pytest.raises(argparse.ArgumentTypeError, match="utf-8"):
        problem(str(file))


def test_a_problem_comes_from_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("2 + 2?\n"))
    assert problem("-") == "2 + 2?"
    for text in (__file__, "/no/such.txt"):  # text, whatever it looks like
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        assert problem("-") == text
    monkeypatch.setattr("sys.stdin", io.StringIO(" \n"))
    with pytest.raises(argparse.ArgumentTypeError, match="empty"):
        problem("-")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff"), "utf-8"))
    with pytest.raises(argparse.ArgumentTypeError, match=r"standard input: .*utf-8"):
        problem("-")


@pytest.mark.parametrize("problem", ["-3", "-3 + 5", "- 3"])
def test_a_problem_may_begin_with_a_minus(problem: str) -> None:
    assert _parser().parse_args(["solve", "model", problem]).problem == problem


def test_a_beam_is_of_a_search(capsys: Any) -> None:
    assert main(["solve", "no-such-model.gguf", "x", "--beam", "5"]) == 2
    assert "--beam is for a search" in capsys.readouterr().err


def test_an_approach_is_a_whole_answer(capsys: Any) -> None:
    arguments = ["solve", "none.gguf", "x", "--approach", "First", "--depth", "2"]
    assert main(arguments) == 2
    assert "--approach" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--n", "0"], "--n: must be a whole number, at least 2"),
        (["--out", __file__], "test_cli.py' is a file, not a folder"),
        (["--seed", "-5"], "--seed: must be in 0 .. 2**64 - 1, got '-5'"),
        (["--threads", "9999"], "--threads: must be in 1 .. 1024, got '9999'"),
        (["--workers", "0"], "--workers: must be a whole number, at least 1, got '0'"),
        (["--dtype", "f64"], "--dtype: must be float32 or bfloat16, got 'f64'"),
        (["--no-pots"], "did you mean '--no-plots'?"),
    ],
)
def test_bad_options_of_experiment(capsys: Any, options: list[str], said: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["experiment", "cgee", *options])
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


def test_bad_engine_settings_are_named(capsys: Any, path: str) -> None:
    for option, value in (("--dtype", "int4"), ("--kv", "much")):
        with pytest.raises(SystemExit) as stopped:
            main(["solve", path, "x", option, value])
        assert stopped.value.code == 2
        assert f"argument {option}: must be" in capsys.readouterr().err
    assert main(["solve", path, "x", "--kv", "1M"]) == 2
    told = "8 branches at a time need 2.8 MiB of KV for their first tokens alone, and kv_bytes"
    assert f"{told} (rksc solve: --kv) is 2 KV blocks, 0.7 MiB" in capsys.readouterr().err


def test_solve(capsys: Any, path: str, tmp_path: Path) -> None:
    problem, page = tmp_path / "problem.txt", tmp_path / "tree.html"
    problem.write_text("Tom has 3 apples and buys 4. How many has he?\n", "utf-8")
    arguments = ["solve", path, str(problem), "--branches", "3"]
    arguments += ["--max-new-tokens", "8"]
    assert main([*arguments, "--json", "--html", str(page)]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["problem"] == "Tom has 3 apples and buys 4. How many has he?"
    assert [node["parent"] for node in said["nodes"]] == [None, 0, 0, 0]
    assert said["best"] in (1, 2, 3)
    assert "Tom has 3 apples" in page.read_text("utf-8")
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert "★" in shown
    assert "\x1b" not in shown
    best = next(node for node in said["nodes"] if node["id"] == said["best"])
    assert best["text"].split()[0] in shown  # the same seed, the same answer


def test_solve_searches_when_asked_for_depth(capsys: Any, path: str) -> None:
    arguments = ["solve", path, "2 + 3?", "--branches", "2", "--depth", "2"]
    assert main([*arguments, "--beam", "1", "--max-new-tokens", "6", "--json"]) == 0
    nodes = json.loads(capsys.readouterr().out)["nodes"]
    assert max(node["depth"] for node in nodes) == 2


def test_bench(capsys: Any, path: str) -> None:
    sizes = ["--prefix", "40", "--branches", "2", "--suffix", "4", "--new", "3", "--verify", "4"]
    mode = ["--activations", "int8"]
    assert main(["bench", path, *sizes, *mode, "--repeat", "1", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["activations"] == "int8"
    assert result["same_results"] is True
    assert result["shared"]["phases"]["total"]["tokens"] == 40 + 2 * (3 + 3 + 5)
    assert result["No-KV"]["phases"]["total"]["tokens"] == 2 + 2 * (42 + 3 + 50)


def test_doctor(capsys: Any, path: str) -> None:
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert "instructions" in said
    assert f"CUDA          {cuda.describe()}\n" in said
    assert main(["doctor", path]) == 0
    said = capsys.readouterr().out
    assert "chat template: yes" in said
    assert "at 2 <|im_end|>, 0 <|endoftext|>" in said
    assert "30 layers" in said
    share = r"{:14}.* of \d.*; (\d+)% of the machine's limit\n"
    for what in ("decode", "prefill"):
        found = re.search(share.format(what), said)
        assert found is not None, said
        assert 0 < int(found[1]) <= 100


def test_doctor_without_a_compiler_says_what_the_limits_need(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setenv("CC", "/no/such/cc")
    rates._library.cache_clear()
    assert main(["doctor", path]) == 0
    said = capsys.readouterr().out
    assert "limits        unknown: " in said
    assert "no compiler /no/such/cc: install gcc or clang" in said


def test_doctor_tells_what_is_there_of_cuda(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The build's library and the driver's GPUs; both are asked, neither is assumed."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("a driver to ask is made by a C compiler")
    fake = tmp_path / "libcuda.so.1"
    source = tmp_path / "driver.c"
    source.write_text(
        "#include <stddef.h>\n#include <string.h>\n"
        "int cuInit(unsigned flags) { return BROKEN; }\n"
        "int cuDeviceGetCount(int *n) { *n = GPUS; return 0; }\n"
        'int cuDeviceGetName(char *to, int n, int i) { strcpy(to, "GPU X"); return 0; }\n'
        "int cuDeviceTotalMem_v2(size_t *to, int i) { *to = (size_t)80 << 30; return 0; }\n"
    )
    real = ctypes.CDLL

    def driver(gpus: int, broken: int = 0) -> str:
        made = tmp_path / f"{gpus}-{broken}.so"
        numbers = [f"-DGPUS={gpus}", f"-DBROKEN={broken}"]
        command = [compiler, "-shared", "-fPIC", *numbers, str(source), "-o", str(made)]
        subprocess.run(command, check=True)
        monkeypatch.setattr(
            ctypes, "CDLL", lambda name, **k: real(made if name == fake.name else name, **k)
        )
        return cuda.describe()

    monkeypatch.delenv("RKSC_CUDA_LIBRARY", raising=False)
    monkeypatch.setattr(cuda, "__file__", str(tmp_path / "cuda.py"))  # no library beside it
    assert driver(2) == ("not in this build (RKSC_CUDA=on adds it); GPU X (80 GiB), GPU X (80 GiB)")
    monkeypatch.setenv("RKSC_CUDA_LIBRARY", str(tmp_path / "2-0.so"))
    assert driver(0) == "in this build; no GPU"
    assert driver(1, broken=999) == "in this build; the NVIDIA driver says error 999"
    monkeypatch.setenv("RKSC_CUDA_LIBRARY", str(tmp_path / "gone.so"))
    assert driver(1).startswith("built, but ")

    def no_driver(name: str, **options: Any) -> Any:
        raise OSError(f"{name}: no such file")

    monkeypatch.setattr(ctypes, "CDLL", no_driver)
    assert cuda.describe().endswith("no NVIDIA driver here (libcuda.so.1)")


def test_selftest_passes(smollm2: Model) -> None:
    findings = list(selftest(smollm2, dtype=best_dtype()))
    assert [f.name for f in findings if not f.passed] == []
    seen = {f.name: f.seen for f in findings}
    assert len(seen) == 7
    assert "cosines [" in seen["ASKS accepts a rewording"]
    assert "0 tokens computed" in seen["CGEE level 1 skips a verification"]


def test_selftest_can_fail(monkeypatch: pytest.MonkeyPatch, smollm2: Model, capsys: Any) -> None:
    """A gate that accepts everything, and one that breaks, are FAILs and status 1."""

    def broken(make: Any) -> Finding:
        raise KeyError("kv")

    monkeypatch.setattr(module, "UNRELATED", REWORDED)
    monkeypatch.setattr(module, "PROBES", (module._asks_rejects, broken))
    accepted, raised = module.selftest(smollm2, dtype=best_dtype())
    assert accepted.name == "ASKS rejects another question"
    assert not accepted.passed
    assert str(raised) == "FAIL  broken: KeyError: 'kv'"
    monkeypatch.setattr("rksc.cli.command.selftest", lambda *a, **k: [Finding("x", False, "seen")])
    assert main(["doctor", str(smollm2.path), "--selftest"]) == 1
    assert "FAIL  x: seen" in capsys.readouterr().out


def test_the_selftests_texts_mean_what_they_say() -> None:
    assert same_numbers(WORDING, REWORDED)
    assert same_numbers(WORDING, UNRELATED)
    assert not same_numbers(WORDING, OTHER_NUMBERS)


def test_demo(capsys: Any, path: str) -> None:
    assert main(["demo", "--model", path, "--branches", "3", "--max-new-tokens", "6"]) == 0
    said = capsys.readouterr().out
    assert "gold" in said
    assert "without sharing" in said
    assert "the same tokens and scores, bit for bit" in said


def test_the_demo_judges_only_what_came_to_an_end() -> None:
    def solution(*rows: tuple[str, str], best: int) -> Any:
        branch: Any = None
        root = Node(0, None, branch, 0)
        nodes = [root] + [
            Node(i, 0, branch, 1, text=text, finish_reason=reason)
            for i, (text, reason) in enumerate(rows, 1)
        ]
        stats: Any = None
        return Solution("", nodes, nodes[best], "", [], stats, 1)

    rows = [("Answer: 5", "eos"), ("so it is 5", "length"), ("Answer: 6", "stop")]
    said = [demo_module.judge(solution(*rows, best=i), "5") for i in (1, 2, 3)]
    assert "the chosen answer is right; 1 of 3 are" in said[0]
    assert "cut off" in said[1]
    assert "the choice is wrong; 1 of 3" in said[2]


def test_demo_model_is_found_or_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="pip install"):
        find_model()


def test_data() -> None:
    rows = data.problems()
    assert len(rows) == len({row.id for row in rows}) == 40
    for row in (*rows, *data.examples()):
        assert row.solution.endswith(f"#### {row.answer}"), row.id
        assert "<<" not in row.solution
    text = data.worked(data.examples())
    assert text.count("Question: ") == text.count("Answer: ") == 4
    folder = Path(data.__file__).parent
    assert "MIT" in (folder / "LICENSE.gsm8k").read_text("utf-8")
