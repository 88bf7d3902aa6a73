"""What the engine must know about a model: configuration, RoPE, names and shapes of tensors.

It knows what files say (`formats`, `text`) and no engine.
"""
