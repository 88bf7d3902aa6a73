"""Files of models, read as data: safetensors and GGUF, bounded, every fault named.

It knows files, bytes and dtypes; no text, no model, no engine.
"""
