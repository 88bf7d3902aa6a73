"""The `rksc` command, with what only it has: the demo and the self-test.

It knows every room, and none knows it.
"""
