"""Model files that the peers can read, with the weights of one GGUF file.

    python benchmarks/derive.py MODEL.gguf FOLDER [KIND ...]

Kinds: BF16, F32, F16, Q8_0 write FOLDER/NAME-KIND.gguf with all matrices in that type (vectors
stay F32); bfloat16, float32 write a Hugging Face folder FOLDER/NAME-KIND. What is there is left as
it is. Needs the `gguf` package, for folders also torch and transformers.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

GGUF_KINDS = {"F32": 0, "F16": 1, "Q8_0": 7, "BF16": 32}  # general.file_type
FOLDER_KINDS = ("bfloat16", "float32")


INSTALL = "pip install torch==2.13.0 transformers accelerate gguf"


def derive(source: Path, kind: str, folder: Path) -> Path:
    """The file or folder of this kind, made if it is not there; `source` itself where its
    matrices already are in that GGUF type."""
    target = _target(source, kind, folder)
    if not target.exists():
        write: Any = _write_folder if kind in FOLDER_KINDS else _write_gguf
        folder.mkdir(parents=True, exist_ok=True)
        partial = target.with_name("partial-" + target.name)
        shutil.rmtree(partial, ignore_errors=True)
        write(source, partial, kind)
        partial.rename(target)
    return target


def missing(source: Path, kinds: Iterable[str], folder: Path) -> list[str]:
    """Packages that this Python lacks for writing what is not there yet."""
    wanted: set[str] = set()
    for kind in kinds:
        if not _target(source, kind, folder).exists():
            wanted |= {"gguf", *(("torch", "transformers") if kind in FOLDER_KINDS else ())}
    return sorted(name for name in wanted if importlib.util.find_spec(name) is None)


def _target(source: Path, kind: str, folder: Path) -> Path:
    if kind in FOLDER_KINDS:
        return folder / f"{source.stem}-{kind}"
    if type_of(source) == kind:
        return source
    if kind not in GGUF_KINDS:
        raise ValueError(f"cannot write GGUF type {kind}; known: {', '.join(GGUF_KINDS)}")
    return folder / f"{source.stem}-{kind}.gguf"


def type_of(source: Path) -> str:
    """The type that most matrices of a GGUF have."""
    from rksc.formats.gguf import read_gguf

    sizes: dict[str, int] = {}
    for tensor in read_gguf(source).tensors.values():
        size = 1
        for dim in tensor.shape:
            size *= dim
        sizes[tensor.type] = sizes.get(tensor.type, 0) + size
    return max(sizes, key=lambda kind: sizes[kind])


def _write_gguf(source: Path, target: Path, kind: str) -> None:
    import gguf

    reader = gguf.GGUFReader(source)
    fields = {k: f for k, f in reader.fields.items() if not k.startswith("GGUF.")}
    writer = gguf.GGUFWriter(target, fields.pop("general.architecture").contents())
    for name, field in fields.items():
        value = GGUF_KINDS[kind] if name == "general.file_type" else field.contents()
        array = field.types[0] == gguf.GGUFValueType.ARRAY
        writer.add_key_value(name, value, field.types[0], field.types[-1] if array else None)
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        wanted = gguf.GGMLQuantizationType["F32" if values.ndim < 2 else kind]
        writer.add_tensor(tensor.name, gguf.quantize(values, wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_folder(source: Path, target: Path, kind: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    model.hf_quantizer, model.is_quantized = None, False  # it holds plain numbers now
    del model.config.quantization_config
    model.to(getattr(torch, kind)).save_pretrained(target)
    AutoTokenizer.from_pretrained(**where).save_pretrained(target)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("source", type=Path, metavar="MODEL.gguf")
    parser.add_argument("folder", type=Path)
    kinds = [*GGUF_KINDS, *FOLDER_KINDS]
    parser.add_argument("kinds", nargs="*", default=["BF16", "F32", "Q8_0", *FOLDER_KINDS],
                        metavar="KIND", help=", ".join(kinds))  # fmt: skip
    args = parser.parse_args()
    for kind in args.kinds:
        print(derive(args.source, kind, args.folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
