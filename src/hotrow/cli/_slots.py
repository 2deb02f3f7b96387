"""Numbers of slots, as users write them."""

from __future__ import annotations


def read_slots(text: str, num_rows: int) -> int:
    """A number, or percent of all rows."""
    try:
        if text.strip().endswith("%"):
            count = int(float(text.strip()[:-1]) / 100 * num_rows)
        else:
            count = int(text)
    except ValueError:
        raise ValueError(
            f"--slots: cannot read {text.strip()!r}; write numbers or percent, such as 1%,5%,100000"
        ) from None
    if not 0 < count <= num_rows:
        raise ValueError(
            f"--slots: {text.strip()} makes {count:,} slots; there may be 1 to {num_rows:,}"
        )
    return count
