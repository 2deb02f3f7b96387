"""Numbers sent to the device, one after the other, without a wait."""

from __future__ import annotations

import pytest
import torch

from hotrow.engine.uploads import _PLACES, Upload
from hotrow.support.streams import lanes_of

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_each_is_there_in_its_turn(device: str) -> None:
    upload = Upload((2, 3), torch.int64, lanes_of(torch.device(device)))
    seen = []
    if device == "cuda":
        torch.cuda._sleep(50_000_000)  # all places are taken before the first has left
    for number in range(2 * _PLACES + 3):
        seen.append(upload.send([[number] * 3, [-number] * 3]).clone())
    assert [int(each[0, 2]) for each in seen] == list(range(2 * _PLACES + 3))
    assert [int(each[1, 0]) for each in seen] == [-number for number in range(2 * _PLACES + 3)]


@pytest.mark.parametrize("device", DEVICES)
def test_one_line_is_for_all(device: str) -> None:
    upload = Upload((2, 3), torch.float32, lanes_of(torch.device(device)))
    assert upload.send((0.5, 1.5, 2.5)).tolist() == [[0.5, 1.5, 2.5]] * 2
