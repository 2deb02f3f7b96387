"""A run's parts fit together, on a CPU and on a GPU."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from commands import SMALL_SETTINGS
from hotrow.engine.profile import save_profile
from hotrow.inputs.tree import tensors_in
from hotrow.models import MODELS
from hotrow.run.config import CLICK_MODELS, SEQUENCE_MODELS, RunConfig, load
from hotrow.run.job import Job, all_fast, build, differences, same_bits

KINDS = [*CLICK_MODELS, *SEQUENCE_MODELS]
SEQUENCES = ("model.kind=tbsm", "model.num_steps=5", "data.constant=['cat_1']")
OPTIMIZERS = ("sgd", "adagrad", "adam", "adamw")

on_gpu = [
    pytest.mark.gpu,
]


def config(*overrides: str) -> RunConfig:
    return load(overrides=[*SMALL_SETTINGS, "data.samples=480", *overrides])


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("cat_1", "table 'cat_1' with at least 99 rows, and in this run it has 60; count those"),
        ("shop", "table 'shop', and this run has cat_0, cat_1, cat_2; count those"),
    ],
)
def test_counts_of_other_tables_are_refused(tmp_path: Path, table: str, message: str) -> None:
    counts = torch.arange(1, 101)
    counts[-1] = 0  # a row that was not read is not in the file
    save_profile(tmp_path, {"cat_0": counts, table: counts})
    with pytest.raises(ValueError, match=re.escape(f"{str(tmp_path)!r} has counts of {message}")):
        build(config(f"embedding.profile={tmp_path}"))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_on_a_cpu_the_dense_optimizer_has_the_settings_of_the_run(name: str) -> None:
    job = build(config(f"training.optimizer.name={name}", "training.optimizer.lr=0.3"))
    (group,) = job.dense_optimizer.param_groups
    assert group["lr"] == 0.3
    assert not group["fused"]
    assert not any(tensor.is_pinned() for tensor in tensors_in(next(job.samples.batches(1))))


def trained(settings: RunConfig) -> Job:
    job = build(settings)
    for _ in job.train():
        pass
    return job


BAGS = [("data.lookups=1",), ("data.lookups=[3, 1, 2]",)]
CASES = [*((f"model.kind={kind}", *bags) for kind in CLICK_MODELS for bags in BAGS), SEQUENCES]


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_every_kind_of_model_has_the_bits_of_all_fast(case: tuple[str, ...]) -> None:
    settings = config(*case, "training.steps=12")
    left, right = trained(settings), trained(all_fast(settings))
    assert type(left.model) is MODELS[settings.model.kind]
    assert left.embedding.traffic().evicted_rows > 0
    assert differences(left, right) == []


def test_without_a_file_sequences_are_short_work() -> None:
    settings = load(overrides=["model.kind=tbsm", "data.batch_size=128"])
    assert settings.data.names == ("user", "item", "category")
    assert settings.data.batch_size == 128
    assert load(overrides=["model.kind=tbsm", "data.rows=[30, 40]"]).data.names == ()


@pytest.mark.parametrize("kind", KINDS)
def test_every_dense_weight_is_compared(kind: str) -> None:
    settings = config(f"model.kind={kind}")
    left, right = build(settings), build(settings)
    assert differences(left, right) == []
    names = [name for name, _ in left.model.named_parameters()]
    assert len(names) > 5
    for name, parameter in right.model.named_parameters():
        kept = parameter.detach().clone()
        parameter.data.flatten()[-1] += 1.0  # its memory is one piece
        assert differences(left, right) == [name]
        parameter.data.copy_(kept)
    assert differences(left, right) == []


def test_rows_and_weights_that_one_model_lacks_differ() -> None:
    left, right = build(config()), build(config("run.seed=1"))
    assert "rows of table cat_0" in differences(left, right)
    right.model.register_parameter("more", torch.nn.Parameter(torch.zeros(2)))
    assert "more" in differences(left, right)
    assert "more" in differences(right, left)


def test_bits_are_compared_in_any_layout() -> None:
    apart = torch.zeros(4, 8)[:, :1]
    assert same_bits(apart, apart.clone())
    assert same_bits(torch.tensor(1.5), torch.tensor(1.5))
    assert same_bits(torch.tensor(torch.nan), torch.tensor(torch.nan))
    assert not same_bits(torch.tensor(0.0), torch.tensor(-0.0))
    assert not same_bits(torch.zeros(2), torch.zeros(2, 1))


@pytest.mark.parametrize(
    ("settings", "shapes"),
    [
        (
            ("kind=dcnv2", "cross_layers=2", "cross_rank=7", "bottom=[9]", "top=[6, 5]"),
            {
                "bottom.0": (9, 13), "bottom.2": (4, 9), "cross.1.down": (7, 16),
                "cross.2.down": None, "top.2": (5, 6),
            },
        ),
        (("kind=dcnv2", "cross_rank=full"), {"cross.2.up": (16, 16)}),
        (
            ("kind=tbsm", "num_steps=5", "bottom=[9]", "top=[7, 6]", "final=[5]"),
            {
                "bottom.0": (9, 1 + 13), "bottom.2": (4, 9), "top.0": (7, 4 + 6), "top.2": (6, 7),
                "sequence.0": (15, 5), "final.0": (5, 12), "final.2": (1, 5),
            },
        ),
        # A DeepFM's rows have room for first-order weights.
        (("kind=deepfm", "deep=[6]"), {"deep.0": (6, (13 + 3) * 4)}),
    ],
)  # fmt: skip
def test_settings_reach_the_model(
    settings: tuple[str, ...], shapes: dict[str, tuple[int, ...] | None]
) -> None:
    job = build(config(*(f"model.{each}" for each in settings)))
    found = {key: tuple(weight.shape) for key, weight in job.model.named_parameters()}
    assert {name: found.get(f"{name}.weight") for name in shapes} == shapes
    dim = 5 if "kind=deepfm" in settings else 4
    assert {table.embedding_dim for table in job.embedding.tables} == {dim}


@pytest.mark.parametrize("kind", KINDS)
def test_the_dense_weights_follow_the_seed(kind: str) -> None:
    jobs = [build(config(f"model.kind={kind}", f"run.seed={seed}")) for seed in (1, 1, 2)]
    assert differences(jobs[0], jobs[1]) == []
    names = [name for name, weight in jobs[0].model.named_parameters() if weight.dim() > 1]
    assert set(names) <= set(differences(jobs[0], jobs[2]))


@pytest.mark.parametrize(
    ("cause", "error"), [(ImportError("no module"), ValueError), (None, RuntimeError)]
)
def test_only_a_missing_triton_is_an_error_of_users(
    monkeypatch: pytest.MonkeyPatch, cause: ImportError | None, error: type[Exception]
) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise RuntimeError("rows on a GPU need Triton") from cause

    monkeypatch.setattr("hotrow.run.job.EmbeddingBagCollection", refuse)
    with pytest.raises(error, match="rows on a GPU need Triton"):
        build(config())


class TestOnAGpu:
    pytestmark = on_gpu

    @pytest.mark.parametrize("name", OPTIMIZERS)
    def test_every_dense_optimizer_gives_the_bits_of_all_fast(self, name: str) -> None:
        settings = config("run.device=cuda", f"training.optimizer.name={name}")
        left, right = build(settings), build(all_fast(settings))
        losses = [list(job.train()) for job in (left, right)]
        assert [x.loss for x in losses[0]] == [x.loss for x in losses[1]]
        assert differences(left, right) == []

    @pytest.mark.parametrize("case", CASES, ids=" ".join)
    def test_every_kind_of_model_gives_the_bits_of_all_fast(self, case: tuple[str, ...]) -> None:
        settings = config("run.device=cuda", *case)
        left = trained(settings)
        if case is SEQUENCES:
            assert left.embedding.traffic().evicted_rows > 0
            assert left.trainer._captured is not None
        assert differences(left, trained(all_fast(settings))) == []

    @pytest.mark.parametrize("more", [(), SEQUENCES])
    def test_batches_are_page_locked_and_the_model_is_on_the_device(
        self, more: tuple[str, ...]
    ) -> None:
        job = build(config("run.device=cuda:0", *more))
        assert all(tensor.is_pinned() for tensor in tensors_in(next(job.samples.batches(1))))
        assert {weight.device.type for weight in job.model.parameters()} == {"cuda"}

    def test_a_learning_rate_is_a_tensor_on_the_device(self) -> None:
        settings = config("run.device=cuda")
        for name in ("sgd", "adam", "adamw"):
            section = replace(settings.training.optimizer, name=name)
            training = replace(settings.training, optimizer=section)
            optimizer = build(replace(settings, training=training)).dense_optimizer
            assert optimizer.param_groups[0]["lr"].device.type == "cuda"
