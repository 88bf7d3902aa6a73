"""`rksc serve`: OpenAI's HTTP API over the clients' engine (extra `[serve]`).

It knows HTTP and `clients`; nothing below knows it.
"""
