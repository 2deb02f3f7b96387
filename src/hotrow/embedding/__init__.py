"""The torch modules users call: collections, their optimizer, the autograd step, `ahead`.

Turns one `backward()` into one update per row. Does not know training loops or run files.
"""
