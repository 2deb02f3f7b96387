"""The program for compute-sanitizer, tried without one: every kernel runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

PROGRAM = Path(__file__).with_name("sanitize.py")


@pytest.mark.slow
def test_the_program_for_sanitizers_launches_every_kernel() -> None:
    environment = dict(os.environ)
    if not torch.cuda.is_available():
        environment["TRITON_INTERPRET"] = "1"
    done = subprocess.run(
        [sys.executable, PROGRAM], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    ran, of = done.stdout.splitlines()[-1].split(" kernels ran")[0].split(" of ")
    assert int(ran) == int(of) >= 30
