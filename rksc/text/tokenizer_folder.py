"""The tokenizer of a Hugging Face folder: tokenizer.json and the files beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..formats.files import reading
from .special import eos_tokens, folder_templates, named_tokens, read_tokenizer_config
from .tokenizer_json import first_ids_of, pieces_of, read_tokenizer_json


def read_folder_tokenizer(folder: Path) -> dict[str, Any]:
    """The arguments of `Tokenizer`."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ValueError(
            f"{path}: no such file; save_pretrained of a fast tokenizer writes it, or pass "
            "tokenizer=False and work with token ids"
        )
    pipeline, described = read_tokenizer_json(path)
    config = read_tokenizer_config(folder)
    names = {name: named.value for name, named in named_tokens(folder, config).items()}
    bos_id, eos_id = (
        pipeline.token_id(names[key]) if key in names else None
        for key in ("bos_token", "eos_token")
    )
    with reading(path):
        first = first_ids_of(described)
        pieces, special, strips_space = pieces_of(pipeline, described)
    if bos_id is None and first and first[0] in pipeline.added():
        bos_id = first[0]
    adds_bos = config.get("add_bos_token")
    if not isinstance(adds_bos, bool):
        adds_bos = bos_id is not None and first[:1] == [bos_id]
    return {
        "encoder": pipeline,
        "pieces": pieces,
        "special": special,
        "bos_id": bos_id,
        "eos_id": eos_id,
        "ends": [pipeline.token_id(eos.value) for eos in eos_tokens(folder, config)],
        "adds_bos": adds_bos,
        "strips_space": strips_space,
        "templates": folder_templates(folder, config),
        "names": names,
    }
