"""Ranks of a torch process group that share the rows of collections.

Knows which rank owns a row, and exchanges ids, rows and gradients between ranks. Does not know
modules, optimizers of torch, or how an engine keeps the rows that a rank owns.
"""
