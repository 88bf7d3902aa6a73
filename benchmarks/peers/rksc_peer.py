"""rksc as one of the contestants, with sharing or (--no-share) as "No-KV"; see protocol.py."""

from __future__ import annotations

from protocol import Answer, Run, Work, options, serve

import rksc
from rksc.experiments import workload as bench


def prepare() -> tuple[Run, str]:
    args = options(
        ("--no-share", {"action": "store_true"}), ("--activations", {"choices": ["int8", "int16"]})
    )
    model = rksc.load(args.model, tokenizer=False)
    way = bench.alone if args.no_share else bench.shared
    settings = {
        "tokenizer": None, "asks": None, "cgee": None, "share": not args.no_share,
        "dtype": args.dtype, "activations": args.activations, "isa": args.isa,
        "n_threads": args.threads or None, "kv_bytes": bench.kv_bytes(model.config, args.tokens),
    }  # fmt: skip

    def run(given: Work) -> Answer:
        work = bench.Work(
            given["prefix"], given["suffixes"], given["question"], yes=0, no=1,
            max_new_tokens=given["new"], stop_ids=(),
        )  # fmt: skip
        session = model.session(**settings)
        outcome = way(session, work)
        phases = outcome.clock.phases
        return {
            "seconds": {name: phase.seconds for name, phase in phases.items()},
            "tokens": sum(phase.tokens for phase in phases.values()),
            "chosen": [generation.tokens.tolist() for generation in outcome.generations],
            "arithmetic": session.activations or session.dtype,
            "scores": [verdict.score for verdict in outcome.verdicts],
        }

    return run, rksc.__version__


if __name__ == "__main__":
    serve(prepare)
