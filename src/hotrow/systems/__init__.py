"""The published systems, on top of the engine; here is what they share.

`fae`, `hotline` and `slipstream` order, split or drop samples. Does not know how rows move.
"""
