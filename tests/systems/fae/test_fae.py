"""FAE in a trainer: every sample once an epoch, and in its order the bits of all-fast."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hotrow
from builders import RULES
from click_models import ClickModel, same_bits, trainer_of
from hotrow.data import ClickBatch, Loader
from hotrow.data.sources import Samples
from hotrow.engine.host.rows import HostRows
from hotrow.inputs.hotset import popular
from hotrow.systems.calibrate import RandEmBox
from hotrow.systems.fae.fae import FAE
from hotrow.systems.slipstream.skip import Skip
from hotrow.systems.slipstream.slipstream import Slipstream

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZE, ROWS = 16, (400, 60)
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}  # as in tests/contracts.py


class Model(ClickModel):
    def __init__(
        self,
        rule: str = "adagrad",
        strategy: str = "static",
        *,
        slots: int = 250,
        dims: tuple[int, int] = (4, 4),
        rows: tuple[int, int] = ROWS,
        device: torch.device | str = "cpu",
    ) -> None:
        tables = [
            hotrow.EmbeddingBagConfig("a", rows[0], dims[0], ["a", "c"]),
            hotrow.EmbeddingBagConfig("b", rows[1], dims[1], ["b"]),
        ]
        shares = [hotrow.Share(slots, buffer_rows=64, dense_map=True)] * len(set(dims))
        embedding = hotrow.EmbeddingBagCollection(
            tables,
            RULES[rule],
            hotrow.Budget(tuple(shares), window_bytes=1 << 20),
            strategy=strategy,
            device=device,
            seed=3,
        )
        super().__init__(embedding, num_dense=2)


def clicks(count: int, seed: int = 1, *, skew: float = 6.0, jagged: bool = False) -> list[Any]:
    """Batches whose samples are numbered in `dense`, so that each can be found again."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for number in range(count):
        size = SIZE if number < count - 1 else SIZE // 2
        many = 3 if jagged else 1
        columns = [
            (torch.rand(size * many, generator=generator) ** skew * rows).long()
            for rows in (ROWS[0], ROWS[1], ROWS[0])
        ]
        sparse: Any = torch.stack(columns, dim=1)
        if jagged:
            lengths = torch.randint(0, many + 1, (3 * size,), generator=generator)
            ends = lengths.view(3, size).sum(1)
            values = torch.cat([c[:n] for c, n in zip(columns, ends.tolist(), strict=True)])
            sparse = hotrow.KeyedJaggedTensor(["a", "c", "b"], values % ROWS[1], lengths=lengths)
        else:
            sparse = sparse[:, [0, 2, 1]]
        dense = torch.stack(
            [torch.arange(size) + 1000.0 * number, torch.rand(size, generator=generator)], dim=1
        )
        dense[:, 0] /= 1e5
        label = torch.randint(0, 2, (size,), generator=generator).float()
        found.append(ClickBatch(dense=dense, sparse=sparse, label=label))
    return found


LOADER, TEST = clicks(24), clicks(3, seed=5)


class Seen:
    """What a model was trained with, in order."""

    def __init__(self, model: Model) -> None:
        self.batches: list[ClickBatch] = []
        self.engines: list[str] = []
        forward = model.forward

        def noted(batch: ClickBatch) -> Tensor:
            if model.training:
                self.batches.append(copy.deepcopy(batch))
                self.engines.append(type(model.embedding.groups[0]).__name__)
            return forward(batch)

        model.forward = noted  # type: ignore[method-assign]

    @property
    def samples(self) -> Counter[int]:
        numbers = torch.cat([(batch.dense[:, 0] * 1e5).round() for batch in self.batches])
        return Counter(numbers.long().tolist())


def train(
    model: Model, fae: FAE, loader: Iterable[Any] = LOADER, *, quiet: bool = True, **options: Any
) -> tuple[Seen, list[Any]]:
    seen = Seen(model)
    with warnings.catch_warnings():
        if quiet:
            warnings.filterwarnings("ignore", "there is no test loss")
        records = list(trainer_of(model, fae, **options).run(loader))
    model.embedding.check()
    return seen, records


def plain(model: Model, batches: list[Any]) -> list[Any]:
    """All-fast training on the same batches in the same order."""
    return list(trainer_of(model).run(batches))


def fae_of(**options: Any) -> FAE:
    return FAE(**{"sample_rate": 0.5, "test": TEST, **options})


def assert_like_all_fast(model: Model, seen: Seen, twin: Model) -> list[Any]:
    """The same samples in the same order give the same rows; every sample came once."""
    records = plain(twin, seen.batches)
    assert same_bits(model, twin)
    assert seen.samples == ALL
    return records


ALL = Counter(
    {number * 1000 + k: 1 for number in range(24) for k in range(SIZE if number < 23 else 8)}
)


# -- contract ----------------------------------------------------------------------------


@pytest.mark.parametrize("cold", ["fetched", "hybrid"])
@pytest.mark.parametrize(
    ("rule", "widths"), [*((rule, "one") for rule in RULES), ("adam", "two"), ("adam", "jagged")]
)
def test_rows_are_those_of_all_fast_in_the_same_order(rule: str, widths: str, cold: Any) -> None:
    """Of one width or two, and of bags, some of them empty."""
    options: Any = {"one": {}, "two": {"dims": (4, 6), "slots": 130}, "jagged": {"slots": 120}}
    model, twin = Model(rule, **options[widths]), Model(rule, "all-fast", **options[widths])
    fae, loader = fae_of(cold=cold, shuffle_rate=20), LOADER
    if widths == "jagged":
        test = clicks(2, 5, jagged=True)
        fae, loader = fae_of(hot_budget=60 * 48, cold=cold, test=test), clicks(24, jagged=True)
    seen, records = train(model, fae, loader)
    expected = assert_like_all_fast(model, seen, twin)
    assert [record.loss for record in records] == [record.loss for record in expected]
    assert 0 < fae.record.hot_share < 1
    assert fae.record.switches > (4 if widths == "one" else 0)


@pytest.mark.parametrize("cold", ["fetched", "hybrid"])
def test_hot_batches_hold_hot_rows_alone_and_fetch_none(cold: Any) -> None:
    model = Model()
    fae = fae_of(cold=cold)
    seen, records = train(model, fae)
    assert fae.hot is not None
    kinds = []
    for batch, record, engine in zip(seen.batches, records, seen.engines, strict=True):
        hot = popular(model.embedding.pipeline.prepare(batch.sparse).batch, fae.hot)
        assert bool(hot.all()) or not bool(hot.any())
        kinds.append(bool(hot.all()))
        if kinds[-1]:
            assert record.fetched_rows == record.evicted_rows == 0
            assert engine != HostRows.__name__
        elif cold == "hybrid":
            assert engine == HostRows.__name__
    lookups = sum(batch.sparse.numel() for batch in seen.batches)
    assert sum(record.lookups for record in records) == lookups == model.embedding.traffic().lookups
    assert kinds.count(True) == fae.record.hot_batches
    assert kinds.count(False) == fae.record.cold_batches
    assert fae.record.switches == sum(a != b for a, b in pairwise(kinds))


def test_synchronisation_is_of_all_hot_rows_with_their_state() -> None:
    model = Model("adam")
    fae = FAE.as_published(sample_rate=0.5, hot_budget=None, test=TEST, shuffle_rate=25)
    seen, _ = train(model, fae)
    record = fae.record
    assert HostRows.__name__ in seen.engines
    assert record.hot_bytes == record.num_hot_rows * 4 * 3 * 4  # weights and both moments
    # To the host for the first segment, and at every switch; the last one is hot.
    assert record.synchronised_bytes == (record.switches + 1) * record.hot_bytes
    fetched = fae_of()
    train(Model("adam"), fetched)
    assert fetched.record.synchronised_bytes == 0


# -- the Shuffle Scheduler -------------------------------------------------------------------


class Falling(FAE):
    """FAE with invented test losses."""

    losses: Iterator[float]

    def _evaluated(self) -> float | None:
        super()._evaluated()
        return next(self.losses)


def test_test_losses_are_means_over_samples_in_evaluation_mode() -> None:
    model = Model()
    fae = fae_of()
    trainer = trainer_of(model, fae)
    list(trainer.run(LOADER))
    step, loss = fae.record.test_losses[-1]
    assert step == trainer.step
    logits = torch.cat([trainer.predict(batch) for batch in TEST])
    labels = torch.cat([batch.label for batch in TEST])
    assert loss == pytest.approx(
        float(F.binary_cross_entropy_with_logits(logits, labels)), rel=1e-5
    )
    assert trainer.evaluate(TEST).log_loss == pytest.approx(loss, rel=1e-5)
    assert model.training


def test_without_samples_to_evaluate_the_rate_stays_and_that_is_said_once() -> None:
    fae = FAE(sample_rate=0.5, shuffle_rate=10)
    with pytest.warns(UserWarning, match="there is no test loss") as said:
        train(Model(), fae, quiet=False)
    assert len(said) == 1
    assert [rate for _, rate in fae.record.rates] == [10.0]


# -- choosing ----------------------------------------------------------------------------


def test_the_hottest_rows_within_the_budget_are_pinned() -> None:
    model = Model("sgd")
    fae = FAE(sample_rate=1.0, hot_budget=16 * 30, test=TEST)
    train(model, fae)
    counts = torch.zeros(sum(ROWS), dtype=torch.int64)
    for batch in LOADER:
        ids = batch.sparse + torch.tensor([0, 0, ROWS[0]])
        counts += torch.bincount(ids.flatten(), minlength=len(counts))
    assert fae.hot is not None
    assert fae.hot.num_rows == fae.record.num_hot_rows == 30
    hot = fae.hot.is_hot[: len(counts)]
    assert int(counts[hot].min()) >= int(counts[~hot].max())
    assert fae.record.covered == pytest.approx(int(counts[hot].sum()) / int(counts.sum()))


@pytest.mark.parametrize("estimate", ["exact", "rand-em-box", RandEmBox(chunks=3)])
def test_a_threshold_pins_what_fits(estimate: Any) -> None:
    fae = FAE(
        sample_rate=1.0, choose="threshold", estimate=estimate, hot_budget=16 * 60, test=TEST,
        small_table_bytes=0,
    )  # fmt: skip
    with pytest.warns(UserWarning, match="the budget is small for these tables"):
        train(Model("sgd"), fae)
    assert fae.record.threshold is not None
    assert 0 < fae.record.hot_bytes <= 16 * 60


def test_more_rows_than_there_is_room_for_are_cut_and_that_is_said() -> None:
    fae = FAE(sample_rate=1.0, hot_budget=16 * 220, test=TEST)
    model = Model("sgd", slots=100)
    with pytest.warns(UserWarning, match="more than there is room for beside a batch"):
        train(model, fae)
    assert 0 < fae.record.num_hot_rows < 100
    assert "more than there is room for" in fae.described()
    # A budget for every row is no promise, either; what is said to be covered is.
    with pytest.warns(UserWarning, match="more than there is room for") as told:
        train(Model("sgd", slots=100), every := FAE(sample_rate=1.0, hot_budget="100%", test=TEST))
    assert len(told) == 1
    assert every.record.covered == fae.record.covered < 1


def test_no_room_to_pin_is_told() -> None:
    fae = FAE(sample_rate=1.0, test=TEST)
    expected = "no room to pin rows|holds no row|samples is hot|passes through in chunks"
    with pytest.warns(UserWarning, match=expected) as told:
        seen, _ = train(Model("sgd", slots=20), fae)
    assert any("no room to pin rows beside a batch" in str(each.message) for each in told)
    assert seen.samples == ALL


@pytest.mark.parametrize("slots", [600, sum(ROWS)])  # no budget makes more than there are rows
def test_a_budget_for_every_row_makes_every_sample_hot(slots: int) -> None:
    model, skip = Model("adam", slots=slots), HalfOf()
    fae = fae_of(cold="hybrid", hot_budget="100%")
    with pytest.warns(UserWarning, match="holds every row"):
        seen, records = train(model, fae)
    assert_like_all_fast(model, seen, Model("adam", "all-fast"))
    assert (fae.record.hot_share, fae.record.switches) == (1, 0)
    assert len(fae.record.test_losses) == 2  # half of the batches each
    assert sum(record.fetched_rows for record in records) == 0
    # Pinned between two passes, which is the work of some step, too.
    assert sum(record.loaded_rows for record in records) == fae.record.num_hot_rows
    fae = fae_of(hot_budget="100%", epochs=2, skip=skip)
    with pytest.warns(UserWarning, match="holds every row"):
        train(Model("adam", slots=slots), fae)
    assert len(skip.noted) >= 4
    assert skip.noted == [loss for _, loss in fae.record.test_losses]


@pytest.mark.parametrize("cold", ["fetched", "hybrid"])
def test_a_budget_for_no_row_makes_every_sample_cold(cold: Any) -> None:
    model, fae = Model("adam"), fae_of(cold=cold, hot_budget=4)
    with pytest.warns(UserWarning, match=r"holds no row|none of the 376 samples is hot") as said:
        seen, _ = train(model, fae)
    assert len(said) == 2
    assert_like_all_fast(model, seen, Model("adam", "all-fast"))
    assert (fae.record.hot_share, fae.record.switches) == (0, 0)


def test_the_samples_that_a_skip_would_evaluate_on_serve() -> None:
    fae = FAE(sample_rate=0.5, skip=Slipstream(target=0, test=TEST))
    train(Model(), fae)  # without a warning
    assert len(fae.record.test_losses) == 2


# -- in a trainer ------------------------------------------------------------------------


def test_the_rate_follows_evaluations_and_a_second_trainer_begins_anew() -> None:
    fae, rates = Falling(sample_rate=0.5, test=TEST, epochs=4), []
    first, second = Model(), Model()
    for model in (first, second):
        fae.losses = iter([1.0, 2.0, 3.0, *[0.5] * 30])
        train(model, fae)
        rates.append(fae.record.rates)
    assert rates[0] == rates[1] == tuple(sorted(rates[0]))
    assert [rate for _, rate in rates[0]][:4] == [50.0, 25.0, 12.5, 25.0]
    assert same_bits(first, second)


def test_a_second_run_over_the_same_batches_counts_no_more() -> None:
    model, twin = Model(), Model("adagrad", "all-fast")
    done: list[tuple[str, int]] = []
    fae = fae_of(progress=lambda what, count: done.append((what, count)))
    seen, trainer = Seen(model), trainer_of(model, fae)
    list(trainer.run(LOADER))
    assert sum(count for what, count in done if what == "counting") == len(ALL)
    assert sum(count for what, count in done if what == "separating") == len(ALL)
    done.clear()
    list(trainer.run(LOADER))
    assert not done
    list(trainer.run(clicks(8, seed=3)))  # other batches have other hot rows
    assert done
    plain(twin, seen.batches)
    assert same_bits(model, twin)


@pytest.mark.parametrize("cold", ["fetched", "hybrid"])
def test_leaving_the_loop_leaves_rows_where_they_belong(cold: Any) -> None:
    for leave_at in (1, 5, 9):
        model, twin = Model("adam"), Model("adam", "all-fast")
        fae = fae_of(cold=cold)
        seen = Seen(model)
        for record in trainer_of(model, fae).run(LOADER):
            if record.step == leave_at:
                break
        assert not model.embedding.pins.is_on_host
        plain(twin, seen.batches)
        assert same_bits(model, twin)


def test_an_error_in_the_loop_is_the_one_that_is_told() -> None:
    model = Model()
    trainer = trainer_of(model, fae_of(cold="hybrid"))

    def fail(logits: Tensor, labels: Tensor) -> Tensor:
        if trainer.step == 3:
            raise ZeroDivisionError("mine")
        return F.binary_cross_entropy_with_logits(logits, labels)

    trainer.loss_fn = fail
    with pytest.raises(ZeroDivisionError, match="mine"):
        list(trainer.run(LOADER))
    assert not model.embedding.pins.is_on_host


class HalfOf(Skip):
    """A skip that leaves out every other hot batch, and is bound like Slipstream."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.noted: list[float] = []
        self.hot: Any = None
        self.closed = 0
        self.offered = 0

    def bound(self, embedding: Any, hot: Any, num_batches: int, *, ids: Any) -> HalfOf:
        self.hot = hot
        self.begun.append(num_batches)
        return self

    def begin(self, num_batches: int) -> None:
        self.begun.append(num_batches)

    def segments(self, batches: Iterable[Any]) -> Iterator[Iterable[Any]]:
        every = list(batches)
        self.offered += len(every)
        yield every[::2]

    def note(self, validation_loss: float) -> None:
        self.noted.append(validation_loss)

    def close(self) -> None:
        self.closed += 1


def test_a_skip_sees_hot_batches_alone_and_every_evaluation() -> None:
    skip, model = HalfOf(), Model()
    fae = fae_of(epochs=2, skip=skip)
    seen, _ = train(model, fae)
    hot = fae.record.hot_batches
    assert skip.hot is fae.hot
    assert skip.begun == [hot, hot]
    assert skip.offered == 2 * hot
    assert skip.noted == [loss for _, loss in fae.record.test_losses]
    assert skip.closed == 1
    cold = [
        not bool(popular(model.embedding.pipeline.prepare(x.sparse).batch, fae.hot).all())
        for x in seen.batches
    ]  # type: ignore[arg-type]
    assert cold.count(True) == 2 * fae.record.cold_batches
    assert hot // 2 <= cold.count(False) / 2 < hot


def test_what_was_done_is_described() -> None:
    fae = fae_of(cold="hybrid")
    assert fae.described() == "nothing was trained yet"
    train(Model(), fae)
    said = fae.described()
    for part in (
        "hot rows", "samples are hot", "switches", "brought up to date", "rate 50 %",
        " s, before the first step",
    ):  # fmt: skip
        assert part in said
    assert min(fae.record.counted_seconds, fae.record.separated_seconds) > 0
    train(Model(), fae := fae_of(sample_rate=0.1))
    assert "every row that was counted is hot: a larger sample may" in fae.described()
    with pytest.warns(UserWarning, match=r"no access was counted|samples is hot"):
        train(Model(), fae := fae_of(sample_rate=1e-9))
    assert "serve none of the accesses in 0 counted samples" in fae.described()


def test_no_more_than_so_many_samples_are_trained() -> None:
    fae = fae_of(epochs=3, most_samples=5 * SIZE + 1)
    seen, records = train(Model(), fae)
    assert 5 * SIZE + 1 <= seen.samples.total() < 7 * SIZE
    assert fae.total_steps is None
    whole = fae_of(epochs=2, most_samples=2 * ALL.total())
    seen, records = train(Model(), whole)
    assert (
        whole.total_steps
        == len(records)
        == 2 * (whole.record.hot_batches + whole.record.cold_batches)
    )
    assert seen.samples == ALL + ALL
    epochs = [
        torch.cat([batch.dense[:, 0] for batch in seen.batches[low : low + len(records) // 2]])
        for low in (0, len(records) // 2)
    ]
    assert not torch.equal(*epochs)  # each in another order


class Source:
    """The samples of LOADER, by their place."""

    single = features = ("a", "c", "b")
    identity = "the clicks of this test"

    def __init__(self) -> None:
        self._ids = torch.cat([batch.sparse for batch in LOADER]).numpy()
        self._dense = torch.cat([batch.dense for batch in LOADER]).numpy()
        self._label = torch.cat([batch.label for batch in LOADER]).numpy()
        self.sizes = np.full(4, len(self._ids) // 4, dtype=np.int64)

    def read(self, blocks: Any) -> Samples:
        size = int(self.sizes[0])
        places = np.concatenate([np.arange(each * size, (each + 1) * size) for each in blocks])
        label = self._label[places].astype(np.uint8)
        return Samples(self._ids[places], self._dense[places], label, {})


def test_a_loader_tells_its_samples_apart_and_finds_them_again_in_a_folder(tmp_path: Path) -> None:
    outcomes = []
    for run in range(2):
        model, twin = Model(), Model("adagrad", "all-fast")
        done: Counter[str] = Counter()

        def progress(what: str, count: int, done: Counter[str] = done) -> None:
            done[what] += count

        fae = fae_of(folder=tmp_path, progress=progress)
        seen, _ = train(model, fae, Loader(Source(), batch_size=SIZE, epochs=2, seed=1))
        assert seen.samples == Counter(dict.fromkeys(ALL, 2))
        assert fae.record.reused == ("separating" not in done) == (run == 1)
        plain(twin, seen.batches)
        assert same_bits(model, twin)
        outcomes.append(model)
    assert same_bits(*outcomes)
    with pytest.raises(ValueError, match="leave epochs= out"):
        train(Model(), FAE(epochs=2), Loader(Source(), batch_size=SIZE))


# -- bad input ---------------------------------------------------------------------------


def test_models_and_settings_it_cannot_train_with_are_refused() -> None:
    model = Model(strategy="lookahead")
    with pytest.raises(ValueError, match=r"strategy='static'.*this one has 'lookahead'"):
        trainer_of(model, FAE())
    two = nn.ModuleList([Model(), Model()])
    with pytest.raises(ValueError, match=r"one collection, and the model has 2: '0\.embedding'"):
        hotrow.Trainer(two, F.mse_loss, dense_optimizer=None, ids=id, system=FAE())
    with pytest.raises(ValueError, match="the model has 0"):
        hotrow.Trainer(nn.Linear(1, 1), F.mse_loss, dense_optimizer=None, ids=id, system=FAE())
    for wrong in (
        {"choose": "best"}, {"cold": "warm"}, {"estimate": "guess"}, {"sample_rate": 0.0},
        {"epochs": 0}, {"test": iter(TEST)}, {"test": []}, {"shuffle_rate": 80.0},
    ):  # fmt: skip
        with pytest.raises(ValueError, match=next(iter(wrong)).split("_")[-1]):
            FAE(**wrong)
    for skip in ("slipstream", hotrow.Slipstream):
        with pytest.raises(TypeError, match=r"such as hotrow.Slipstream\(\), not .*slipstream"):
            FAE(skip=skip)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fae", "loader", "said"),
    [
        ({}, iter(LOADER), "which can be read only once"),
        ({}, [], "gave no batch"),
        ({"test": range(0)}, LOADER, "no sample to evaluate"),
    ],
)
def test_loaders_it_cannot_train_with_are_refused(fae: Any, loader: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        train(Model(), fae_of(**fae), loader)


def test_an_id_that_no_table_has_is_named() -> None:
    loader = clicks(3)
    loader[1].sparse[2, 0] = 401
    with pytest.raises(ValueError, match=r"feature 'a', sample 2: id 401"):
        train(Model(), fae_of(sample_rate=1.0), loader)


# -- on a device -------------------------------------------------------------------------


@pytest.mark.thinned(2)
@pytest.mark.parametrize("cold", ["fetched", "hybrid"])
@pytest.mark.usefixtures("device_rows")
def test_on_a_device_rows_are_those_of_all_fast_in_the_same_order(cold: Any) -> None:
    model, twin = (Model("adam", each, device=DEVICE) for each in ("static", "all-fast"))
    fae = FAE(sample_rate=1.0, cold=cold, hot_budget=40 * 48, test=TEST[:1])
    seen, _ = train(model, fae, LOADER[:6], graphs=False)  # what is replayed is not seen
    assert 0 < fae.record.hot_share < 1
    plain(twin, seen.batches)
    if cold == "fetched":
        assert same_bits(model, twin)
    for mine, other in zip(model.bits(), twin.bits(), strict=True):
        torch.testing.assert_close(mine, other, **TOLERANCE)


@pytest.mark.gpu
@pytest.mark.parametrize("cold", ["fetched", "hybrid"])
@pytest.mark.parametrize("rule", RULES)
def test_on_a_gpu_captured_steps_give_the_bits_of_eager_ones(rule: str, cold: Any) -> None:
    loader = clicks(80)
    models = []
    for graphs in (True, False):
        model = Model(rule, device=DEVICE)
        fae = FAE(sample_rate=0.5, cold=cold, test=TEST, shuffle_rate=25)
        seen = Seen(model) if not graphs else None
        list(trainer_of(model, fae, graphs=graphs).run(loader))
        model.embedding.check()
        models.append(model)
    assert same_bits(*models)
    twin = Model(rule, "all-fast", device=DEVICE)
    assert seen is not None
    plain(twin, seen.batches)
    if cold == "fetched":
        assert same_bits(models[0], twin)
    for mine, other in zip(models[0].bits(), twin.bits(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-2, atol=1e-3)
