"""What tests share that read what anybody may have written.

benchmarks/fuzz.py has them try for long, with other seeds.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st

from hotrow.checkpoint.manifest import checksum_of
from hotrow.support.files import BlockSums

EXAMPLES = int(os.environ.get("HOTROW_FUZZ_EXAMPLES", "25"))
SEED = os.environ.get("HOTROW_FUZZ_SEED")  # None: the same examples every time


def fuzzed(test: Callable[..., None]) -> Callable[..., None]:
    """For a test with `given`."""
    tried = settings(
        max_examples=EXAMPLES,
        deadline=None,
        suppress_health_check=[
            HealthCheck.function_scoped_fixture,
            HealthCheck.too_slow,
            HealthCheck.data_too_large,
        ],
    )(test)
    return tried if SEED is None else seed(int(SEED))(tried)


odd = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**65), 2**65)
    | st.sampled_from([0, 1, 7, 8, 2**31, 2**62, -1])
    | st.floats()
    | st.text(max_size=9)
    | st.sampled_from(["../x", "/etc/passwd", "rows", "F32", "00001-step-1", "a" * 5000, "\0"]),
    lambda each: (
        st.lists(each, max_size=4) | st.dictionaries(st.text(max_size=6), each, max_size=4)
    ),
    max_leaves=8,
)


def leaves(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The places of all values in a tree."""
    pairs = (
        tree.items()
        if isinstance(tree, dict)
        else enumerate(tree)
        if isinstance(tree, list)
        else ()
    )
    return [path, *(each for key, value in pairs for each in leaves(value, (*path, key)))]


def changed(tree: Any, data: st.DataObject) -> Any:
    """A tree of which one value, or a few, are others."""
    tree = copy.deepcopy(tree)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.sampled_from(leaves(tree)))
        value = data.draw(odd)
        if not place:
            return value
        inner = tree
        for key in place[:-1]:
            inner = inner[key]
        if data.draw(st.booleans()):
            inner[place[-1]] = value
        else:
            del inner[place[-1]]
    return tree


def damaged(whole: bytes, data: st.DataObject) -> bytes:
    """Bytes of which some are others, more or fewer."""
    part = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, max(0, len(part) - 1)))
        kind = data.draw(st.sampled_from(["flip", "cut", "put", "end"]))
        if kind == "flip" and part:
            part[at] ^= data.draw(st.integers(1, 255))
        elif kind == "cut":
            del part[at : at + data.draw(st.integers(1, 64))]
        elif kind == "put":
            part[at:at] = data.draw(st.binary(max_size=32))
        else:
            del part[at:]
    return bytes(part)


@contextmanager
def replaced(path: Path, contents: bytes) -> Iterator[None]:
    """Inside, a file holds something else."""
    whole = path.read_bytes()
    try:
        path.write_bytes(contents)
        yield
    finally:
        path.write_bytes(whole)


def sealed(body: Any) -> bytes:
    """A manifest with the checksum that belongs to it, which an attacker can compute, too."""
    return json.dumps(
        {**body, "checksum": checksum_of(body)} if isinstance(body, dict) else body
    ).encode()


@contextmanager
def forged(checkpoint: Path, file: str, contents: bytes) -> Iterator[None]:
    """Inside, a file of a checkpoint holds something else, and all checksums fit."""
    manifest = json.loads((checkpoint / "checkpoint.json").read_text())
    small = [manifest[key] for key in ("dense", "state", "state_tensors")]
    shards = [shard for table in manifest["tables"] for shard in table["shards"]]
    record = next(record for record in small + shards if record["file"] == file)
    kind = "sums" if "sums" in record else "sha256"
    digest = BlockSums() if kind == "sums" else hashlib.sha256()
    digest.update(contents)
    record |= {"bytes": len(contents), kind: digest.hexdigest()}
    with (
        replaced(checkpoint / file, contents),
        replaced(checkpoint / "checkpoint.json", sealed(manifest)),
    ):
        yield
