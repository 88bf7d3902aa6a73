"""Modules of version 0.1 import by their old names, and say where they are now."""

from __future__ import annotations

import importlib
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


def test_all_modules_of_before_are_somewhere() -> None:
    for old, new in MOVED.items():
        assert sys.modules[f"rksc.{old}"].__doc__
        for each in new:
            if each == "server.app":
                pytest.importorskip("uvicorn")
                pytest.importorskip("prometheus_client")
            assert importlib.import_module(f"rksc.{each}").__name__ == f"rksc.{each}"


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
