"""Readers of what anybody may have written say ValueError, or read it; nothing else happens."""

from __future__ import annotations

import io
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hotrow
from fuzzing import changed, damaged, forged, fuzzed, odd, replaced, sealed
from hotrow.checkpoint import Checkpoint
from hotrow.checkpoint.folder import saved_in
from hotrow.checkpoint.manifest import read_manifest
from hotrow.checkpoint.parts import unpack
from hotrow.checkpoint.tables import export_tables, import_tables, verify_export
from hotrow.checkpoint.tensors import read_head, read_tensors
from hotrow.run.config import RunConfig
from hotrow.support import toml

FILE_SIZES = (500, 4 << 20)
TABLES = (hotrow.EmbeddingBagConfig("item", 60, 4, ["item"]),)


def collection() -> hotrow.EmbeddingBagCollection:
    return hotrow.EmbeddingBagCollection(
        TABLES, hotrow.Adagrad(lr=0.1), strategy="all-fast", seed=0
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A whole checkpoint and an incremental one."""
    root = tmp_path_factory.mktemp("fuzz")
    model = collection()
    for step in (1, 2):
        model(torch.tensor([[3], [40]])).values().sum().backward()
        hotrow.save_checkpoint(root, model, step=step, extra={"a": (1, [2.5])}, full_every=9)
    one, other = saved_in(root)
    return one, other


def try_to_load(folder: Path) -> None:
    with suppress(ValueError):
        Checkpoint(folder).verify()
    with suppress(ValueError):
        hotrow.load_checkpoint(folder, collection(), random=False)


@fuzzed
@given(data=st.data(), which=st.integers(0, 1))
def test_manifests(
    data: st.DataObject, which: int, folders: tuple[Path, Path], largest: list[int]
) -> None:
    folder = folders[which]
    path = folder / "checkpoint.json"
    with replaced(path, sealed(changed(json.loads(path.read_text()), data))):
        try_to_load(folder)
    with replaced(path, damaged(path.read_bytes(), data)), suppress(ValueError):
        read_manifest(folder)


@fuzzed
@given(data=st.data(), which=st.integers(0, 1))
def test_shards_whose_checksums_were_made_to_fit(
    data: st.DataObject, which: int, folders: tuple[Path, Path], largest: list[int]
) -> None:
    folder = folders[which]
    manifest = json.loads((folder / "checkpoint.json").read_text())
    files = [manifest["dense"], manifest["state_tensors"], *manifest["tables"][0]["shards"]]
    file = data.draw(st.sampled_from(files))["file"]
    text = (folder / file).read_bytes()
    length = int.from_bytes(text[:8], "little")
    if data.draw(st.booleans()):  # another header, in its form
        header = json.dumps(changed(json.loads(text[8 : 8 + length]), data)).encode()
        text = len(header).to_bytes(8, "little") + header + text[8 + length :]
    else:
        text = damaged(text, data)
    with forged(folder, file, text):
        try_to_load(folder)


@fuzzed
@given(data=st.data())
def test_states_whose_checksums_were_made_to_fit(
    data: st.DataObject, folders: tuple[Path, Path], largest: list[int]
) -> None:
    folder = folders[0]
    text = json.dumps(changed(json.loads((folder / "state.json").read_text()), data)).encode()
    with forged(folder, "state.json", text):
        with suppress(ValueError):
            hotrow.load_checkpoint(folder, collection())
        for draw in (torch.rand, np.random.rand):  # from whatever was loaded
            draw(700)


def test_a_part_without_a_name_is_refused(folders: tuple[Path, Path]) -> None:
    tree = json.loads((folders[0] / "state.json").read_text())
    next(entry for entry in tree["table"] if entry[0] == "parts")[1] = {"table": [[None, 1]]}
    with (
        forged(folders[0], "state.json", json.dumps(tree).encode()),
        pytest.raises(ValueError, match="a part of it has no name"),
    ):
        hotrow.load_checkpoint(folders[0], collection())


@fuzzed
@given(text=st.binary(max_size=300))
def test_heads_of_any_bytes(text: bytes, largest: list[int], tmp_path: Path) -> None:
    with suppress(ValueError):
        read_head(io.BytesIO(text), len(text))
    (tmp_path / "x").write_bytes(text)
    with suppress(ValueError):
        read_tensors(tmp_path / "x", remedy="")


@fuzzed
@given(found=odd)
def test_values_of_any_form(found: Any) -> None:
    with suppress(ValueError):
        unpack(found, {"x": torch.ones(1)})


@fuzzed
@given(data=st.data())
def test_run_files(data: st.DataObject, tmp_path: Path) -> None:
    keys = {"run": {"name": "a"}, "data": {"rows": [4]}, "embedding": {"budget": "1%"}}
    found = changed(keys, data)
    with suppress(ValueError):
        toml.build(RunConfig, found if isinstance(found, dict) else {}, where="x", section="")
    (tmp_path / "x.toml").write_bytes(data.draw(st.binary(max_size=60)))
    with suppress(ValueError):
        toml.read(tmp_path / "x.toml")


FORMS = ("safetensors", "parquet", "npz")


@pytest.fixture(scope="module")
def exported(folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table in each of the forms that others read."""
    root = tmp_path_factory.mktemp("exported")
    for to in FORMS:
        export_tables(folders[0], root / to, to=to)
    weights = np.ones((60, 4), np.float32)
    np.savez_compressed(root / "compressed.npz", **{"embedding_bags.item.weight": weights})
    return root


@fuzzed
@given(data=st.data(), to=st.sampled_from(FORMS))
def test_records_of_exports(data: st.DataObject, to: str, exported: Path) -> None:
    record = exported / to / "export.json"
    verify_export(record.parent)
    text = json.dumps(changed(json.loads(record.read_text()), data)).encode()
    for contents in (text, damaged(record.read_bytes(), data)):
        with replaced(record, contents), suppress(ValueError):
            verify_export(record.parent)


@fuzzed
@given(data=st.data(), which=st.integers(0, 3))
def test_tables_of_others(
    data: st.DataObject, which: int, exported: Path, largest: list[int]
) -> None:
    tables = [path for path in exported.rglob("*") if path.suffix[1:] in FORMS]
    path = sorted(path for path in tables if path.stem != "dense")[which]
    with replaced(path, damaged(path.read_bytes(), data)), suppress(ValueError):
        import_tables(path, collection())
