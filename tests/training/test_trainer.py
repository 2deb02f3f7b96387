"""The trainer's loop gives the bits of a loop written by hand, and evaluation changes none."""

import math
from collections.abc import Generator, Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hotrow
from click_models import ClickModel, trainer_of
from compiling import note_compiled
from hotrow.data import ClickBatch, SyntheticClicks, SyntheticConfig
from hotrow.support.records import EvalRecord
from hotrow.training.trainer import Trainer

CLICKS = SyntheticClicks(SyntheticConfig(rows=(300, 40), batch_size=16, num_dense=3))
BATCHES = list(CLICKS.batches(0, 12))
HELD_OUT = list(CLICKS.batches(12, 16))


class Model(ClickModel):
    def __init__(self, strategy: str = "lookahead") -> None:
        embedding = hotrow.EmbeddingBagCollection(
            [
                hotrow.EmbeddingBagConfig("a", 300, 4, ["a"]),
                hotrow.EmbeddingBagConfig("b", 40, 4, ["b"]),
            ],
            hotrow.Adagrad(lr=0.1),
            budget="60%",
            strategy=strategy,
            seed=0,
        )
        super().__init__(embedding, num_dense=3)
        # Both need care in evaluation: one changes its buffers, the other draws random numbers.
        self.norm, self.drop = nn.BatchNorm1d(11), nn.Dropout(0.1)
        self.top = nn.Sequential(self.norm, self.drop, self.top)


def make_trainer(strategy: str = "lookahead", **options: Any) -> Trainer[ClickBatch]:
    return trainer_of(Model(strategy), **options)


def run(trainer: Trainer[ClickBatch], batches: list[ClickBatch] = BATCHES) -> list[float]:
    torch.manual_seed(1)  # for the dropout
    return [record.loss for record in trainer.run(batches)]


def bits(trainer: Trainer[ClickBatch]) -> list[Tensor]:
    assert isinstance(trainer.model, Model)
    return trainer.model.bits()


def embedding_of(trainer: Trainer[ClickBatch]) -> hotrow.EmbeddingBagCollection:
    assert isinstance(trainer.model, Model)
    return trainer.model.embedding


def all_equal(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_run_gives_the_bits_of_a_loop_written_by_hand() -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    by_hand = []
    torch.manual_seed(1)
    for batch in hotrow.ahead(BATCHES, model, ids=lambda b: b.sparse):
        loss = F.binary_cross_entropy_with_logits(model(batch), batch.label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        by_hand.append(loss.item())
    trainer = make_trainer()
    assert run(trainer) == by_hand
    assert all_equal(bits(trainer), model.bits())


def test_a_batch_smaller_than_others_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each size is compiled anew: for seconds, and the last batches of epochs have any."""
    compiled = note_compiled(
        monkeypatch, lambda each: len(each.label) if isinstance(each, ClickBatch) else None
    )
    sizes = (16, 16, 5, 16, 9)
    batches = [
        ClickBatch(b.dense[:size], b.sparse[:size], b.label[:size])
        for b, size in zip(BATCHES, sizes, strict=False)
    ]
    trainer = make_trainer(compile=True)
    assert run(trainer, batches) == run(make_trainer(), batches)
    assert compiled == [16, 16, 16]
    run(trainer, batches[2:3])  # all batches of another run may be smaller
    assert compiled == [16, 16, 16, 5]


def test_records_add_up_to_the_traffic_of_the_collection() -> None:
    trainer = make_trainer()
    records = list(trainer.run(BATCHES))
    assert [record.step for record in records] == list(range(1, 13))
    assert all(record.samples == 16 and record.seconds > 0 for record in records)
    traffic = embedding_of(trainer).traffic()
    assert traffic.lookups == 12 * 32
    for name in ("lookups", "unique_rows", "fetched_rows", "evicted_rows", "bytes_fetched"):
        assert sum(getattr(record, name) for record in records) == getattr(traffic, name)


def test_losses_per_sample_are_averaged() -> None:
    def per_sample(logits: Tensor, labels: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(logits, labels, reduction="none")

    mean, each = make_trainer(), make_trainer(loss_fn=per_sample)
    assert run(mean) == run(each)


def test_leaving_the_loop_and_coming_back_changes_no_bit() -> None:
    whole, halves = make_trainer(), make_trainer()
    expected = run(whole)
    losses = []
    torch.manual_seed(1)
    for record in halves.run(BATCHES):
        losses.append(record.loss)
        if record.step == 5:
            break
    losses += [record.loss for record in halves.run(BATCHES[5:])]
    assert halves.step == 12
    assert losses == expected
    assert all_equal(bits(whole), bits(halves))


@pytest.mark.parametrize("strategy", hotrow.STRATEGIES)
def test_evaluation_between_steps_changes_no_bit(strategy: str) -> None:
    plain, evaluated = make_trainer(strategy), make_trainer(strategy)
    expected = run(plain)
    torch.manual_seed(1)
    losses = []
    for record in evaluated.run(BATCHES):
        losses.append(record.loss)
        evaluated.evaluate(HELD_OUT)
    assert losses == expected
    assert all_equal(bits(plain), bits(evaluated))
    assert embedding_of(plain).traffic() == embedding_of(evaluated).traffic()


def test_evaluation_gives_every_module_its_own_mode_back() -> None:
    trainer = make_trainer()
    assert isinstance(trainer.model, Model)
    trainer.model.norm.eval()
    trainer.evaluate(HELD_OUT)
    assert trainer.model.training
    assert trainer.model.drop.training
    assert not trainer.model.norm.training


def test_training_brings_the_log_loss_down() -> None:
    trainer = make_trainer()
    before = trainer.evaluate(BATCHES)
    for _ in range(5):
        list(trainer.run(BATCHES))
    after = trainer.evaluate(BATCHES)
    assert (before.step, after.step) == (0, 60)
    assert after.samples == 192
    assert after.log_loss < before.log_loss
    assert after.auc > before.auc


class Given(nn.Module):
    """Predicts what it is told."""

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return batch[0]


def quality(scores: list[float], labels: list[float]) -> EvalRecord:
    trainer: Trainer[tuple[Tensor, Tensor]] = Trainer(
        Given(),
        F.binary_cross_entropy_with_logits,
        dense_optimizer=None,
        ids=lambda batch: batch[0],
        labels=lambda batch: batch[1],
    )
    return trainer.evaluate([(torch.tensor(scores), torch.tensor(labels))])


def test_auc_is_the_share_of_pairs_in_the_right_order() -> None:
    scores, labels = [0.1, 0.4, 0.35, 0.8], [0.0, 0.0, 1.0, 1.0]
    found = quality(scores, labels)
    assert found.auc == 0.75
    expected = F.binary_cross_entropy_with_logits(torch.tensor(scores), torch.tensor(labels))
    assert found.log_loss == pytest.approx(expected.item())
    assert quality([30.0, 20.0], [1.0, 0.0]).auc == 1.0  # large logits are still ranked


@pytest.mark.parametrize(
    ("scores", "labels"), [([0.1, math.nan], [0.0, 1.0]), ([0.1, 0.4], [1.0, 1.0])]
)
def test_auc_of_nan_or_of_one_class_alone_is_nan(scores: Any, labels: Any) -> None:
    found = quality(scores, labels)
    assert math.isnan(found.auc)
    assert math.isnan(found.log_loss) == math.isnan(scores[1])


def test_training_or_evaluating_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="there is nothing to evaluate"):
        make_trainer().evaluate([])
    with pytest.raises(ValueError, match="the loader yielded no batch"):
        next(iter(make_trainer().run([])))


@pytest.mark.parametrize("system", ["fae", hotrow.FAE])
def test_what_is_no_system_is_refused(system: Any) -> None:
    with pytest.raises(TypeError, match=r"such as hotrow.Hotline\(\), not .*(fae|FAE)"):
        Trainer(nn.Linear(1, 1), F.mse_loss, dense_optimizer=None, ids=id, system=system)


@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        ("fae-hybrid", r"give hotrow.FAE\(\) to hotrow.Trainer"),
        ("hotline+slipstream", r"give hotrow.Hotline\(\) and hotrow.Slipstream\(\) to"),
    ],
)
def test_a_system_is_no_strategy_of_a_collection(strategy: str, said: str) -> None:
    tables = [hotrow.EmbeddingBagConfig("a", 10, 4, ["f"])]
    with pytest.raises(ValueError, match=said):
        hotrow.EmbeddingBagCollection(tables, hotrow.SGD(lr=0.1), "50%", strategy=strategy)


def test_the_caller_gets_its_choice_of_algorithms_back() -> None:
    seen = []
    trainer = make_trainer()
    loss_fn = trainer.loss_fn

    def watched(*args: torch.Tensor) -> torch.Tensor:
        seen.append(torch.are_deterministic_algorithms_enabled())
        return loss_fn(*args)

    trainer.loss_fn = watched
    for record in trainer.run(BATCHES):
        assert not torch.are_deterministic_algorithms_enabled()
        if record.step == 2:
            break
    assert seen == [True, True]
    assert torch.utils.deterministic.fill_uninitialized_memory
    for _ in make_trainer(deterministic=False).run(BATCHES[:2]):
        assert not torch.are_deterministic_algorithms_enabled()


def test_ctrl_c_leaves_every_finished_step_whole() -> None:
    def interrupted() -> Iterator[ClickBatch]:
        yield from BATCHES[:7]
        raise KeyboardInterrupt

    trainer, reference = make_trainer("lru"), make_trainer("all-fast")
    torch.manual_seed(1)
    with pytest.raises(KeyboardInterrupt):
        list(trainer.run(interrupted()))
    assert trainer.step == 7
    embedding_of(trainer).check()
    run(reference, BATCHES[:7])
    assert all_equal(bits(trainer), bits(reference))


def test_normalised_entropy_compares_with_whoever_knows_the_share_of_clicks() -> None:
    rate = 0.25
    labels = [1.0, 0.0, 0.0, 0.0]
    known = quality([math.log(rate / (1 - rate))] * 4, labels)
    assert known.normalised_entropy == pytest.approx(1.0)
    better = quality([2.0, -2.0, -2.0, -2.0], labels)
    assert better.normalised_entropy == pytest.approx(better.log_loss / known.log_loss)
    assert math.isnan(quality([0.1, 0.4], [1.0, 1.0]).normalised_entropy)


def test_dense_gradients_are_clipped_and_rows_are_not() -> None:
    class Length(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            every = [each.grad for group in self.param_groups for each in group["params"]]
            lengths.append(torch.cat([each.flatten() for each in every]).norm().item())
            return super().step(closure)

    lengths: list[float] = []
    trainer = make_trainer(clip_norm=1e-3)
    trainer.dense_optimizer = trainer._step._optimizer = Length(trainer.model.parameters(), lr=0.1)
    before = bits(trainer)[-2:]
    run(trainer)
    assert len(lengths) == len(BATCHES)
    assert max(lengths) == pytest.approx(1e-3, rel=1e-2)
    moved = max((a - b).abs().max().item() for a, b in zip(before, bits(trainer)[-2:], strict=True))
    assert moved > 0.01
    with pytest.raises(ValueError, match="clip_norm must be a number above 0, got 0"):
        make_trainer(clip_norm=0)


def test_gradients_that_nobody_trains_by_do_not_shorten_the_others() -> None:
    outcomes = []
    for others_grow in (False, True):
        trainer = make_trainer(clip_norm=1e-3)
        first, *rest = trainer.model.parameters()
        optimizer = torch.optim.SGD(rest, lr=0.1)
        trainer.dense_optimizer = trainer._step._optimizer = optimizer
        if others_grow:
            first.grad = torch.full_like(first, 1e3)
        run(trainer)
        outcomes.append([each.detach().clone() for each in rest])
    assert all(map(torch.equal, *outcomes))


class Backwards:
    """Trains batches in pairs, the last one first, and looks around between two passes."""

    trainer: Trainer[ClickBatch]
    is_closed = False

    def attach(self, trainer: Trainer[ClickBatch]) -> None:
        self.trainer = trainer

    def passes(self, batches: Iterable[ClickBatch]) -> Generator[Iterable[ClickBatch]]:
        every = list(batches)[::-1]
        try:
            for first in range(0, len(every), 2):
                assert self.trainer.step == first  # all of the pass before has been trained
                bits(self.trainer)
                yield []  # a pass may be empty
                yield every[first : first + 2]
        finally:
            self.is_closed = True


def test_a_system_decides_on_passes() -> None:
    plain, other = make_trainer(), make_trainer(system=(backwards := Backwards()))
    assert run(other, BATCHES[:5]) == run(plain, BATCHES[4::-1])
    assert all_equal(bits(other), bits(plain))
    assert backwards.is_closed


def test_who_leaves_the_loop_closes_the_system() -> None:
    trainer = make_trainer(system=(backwards := Backwards()))
    for _ in trainer.run(BATCHES):
        break
    assert backwards.is_closed
    assert len(run(make_trainer(), BATCHES[:1])) == 1
