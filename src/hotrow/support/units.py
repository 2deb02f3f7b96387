"""Numbers of bytes: read from what users write, and written for people."""

from __future__ import annotations

import math
import re

_UNITS = {
    "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
    "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40,
}  # fmt: skip
_LEAST_BYTES = 100_000  # a text with a smaller number and no unit lacks its unit


# Two digits of exponent are enough for any memory, and no float overflows.
_NUMBER = r"[0-9][0-9_]*(?:\.[0-9]+)?(?:e\+?[0-9]{1,2})?"


def parse_bytes(text: str | float, *, total: int | None = None) -> int:
    """4_000_000, 4e6, "4GB", "4G" (the same), "1.5 GiB", or "10%" of `total` bytes."""
    if isinstance(text, float) and 0 < text <= 1:  # 1.0 is more likely to mean all of them
        raise ValueError(
            f"a budget of {text} is not a number of bytes; for a share of the tables' bytes write "
            f"'{100 * text:g}%'"
        )
    if isinstance(text, float) and not text.is_integer():
        raise ValueError(
            f"a budget of {text} is not a whole number of bytes; write 4_000_000, '1.5GiB' or "
            "'10%' of the tables' bytes"
        )
    if isinstance(text, int | float) and not isinstance(text, bool):
        value = int(text)
    else:
        match = re.fullmatch(rf"\s*({_NUMBER})\s*([a-z]*|%)\s*", str(text).lower())
        unit = match and (match[2] or "b")
        if not match or (unit != "%" and unit not in _UNITS) or (unit == "%" and total is None):
            raise ValueError(
                f"cannot read {text!r} as a number of bytes; write 4_000_000, '512MiB', '4GB' "
                "(10**9, and so is '4G'), '4GiB' (2**30)"
                + (" or '10%' of the tables' bytes" if total is not None else "")
            )
        scale = (total or 0) / 100 if unit == "%" else _UNITS[str(unit)]
        value = int(float(match[1].replace("_", "")) * scale)
        if 0 < value < _LEAST_BYTES and not match[2]:
            number = match[1]
            raise ValueError(
                f"{text!r} has no unit; write '{number}GB' ({number} * 10**9 bytes), "
                f"'{number}GiB' ({number} * 2**30), "
                + (f"'{number}%' of the tables' bytes, " if total is not None else "")
                + f"or '{number}B'"
            )
    if value <= 0:
        raise ValueError(f"a budget must be above zero bytes, got {text!r}")
    return value


def show_bytes(value: float, *, beside: float | None = None) -> str:
    """1,234 B, 12.3 MiB, ... for people. Two different numbers that are shown `beside` each other
    get as many digits as they need to look different."""
    for digits in range(1, 13):
        text = _shown(value, digits)
        if beside is None or beside == value or text != _shown(beside, digits):
            return text
    return f"{value:,.0f} B"


def _shown(value: float, digits: int) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:,.0f} {unit}" if unit == "B" else f"{value:,.{digits}f} {unit}"
        value /= 1024
    return f"{value:,.{digits + 1}f} TiB"


def write_budget(num_bytes: int, *, total: int | None = None) -> str:
    """As a user writes it, with two digits and no fewer bytes; a share if there is a `total`."""
    if total is not None:
        size, unit = 100 * num_bytes / total, "%"
    else:
        sizes = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
        scale, unit = next((each for each in sizes if each[0] <= num_bytes), sizes[-1])
        size = num_bytes / scale
    digits = max(0, 1 - math.floor(math.log10(size)))
    return f"{math.ceil(size * 10**digits) / 10**digits:g}{unit}"
