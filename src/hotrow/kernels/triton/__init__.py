"""The operations as Triton kernels; `reference` says what each one means."""
