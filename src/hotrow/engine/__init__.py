"""Moves rows between the store and slots in fast memory: plan, fill, look up, update.

Has the strategies, the stages of a batch and their schedule; `gpu` has what needs a GPU. Does not
know modules, autograd or losses.
"""
