"""What the engine must know about a model: configuration, RoPE, names of tensors.

It knows what files say (`formats`, `text`) and the core's table of tensors, and no engine.
"""
