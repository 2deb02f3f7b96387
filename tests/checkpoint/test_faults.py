"""Whatever a disk does, no checkpoint is loaded that is not what was saved."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import hotrow
from hotrow.checkpoint.folder import latest_in, saved_in
from hotrow.support.files import BlockSums, Disk
from saved_training import Loop, OpenFile, is_whole, names_in, same

SOURCE = Path(hotrow.__file__).parent
Saved = tuple[Path, Loop]


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    other = Loop("adagrad", seed=5)
    other.load(folder)
    return bits(other)


def bits(loop: Loop) -> dict[str, torch.Tensor]:
    """All but random states, which loading changes for every loop."""
    return {key: tensor for key, tensor in loop.everything().items() if key != "random"}


@pytest.fixture
def saved(tmp_path: Path) -> Saved:
    """A whole checkpoint, and one with the rows that have changed since, of several shards."""
    loop = Loop("adagrad")
    loop.train(0, 2, lambda step: loop.save(tmp_path, step, full_every=9))
    assert not is_whole(latest_in(tmp_path) or tmp_path)
    return tmp_path, loop


@pytest.mark.filterwarnings("ignore:.* which 'latest' names, is gone")  # a bit of that file
def test_a_bit_that_flips_anywhere_is_found(saved: Saved) -> None:
    root, training = saved
    expected, older = bits(training), loaded(saved_in(root)[0])
    assert same(loaded(root), expected)
    draw = torch.Generator().manual_seed(3)
    files = sorted(path for path in root.rglob("*") if path.is_file())
    assert len(files) > 12
    for path in files:
        whole = path.read_bytes()
        places = {0, len(whole) - 1, *torch.randint(len(whole), (2,), generator=draw).tolist()}
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
def test_a_manifest_that_was_changed_is_refused(saved: Saved, number: int) -> None:
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
    assert same(loaded(root), bits(training))


def test_files_that_are_cut_or_missing_are_found(saved: Saved) -> None:
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


class ShortWrite(OpenFile):
    """A file that takes half of a write, and then no more."""

    def __init__(self, path: Path) -> None:
        super().__init__(path.open("wb", buffering=0))

    def write(self, part: Any) -> int:
        self._file.write(bytes(part)[: len(part) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


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
    training = Loop("adagrad")
    training.save(tmp_path, 1)
    before = bits(training)
    training.train(0, 1)
    now = bits(training)
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
    tmp_path: Path, use_disk: Callable[[type[Disk]], None]
) -> None:
    class NoLatest(Disk):
        def open(self, path: Path) -> Any:
            return ShortWrite(path) if path.name.startswith("latest") else super().open(path)

    training = Loop("adagrad")
    training.save(tmp_path, 1)
    use_disk(NoLatest)
    with pytest.raises(OSError, match="the disk is full"):
        training.save(tmp_path, 2)
    assert names_in(tmp_path) == ["00001-step-1", "latest"]


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
    saved: Saved, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
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
    shard = next((folder / "rows").iterdir())
    shutil.move(shard, tmp_path / "outside")
    shard.symlink_to(tmp_path / "outside")
    with pytest.raises(ValueError, match="leads out of its folder"):
        loaded(folder)
