"""Ordinary DataLoaders feed the look-ahead, whatever their workers are."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils.data import DataLoader

import hotrow
from builders import CASES, Samples, build, is_left_out_of_forks, outcome, readout, train

CASE = CASES["one-hot"]


def run(embedding: hotrow.EmbeddingBagCollection, loader: Any) -> Any:
    losses = []
    for ids, label in hotrow.ahead(loader, embedding, ids=lambda batch: batch[0]):
        loss = readout(embedding(ids)) * label.mean()
        loss.backward()
        losses.append(loss.detach())
    return outcome(embedding, losses)


@pytest.mark.parametrize("workers", ["none", "fork", pytest.param("spawn", marks=pytest.mark.slow)])
# Python warns of forks beside threads; a loader that forks is what this is about.
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_data_loader_gives_the_same_bits_with_any_workers(workers: str) -> None:
    options: dict[str, Any] = {}
    if workers != "none":
        options = {"num_workers": 2, "multiprocessing_context": workers}
    loader = DataLoader(Samples(), batch_size=8, **options)
    expected = run(build(CASE), DataLoader(Samples(), batch_size=8))
    found = run(build(CASE, strategy="lookahead", budget=4000), loader)
    assert found.same_bits(expected)


def test_forked_workers_do_not_see_the_store() -> None:
    """Reading it there would be an error, not a copy."""
    embedding = build(CASE, strategy="lookahead", budget=4000)
    assert is_left_out_of_forks(embedding.groups[0].store.rows.data_ptr())


def test_a_second_epoch_goes_on_where_the_first_one_ended() -> None:
    batches = CASE.batches(12)
    embedding, reference = build(CASE, strategy="lookahead", budget=4000), build(CASE)
    for _ in range(2):
        found = train(embedding, batches)
        expected = train(reference, batches)
        assert found.same_bits(expected)
