"""Operations on rows and ids.

`reference` is the specification: plain PyTorch, any device. `triton` has the same for GPUs.
"""
