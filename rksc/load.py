"""rksc.load: a Hugging Face folder or a GGUF file as weights, configuration and tokenizer."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ._core import Tensor
from .config import ModelConfig, token_ids
from .gguf import GGUF, read_gguf
from .safetensors import read_folder
from .stored import Stored, read_json

if TYPE_CHECKING:
    from .session import BranchSession
    from .tokenizer import Tokenizer

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"

# Left over in old checkpoints: values that the configuration implies.
_DERIVED = re.compile(r"model\.layers\.\d+\.self_attn\.(rotary_emb\.inv_freq|bias|masked_bias)")

_GGUF_NAMES = {
    "token_embd.weight": _EMBEDDING,
    "output_norm.weight": "model.norm.weight",
    "output.weight": _HEAD,
}
_GGUF_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GGUF_BLOCK = re.compile(r"blk\.(0|[1-9]\d{0,5})\.(\w+)\.(weight|bias)")


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

        Without the `tokenizers` library the session has no tokenizer and takes ids only.
        """
        from .session import BranchSession

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
    path = Path(path)
    if path.is_dir():
        weights, config, own = _load_folder(path)
    elif path.suffix == ".gguf":
        weights, config, own = _load_gguf(path)
    elif not path.exists():
        raise ValueError(f"{path}: no such file or folder")
    else:
        raise ValueError(f"{path}: neither a folder nor a .gguf file")
    if tokenizer is None:
        return Model(weights, config, own, path)
    return Model(weights, config, None if tokenizer is False else tokenizer, path)


Parts = tuple[dict[str, Tensor], ModelConfig, Callable[[], "Tokenizer"]]


def _load_folder(folder: Path) -> Parts:
    described = read_json(folder / "config.json")
    try:
        config = ModelConfig.of(described)
        generation = folder / "generation_config.json"
        if generation.exists():
            eos = token_ids(read_json(generation).get("eos_token_id"), "eos_token_id")
            config = replace(config, eos=eos or config.eos)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None
    stored = {k: v for k, v in read_folder(folder).items() if not _DERIVED.fullmatch(k)}
    config = _check_head(stored, config, folder)
    _check_weights(stored, config, folder)

    def tokenizer() -> Tokenizer:
        from .tokenizer import Tokenizer

        return Tokenizer.from_folder(folder)

    return {name: s.tensor() for name, s in stored.items()}, config, tokenizer


def _load_gguf(path: Path) -> Parts:
    file = read_gguf(path)
    try:
        config = ModelConfig.from_gguf(file.metadata, _rope_factors(file))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    stored: dict[str, Stored] = {}
    for name, tensor in file.tensors.items():
        if name != "rope_freqs.weight":
            stored[_hf_name(tensor)] = tensor
    config = replace(
        config,
        tied=_HEAD not in stored,
        qkv_bias=config.qkv_bias or any(name.endswith("q_proj.bias") for name in stored),
        output_bias=config.architecture == "llama"
        and any(name.endswith("o_proj.bias") for name in stored),
    )
    _check_weights(stored, config, path)
    metadata = file.metadata

    def tokenizer() -> Tokenizer:
        from .tokenizer import Tokenizer

        return Tokenizer.from_gguf(metadata)

    return {name: s.tensor(name) for name, s in stored.items()}, config, tokenizer


def _rope_factors(file: GGUF) -> list[float] | None:
    stored = file.tensors.get("rope_freqs.weight")
    if stored is None:
        return None
    if stored.type != "F32" or len(stored.shape) != 1:
        raise ValueError(f"GGUF: rope_freqs.weight must be a row of F32, not {stored.type}")
    return [float(factor) for factor in stored.tensor().numpy()]


def _hf_name(stored: Stored) -> str:
    if stored.name in _GGUF_NAMES:
        return _GGUF_NAMES[stored.name]
    match = _GGUF_BLOCK.fullmatch(stored.name)
    if match is None or match[2] not in _GGUF_BLOCK_NAMES:
        raise ValueError(f"{stored.path}: tensor {stored.name} has no place in this architecture")
    return f"model.layers.{match[1]}.{_GGUF_BLOCK_NAMES[match[2]]}.{match[3]}"


# ---- which tensors a model must have ------------------------------------------------------


def _check_head(stored: dict[str, Stored], config: ModelConfig, folder: Path) -> ModelConfig:
    """Settle a tied head: an equal copy is dropped, a different one is used after all.

    The second is a contradiction in the folder; transformers 5 resolves it likewise.
    """
    if not config.tied or _HEAD not in stored or _EMBEDDING not in stored:
        return config
    head, embedding = stored[_HEAD], stored[_EMBEDDING]
    if head.equals(embedding):
        del stored[_HEAD]
        return config
    warnings.warn(
        f"{folder}: tie_word_embeddings is true, but {_HEAD} differs from {_EMBEDDING}: "
        f"{_HEAD} is used",
        stacklevel=4,
    )
    return replace(config, tied=False)


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shapes by Hugging Face name of all tensors of a model."""
    width, ffn = config.width, config.ffn_width
    q, kv = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {_EMBEDDING: (config.vocab_size, width)}
    for i in range(config.n_layers):
        layer = f"model.layers.{i}."
        shapes |= {
            layer + "input_layernorm.weight": (width,),
            layer + "self_attn.q_proj.weight": (q, width),
            layer + "self_attn.k_proj.weight": (kv, width),
            layer + "self_attn.v_proj.weight": (kv, width),
            layer + "self_attn.o_proj.weight": (width, q),
            layer + "post_attention_layernorm.weight": (width,),
            layer + "mlp.gate_proj.weight": (ffn, width),
            layer + "mlp.up_proj.weight": (ffn, width),
            layer + "mlp.down_proj.weight": (width, ffn),
        }
        if config.qkv_bias:
            shapes |= {
                layer + "self_attn.q_proj.bias": (q,),
                layer + "self_attn.k_proj.bias": (kv,),
                layer + "self_attn.v_proj.bias": (kv,),
            }
        if config.output_bias:
            shapes[layer + "self_attn.o_proj.bias"] = (width,)
    shapes["model.norm.weight"] = (width,)
    if not config.tied:
        shapes[_HEAD] = (config.vocab_size, width)
    return shapes


def _check_weights(stored: Mapping[str, Stored], config: ModelConfig, path: Path) -> None:
    """Every tensor that the configuration asks for is there with its shape; no other is."""
    if config.n_layers > len(stored):  # before a table of a crafted number of layers
        raise ValueError(f"{path}: {len(stored)} tensors cannot be {config.n_layers} layers")
    shapes = expected_shapes(config)
    for name, shape in shapes.items():
        if name not in stored:
            hint = " (and tie_word_embeddings is false)" if name == _HEAD else ""
            raise ValueError(f"{path}: tensor {name} is missing{hint}")
        if stored[name].shape != shape:
            raise ValueError(
                f"{stored[name].path}: tensor {stored[name].name} has shape "
                f"{stored[name].shape}, expected {shape}"
            )
    for name, tensor in stored.items():
        if name not in shapes:
            raise ValueError(
                f"{tensor.path}: tensor {tensor.name} has no place in this "
                f"{config.architecture} of {config.n_layers} layers"
            )
