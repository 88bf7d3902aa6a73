"""Modules of version 0.1 import by their old names, and say where they are now."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import rksc
from rksc.moved import MOVED


@pytest.mark.parametrize(
    ("old", "name", "new"),
    [
        ("rksc.solve", "final_answer", "rksc.answers.final"),
        ("rksc.solve", "Solution", "rksc.reasoning.solve"),
        ("rksc.chat", "render", "rksc.text.chat"),
        ("rksc.chat", "encode_chat", "rksc.text.chat_tokens"),
        ("rksc.tokenizer", "Tokenizer", "rksc.text.tokenizer"),
        ("rksc.guard", "same_numbers", "rksc.answers.guard"),
        ("rksc.load", "Model", "rksc.engine.load"),
        ("rksc.demo", "find_model", "rksc.engine.defaults"),
        ("rksc.experiments.stats", "wilson", "rksc.calibration.stats"),
    ],
)
def test_a_name_of_before_comes_with_a_warning(old: str, name: str, new: str) -> None:
    module = importlib.import_module(old)
    with pytest.warns(DeprecationWarning, match=rf"^{old}\.{name} is {new}\.{name} now") as told:
        value = getattr(module, name)
    assert value is getattr(importlib.import_module(new), name)
    assert told[0].filename == __file__


IMPORTS = """
import pickle, sys
import rksc
old = {name for name in sys.modules if name.removeprefix("rksc.") in MOVED}
assert old == {"rksc.solve", "rksc.search", "rksc.load", "rksc.calibrate"}, old
import rksc.chat
assert rksc.chat.render is rksc.text.chat.render
import rksc.experiments.stats as stats
assert stats.wilson is rksc.calibration.stats.wilson
import rksc.solve
from rksc.guard import *
assert is_rewording is rksc.is_rewording
from importlib.util import find_spec
assert find_spec("rksc.tokenizer") and not find_spec("rksc.tokens")
for name in sorted(MOVED):
    if name != "serve" or find_spec("uvicorn"):
        __import__(f"rksc.{name}")
assert callable(rksc.solve) and callable(rksc.load)
"""


def test_the_old_spellings_in_a_fresh_process() -> None:
    """Plain imports, `from ... import *`, and nothing of them where nobody asks."""
    code = f"MOVED = {sorted(MOVED)}\n{IMPORTS}"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_functions_keep_the_names_that_modules_had() -> None:
    for function in (rksc.solve, rksc.search, rksc.load, rksc.calibrate):
        module = f"rksc.{function.__name__}"
        assert importlib.import_module(module) is not function
        assert getattr(rksc, function.__name__) is function


def test_what_never_was_is_an_attribute_error_that_names_the_new_place() -> None:
    with pytest.raises(AttributeError, match=r"rksc\.guard.*nothing.*rksc\.answers\.guard"):
        importlib.import_module("rksc.guard").nothing  # noqa: B018
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("rksc.guards")
