"""Predicts without rows: cost model, machines, the planner as a simulator, budgets.

Serves `budget="auto"` and the studies. Does not know runs or files of records.
"""
