"""rksc speeds up reasoning that branches: one prompt, many continuations, a verifier.

    model = rksc.load("folder-or-file.gguf")
    print(rksc.solve(model, "What is 12 * 34?", approaches=8))

`BranchSession` is the engine underneath: prefill, fork, generate, verify, select.
"""

import sys as _sys

try:
    from ._core import Branch, CapacityError, DeviceArray, Tensor
except ModuleNotFoundError as _error:
    if _error.name != f"{__name__}._core":
        raise
    raise ImportError(
        f"{__path__[0]} is not built for this Python. In a clone: pip install -e . (or make dev). "
        "An rksc that is installed elsewhere is found from other folders"
    ) from None

from .answers.final import final_answer, same_answer
from .answers.guard import is_rewording, same_numbers
from .answers.number_words import numbers
from .calibration.calibrate import calibrate, calibrate_cgee
from .engine.load import Model, load
from .engine.options import ASKS, CGEE, RSBCM, Sampling
from .engine.results import Gate, Generation, Stats, Token, Verdict
from .engine.session import BranchSession
from .model.config import ModelConfig
from .moved import keep as _keep
from .reasoning.search import search
from .reasoning.solve import Approach, Solution, solve
from .reasoning.tree import Node, Phase
from .text.tokenizer import Tokenizer
from .version import __version__ as __version__

_keep(_sys.modules[__name__])

__all__ = [
    "ASKS",
    "CGEE",
    "RSBCM",
    "Approach",
    "Branch",
    "BranchSession",
    "CapacityError",
    "DeviceArray",
    "Gate",
    "Generation",
    "Model",
    "ModelConfig",
    "Node",
    "Phase",
    "Sampling",
    "Solution",
    "Stats",
    "Tensor",
    "Token",
    "Tokenizer",
    "Verdict",
    "calibrate",
    "calibrate_cgee",
    "final_answer",
    "is_rewording",
    "load",
    "numbers",
    "same_answer",
    "same_numbers",
    "search",
    "solve",
]
