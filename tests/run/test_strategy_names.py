"""Names of strategies, and runs of every system."""

from __future__ import annotations

from collections import Counter
from types import NoneType
from typing import Any

import pytest

from hotrow.engine.strategy import STRATEGIES
from hotrow.run.config import load
from hotrow.run.job import build, record_of, told_of
from hotrow.run.strategy_names import SKIPS, SYSTEMS, find_named
from hotrow.systems.fae.fae import FAE
from hotrow.systems.hotline.hotline import Hotline
from hotrow.systems.slipstream.slipstream import RandomDrop, Slipstream

SMALL = [
    "data.rows=[400,30]", "data.num_dense=2", "data.batch_size=32", "data.samples=800",
    "data.eval_batches=2", "model.embedding_dim=4", "model.bottom=[8]", "model.top=[8]",
    "embedding.budget=60%", "training.check_equality=false", "training.eval_every=20",
]  # fmt: skip


def job_of(*settings: str) -> Any:
    return build(load(None, overrides=[*SMALL, *settings]))


@pytest.mark.parametrize(
    ("name", "rows", "system", "skip", "contract"),
    [
        ("lookahead", "lookahead", None, None, "exact"),
        ("hybrid", "hybrid", None, None, "exact up to rounding"),
        ("hotline", "static", "hotline", None, "exact up to rounding"),
        ("fae", "static", "fae", None, "changed"),
        ("fae-hybrid+slipstream", "static", "fae-hybrid", "slipstream", "changed"),
        ("lru+random-drop", "lru", None, "random-drop", "changed"),
    ],
)
def test_names_have_parts(
    name: str, rows: str, system: str | None, skip: str | None, contract: str
) -> None:
    found = find_named(name)
    assert (found.rows.name, found.system, found.skip) == (rows, system, skip)
    assert (found.name, found.contract) == (name, contract)
    assert found.summary


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hotlin", "did you mean 'hotline'"),
        ("lookahead+slip", "there is no '\\+slip' to put on a strategy; there are"),
        ("slipstream", "goes on top of a strategy, such as 'lookahead\\+slipstream'"),
        ("hybrid-plain+slipstream", "by `hotrow compare` alone and with nothing on top"),
        ("fea+slipstream", "there is no strategy 'fea'"),
    ],
)
def test_other_names_are_refused(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_named(name)
    with pytest.raises(ValueError, match=message):
        job_of(f"embedding.strategy={name}")


def test_no_name_means_two_things() -> None:
    assert not set(SYSTEMS) & set(STRATEGIES)
    assert not set(SKIPS) & {*SYSTEMS, *STRATEGIES}


@pytest.mark.parametrize(
    ("name", "kind", "keys", "words"),
    [
        ("lookahead", NoneType, set(), ()),
        ("fae", FAE, {"fae"}, ("hot and cold",)),
        ("fae-hybrid", FAE, {"fae"}, ("hot and cold",)),
        ("hotline", Hotline, {"hotline"}, ("popular samples",)),
        ("lookahead+slipstream", Slipstream, {"skip"}, ("left out",)),
        ("lookahead+random-drop", RandomDrop, {"skip"}, ("left out",)),
        ("hotline+random-drop", Hotline, {"hotline", "skip"}, ("popular samples", "left out")),
        ("fae+slipstream", FAE, {"fae", "skip"}, ("hot and cold", "left out")),
    ],
)
@pytest.mark.filterwarnings("ignore")  # so few samples are not what systems are made for
def test_a_run_trains_by_its_system_and_records_it(
    name: str, kind: type, keys: set[str], words: tuple[str, ...]
) -> None:
    job = job_of(f"embedding.strategy={name}", "training.epochs=2")
    assert isinstance(job.trainer.system, kind)
    trained = sum(record.samples for record in job.train())
    if name == "lookahead+random-drop":
        assert trained == 1600 * 7 // 10
    elif "+" not in name:
        assert trained == 1600
    assert 0.3 < job.evaluate(at_end=True).auc <= 1
    assert record_of(job.trainer.system).keys() == keys
    assert tuple(told_of(job.trainer.system)) == words


def samples_of(job: Any) -> Counter[float]:
    """Count the samples that a job trains, by a number that no two samples share."""
    seen: Counter[float] = Counter()
    forward = job.model.forward

    def noted(batch: Any) -> Any:
        if job.model.training:
            seen.update(batch.dense[:, 0].tolist())
        return forward(batch)

    job.model.forward = noted
    steps = len(list(job.train()))
    assert job.known_steps in (steps, None)
    return seen


@pytest.mark.parametrize("length", ["training.steps=17", "training.epochs=2", "training.steps=35"])
@pytest.mark.filterwarnings("ignore")
def test_fae_trains_the_samples_that_others_do(length: str) -> None:
    plain, job = (
        job_of("embedding.strategy=static", length),
        job_of("embedding.strategy=fae", length),
    )
    assert job.known_steps is None  # before it has sorted them
    wanted, found = samples_of(plain), samples_of(job)
    if length == "training.steps=35":  # an epoch, and batches of both kinds to the number of 10
        assert 35 * 32 <= found.total() < 36 * 32
        assert found.keys() == wanted.keys()
    else:
        assert found == wanted
        assert job.known_steps is not None
    assert plain.known_steps == plain.total_steps
    assert job_of("embedding.strategy=lru+random-drop", length).known_steps is None


def test_bits_are_not_compared_where_samples_are_changed() -> None:
    with pytest.raises(ValueError, match="check_equality compares all bits with all-fast, and fae"):
        job_of("embedding.strategy=fae", "training.check_equality=true")


@pytest.mark.parametrize(
    "setting",
    ["system.target=1.5", "system.mode=some", "system.hot_budget=0", "system.least_visits=-1"],
)
def test_settings_of_systems_are_checked(setting: str) -> None:
    with pytest.raises(ValueError, match="must be"):
        job_of(setting)
