"""Slipstream: finds rows that have stopped changing, and drops samples that read only such.

Also its control, random-drop. Does not know how batches are trained.
"""
