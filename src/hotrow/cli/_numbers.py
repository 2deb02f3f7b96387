"""Numbers of slots and of batches, as users write them."""

from __future__ import annotations

import math


def read_slots(text: str, num_rows: int) -> int:
    """A number, or percent of all rows."""
    try:
        if text.strip().endswith("%"):
            count = int(float(text.strip()[:-1]) / 100 * num_rows)
        else:
            count = int(text)
    except (ValueError, OverflowError):  # inf% is a number, too
        raise ValueError(
            f"--slots: cannot read {text.strip()!r}; write numbers or percent, such as 1%,5%,100000"
        ) from None
    if not 0 < count <= num_rows:
        raise ValueError(
            f"--slots: {text.strip()} makes {count:,} slots; there may be 1 to {num_rows:,}"
        )
    return count


def read_depths(text: str) -> list[int]:
    """Numbers of batches, with commas between."""
    return [_depth(part) for part in text.split(",")]


def check_dense_ms(value: float | None) -> None:
    if value is not None and not 0 <= value < math.inf:
        raise ValueError(f"--dense-ms must be a number of at least 0, not {value:g}")


def _depth(text: str) -> int:
    try:
        found = int(text)
    except ValueError:
        raise ValueError(f"--depths: cannot read {text.strip()!r}; write 50 or 50,200") from None
    if found < 0:
        raise ValueError(f"--depths must be at least 0, not {found}")
    return found
