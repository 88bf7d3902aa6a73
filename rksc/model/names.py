"""Names of tensors: Hugging Face's, GGUF's, and what wrappers of a model put before them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from .._core import gguf_names
from ..formats.files import shown

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

_GGUF_LAYER = re.compile(r"blk\.(0|[1-9]\d{0,5})\.", re.ASCII)

# Tensors that no model lacks, as a model without its head calls them.
_EVERY_MODEL = ("embed_tokens.weight", "layers.0.input_layernorm.weight")
# What torch.compile, FSDP and checkpointing put into names, not at their beginning alone.
_WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


def from_gguf_name(name: str) -> str | None:
    """Hugging Face's name of a tensor of a GGUF; None: it has no place in this architecture."""
    layer = _GGUF_LAYER.match(name)
    if layer is None:
        return gguf_names.get(name)
    first = gguf_names.get(f"blk.0.{name[layer.end() :]}")
    return first and first.replace(".0.", f".{layer[1]}.")


def check_wrapped(names: Iterable[object]) -> None:
    """ValueError where wrappers of the model show in the names, with how to take them away."""
    texts = [name for name in names if isinstance(name, str)]
    cuts, shows = "", []
    for piece in _WRAPPERS:
        if any(piece in name for name in texts):
            texts = [name.replace(piece, "") for name in texts]
            cuts += f".replace({piece!r}, '')"
            shows.append(piece)
    end = next((end for end in _EVERY_MODEL if any(name.endswith(end) for name in texts)), "")
    fronts = {name.removesuffix(end).removesuffix("model.") for name in texts if name.endswith(end)}
    if end and "" not in fronts:
        front = min(fronts)
        cuts += f".removeprefix({shown(front)})"
        shows.append(front)
    if not cuts:
        return
    advice = f"{{name{cuts}: weight for name, weight in weights.items()}}"
    if any(".lora_" in name or ".base_layer." in name for name in texts):
        advice = "the weights of the merged adapter, model.merge_and_unload().state_dict()"
    raise ValueError(
        f"names of weights have {shown(shows)} in them, as those of a wrapped model: use {advice}"
    )


def check_vocabulary(weights: Any, vocab_size: int) -> None:
    """ValueError unless the embedding has so many rows, before a table of them is made. What shows
    no shape is judged when it is borrowed."""
    for name in (EMBEDDING, EMBEDDING.removeprefix("model.")):
        shape = getattr(weights.get(name), "shape", None)
        if isinstance(shape, tuple) and shape[:1] != (vocab_size,):
            raise ValueError(
                f"{name} has shape {tuple(shape)}, the configuration wants {vocab_size} rows "
                "(vocab_size)"
            )
