"""Settings every test shares: Triton's interpreter without a GPU, one thread per worker, a fixed seed."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    # Triton reads this once, when it is first imported; no test module has been loaded yet.
    os.environ.setdefault("TRITON_INTERPRET", "1")

if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers share the cores: more threads than cores makes small operations many times slower.
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seed() -> int:
    """Seeds torch before every test, so that a test alone and in company sees the same numbers."""
    torch.manual_seed(0)
    return 0


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
