"""What an installed rksc does where there is NumPy and nothing else, no compiler either.

python .ci/installed.py, with the Python of an environment into which a wheel was installed; the
small models and the float64 reference come from tests/.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path = [str(HERE.parent / "tests"), *(p for p in sys.path if p not in ("", str(HERE)))]

import numpy as np
from support.models import T4

import rksc
from rksc.data import problems


def check(holds: bool, what: object) -> None:
    if not holds:
        raise SystemExit(f"installed wheel: {what}")


def main() -> None:
    folder = Path(rksc.__file__).parent
    check("site-packages" in folder.parts, f"{folder} is no installed one")
    version = importlib.metadata.version("rksc")
    check(version == rksc.__version__, f"{version} != {rksc.__version__}")
    needless = ["torch", "transformers", "tokenizers", "tvm_ffi"]
    check(not [name for name in needless if importlib.util.find_spec(name)], "not a clean place")

    tokens = T4.tokens(40)
    expected = T4.reference.logits(tokens)
    for isa in rksc._core.isas:
        session = rksc.BranchSession(T4.weights, T4.config, kv_bytes="1MiB", isa=isa)
        kids = session.prefill(tokens).fork(3)
        error = np.abs(kids[0].logits - expected).max() / np.abs(expected).max()
        check(error < 1e-4, f"{isa}: logits are off by {error:.1e}")
        made = session.generate(kids, 8, rksc.Sampling(temperature=1.0), stop_ids=())
        check([len(g.tokens) for g in made] == [8] * 3, made)
        check(session.select(kids) in kids, "select")
        session.check()
    check(len(problems()) == 40, "the demo's problems")
    for group, wanted in (
        ("pytest11", "pytest_rksc"),
        ("lm_eval.models", "rksc.clients.lm_eval:RKSC"),
    ):
        (found,) = importlib.metadata.entry_points(group=group, name="rksc")
        check(found.value == wanted, f"{group}: {found}")
    command = Path(sys.executable).parent / "rksc"
    said = subprocess.run([command, "doctor"], check=True, capture_output=True, text=True).stdout
    check(f"rksc          {version}" in said, said)
    python = ".".join(map(str, sys.version_info[:3]))
    print(
        f"rksc {version} on Python {python}, NumPy {np.__version__}: {', '.join(rksc._core.isas)}"
    )


if __name__ == "__main__":
    main()
