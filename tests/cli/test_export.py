"""Tables leave and come back; a served model scores without hotrow; what is damaged is found."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from safetensors.torch import load_file, save_file

import hotrow
from commands import SMALL_SETTINGS, refused, settings, spoil, succeeds
from commands import hotrow as command
from hotrow.checkpoint.folder import saved_in
from hotrow.checkpoint.tables import export_tables, import_tables
from hotrow.run.job import same_bits
from hotrow.run.open_run import open_trained

SMALL = (
    *SMALL_SETTINGS, "data.samples=64", "embedding.strategy=all-fast", "checkpoint.every_steps=2",
    "checkpoint.full_every=2",
)  # fmt: skip
SHAPES = {
    "dlrm": (),
    "dcnv2": ("model.cross_rank=4", "data.lookups=[3, 1, 2]"),
    "deepfm": ("model.deep=[8]",),
    "tbsm": ("model.num_steps=3",),
}
pytestmark = pytest.mark.usefixtures("folder")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of all kinds of models."""
    folder = tmp_path_factory.mktemp("export")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for kind, given in SHAPES.items():
            named = (f"run.name={kind}", f"model.kind={kind}")
            succeeds("train", *settings(*SMALL, *named, *given))
    return folder / "runs"


@pytest.fixture
def run(models: Path, folder: Path) -> Path:
    """A copy of the run of a DLRM, as runs/dlrm."""
    return Path(shutil.copytree(models / "dlrm", folder / "runs" / "dlrm"))


def collection(rows: int = 10, **options: Any) -> hotrow.EmbeddingBagCollection:
    table = hotrow.EmbeddingBagConfig("item", rows, 4, ["item"])
    return hotrow.EmbeddingBagCollection([table], hotrow.Adagrad(), strategy="all-fast", **options)


@pytest.mark.parametrize("to", ["safetensors", "parquet", "npz"])
def test_tables_leave_and_come_back(to: str, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotrow.checkpoint.tensors.PIECE_BYTES", 999)
    newest = saved_in(run / "checkpoints")[-1]
    assert (json.loads((newest / "checkpoint.json").read_text())["parent"]) is not None
    succeeds("export", newest, "--to", to, "--out", "tables")
    state = open_trained("dlrm").model.state_dict()
    key = "embedding.embedding_bags.cat_0.weight"
    if to == "npz":
        assert np.array_equal(np.load("tables/tables.npz")[key], state[key].numpy())
    elif to == "parquet":
        table = pyarrow.parquet.read_table(f"tables/000-{key}.parquet")
        assert table["row"].to_pylist() == list(range(400))
        assert table["weight"].to_pylist() == state[key].tolist()
    else:
        assert same_bits(load_file(f"tables/000-{key}.safetensors")[key], state[key])
    assert same_bits(
        load_file("tables/dense.safetensors")["bottom.0.weight"], state["bottom.0.weight"]
    )
    empty = hotrow.EmbeddingBagCollection(
        [
            hotrow.EmbeddingBagConfig(f"cat_{i}", n, 4, [f"f{i}"])
            for i, n in enumerate((400, 60, 5))
        ],
        hotrow.SGD(lr=0.1),
        budget="60%",
        seed=9,
    )
    # By another model's name for it, which ends in the same.
    other = torch.nn.ModuleDict({"embedding": empty})
    assert import_tables("tables", other)[0] == key
    for name, weight in other.state_dict().items():
        assert same_bits(weight, state[name])
    assert "is not empty" in refused("export", "dlrm", "--to", to, "--out", "tables")


def test_a_saved_model_is_exported_and_odd_files_are_read(folder: Path, run: Path) -> None:
    succeeds("export", "runs/dlrm/model", "--to", "npz", "--out", "a")
    model = collection()
    with pytest.raises(ValueError, match="there is no nowhere to read tables from"):
        import_tables("nowhere", model)
    with pytest.raises(ValueError, match="a has no table of this model"):
        import_tables("a", model)
    half = torch.randn(10, 4).half()
    save_file({"item": half, "other": torch.ones(1)}, folder / "half.safetensors")
    assert import_tables(folder / "half.safetensors", model) == ["embedding_bags.item.weight"]
    assert torch.equal(model.state_dict()["embedding_bags.item.weight"], half.float())
    np.savez(folder / "b.npz", **{"item.weight": np.ones((10, 4)), "text": np.array(["a"])})
    import_tables(folder / "b.npz", model)
    assert model.state_dict()["embedding_bags.item.weight"].eq(1).all()
    np.savez(folder / "c.npz", item=np.ones((9, 4)))
    with pytest.raises(ValueError, match=r"has \[9, 4\] as item, and the table is \[10, 4\]"):
        import_tables(folder / "c.npz", model)
    np.savez(folder / "d.npz", item=np.array([[None] * 4] * 10))  # which only a pickle can hold
    with pytest.raises(ValueError, match="no table of this model"):
        import_tables(folder / "d.npz", model)
    for name in ("e.npz", "e.safetensors", "e.parquet"):
        (folder / name).write_bytes(b"PK nonsense" * 9)
        with pytest.raises(ValueError, match=r"e\.\w+ cannot be read"):
            import_tables(folder / name, model)
    with pytest.raises(ValueError, match="tables are written as safetensors, parquet, npz"):
        export_tables(run, folder / "x", to="csv")


@pytest.mark.parametrize("spoilt", ["bottom.0.weight", "embedding.embedding_bags.cat_1.weight"])
def test_weights_that_are_not_finite_are_not_exported(spoilt: str, run: Path) -> None:
    job = open_trained("dlrm")
    if spoilt.startswith("bottom"):
        job.model.state_dict()[spoilt][0] = torch.nan
    else:
        rows = torch.zeros(1, 4)
        rows[0, 2] = torch.inf
        job.embedding.load_weights("cat_1", 7, rows)
    shutil.rmtree(run / "model")
    hotrow.save_model(run / "model", job.model)
    what = spoilt if spoilt.startswith("bottom") else f"row 7 of {spoilt}"
    for where in (("--to", "npz", "--out", "out"), ("--serve", "out")):
        error = refused("export", "dlrm", *where)
        assert f"runs/dlrm/model: {what} holds NaN or infinite values" in error
        assert "Take an earlier checkpoint" in error
        assert not any(Path("out").rglob("*"))
    assert f"runs/dlrm/model: {what} holds NaN or infinite values" in refused("verify", "dlrm")


@pytest.mark.parametrize("to", ["parquet", "npz"])
def test_an_export_that_fails_leaves_nothing(to: str, folder: Path) -> None:
    saved = hotrow.save_checkpoint(folder / "saved", collection(), step=1)
    (shard,) = (saved / "rows").iterdir()
    spoil(shard)  # which is known when all rows were read
    with pytest.raises(ValueError, match="it has changed since it was written"):
        export_tables(saved, "tables", to=to)
    assert not list(Path("tables").iterdir())


def test_rows_of_a_parquet_file_go_to_their_table_alone(folder: Path) -> None:
    tables = [hotrow.EmbeddingBagConfig(name, 4, 2, [name]) for name in ("a", "b")]
    model = hotrow.EmbeddingBagCollection(tables, hotrow.SGD(), strategy="all-fast")
    before = model.state_dict()
    for rows in ([-2, -1, 0, 1], [1, 2, 3, 4], [0, 1, 0, 1]):
        flat = pyarrow.array(np.ones(8, np.float32))
        weights = pyarrow.FixedSizeListArray.from_arrays(flat, 2)
        pyarrow.parquet.write_table(
            pyarrow.table({"row": rows, "weight": weights}), "b.parquet", row_group_size=2
        )
        with pytest.raises(ValueError, match=r"b\.parquet cannot be read: .*not all, in order"):
            import_tables("b.parquet", model)
        assert torch.equal(
            model.state_dict()["embedding_bags.a.weight"], before["embedding_bags.a.weight"]
        )


def test_an_array_that_says_it_has_a_long_header_takes_no_memory(folder: Path) -> None:
    model, size = collection(), 64 << 20
    with zipfile.ZipFile("x.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        begin = b"\x93NUMPY\x02\x00" + size.to_bytes(4, "little")
        archive.writestr("item.npy", begin + bytes(size), compresslevel=1)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"x\.npz cannot be read"):
            import_tables("x.npz", model)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


SERVED = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("hotrow", "safetensors", "triton"):
            raise ImportError(name)

sys.meta_path.insert(0, Refuse())
import importlib.util
import torch

for kind in sys.argv[1:]:
    spec = importlib.util.spec_from_file_location(kind, f"{kind}/serve.py")
    serve = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(serve)
    given = torch.load(f"{kind}/batch.pt", weights_only=True)
    print(repr(serve.load()(serve.Batch(*given)).tolist()))
"""


def test_served_models_need_no_hotrow(folder: Path, models: Path) -> None:
    expected = []
    for kind in SHAPES:
        succeeds("export", kind, "--serve", kind, "--runs", models)
        job = open_trained(kind, runs=models)
        batch = next(iter(job.samples.batches(1)))
        expected.append(job.trainer.predict(batch))
        sparse: Any = batch.sparse
        if not isinstance(sparse, torch.Tensor):
            sparse = (sparse.values(), sparse.offsets())
        given = (batch.dense, sparse, getattr(batch, "lengths", None))
        torch.save(given, folder / kind / "batch.pt")
    done = subprocess.run(
        [sys.executable, "-c", SERVED, *SHAPES], capture_output=True, text=True,
        env={"PATH": "/usr/bin", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for line, mine in zip(done.stdout.splitlines(), expected, strict=True):
        torch.testing.assert_close(torch.tensor(json.loads(line)), mine, rtol=1e-6, atol=1e-6)


def test_verify_says_what_is_whole_and_what_is_not(run: Path) -> None:
    text = succeeds("verify", "dlrm").stdout
    assert succeeds("verify", "runs").stdout == text
    assert text.count("checkpoint, ") == 2
    assert "runs/dlrm/model: model, 5 files, " in text
    (shard,) = (run / "model/rows").glob("000-*")
    spoil(shard)
    assert "has changed since it was written" in refused("verify", "runs/dlrm/model")
    newest = saved_in(Path("runs/dlrm/checkpoints"))[-1]
    facts = json.loads(succeeds("verify", newest, "--json").stdout)
    assert facts["kind"] == "checkpoint"
    assert facts["bytes"] == sum(p.stat().st_size for p in newest.rglob("*") if p.is_file())
    newest.joinpath("checkpoint.json").unlink()
    result = command("verify", "dlrm")
    assert result.exit_code == 2
    assert f"{newest} is no checkpoint: it has no checkpoint.json" in result.stderr
    assert "runs/dlrm/model/rows/000-00000.safetensors has changed" in result.stderr
    assert result.stdout.count("checkpoint, ") == 1
    assert "there is no folder nowhere" in refused("verify", "nowhere")
    Path("empty").mkdir()
    assert "holds no checkpoint, no model" in refused("verify", "empty")


EXPORTS = {
    "safetensors": (("--to", "safetensors", "--out", "out"), "exported tables, 4 files, "),
    "parquet": (("--to", "parquet", "--out", "out"), "exported tables, 4 files, "),
    "npz": (("--to", "npz", "--out", "out"), "exported tables, 2 files, "),
    "serve": (("--serve", "out"), "model to serve, 6 files, "),
}


@pytest.mark.parametrize("kind", EXPORTS)
def test_an_export_is_verified(kind: str, models: Path) -> None:
    words, what = EXPORTS[kind]
    succeeds("export", "dlrm", *words, "--runs", models)
    text = succeeds("verify", "out").stdout
    assert text.startswith(f"out: {what}")
    assert text.endswith(", as written\n")
    facts = json.loads(succeeds("verify", "out", "--json").stdout)
    files = [path for path in Path("out").rglob("*") if path.is_file()]
    record = next(path for path in files if path.name == "export.json")
    files.remove(record)
    assert facts["files"] == len(files)
    assert facts["bytes"] == sum(path.stat().st_size for path in files)
    for path in files:
        data = path.read_bytes()
        for spoilt in (data[:-1], data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]):
            path.write_bytes(spoilt)
            error = refused("verify", "out")
            assert str(path) in error
            assert "export it again" in error
        path.unlink()
        assert f"{path} is missing" in refused("verify", "out")
        path.write_bytes(data)
    succeeds("verify", "out")
    written = json.loads(record.read_text())
    written["tables"][0]["rows"] += 1
    record.write_text(json.dumps(written))
    assert "and [401, 4] was written; export it again" in refused("verify", "out")
    record.write_text(record.read_text()[:-30])
    assert "export.json is not valid JSON" in refused("verify", "out")


@pytest.mark.parametrize("kind", EXPORTS)
def test_an_export_without_checksums_is_read(kind: str, models: Path) -> None:
    """As earlier versions have written it."""
    words, what = EXPORTS[kind]
    succeeds("export", "dlrm", *words, "--runs", models)
    Path("out/export.json").unlink()
    text = succeeds("verify", "out").stdout
    assert text.startswith(f"out: {what.split(',')[0]}, ")
    assert "there are no checksums to compare" in text
    tables = [path for path in Path("out").rglob("*") if path.suffix in (".npz", ".parquet")]
    tables = tables or [*Path("out").rglob("00*.safetensors")]
    table = tables[0]
    data = table.read_bytes()
    table.write_bytes(data[:-100])
    assert f"{table} cannot be read" in refused("verify", "out")
    if table.suffix == ".safetensors":
        table.write_bytes(data[:-4] + np.float32(np.nan).tobytes())
        assert "is not finite; export it again" in refused("verify", "out")
    table.write_bytes(data)
    dense = Path("out/dense.safetensors")
    dense.write_bytes(dense.read_bytes()[:-4])
    assert f"{dense} cannot be read" in refused("verify", "out")


def test_an_export_needs_a_format_a_folder_and_a_run() -> None:
    assert "say what is wanted" in refused("export", "dlrm")
    assert "there is no run nothing" in refused("export", "nothing", "--to", "npz", "-o", "x")
    Path("runs").mkdir()
    assert "say where the tables go" in refused("export", "runs", "--to", "npz")
