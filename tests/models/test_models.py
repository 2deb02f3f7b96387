"""What holds for every model: its twin in plain PyTorch, exact strategies, half precision,
compilers, padding, captured steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hotrow
from dense_masters import MasterWeights
from graph_replays import Replays, without_gpu
from hotrow.engine.gpu.rows import gpu_rows
from hotrow.inputs.tree import tensors_in
from hotrow.models import DLRM, MODELS, DCNv2, DeepFM
from hotrow.models.layers import normalised
from hotrow.run.job import same_bits
from hotrow.support.streams import lanes_of
from hotrow.training.graphed import GraphedStep
from model_cases import (
    DIM,
    MODEL_CASES,
    NUM_DENSE,
    STEP_FEATURES,
    ModelCase,
    Twin,
    clicks,
    tables,
)

loss_fn = F.binary_cross_entropy_with_logits


@pytest.fixture(params=MODEL_CASES)
def case(request: pytest.FixtureRequest) -> ModelCase:
    return MODEL_CASES[request.param]


def train_plainly(model: nn.Module, batches: list[Any], lr: float = 0.1) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    losses = []
    for batch in batches:
        loss = loss_fn(model(batch), batch.label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train(model: nn.Module, batches: list[Any], **options: Any) -> list[float]:
    """With hotrow's trainer."""
    trainer: hotrow.Trainer[Any] = hotrow.Trainer(
        model,
        loss_fn,
        dense_optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        ids=lambda batch: batch.sparse,
        **options,
    )
    return [record.loss for record in trainer.run(batches)]


def test_every_model_has_a_case() -> None:
    assert {type(each.build()) for each in MODEL_CASES.values()} == set(MODELS.values())


def test_a_model_says_and_learns_what_its_twin_does(case: ModelCase) -> None:
    model = case.build()
    twin, start = case.twin_of(model), case.twin_of(model).state()
    batches = case.batches(20)
    logits = model(batches[0])
    assert logits.shape == batches[0].label.shape
    torch.testing.assert_close(logits, twin(batches[0]), rtol=1e-5, atol=1e-5)
    losses = train(model, batches)
    assert losses == pytest.approx(train_plainly(twin, batches), rel=1e-4)
    found = model.state_dict()
    for key, expected in twin.state().items():
        torch.testing.assert_close(found[key], expected, rtol=1e-3, atol=1e-5, msg=key)
        assert not torch.equal(found[key], start[key]), f"{key} was not trained"


class Plain(nn.Module):
    """nn.EmbeddingBag or nn.Embedding per table, with the face of a collection."""

    def __init__(self, twin: Twin) -> None:
        super().__init__()
        self.twin = [twin]  # a list, so that its dense part is not ours
        self.rows = twin.rows

    def forward(self, sparse: Any) -> Any:
        (twin,) = self.twin
        if twin.pooling == "sum":
            joined = torch.cat(twin.pooled(sparse), dim=1)
            return SimpleNamespace(values=lambda: joined)
        ids = sparse.values().chunk(len(STEP_FEATURES))
        pairs = zip(STEP_FEATURES, ids, strict=True)
        return {name: self.rows[name](each) for name, each in pairs}


def told(case: ModelCase) -> dict[str, Any]:
    """What a collection would tell a model."""
    kind = type(case.build()).__name__
    if kind == "TBSM":
        return {"features": STEP_FEATURES}
    if kind == "DCNv2":
        return {"embedding_width": sum(each.embedding_dim for each in case.tables)}
    return {"num_features": len(case.tables)}


def test_a_model_trains_on_modules_of_torch(case: ModelCase) -> None:
    ours = case.build()
    plain = case.build(Plain(case.twin_of(ours)), **told(case))
    batches = case.batches(5)
    assert train_plainly(plain, batches) == pytest.approx(train(ours, batches), rel=1e-4)


def test_a_generator_or_torchs_seed_decides_the_start(case: ModelCase) -> None:
    def weights(seed: int, generator: torch.Generator | None) -> Tensor:
        (generator or torch.default_generator).manual_seed(seed)
        model = case.build(generator=generator)
        return nn.utils.parameters_to_vector(model.parameters()).detach()

    for generator in (torch.Generator(), None):
        assert torch.equal(weights(1, generator), weights(1, generator))
        assert not torch.equal(weights(1, generator), weights(2, generator))


def gradients(model: nn.Module, logits: Tensor) -> list[Tensor]:
    model.zero_grad()
    logits.square().mean().backward()
    return [each.grad for each in model.parameters() if each.grad is not None]


COMPILED = [name for name in MODEL_CASES if name not in ("dlrm", "deepfm-multi-hot")]


@pytest.mark.thinned(4)
@pytest.mark.parametrize("name", COMPILED)
def test_the_dense_part_is_one_graph_for_a_compiler(name: str) -> None:
    torch.compiler.reset()
    case = MODEL_CASES[name]
    model: Any = case.build()
    (batch,) = case.batches(1)
    looked_up, inputs = model.embedding(batch.sparse), [batch.dense]
    if batch.dense.dim() == 2:
        inputs.append(looked_up.values().detach())
    else:
        vectors = torch.cat([looked_up[name] for name in model.features], dim=1)
        inputs += [vectors.detach(), batch.lengths]
    expected = model.score(*inputs)
    wanted = gradients(model, expected)
    found = torch.compile(model.score, fullgraph=True, backend="aot_eager")(*inputs)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gradients(model, found), wanted, rtol=1e-3, atol=1e-5)


# torch's compiler reads what it warns others of.
@pytest.mark.thinned(6)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_compiled_model_trains_to_the_same_weights(case: ModelCase) -> None:
    """Whole, the lookup being left out of the graphs."""
    torch.compiler.reset()
    models = [case.build(), case.build()]
    batches = case.batches(4)
    expected = train(models[0], batches)
    models[1].compile(backend="aot_eager")
    assert train(models[1], batches) == pytest.approx(expected, rel=1e-4)


def test_half_weights_give_float32_logits(case: ModelCase) -> None:
    (batch,) = case.batches(1)
    expected, logits = case.build()(batch), case.build().bfloat16()(batch)
    assert logits.dtype == torch.float32
    assert not torch.equal(logits, logits.bfloat16().float())  # they have the digits, too
    torch.testing.assert_close(logits, expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("how", ["masters", "autocast"])
def test_a_model_learns_in_half_precision(case: ModelCase, how: str) -> None:
    batches = case.batches(20)
    expected = train(case.build(), batches)
    model = case.build()
    if how == "autocast":
        losses = train(model, batches, autocast=torch.bfloat16)
    else:
        optimizer = MasterWeights(model, lambda masters: torch.optim.SGD(masters, lr=0.1))
        losses = []
        for batch in hotrow.ahead(batches, model, ids=lambda batch: batch.sparse):
            loss = loss_fn(model(batch), batch.label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses == pytest.approx(expected, rel=0.05)
    assert losses != expected


def test_padding_changes_neither_the_start_nor_the_training(case: ModelCase) -> None:
    plain, padded = case.build(), case.build(pad_to=24)
    for name in case.padded:
        first = getattr(padded, name)[0]
        assert first.weight.shape[1] == first.in_features + first.padding
        assert first.weight.shape[1] % 24 == 0
    assert sum(getattr(padded, name)[0].padding for name in case.padded) > 0
    torch.testing.assert_close(padded.state_dict(), plain.state_dict(), rtol=0, atol=0)
    batches = case.batches(10)
    assert train(padded, batches) == pytest.approx(train(plain, batches), rel=1e-4)
    other = case.build(pad_to=8)
    other.load_state_dict(padded.state_dict())
    torch.testing.assert_close(other.state_dict(), padded.state_dict(), rtol=0, atol=0)


@pytest.mark.slow
@without_gpu
@pytest.mark.parametrize(
    ("name", "slots"), [("dcnv2-full", 240), ("deepfm-multi-hot", 460), ("tbsm", 440)]
)
def test_a_captured_step_gives_the_bits_of_eager_ones(
    name: str,
    slots: int,
    seen: Replays,
) -> None:
    """On the device's engine, with stand-ins for graphs."""
    case = MODEL_CASES[name]
    # The largest first: its room is that of all others.
    batches = sorted(case.batches(6), key=lambda batch: -len(tensors_in(batch.sparse)[0]))

    def run(captured: bool, **options: Any) -> Any:
        model = case.build(case.embedding(engine=gpu_rows, **options))
        seen.tables = tuple(table.name for table in model.embedding.tables)
        step = GraphedStep(
            model,
            loss_fn,
            torch.optim.SGD(model.parameters(), lr=0.1),
            labels=lambda batch: batch.label,
            lanes=lanes_of(torch.device("cpu")) if captured else None,
            graphs=seen.settings() if captured else None,
        )
        stream = hotrow.ahead(batches, model, ids=lambda batch: batch.sparse, step=step)
        losses = [float(step(batch)) for batch in stream]
        return losses, model.state_dict(), model.embedding.traffic().evicted_rows

    losses, state, _ = run(captured=False)
    budget = hotrow.Budget((hotrow.Share(slots, 32, True),), window_bytes=1 << 14)
    found_losses, found, evicted = run(captured=True, strategy="lookahead", budget=budget)
    assert seen.replays > 2
    assert evicted > 0
    assert found_losses == losses
    assert all(same_bits(found[key], state[key]) for key in state)


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("dlrm", {"num_dense": 3}, "features.*num_features="),
        ("dcnv2", {"num_dense": 3}, "tables.*embedding_width="),
        ("deepfm", {"num_dense": 3, "dim": 4}, "features.*num_features="),
        ("tbsm", {}, "features.*features="),
    ],
)
def test_an_embedding_that_does_not_tell_is_asked_for(
    name: str, options: dict[str, int], told: str
) -> None:
    with pytest.raises(ValueError, match=f"Identity does not tell its {told}"):
        MODELS[name](nn.Identity(), **options)


def test_an_embedding_of_another_width_is_named_in_the_error(case: ModelCase) -> None:
    wrong = [
        type(each)(each.name, each.num_embeddings, 3, each.feature_names) for each in case.tables
    ]
    embedding = case.collection(wrong, hotrow.SGD(), strategy="all-fast")
    model = case.build(embedding, **told(case))
    with pytest.raises(ValueError, match=r"the embedding gives .* would be|cross layers are made"):
        model(case.batches(1)[0])


def test_a_part_that_does_not_end_in_one_logit_is_refused() -> None:
    embedding = MODEL_CASES["dlrm"].embedding()
    for name, part in (("dlrm", "top"), ("dcnv2", "top"), ("deepfm", "deep"), ("tbsm", "final")):
        options = {"dim": 4} if name == "deepfm" else {}
        with pytest.raises(ValueError, match=f"{part}.* of a .* ends in one logit, not in 2"):
            MODELS[name](embedding, num_dense=3, **options, **{part: (4, 2)})


# -- Normalised vectors ------------------------------------------------------------------


@pytest.mark.parametrize("widths", [[2, 2], [2, 4]])
def test_each_vector_has_mean_0_and_variance_1(widths: list[int]) -> None:
    vectors = torch.tensor([[1.0, 3.0, 10.0, -10.0, 30.0, 10.0]])[:, : sum(widths)]
    right = [-1.0, 1.0, 1.0, -1.0]
    if widths[1] == 4:  # mean 10, deviations 0, -20, 20, 0
        right = [-1.0, 1.0, 0.0, -(2**0.5), 2**0.5, 0.0]
    torch.testing.assert_close(normalised(vectors, widths), torch.tensor([right]))


def scaled(model: Any, times: float) -> None:
    for table in model.embedding.tables:
        width = table.embedding_dim - isinstance(model, DeepFM)  # but first-order weights
        rows = dict(model.embedding.state_dict())[model.embedding.key_of(table.name)].clone()
        rows[:, :width] = rows[:, :width] * times + 2 * times
        model.embedding.load_weights(table.name, 0, rows)


def wide(case: ModelCase, **options: Any) -> Any:
    """Rows whose numbers are about 1."""
    drawn = [
        hotrow.EmbeddingBagConfig(
            t.name, t.num_embeddings, t.embedding_dim, t.feature_names, t.pooling, t.padding_idx,
            hotrow.Normal(),
        )
        for t in case.tables
    ]  # fmt: skip
    embedding = case.collection(drawn, hotrow.SGD(lr=0.1), strategy="all-fast", seed=3)
    return case.build(embedding, **options)


def test_how_large_rows_are_plays_no_part(case: ModelCase) -> None:
    (batch,) = case.batches(1)
    for normalise, alike in ((True, True), (False, False)):
        model = wide(case, normalise=normalise).eval()
        with torch.no_grad():
            before = model(batch)
            scaled(model, 3.0)
            after = model(batch)
        assert torch.allclose(before, after, rtol=1e-3, atol=1e-3) is alike


def test_it_is_off_and_rows_are_trained_through_it(case: ModelCase) -> None:
    (batch,) = case.batches(1)
    plain, off, on = (wide(case, **o) for o in ({}, {"normalise": False}, {"normalise": True}))
    assert torch.equal(plain(batch), off(batch))
    assert plain.state_dict().keys() == on.state_dict().keys()
    before = {key: each.clone() for key, each in on.embedding.state_dict().items()}
    on(batch).square().sum().backward()
    for key, rows in on.embedding.state_dict().items():
        assert bool(rows.isfinite().all())
        assert not torch.equal(rows, before[key])


def test_a_bag_of_nothing_stays_zero() -> None:
    assert not normalised(torch.zeros(2, 6), [3, 3]).any()
    vectors = torch.zeros(1, 4, requires_grad=True)
    normalised(vectors, [4]).sum().backward()
    assert vectors.grad is not None
    assert bool(vectors.grad.isfinite().all())


def test_what_cannot_be_normalised_is_refused() -> None:
    one = hotrow.EmbeddingBagCollection(tables(1, 1, 1), hotrow.SGD(), strategy="all-fast")
    for name, options in {
        "dlrm": {"num_dense": NUM_DENSE, "bottom": (4, 1)},
        "dcnv2": {"num_dense": NUM_DENSE, "bottom": (4,)},
        "deepfm": {"num_dense": NUM_DENSE, "dim": 1},
        "tbsm": {"bottom": (1,)},
    }.items():
        with pytest.raises(ValueError, match="a vector of 1 number would always be 0"):
            MODELS[name](one, normalise=True, **options)
    with pytest.raises(ValueError, match=r"not tell its tables, .* give normalise=F"):
        DCNv2(nn.Identity(), NUM_DENSE, (4,), (1,), embedding_width=8, normalise=True)
    model = DLRM(one, NUM_DENSE, (4, DIM), (1,), normalise=True)
    with pytest.raises(ValueError, match="gives 3 numbers per sample; 3 vectors to normalise"):
        model(clicks(1)[0])
