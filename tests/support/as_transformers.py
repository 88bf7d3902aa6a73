"""The small models as transformers' own classes; imported only where transformers is."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers

from support.models import Small


def as_transformers(model: Small, dtype: Any = torch.float32) -> Any:
    """The transformers model of model.config with model.weights, for inference."""
    config = copy.deepcopy(dict(model.config))  # transformers writes into it
    if config.get("head_dim") is None:
        config.pop("head_dim")
    heads = config["num_attention_heads"]
    if config["hidden_size"] % heads:  # its check overlooks that head_dim is given
        config["num_attention_heads"] = config["num_key_value_heads"]
    hf_config = transformers.AutoConfig.for_model(**config)
    hf_config.num_attention_heads = heads
    made = transformers.AutoModelForCausalLM.from_config(
        hf_config, dtype=dtype, attn_implementation="eager"
    )
    state = {name: torch.from_numpy(w.copy()).to(dtype) for name, w in model.weights.items()}
    if hf_config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    made.load_state_dict(state)
    return made.eval()
