"""Whatever a disk does, no checkpoint is loaded that is not what was saved."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import hotrow
import hotrow.checkpoint.shards as shards
from hotrow.checkpoint import Checkpoint
from hotrow.checkpoint.folder import latest_in, saved_in
from hotrow.run.job import same_bits
from hotrow.support.files import BlockSums, Disk

SOURCE = Path(hotrow.__file__).parent
TABLES = (
    hotrow.EmbeddingBagConfig("item", 300, 8, ["item"]),
    hotrow.EmbeddingBagConfig("tag", 30, 4, ["tag"]),
)


class Training:
    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        embedding = hotrow.EmbeddingBagCollection(
            TABLES, hotrow.Adagrad(lr=0.1), strategy="all-fast", seed=seed
        )
        self.embedding = embedding
        self.model = torch.nn.ModuleDict({"embedding": embedding, "dense": torch.nn.Linear(12, 1)})
        self.optimizer = torch.optim.Adam(self.model.parameters())

    def step(self) -> None:
        ids = torch.stack([torch.randint(300, (8,)), torch.randint(30, (8,))], 1)
        self.model["dense"](self.embedding(ids).values()).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, folder: Path, step: int, **options: Any) -> Path:
        return hotrow.save_checkpoint(
            folder, self.model, step=step, optimizer=self.optimizer, **options
        )

    def bits(self) -> dict[str, torch.Tensor]:
        found = {key: each.clone() for key, each in self.model.state_dict().items()}
        for table in TABLES:
            found |= {
                f"{table.name} sum": self.embedding.row_access.copy_state(table.name)["sum"].clone()
            }
        for number, state in self.optimizer.state_dict()["state"].items():
            found |= {f"{number} {key}": each.clone() for key, each in state.items()}
        return found


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    other = Training(seed=5)
    other.step()
    hotrow.load_checkpoint(folder, other.model, optimizer=other.optimizer)
    return other.bits()


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(same_bits(left[k], right[k]) for k in left)


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Training]:
    """A whole checkpoint, and one with the rows that have changed since, of several shards."""
    monkeypatch.setattr("os.fsync", lambda file: None)
    monkeypatch.setattr(shards, "SHARD_BYTES", 5_000)
    training = Training()
    for step in (1, 2):
        training.step()
        training.save(tmp_path, step, full_every=9)
    assert Checkpoint(latest_in(tmp_path) or "").manifest.parent is not None
    return tmp_path, training


@pytest.mark.filterwarnings("ignore:.* which 'latest' names, is gone")  # a bit of that file
def test_a_bit_that_flips_anywhere_is_found(saved: tuple[Path, Training]) -> None:
    root, training = saved
    expected, older = training.bits(), loaded(saved_in(root)[0])
    assert same(loaded(root), expected)
    draw, files = (
        torch.Generator().manual_seed(3),
        sorted(p for p in root.rglob("*") if p.is_file()),
    )
    assert len(files) > 12
    for path in files:
        whole = path.read_bytes()
        places = {0, len(whole) - 1, *torch.randint(len(whole), (3,), generator=draw).tolist()}
        for place in places:
            flipped = bytearray(whole)
            flipped[place] ^= 1 << int(torch.randint(8, (1,), generator=draw))
            path.write_bytes(flipped)
            found = None
            with suppress(ValueError):
                found = loaded(root)
            if found is not None:  # white space of a manifest, or another name in `latest`
                is_old = path.name == "latest" and same(found, older)
                assert is_old or same(found, expected), f"{path} at {place}"
        path.write_bytes(whole)
    assert same(loaded(root), expected)


@pytest.mark.parametrize("number", [0, 1], ids=["parent", "child"])
def test_a_manifest_that_was_changed_is_refused(saved: tuple[Path, Training], number: int) -> None:
    """Also where what it says could be true: only its checksum tells."""
    root, training = saved
    path = saved_in(root)[number] / "checkpoint.json"
    whole = json.loads(path.read_text())
    changes = {
        "step": whole["step"] + 1,
        "made_by": whole["made_by"] + "1",
        "saved": whole["saved"] + "Z",
        "checksum": whole["checksum"][::-1],
        "tables": whole["tables"][::-1],
        "parent": {"name": "00001-step-1", "checksum": "0" * 64} if number else None,
        "a key that is not known": 1,
    }
    if not number:
        del changes["parent"]
    for key, value in changes.items():
        path.write_text(json.dumps(whole | {key: value}))
        with pytest.raises(ValueError, match="its checksum is another"):
            loaded(root)
    path.write_text(json.dumps(whole))  # with other white space
    assert same(loaded(root), training.bits())


def test_files_that_are_cut_or_missing_are_found(saved: tuple[Path, Training]) -> None:
    root, _ = saved
    for path in sorted(p for p in root.rglob("*") if p.is_file() and p.name != "latest"):
        whole = path.read_bytes()
        for damaged in (whole[:-1], whole[: len(whole) // 2], b"", whole + b"\0"):
            path.write_bytes(damaged)
            with pytest.raises(ValueError, match=r"."):
                loaded(saved_in(root)[-1])
        path.unlink()
        with pytest.raises(ValueError, match=r"."):
            loaded(root / "00002-step-2")
        path.write_bytes(whole)


class Fault:
    """Fails the n-th call of something."""

    def __init__(self, when: int, how: Any, real: Any) -> None:
        self.left, self._how, self._real = when, how, real

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            return self._how(*arguments)
        return self._real(*arguments, **options)


def fails(code: int) -> Any:
    def fail(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    return fail


class ShortWrite:
    """A file that takes half of a write, and then no more."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=0)

    def write(self, part: Any) -> int:
        self._file.write(bytes(part)[: len(part) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> ShortWrite:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def faults() -> Iterator[tuple[str, str, Any]]:
    for name in ("ENOSPC", "EIO"):
        yield f"fsync {name}", "os.fsync", fails(getattr(errno, name))
    yield "rename", "pathlib.Path.rename", fails(errno.EIO)
    yield "replace", "pathlib.Path.replace", fails(errno.EIO)
    yield "torn rename", "pathlib.Path.rename", lambda path, to: torn(path, to)
    yield "short write", "hotrow.support.files.Disk.open", lambda disk, path: ShortWrite(path)
    yield "Ctrl-C", "os.fsync", interrupt


def torn(path: Path, to: Path) -> None:
    """The machine is lost after the name has changed, and before that is durable: some files of
    the folder have no bytes."""
    os.rename(path, to)
    for each in list(to.rglob("*.safetensors"))[:1]:
        each.write_bytes(b"")
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(("name", "what", "how"), [*faults()], ids=lambda each: str(each)[:12])
def test_a_save_that_fails_leaves_the_checkpoint_before(
    name: str, what: str, how: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training()
    training.save(tmp_path, 1)
    before = training.bits()
    training.step()
    now = training.bits()
    module, _, attribute = what.rpartition(".")
    owner: Any = {"os": os, "pathlib.Path": Path, "hotrow.support.files.Disk": Disk}[module]
    real, call = getattr(owner, attribute), 0
    while True:
        call += 1
        fault = Fault(call, how, real)
        with monkeypatch.context() as patch:
            wrapper = (lambda *a, f=fault, **k: f(*a, **k)) if owner is not os else fault
            patch.setattr(owner, attribute, wrapper)
            with suppress(OSError, KeyboardInterrupt):
                training.save(tmp_path, 2, keep=2)
        if fault.left > 0:
            break  # nothing failed any more
        latest = latest_in(tmp_path)
        assert latest is not None
        found = None
        for path in reversed(saved_in(tmp_path)):  # as resuming does
            with suppress(ValueError):
                found = loaded(path)
                break
        assert found is not None
        assert same(found, before) or same(found, now), (name, call)
        if latest.name.endswith("step-1"):
            for path in saved_in(tmp_path)[1:]:
                shutil.rmtree(path)
    assert call > 1
    assert same(loaded(tmp_path), now)
    assert not list(tmp_path.glob("*.partial"))


def test_one_that_latest_cannot_name_is_taken_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training()
    training.save(tmp_path, 1)
    real = Disk.open
    monkeypatch.setattr(
        Disk,
        "open",
        lambda disk, path: ShortWrite(path) if path.name.startswith("latest") else real(disk, path),
    )
    with pytest.raises(OSError, match="the disk is full"):
        training.save(tmp_path, 2)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["00001-step-1"]


def test_sums_of_blocks_do_not_depend_on_how_bytes_come() -> None:
    draw = random.Random(0)
    data = bytearray(draw.randbytes(3_000_000))

    def sums(data: bytes | bytearray, *cuts: int) -> str:
        found = BlockSums()
        for first, last in pairwise([0, *cuts, len(data)]):
            found.update(data[first:last])
        return found.hexdigest()

    expected = sums(data)
    for _ in range(5):
        assert sums(data, *sorted(draw.choices(range(len(data)), k=4))) == expected
        place = draw.randrange(len(data))
        data[place] ^= 1 << draw.randrange(8)
        assert sums(data) != expected
        expected = sums(data)
    swapped = data[1 << 20 : 2 << 20] + data[: 1 << 20] + data[2 << 20 :]
    assert sums(swapped) != expected
    assert sums(data[:-1]) != expected
    assert sums(b"") != sums(b"\0")


def test_a_link_out_of_the_folder_is_refused(saved: tuple[Path, Training], tmp_path: Path) -> None:
    root, _ = saved
    folder = saved_in(root)[0]
    shard = next((folder / "rows").iterdir())
    outside = tmp_path / "outside"
    shutil.move(shard, outside)
    shard.symlink_to(outside)
    with pytest.raises(ValueError, match="leads out of its folder"):
        loaded(folder)


def test_nothing_is_pickled() -> None:
    """In no module that reads files: a pickle can do anything."""
    for path in SOURCE.rglob("*.py"):
        text = path.read_text()
        assert not re.search(r"\bimport (c?pickle|dill|joblib|shelve|marshal)\b", text), path
        assert not re.search(r"\bfrom (c?pickle|dill|joblib|shelve|marshal)\b", text), path
        assert "torch.load(" not in text, path
        assert "allow_pickle=True" not in text, path
        for call in re.findall(r"np\.load\([^)]*\)", text):
            assert "allow_pickle=False" in call, (path, call)


class Malicious:
    def __reduce__(self) -> Any:
        return (os.mkdir, ("harm",))


def test_a_malicious_file_does_no_harm(
    saved: tuple[Path, Training], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    root, _ = saved
    folder = saved_in(root)[0]
    torch.save({"weight": Malicious()}, tmp_path / "bad.pt")
    for name in ("dense.safetensors", "state.safetensors", "state.json", "checkpoint.json"):
        whole = (folder / name).read_bytes()
        shutil.copy(tmp_path / "bad.pt", folder / name)
        with pytest.raises(ValueError, match=r"."):
            loaded(folder)
        (folder / name).write_bytes(whole)
    assert not Path("harm").exists()
