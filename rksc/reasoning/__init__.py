"""Reasoning that branches: a problem put to a model, answers, votes, trees, how they look.

It knows sessions and results, and no client, no experiment.
"""
