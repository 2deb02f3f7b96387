"""A run on data that was prepared before."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from clicks import taobao_lines, write
from commands import events, refused, settings, succeeds
from hotrow import EmbeddingBagCollection, EmbeddingBagConfig, RowWiseAdagrad
from hotrow.data.prepared import Prepared
from hotrow.engine.profile import check_profile, hottest
from hotrow.inputs.tree import tensors_in
from hotrow.models import TBSM
from hotrow.run.config import DataSection, load
from hotrow.run.files import read_run, read_steps
from hotrow.run.job import Job, build, open_data
from hotrow.run.source import open_samples
from hotrow.study.lookups import OfRun
from hotrow.support.records import RunRecord
from hotrow.systems.calibrate import AccessCounts


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder `out` with a table that two columns read, and `taobao` with sequences."""
    here = tmp_path_factory.mktemp("prepared")
    lines = ["label,price,shop,item,last,other"]
    for i in range(400):
        lines.append(f"{i * 7 % 3 % 2},{i % 10},s{i % 5},i{i % 300},i{i * 3 % 300},o{i % 7}")
    (here / "clicks.csv").write_text("\n".join(lines) + "\n")
    (here / "tiny.csv").write_text("\n".join(lines[:6]) + "\n")
    (here / "columns.toml").write_text(
        'label = "label"\ndense = ["price"]\ncategories = ["item", "shop", "last", "other"]\n'
        '[tables]\nlast = "item"\n'
    )
    for name, out in (("clicks", "out"), ("tiny", "tiny")):
        columns = ("--columns", here / "columns.toml")
        succeeds("prepare", "csv", here / f"{name}.csv", *columns, "--out", here / out)
    write(here / "UserBehavior.csv", taobao_lines(200), separator=",")
    succeeds("prepare", "taobao", here / "UserBehavior.csv", "--out", here / "taobao")
    return here


@pytest.fixture
def folder(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The prepared folder `out`, in the current folder."""
    monkeypatch.chdir(tmp_path)
    for name in ("out", "tiny", "taobao"):
        Path(name).symlink_to(prepared / name)
    return Path("out")


@pytest.fixture
def taobao(folder: Path) -> Path:
    return Path("taobao")


def train(*given: str) -> RunRecord:
    succeeds("train", *settings(*given))
    return read_run("runs/default")


CHECKED = "training.check_equality=true"
CLICKS = ("data.kind=prepared", "data.folder=out", "data.batch_size=32", "embedding.budget=60%")


def test_features_of_one_table_come_side_by_side(folder: Path) -> None:
    config = load(overrides=["data.kind=prepared", "data.folder=out", "data.batch_size=50"])
    samples = open_samples(config.data, pin_memory=False)
    names = [names for _, names in samples.tables.values()]
    assert names == [["item", "last"], ["shop"], ["other"]]
    assert samples.num_dense == 1
    assert samples.lookups == {"item": 1, "last": 1, "shop": 1, "other": 1}
    batches = list(samples.batches(2 * samples.batches_per_epoch))
    assert len(batches) == 2 * samples.batches_per_epoch
    for batch in batches:
        assert bool((batch.sparse.amax(0) <= torch.tensor([300, 300, 5, 7])).all())
        assert batch.sparse[:, 2].unique().numel() <= 5
    assert sum(len(each) for each in samples.split("validation").batches) > 0
    assert sum(len(each) for each in samples.split("test").batches) > 0


def test_a_run_on_prepared_data_equals_all_fast(folder: Path) -> None:
    given = ("training.epochs=3", "training.eval_every=5", "model.embedding_dim=4", CHECKED)
    result = succeeds("train", *settings(*CLICKS, *given))
    assert "3 tables of out, " in result.output
    run = read_run("runs/default")
    assert run.summary.equal_to_all_fast is True
    assert run.summary.steps == len(list(read_steps("runs/default"))) > 20
    assert run.evaluations[0].samples != 0


SEQUENCES = ("data.kind=prepared", "data.folder=taobao", "model.kind=tbsm", "model.num_steps=5")


def test_a_tbsm_on_taobao_equals_all_fast(taobao: Path) -> None:
    given = ("data.batch_size=32", "embedding.budget=60%", "training.steps=20", CHECKED)
    run = train(*SEQUENCES, *given)
    assert run.summary.equal_to_all_fast is True
    assert run.evaluations[-1].samples == Prepared(taobao).samples("test")


@pytest.mark.gpu
def test_on_a_gpu_a_tbsm_on_taobao_equals_all_fast_and_batches_are_page_locked(
    taobao: Path,
) -> None:
    given = (*SEQUENCES, "data.batch_size=32", "embedding.budget=60%", "run.device=cuda")
    job = build(load(overrides=given))
    assert all(each.is_pinned() for each in tensors_in(next(job.samples.batches(1))))
    run = train(*given, "training.epochs=3", "training.eval_every=9", CHECKED)
    assert run.summary.equal_to_all_fast is True


def test_splits_of_generated_data_share_no_batch() -> None:
    small = ["data.samples=640", "data.batch_size=64", "data.eval_batches=3", "data.scale=1e-4"]
    samples = open_data(load(overrides=small))
    splits = [list(samples.split(name).batches) for name in ("train", "validation", "test")]
    assert [len(split) for split in splits] == [10, 3, 3]
    seen = {tuple(batch.label.tolist()) for split in splits for batch in split}
    assert len(seen) == 16


def test_a_tbsm_has_a_row_more_for_what_there_is_not(taobao: Path) -> None:
    rows = Prepared(taobao).table_rows
    small = [*SEQUENCES, "data.batch_size=40", "embedding.budget=60%"]
    job = build(load(overrides=small))
    assert isinstance(job.model, TBSM)
    assert job.model.num_steps == 5
    assert job.model.features == ("user", "item", "category")
    for table in job.embedding.tables:
        assert table.num_embeddings == rows[table.name] + 1
        assert table.padding_idx == rows[table.name]
    assert job.samples.lookups == {"user": 6, "item": 6, "category": 6}
    batch = next(job.samples.batches(1))
    assert batch.dense.shape == (40, 6, 2)
    assert job.model.bottom[0].in_features == job.samples.num_dense == 2
    without = build(load(overrides=[*small, "data.dense=[]"]))
    assert next(without.samples.batches(1)).dense.shape == (40, 6, 1)
    assert without.model.bottom[0].in_features == 1


def test_a_model_of_clicks_says_that_it_sums_histories(taobao: Path) -> None:
    config = load(overrides=[*CLICKS, "data.folder=taobao"])
    with pytest.warns(UserWarning, match="history_item and history_category are summed") as told:
        job = build(config)
    assert 'model.kind = "tbsm"' in str(told[0].message)
    assert job.embedding.features == (
        "user", "item", "history_item", "category", "history_category",
    )  # fmt: skip


def test_counted_clicks_read_rows_as_often_as_the_folder(folder: Path) -> None:
    data = Prepared(folder)
    section = DataSection(kind="counted", folder="out", batch_size=500, samples=20_000)
    samples = open_samples(section, pin_memory=False)
    assert {name: rows for name, (rows, _) in samples.tables.items()} == data.table_rows
    assert samples.lookups == {"item": 2, "shop": 1, "other": 1}  # two columns read items
    assert samples.num_dense == 1
    sparse = next(samples.batches(1)).sparse
    for ids, name in zip(sparse.values().split([1000, 500, 500]), sparse.keys(), strict=True):
        counts = torch.from_numpy(np.array(data.counts(name)))
        read = torch.bincount(ids, minlength=len(counts))
        assert not read[counts == 0].any()
        shares = read / read.sum() - counts / counts.sum()
        assert float(shares.abs().max()) < 0.06


def test_counted_data_train_and_are_simulated(folder: Path) -> None:
    data = ("data.kind=counted", "data.folder=out", "data.batch_size=64", "data.samples=1280")
    model = ("embedding.budget=60%", "model.embedding_dim=4")
    assert train(*data, *model, "training.epochs=2", CHECKED).summary.equal_to_all_fast is True
    words = ("--json", "--batches", "4", "--warm-up", "2")
    assert events(succeeds("simulate", *settings(*data), *words))[0]["lookups"] == 4 * 64 * 4


def test_counted_sequences_keep_users_for_all_steps(taobao: Path) -> None:
    config = load(
        overrides=[
            "data.kind=counted", "data.folder=taobao", "data.batch_size=64", "data.samples=640",
            "model.kind=tbsm", "model.num_steps=5", "embedding.profile=true", "training.steps=4",
            "embedding.budget=60%",
        ]
    )  # fmt: skip
    job = build(config)
    user, item, category = next(job.samples.batches(1)).sparse.values().view(3, 64, 6)
    rows = Prepared(taobao).table_rows
    assert bool(((user == user[:, -1:]) | (user == rows["user"])).all())
    assert not bool(((item == item[:, -1:]) | (item == rows["item"])).all())
    assert int(category.max()) == rows["category"]
    assert len(list(job.train())) == 4
    trace = OfRun(config.data, steps=5)
    assert trace.num_rows == sum(rows.values())
    ids = next(trace.batches(1)).rows
    lengths = next(job.samples.batches(1)).lengths
    assert len(ids) == 3 * int((lengths + 1).sum())
    assert int(ids.max()) < trace.num_rows


def test_a_profile_is_what_the_shards_count(folder: Path) -> None:
    data = Prepared(folder)
    profile = data.profile()
    columns: dict[str, list[np.ndarray]] = {name: [] for name in data.table_rows}
    for shard in data.shards("train"):
        for place, feature in enumerate(data.schema.single):
            columns[feature.table].append(shard.ids[:, place])
    tables = [EmbeddingBagConfig(name, rows, 4, [name]) for name, rows in data.table_rows.items()]
    check_profile(profile, tables)
    for name, rows in data.table_rows.items():
        counts = np.bincount(np.concatenate(columns[name]), minlength=rows)
        assert profile[name][0].tolist() == np.flatnonzero(counts).tolist()
        assert profile[name][1].tolist() == counts[counts > 0].tolist()
    embedding = EmbeddingBagCollection(
        tables, RowWiseAdagrad(lr=0.1), budget="60%", profile=profile
    )
    (group,) = embedding.groups
    every = np.concatenate(
        [np.bincount(np.concatenate(columns[name]), minlength=n)
         for name, n in data.table_rows.items()]
    )  # fmt: skip
    hot = hottest(profile, group.layout, 20)
    assert sorted(every[hot.numpy()])[::-1] == sorted(every)[::-1][:20]


def test_a_run_pins_by_the_counts_of_its_folder(folder: Path) -> None:
    given = (*CLICKS, "embedding.profile=true", "model.embedding_dim=4")
    (group,) = build(load(overrides=given)).embedding.groups
    assert group.settings.profile.keys() == Prepared(folder).table_rows.keys()
    assert train(*given, CHECKED).summary.equal_to_all_fast is True


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["data.kind=prepared"], 'kind "prepared" or "counted" and folder belong together'),
        (["data.folder=out"], 'kind "prepared" or "counted" and folder belong together'),
        (["data.kind=prepared", "data.folder=nowhere"], "nowhere does not exist"),
        (["data.kind=prepared", "data.folder=out/manifest.json"], "so it is no prepared data"),
        ([f"run.seed={2**63}"], "[run] seed must be below 2**63"),
        (
            ["data.kind=prepared", "data.folder=out", "data.batch_size=4096"],
            "a batch of 4,096 cannot be filled by",
        ),
        (
            ["data.kind=prepared", "data.folder=tiny", "data.batch_size=2"],
            "tiny holds no sample back for test; prepare more of them",
        ),
        (
            ["data.kind=prepared", "data.folder=out", "model.kind=tbsm"],
            "out has no sequences: its features are item, shop, last, other. A model like tbsm",
        ),
        (["data.kind=counted", "data.folder=out", "model.kind=tbsm"], "out has no sequences"),
        (["data.constant=['cat_0']"], "is for sequences, and this model learns from clicks"),
        (["model.kind=tbsm", "data.lookups=2"], "lookups must be 1 where steps are generated"),
        (["model.kind=tbsm", "data.constant=['shop']"], "constant names 'shop'"),
        (["embedding.profile=true"], "generated data have no counts"),
        (
            ["data.kind=prepared", "data.folder=out", "data.dense=['age']"],
            "the data has no column of numbers 'age'; it has price",
        ),
        (
            ["data.kind=counted", "data.folder=out", "data.dense=['age']"],
            "the data has no column of numbers 'age'; it has price",
        ),
    ],
)
def test_data_that_do_not_fit_are_one_sentence(
    folder: Path, given: list[str], message: str
) -> None:
    assert message in refused("train", *settings(*given))


def job_of(strategy: str, *given: str, samples: Any = None) -> Job:
    small = ("embedding.budget=90%", "training.check_equality=false")
    overrides = [*CLICKS, *small, f"embedding.strategy={strategy}", *given]
    return build(load(overrides=overrides), samples)


@pytest.mark.parametrize("length", ["training.epochs=2", "training.steps=5"])
@pytest.mark.filterwarnings("ignore")  # so few samples are not what FAE is made for
def test_fae_trains_as_many_samples_of_a_folder_as_others(folder: Path, length: str) -> None:
    plain, fae = (job_of(name, length) for name in ("static", "fae"))
    samples = [record.samples for record in plain.train()]
    assert set(samples) == {32}  # the rest, which does not fill a batch, is not trained
    others = [record.samples for record in fae.train()]
    assert sum(others) == sum(samples)
    assert fae.known_steps == len(others)


@pytest.mark.parametrize("name", ["fae", "lookahead+slipstream", "hotline"])
@pytest.mark.filterwarnings("ignore")
def test_systems_take_the_counts_of_a_folder(folder: Path, name: str) -> None:
    job = job_of(name, "training.epochs=2", "embedding.profile=true")
    system: Any = job.trainer.system
    losses = [record.loss for record in job.train()]
    if name == "fae":
        assert system.record.counted_samples == 0
        assert "of the accesses by a profile" in system.described()
        counts = AccessCounts.of_profile(job.embedding.tables, Prepared(folder).profile())
        assert 0 < system.record.num_hot_rows <= int((counts.flat > 0).sum())
    elif name == "hotline":  # which pins what it has learned, and is exact whatever was before
        assert system.record.learned[0].why == "learned"
        plain = job_of("all-fast", "training.epochs=2")
        assert losses == pytest.approx([record.loss for record in plain.train()], rel=1e-4)
    else:
        assert sum(system.record.hot_rows.values()) > 4 * 32  # more than a batch can read


@pytest.mark.parametrize("name", ["fae", "lookahead+slipstream"])
def test_without_samples_to_evaluate_systems_go_on_and_say_so(folder: Path, name: str) -> None:
    samples = open_samples(load(overrides=CLICKS).data, pin_memory=False)

    def none_held_back(name: str, *, whole: bool = False) -> Any:
        raise ValueError("out holds no sample back for validation; prepare more of them")

    samples.split = none_held_back  # type: ignore[method-assign]
    with pytest.warns(UserWarning, match="holds no sample back for validation"):
        job = job_of(name, samples=samples)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert sum(record.samples for record in job.train()) > 0
    said = "there is no test loss" if name == "fae" else "Slipstream has no test= batches"
    assert any(said in str(each.message) for each in told)


@pytest.mark.parametrize("pin", ["ranks", "learned"])
def test_a_folder_is_simulated_as_it_is_read(folder: Path, pin: str) -> None:
    data = ("data.kind=prepared", "data.folder=out", "data.batch_size=16")
    words = ("--json", "--batches", "30", "--warm-up", "5", "--slots", "60", "--pin", pin)
    lines = events(succeeds("simulate", *settings(*data), *words))
    assert [line["strategy"] for line in lines][-2:] == ["lookahead", "belady"]
    # More batches than an epoch has, each with a lookup of four features for every sample.
    assert all(line["lookups"] == 30 * 16 * 4 for line in lines)
    fetched = {line["strategy"]: line["fetched_rows"] for line in lines}
    assert fetched["belady"] <= fetched["lru"] < fetched["uncached"]
