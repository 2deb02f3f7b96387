"""Warnings that point at the line of the user's which led to them."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import torch

# Frames in between: ours, and torch's where it calls us.
_INSIDE = tuple(str(Path(each).parent) + os.sep for each in (__file__, torch.__file__))


def warn(message: str) -> None:
    """A UserWarning at the innermost line that is neither hotrow's nor torch's."""
    depth, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        depth, frame = depth + 1, frame.f_back
    warnings.warn(message, stacklevel=depth)
