"""All rows, in RAM: reads, writes, page-locking, writer threads, changed rows, snapshots.

Also what a budget of bytes holds, and counters of what moved. Does not know batches or slots.
"""
