"""Hotline: learns popular rows, and trains the popular part of a batch first.

Does not know how rows move or which streams they use.
"""
