"""The engine from Python: a model loaded, a session over `_core`, its settings and records.

It knows the rooms of files, texts and models below it, and none that use it.
"""
