"""One training step as CUDA graphs, and the loop of the command line, `Trainer`.

Knows models and losses as functions. Does not know the published systems, data or run files.
"""
