"""`hotrow doctor` says what there is and what will be used."""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from commands import succeeds
from hotrow.cli.doctor import _device_words, _named, examine

NO_GPU = SimpleNamespace(is_available=lambda: False)


def one_gpu(major: int = 9, free: int | None = 100 << 30) -> Any:
    """Return a torch.cuda with one device."""
    about = SimpleNamespace(name="Testla", total_memory=140 << 30, major=major, minor=0)

    def mem_get_info(number: int) -> tuple[int, int]:
        if free is None:
            raise RuntimeError("all CUDA-capable devices are busy or unavailable")
        return free, about.total_memory

    return SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: 1,
        get_device_properties=lambda number: about,
        mem_get_info=mem_get_info,
    )


def test_json_and_tables_name_versions_machine_and_use() -> None:
    facts = json.loads(succeeds("doctor", "--json").stdout)
    assert facts["versions"]["torch"] == torch.__version__
    assert facts["machine"]["cores"] == len(os.sched_getaffinity(0))
    assert facts["machine"]["memory_bytes"] > facts["machine"]["memory_available_bytes"] > 0
    assert "page_lock_limit_bytes" in facts["machine"]
    assert facts["used"]["device"] == "cpu"
    text = succeeds("doctor").stdout
    for fact in ("page lock limit", "memory available", "triton", "kernels", torch.__version__):
        assert fact in text


def test_a_gpu_is_described_and_can_be_used() -> None:
    pytest.importorskip("triton")
    facts = examine(cuda=one_gpu())
    (device,) = facts["machine"]["cuda_devices"]
    assert device == {
        "device": "cuda:0",
        "name": "Testla",
        "memory_bytes": 140 << 30,
        "memory_free_bytes": 100 << 30,
        "compute_capability": "9.0",
    }
    assert facts["on_cuda"]["usable"] is True
    assert facts["on_cuda"]["why_not"] == []
    assert facts["on_cuda"]["kernels"] == "triton"
    text = "cuda:0: Testla, 140.0 GiB (100.0 GiB free), compute capability 9.0"
    assert _device_words(device) == text
    (taken,) = examine(cuda=one_gpu(free=None))["machine"]["cuda_devices"]
    assert taken["memory_free_bytes"] is None
    assert "unknown free" in _device_words(taken)


@pytest.mark.parametrize(
    ("cuda", "has_triton", "reason"),
    [
        (NO_GPU, True, f"torch {torch.__version__} sees no CUDA device"),
        (one_gpu(major=7), True, "no device has compute capability 8.0, which the kernels need"),
        (one_gpu(), False, "triton cannot be imported ("),
    ],
)
def test_it_says_why_cuda_cannot_be_used(
    monkeypatch: pytest.MonkeyPatch, cuda: Any, has_triton: bool, reason: str
) -> None:
    if not has_triton:
        monkeypatch.setitem(sys.modules, "triton", None)
    facts = examine(cuda=cuda)["on_cuda"]
    assert facts["usable"] is False
    assert facts["why_not"][0].startswith(reason)


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        (None, "in bulk, by threads of C"),
        ("there is no C compiler", "by the GPU alone (there is no C compiler)"),
    ],
)
def test_it_says_whether_rows_leave_in_bulk(reason: str | None, words: str) -> None:
    facts = examine(why_no_writer=lambda: reason)["on_cuda"]
    assert facts["leaving_rows"] == words
    assert _named(facts)["evicted rows"] == words


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  Mon Jan  1 2026", True),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release", True),
        ("", False),
        (None, False),
    ],
)
def test_the_version_of_the_driver_is_read(
    tmp_path: Path, text: str | None, version: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # without nvidia-smi
    if text is not None:
        (tmp_path / "version").write_text(text)
    driver = examine(driver=tmp_path / "version")["machine"]["driver"]
    assert driver == ("580.159.04" if version else None)
