"""What every package may use: byte units, messages, threads, streams, files, records, progress.

Knows torch and the machine. Does not know rows, tables or batches.
"""
