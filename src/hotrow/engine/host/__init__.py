"""Rows that stay in host memory: the CPU reads and updates them, for `cpu` and `hybrid`.

With a part for hot rows on the device it is `static-hybrid`. It can stand over the store of
another engine. Does not know autograd or modules.
"""
