"""Host memory in mappings of its own: touched, page-locked, and seen by the GPU. Knows no rows."""

from __future__ import annotations

import mmap
import time

import torch
from torch import Tensor

PORTABLE_AND_MAPPED = 3  # cudaHostRegisterPortable | cudaHostRegisterMapped


class HostMemory:
    """Bytes of host memory; `close()` unlocks them, dropping the last tensor gives them back."""

    def __init__(self, num_bytes: int) -> None:
        memory = mmap.mmap(-1, num_bytes)
        if hasattr(mmap, "MADV_DONTFORK"):  # a fork would copy what is page-locked
            memory.madvise(mmap.MADV_DONTFORK)
        self.bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self.is_locked = False

    def touch(self) -> float:
        """Write to every page, on all cores; the seconds that took."""
        started = time.perf_counter()
        self.bytes.zero_()
        return time.perf_counter() - started

    def lock(self) -> float:
        """Page-lock, so that copies overlap and kernels may read it; the seconds that took."""
        started = time.perf_counter()
        size = self.bytes.numel()
        code = torch.cuda.cudart().cudaHostRegister(
            self.bytes.data_ptr(), size, PORTABLE_AND_MAPPED
        )
        if int(code) != 0:
            raise RuntimeError(f"{size:,} bytes could not be page-locked: CUDA error {int(code)}")
        self.is_locked = True
        return time.perf_counter() - started

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype, *, first_byte: int = 0) -> Tensor:
        """A part of it, as the CPU sees it."""
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        return self.bytes[first_byte : first_byte + num_bytes].view(dtype).view(shape)

    def close(self) -> None:
        if self.is_locked:
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaHostUnregister(self.bytes.data_ptr())
            self.is_locked = False


class _Pointer:
    def __init__(self, host: Tensor) -> None:
        self.host = host
        self.__cuda_array_interface__ = {
            "shape": tuple(host.shape),
            "typestr": "<f4",
            "data": (host.data_ptr(), False),
            "version": 2,
        }


def seen_by_gpu(host: Tensor) -> Tensor:
    """The same page-locked float32 memory as a CUDA tensor: kernels cross the link to it."""
    assert host.dtype == torch.float32
    assert host.is_contiguous()
    # With its number, or torch would ask the pointer, which is the host's, where it lives.
    return torch.as_tensor(_Pointer(host), device=f"cuda:{torch.cuda.current_device()}")
