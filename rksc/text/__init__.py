"""Texts and tokens: tokenizers, chat templates, the tokens that end a turn.

It reads what `formats` opens and knows no model and no engine: a tokenizer serves without either.
"""
