"""The parts of the engine whose slots are on a GPU: planner, memory, fill forms, rows.

Decisions are made by kernels, and the host does not wait for them. Does not know autograd.
"""
