"""Results as tables, charts and pages.

Reads records that runs left on disk. Does not know training.
"""
