"""W1: 1,024 shared tokens, 8 branches, a verification; with sharing and without.

    python benchmarks/branching.py MODEL [--repeat 5] [--json]

Random token ids, greedy, length forced, exact mode. "No-KV" is the paper's baseline: every
branch prefills the whole prompt, every verification reads problem and answer again, in a
session without a prefix index, batched as well as the rest. Tokens are counted by the engine;
the number in brackets follows from the shapes. W2 is --prefix 4096 --branches 32.
"""

from __future__ import annotations

import argparse
import sys

from rksc import _core
from rksc.cli import add_bench_options, bench


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add_bench_options(parser)
    parser.add_argument("--dtype", help="float32 or bfloat16 (default: what the CPU does best)")
    parser.add_argument("--threads", type=int, help="default: what this process may use")
    parser.add_argument("--isa", choices=_core.isas, help="instruction set (default: the best)")
    return bench(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
