"""FAE: counts accesses, pins hot rows, and trains hot and cold batches in turns.

Does not know how rows move or how samples are stored.
"""
