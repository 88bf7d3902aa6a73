"""Under qemu as an older processor: the extension loads, takes what is there, and computes.

python .ci/older_cpu.py Nehalem | Haswell   (the name only decides what is expected)
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / name) for name in (".", "tests")]

import numpy as np
from support.models import ALL
from support.sessions import open_session

from rksc import _core

EXPECTED = {"Nehalem": ("portable",), "Haswell": ("portable", "avx2")}


def main() -> int:
    cpu = sys.argv[1]
    if _core.isas != EXPECTED[cpu]:
        print(f"{cpu}: found {_core.isas}, expected {EXPECTED[cpu]}")
        return 1
    model = ALL["T4"]
    tokens = model.tokens(40)
    want = model.reference.logits(tokens)
    for isa in _core.isas:
        for dtype, limit in (("float32", 1e-4), ("bfloat16", 5e-2)):
            session = open_session(model, isa=isa, dtype=dtype)
            kids = session.prefill(tokens).fork(3)
            got = kids[0].logits
            error = float(np.abs(got - want).max() / np.abs(want).max())
            made = session.generate(kids, 8, stop_ids=())
            ok = error < limit and all(len(g.tokens) == 8 for g in made)
            print(f"{cpu}: {isa} {dtype}: error {error:.1e}{'' if ok else '  FAILED'}")
            if not ok:
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
