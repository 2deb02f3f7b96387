"""Generated logs in the forms of the public data sets, and what must become of them."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

Line = list[str]


def criteo_lines(count: int, *, seed: int = 0, values: int = 40) -> list[Line]:
    """Skewed values, missing ones, negative and long numbers."""
    draw = random.Random(seed)

    def number() -> str:
        return draw.choice(
            ["", "0", "7", "-1", "-2", "12345678", "123456789", str(draw.randrange(9**6))]
        )

    def category(column: int) -> str:
        rank = int(values ** draw.random())
        return (
            "" if rank == 3 and column % 4 == 0 else f"{(rank * 2654435761 + column) % 2**32:08x}"
        )

    return [
        [str(draw.randrange(2)), *(number() for _ in range(13)), *(category(c) for c in range(26))]
        for _ in range(count)
    ]


def taobao_lines(users: int, *, seed: int = 0) -> list[Line]:
    """Events of users who come once, a few or many times, in no order."""
    draw = random.Random(seed)
    lines = []
    for user in range(users):
        for _ in range(draw.choice([1, 2, 5, 40])):
            item = draw.randrange(200)
            time = 1511658000 + draw.randrange(100_000)
            lines.append([str(user), str(item), str(item % 7 + 500), "pv", str(time)])
    draw.shuffle(lines)
    return lines


def write(path: Path, lines: list[Line], *, separator: str = "\t", end: str = "\n") -> Path:
    path.write_bytes("".join(separator.join(line) + end for line in lines).encode())
    return path


def criteo_dense(line: Line) -> list[float]:
    values = [max(0, int(each or 0)) for each in line[1:14]]
    return [float(np.log(np.float32(each) + np.float32(1))) for each in values]


def counts_of(lines: list[Line], column: int) -> Counter[str]:
    return Counter(line[column] for line in lines)


def assert_same_grouping(ids: Any, texts: list[str]) -> None:
    """Equal texts have equal ids, and different ones different ids."""
    seen: dict[str, int] = {}
    for row, text in zip(np.asarray(ids).tolist(), texts, strict=True):
        assert seen.setdefault(text, row) == row
    assert len(set(seen.values())) == len(seen)


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def held_back(count: int) -> int:
    return count // 7
