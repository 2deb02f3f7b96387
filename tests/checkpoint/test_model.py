"""A saved model is the same to the bit when it is loaded; what is damaged is refused, and named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import hotrow
from hotrow.run.job import same_bits
from hotrow.support.files import Disk, checksum
from model_cases import MODEL_CASES, ModelCase
from saved_training import on_gpu

Bag = hotrow.EmbeddingBagConfig
TABLES = (Bag("item", 2500, 8, ["item", "last"]), Bag("tag", 30, 4, ["tag"]))

FILE_SIZES = (40_000, 9_000)  # ends of shards are no ends of pieces


class Small(nn.Module):
    """Two widths, a normalisation with its counter, and weights that two layers share."""

    def __init__(
        self, tables: tuple[Bag, ...] = TABLES, *, hidden: int = 6, seed: int = 0, **options: Any
    ) -> None:
        super().__init__()
        torch.manual_seed(seed)
        options = {"strategy": "all-fast", "seed": seed, **options}
        self.embedding = hotrow.EmbeddingBagCollection(tables, hotrow.SGD(lr=0.1), **options)
        self.first = nn.Linear(20, hidden)
        self.norm = nn.BatchNorm1d(hidden)
        self.left, self.right = nn.Linear(hidden, 1).bfloat16(), nn.Linear(hidden, 1).bfloat16()
        self.right.weight = self.left.weight

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.norm(self.first(self.embedding(ids).values())).bfloat16()
        return self.left(hidden) + self.right(hidden)


def trained(**options: Any) -> Small:
    model = Small(**options)
    ids = torch.stack([torch.randint(rows, (64,)) for rows in (2500, 2500, 30)], dim=1)
    for _ in range(3):
        model(ids.to(model.embedding.device)).sum().backward()
    return model


def same(left: nn.Module, right: nn.Module) -> bool:
    one, other = left.state_dict(), right.state_dict()
    return one.keys() == other.keys() and all(
        same_bits(one[key].cpu(), other[key].cpu()) for key in one
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    hotrow.save_model(tmp_path / "model", trained())
    return tmp_path / "model"


def refused(folder: Path, model: nn.Module | None = None) -> str:
    """What is said; and nothing has changed."""
    model = model or Small(seed=1)
    before = {key: each.clone() for key, each in model.state_dict().items()}
    with pytest.raises(ValueError, match=r".") as error:
        hotrow.load_model(folder, model)
    after = model.state_dict()
    assert all(same_bits(after[key], each) for key, each in before.items())
    return str(error.value)


@pytest.mark.parametrize("case", MODEL_CASES.values(), ids=MODEL_CASES)
def test_every_kind_of_model_comes_back_to_the_bit(case: ModelCase, tmp_path: Path) -> None:
    model = case.build(case.embedding(hotrow.Adam(lr=0.1), strategy="lookahead", budget="60%"))
    for batch in hotrow.ahead(case.batches(3), model, ids=lambda batch: batch.sparse):
        model(batch).sum().backward()
    hotrow.save_model(tmp_path / "model", model)
    # Another budget, strategy and optimizer: weights are weights.
    other = case.build(
        case.embedding(seed=9, strategy="uncached", budget="70%"),
        generator=torch.Generator().manual_seed(9),
    )
    assert not same(model, other)
    hotrow.load_model(tmp_path / "model", other)
    assert same(model, other)
    other.embedding.check()  # type: ignore[operator, union-attr]


def test_row_state_stays_as_it_is(tmp_path: Path) -> None:
    def collection(seed: int) -> hotrow.EmbeddingBagCollection:
        rule = hotrow.Adagrad(lr=0.1)
        return hotrow.EmbeddingBagCollection(TABLES, rule, strategy="all-fast", seed=seed)

    one, other = collection(0), collection(1)
    for each in (one, other):
        each(torch.tensor([[3, 4, 5]])).values().sum().backward()
    before = other.row_access.copy_state("item")["sum"].clone()
    hotrow.save_model(tmp_path / "bare", one)  # a collection is a model, too
    hotrow.load_model(tmp_path / "bare", other)
    assert same(one, other)
    assert torch.equal(other.row_access.copy_state("item")["sum"], before)


def test_half_precision_counters_and_shared_weights_come_back(folder: Path) -> None:
    model = Small(seed=1)
    hotrow.load_model(folder, model)
    assert same(model, trained())
    assert model.norm.num_batches_tracked == 3
    assert model.left.weight.dtype == torch.bfloat16
    assert model.left.weight is model.right.weight


@pytest.mark.usefixtures("device_engine")
@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.slow), on_gpu("cuda")])
def test_rows_on_a_device_come_back(device: str, tmp_path: Path) -> None:
    def make(seed: int) -> hotrow.EmbeddingBagCollection:
        tables = (Bag("item", 300, 8, ["item"]),)
        return hotrow.EmbeddingBagCollection(
            tables, hotrow.SGD(lr=0.1), budget="60%", seed=seed, device=device
        )

    one, other = make(0), make(1)
    for each in (one, other):  # so that some rows have slots, and others not
        for ids in hotrow.ahead([torch.randint(300, (16, 1)) for _ in range(2)], each):
            each(ids).values().sum().backward()
    hotrow.save_model(tmp_path / "model", one)
    hotrow.load_model(tmp_path / "model", other)
    assert same(one, other)
    other.check()


def test_others_can_read_the_files(folder: Path) -> None:
    """They are safetensors, and the manifest says which rows are where."""
    state = trained().state_dict()
    dense = load_file(folder / "dense.safetensors")
    tables = json.loads((folder / "manifest.json").read_text())["tables"]
    assert dense.keys() | {table["key"] for table in tables} == state.keys()
    assert all(same_bits(each, state[key]) for key, each in dense.items())
    for table in tables:
        rows = [load_file(folder / shard["file"])["weights"] for shard in table["shards"]]
        assert same_bits(torch.cat(rows), state[table["key"]])
    assert [len(table["shards"]) for table in tables] == [2, 1]
    assert sorted(path.name for path in folder.iterdir()) == [
        "dense.safetensors", "manifest.json", "rows",
    ]  # fmt: skip


def test_tensors_that_are_not_known_are_left_aside(folder: Path) -> None:
    """So that row state can come to lie beside the weights."""
    manifest = json.loads((folder / "manifest.json").read_text())
    shard = manifest["tables"][1]["shards"][0]
    path = folder / shard["file"]
    save_file(load_file(path) | {"sum": torch.ones(30, 4)}, path)
    shard |= {"bytes": path.stat().st_size, "sha256": checksum(path)}
    (folder / "manifest.json").write_text(json.dumps(manifest | {"step": 7}))
    model = Small(seed=1)
    hotrow.load_model(folder, model)
    assert same(model, trained())


def test_a_table_is_never_in_memory_as_a_whole(tmp_path: Path, largest: list[int]) -> None:
    model = trained(budget="30%", strategy="lookahead")
    largest[0] = 0
    hotrow.save_model(tmp_path / "model", model)
    hotrow.load_model(tmp_path / "model", model)
    assert 0 < largest[0] <= 4 * 1024 * 8 < 4 * 2500 * 8


def flip(path: Path, place: int) -> None:
    found = bytearray(path.read_bytes())
    found[place] ^= 1
    path.write_bytes(found)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-4])


def lead_out(path: Path) -> None:
    path.rename(path.parents[2] / "elsewhere")
    path.symlink_to(path.parents[2] / "elsewhere")


DAMAGE: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "number": ("rows/000-00001.safetensors", lambda path: flip(path, -1), "SHA-256 differs"),
    "header": ("rows/001-00000.safetensors", lambda path: flip(path, 20), "SHA-256 differs"),
    "dense": ("dense.safetensors", lambda path: flip(path, -1), "SHA-256 differs"),
    "cut": ("rows/000-00000.safetensors", cut, "bytes instead of"),
    "gone": ("rows/000-00001.safetensors", Path.unlink, "is missing"),
    "link": ("rows/000-00001.safetensors", lead_out, "leads out of its folder"),
}


@pytest.mark.parametrize(("name", "spoil", "message"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_is_named(
    folder: Path, name: str, spoil: Callable[[Path], object], message: str
) -> None:
    spoil(folder / name)
    told = refused(folder)
    assert str(folder / name) in told
    assert message in told


Changes = dict[str, tuple[Callable[[dict[str, Any]], object], str]]
WRONG: Changes = {
    "newer": (lambda m: m.update(format=3), "a newer hotrow: its format is 3, and this one reads"),
    "format": (lambda m: m.update(format="1"), "format must be a whole number"),
    "up": (lambda m: m["dense"].update(file="../model/dense.safetensors"), "no file inside"),
    "absolute": (lambda m: shard(m).update(file="/etc/passwd"), "no file inside the folder"),
    "twice": (lambda m: shard(m).update(file="dense.safetensors"), "named twice"),
    "gap": (lambda m: shard(m, 1).update(first=1300), "begins with row 1,300"),
    "rows": (lambda m: m["tables"][0].update(rows=10**9), "has 1,000,000,000 rows, 2,500 of them"),
    "many": (lambda m: shard(m).update(rows=10**12), "too few for 1,000,000,000,000 rows"),
    "less": (lambda m: m["tables"][0]["shards"].pop(), "has 2,500 rows, 1,250 of them in shards"),
    "negative": (
        lambda m: shard(m).update(bytes=-1),
        "tables[0].shards[0].bytes: expected a whole number >= 0",
    ),
    "no dense": (lambda m: m.pop("dense"), "it lacks dense"),
    "narrow": (lambda m: m["tables"][1].update(dim=2), "is saved as [30, 2], and the model's is"),
}


def shard(manifest: dict[str, Any], place: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = manifest["tables"][0]["shards"][place]
    return found


@pytest.mark.parametrize(("change", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_manifest_is_refused(
    folder: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))
    assert message in refused(folder)


def test_a_shard_of_another_shape_than_its_manifest_says_is_refused(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    path = folder / shard(manifest)["file"]
    save_file({"weights": torch.zeros(1251, 8)}, path)
    shard(manifest).update(bytes=path.stat().st_size, sha256=checksum(path))
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert "holds F32 [1251, 8] as weights, and by the manifest F32 [1250, 8]" in refused(folder)


def test_a_folder_without_a_manifest_is_no_model(folder: Path, tmp_path: Path) -> None:
    for text, message in (("{", "is not valid JSON"), ("[]", "format must be a whole number")):
        (folder / "manifest.json").write_text(text)
        assert message in refused(folder)
    (folder / "manifest.json").unlink()
    assert "holds no model: it has no manifest.json" in refused(folder)
    assert "holds no model" in refused(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            {"tables": (Bag("item", 2400, 8, ["item", "last"]), TABLES[1])},
            "item.weight is saved as [2500, 8], and the model's is [2400, 8]",
        ),
        (
            {"tables": (TABLES[0], Bag("tags", 30, 4, ["tag"]))},
            "tag.weight [30, 4] is saved alone; embedding.embedding_bags.tags.weight [30, 4] is "
            "not saved",
        ),
        ({"hidden": 7}, "first.weight is saved as [6, 20], and the model's is [7, 20]"),
        ({"hidden": 7}, "; 5 more"),
    ],
)
def test_a_model_of_another_shape_is_told_what_differs(
    folder: Path, other: dict[str, Any], message: str
) -> None:
    told = refused(folder, Small(seed=1, **other))
    assert "is of another model" in told
    assert message in told


@pytest.mark.parametrize("name", ["dense", "000-00001", "001-00000", "manifest", "Ctrl-C"])
def test_a_save_that_fails_leaves_nothing_behind(
    name: str, tmp_path: Path, use_disk: Callable[[type[Disk]], None]
) -> None:
    class Full(Disk):
        """No room for one file."""

        def open(self, path: Path) -> Any:
            if name in path.name:
                return Path("/dev/full").open("wb", buffering=0)
            if name == "Ctrl-C" and "000-00001" in path.name:
                raise KeyboardInterrupt
            return super().open(path)

    use_disk(Full)
    message = "^$" if name == "Ctrl-C" else rf"the disk is full: .*{name}.* was not written"
    with pytest.raises((OSError, KeyboardInterrupt), match=message):
        hotrow.save_model(tmp_path / "model", trained())
    assert list(tmp_path.iterdir()) == []


def test_a_saved_model_is_never_replaced(folder: Path) -> None:
    with pytest.raises(ValueError, match="holds a model already"):
        hotrow.save_model(folder, Small())
    model = Small(seed=1)
    hotrow.load_model(folder, model)
    assert same(model, trained())


def test_what_is_no_tensor_is_refused(tmp_path: Path) -> None:
    class Strange(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"a": 1}

        def set_extra_state(self, state: Any) -> None: ...

    with pytest.raises(
        ValueError, match="_extra_state has the type dict, and only tensors are saved"
    ):
        hotrow.save_model(tmp_path / "model", Strange(2, 2))
    assert list(tmp_path.iterdir()) == []
