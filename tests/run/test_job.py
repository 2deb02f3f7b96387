"""A run's parts fit together, on a CPU and on a GPU."""

from dataclasses import replace

import pytest
import torch

from hotrow.ahead import tensors_in
from hotrow.run.config import RunConfig, load
from hotrow.run.job import all_fast, build, differences

SMALL = (
    "data.rows=[400, 60, 5]",
    "data.batch_size=16",
    "data.samples=480",
    "model.embedding_dim=4",
    "embedding.budget=60%",
)
OPTIMIZERS = ("sgd", "adagrad", "adam", "adamw")

on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def config(*overrides: str) -> RunConfig:
    return load(overrides=[*SMALL, *overrides])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_on_a_cpu_the_dense_optimizer_has_the_settings_of_the_run(name: str) -> None:
    job = build(config(f"training.optimizer.name={name}", "training.optimizer.lr=0.3"))
    assert job.trainer.dense_optimizer is not None
    (group,) = job.trainer.dense_optimizer.param_groups
    assert group["lr"] == 0.3
    assert not group["fused"]


def test_on_a_cpu_batches_are_left_as_they_are() -> None:
    job = build(config())
    assert not any(each.is_pinned() for each in tensors_in(next(job.batches())))


def test_triton_that_is_missing_is_said_in_the_users_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise RuntimeError("rows on a GPU need Triton") from ImportError("no module")

    monkeypatch.setattr("hotrow.run.job.EmbeddingBagCollection", refuse)
    with pytest.raises(ValueError, match="rows on a GPU need Triton"):
        build(config())


def test_other_errors_stay_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **options: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("hotrow.run.job.EmbeddingBagCollection", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        build(config())


class TestOnAGpu:
    pytestmark = on_gpu

    @pytest.mark.parametrize("name", OPTIMIZERS)
    def test_every_dense_optimizer_gives_the_bits_of_all_fast(self, name: str) -> None:
        settings = config("run.device=cuda", f"training.optimizer.name={name}")
        left, right = build(settings), build(all_fast(settings))
        losses = [list(job.trainer.run(job.batches())) for job in (left, right)]
        assert [x.loss for x in losses[0]] == [x.loss for x in losses[1]]
        assert differences(left, right) == []

    def test_batches_are_page_locked_and_the_model_is_on_the_device(self) -> None:
        job = build(config("run.device=cuda:0"))
        assert all(each.is_pinned() for each in tensors_in(next(job.batches())))
        assert {each.device.type for each in job.model.parameters()} == {"cuda"}

    def test_a_learning_rate_is_a_tensor_on_the_device(self) -> None:
        settings = config("run.device=cuda")
        for name in ("sgd", "adam", "adamw"):
            section = replace(settings.training.optimizer, name=name)
            training = replace(settings.training, optimizer=section)
            optimizer = build(replace(settings, training=training)).trainer.dense_optimizer
            assert optimizer is not None
            assert optimizer.param_groups[0]["lr"].device.type == "cuda"
