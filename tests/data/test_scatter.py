"""The permutation: one-to-one, scattered, and different for every key."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotrow.data.popularity import Scatter
from hotrow.support.hashing import hashed, key_of


@given(num_rows=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
def test_every_row_is_reached_once(num_rows, key):
    ids = Scatter(num_rows, key=key)(np.arange(num_rows))
    assert np.array_equal(np.sort(ids), np.arange(num_rows))


@pytest.mark.parametrize("num_rows", [2**20, 2**20 + 1, 1_000_003])
def test_every_row_of_a_large_table_is_reached_once(num_rows):
    ids = Scatter(num_rows, key=7)(np.arange(num_rows))
    assert np.bincount(ids, minlength=num_rows).max() == 1


def test_the_first_positions_spread_over_the_whole_table():
    num_rows = 10_131_227
    ids = np.sort(Scatter(num_rows, key=7)(np.arange(10_000)))
    per_tenth = np.bincount(ids * 10 // num_rows, minlength=10)
    assert per_tenth.min() > 800
    assert per_tenth.max() < 1200
    gaps = np.diff(ids) / (num_rows / 10_000)
    assert gaps.std() == pytest.approx(1.0, abs=0.1)  # as between points thrown at random


def test_ids_beyond_the_range_of_floats_survive():
    ids = Scatter(2**40 + 3, key=1)(np.arange(2**40 - 1000, 2**40))
    assert len(np.unique(ids)) == 1000
    assert ids.min() >= 0
    assert ids.max() < 2**40 + 3


def test_other_keys_give_other_orders():
    orders = [tuple(Scatter(1000, key=key)(np.arange(1000))) for key in range(20)]
    assert len(set(orders)) == 20


def test_every_use_of_a_seed_has_a_key_of_its_own():
    keys = {
        key_of(seed, purpose, table)
        for seed in range(20)
        for purpose in ("scatter", "effect", "slope")
        for table in range(30)
    }
    assert len(keys) == 20 * 3 * 30


def test_each_bit_of_a_hash_is_set_half_of_the_time():
    bits = np.unpackbits(hashed(np.arange(20_000), key=3).view(np.uint8).reshape(-1, 8), axis=1)
    assert np.abs(bits.mean(axis=0) - 0.5).max() < 0.02
