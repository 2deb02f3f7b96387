"""How much host memory there is: the machine's, or what its container leaves."""

from __future__ import annotations

from pathlib import Path

from hotrow.support.units import show_bytes


def check_fits(num_rows: int, width: int) -> None:
    """Refuse more rows than there is memory for."""
    num_bytes, have = num_rows * width * 4, available_bytes()
    if have is not None and num_bytes > have:
        raise ValueError(
            f"{num_rows:,} rows of {width} floats need {show_bytes(num_bytes, beside=have)} of "
            f"host memory, and {show_bytes(have, beside=num_bytes)} are available. Use a machine "
            "with more memory, smaller tables, or an optimizer that keeps less state per row"
        )


def available_bytes(
    meminfo: Path = Path("/proc/meminfo"),
    own_cgroup: Path = Path("/proc/self/cgroup"),
    cgroups: Path = Path("/sys/fs/cgroup"),
) -> int | None:
    """Host memory a process may still take, by the machine and by its container; None: unknown."""
    limits = [_left(folder) for folder in _cgroup_folders(own_cgroup, cgroups)]
    kib = _number(meminfo, "MemAvailable:")
    if kib is not None:
        limits.append(1024 * kib)
    return min((limit for limit in limits if limit is not None), default=None)


def _cgroup_folders(own_cgroup: Path, cgroups: Path) -> list[Path]:
    """Where this process's limits stand: its own group's, and those of all groups around it."""
    folders = []
    for line in _read(own_cgroup).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):  # version 2 has one hierarchy, without a name
            continue
        root = cgroups / controllers
        own = root / path.lstrip("/")
        # Inside a container the path may be the host's; the root is then the container's own.
        folders += [each for each in (own, *own.parents) if each.is_relative_to(root)]
    return folders


def _left(folder: Path) -> int | None:
    """What is left in a group, by the names of version 2 or of version 1."""
    for most, used in (
        ("memory.max", "memory.current"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        limit, current = _read(folder / most).strip(), _read(folder / used).strip()
        if limit.isdigit() and current.isdigit():
            # Copies of files count as used, and are given up when memory is asked for.
            files = _number(folder / "memory.stat", "inactive_file ") or 0
            return max(0, int(limit) - int(current) + files)
    return None


def _number(path: Path, name: str) -> int | None:
    """Return the number in the line of a file that begins with a name."""
    lines = [line for line in _read(path).splitlines() if line.startswith(name)]
    return int(lines[0].split()[1]) if lines else None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
