"""`hotrow doctor` says what there is and what will be used."""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hotrow.cli.doctor
from commands import hotrow as invoke


def doctor_says(*arguments: str) -> str:
    result = invoke("doctor", *arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def facts() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(doctor_says("--json"))
    return found


def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def one_gpu(monkeypatch: pytest.MonkeyPatch, *, major: int, free: int | None = 100 << 30) -> None:
    about = SimpleNamespace(name="Testla", total_memory=140 << 30, major=major, minor=0)

    def mem_get_info(number: int) -> tuple[int, int]:
        if free is None:
            raise RuntimeError("all CUDA-capable devices are busy or unavailable")
        return free, about.total_memory

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: about)
    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)


def test_json_names_versions_machine_and_use() -> None:
    found = facts()
    assert found["versions"]["torch"] == torch.__version__
    assert found["machine"]["cores"] == len(os.sched_getaffinity(0))
    assert found["machine"]["memory_bytes"] > found["machine"]["memory_available_bytes"] > 0
    assert "page_lock_limit_bytes" in found["machine"]
    assert found["used"]["device"] == "cpu"


def test_people_read_the_same_facts() -> None:
    said = doctor_says()
    for fact in ("page lock limit", "memory available", "triton", "kernels", torch.__version__):
        assert fact in said


def test_without_a_gpu_it_says_why_cuda_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    no_gpu(monkeypatch)
    found = facts()
    assert found["machine"]["cuda_devices"] == []
    assert found["on_cuda"]["usable"] is False
    assert found["on_cuda"]["why_not"][0] == f"torch {torch.__version__} sees no CUDA device"
    assert "sees no CUDA device" in doctor_says()


def test_a_gpu_is_described_and_can_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    one_gpu(monkeypatch, major=9)
    found = facts()
    assert found["machine"]["cuda_devices"] == [
        {
            "device": "cuda:0",
            "name": "Testla",
            "memory_bytes": 140 << 30,
            "memory_free_bytes": 100 << 30,
            "compute_capability": "9.0",
        }
    ]
    assert found["on_cuda"]["usable"] is True
    assert found["on_cuda"]["why_not"] == []
    assert found["on_cuda"]["kernels"] == "triton"
    said = " ".join(doctor_says().split())  # a narrow screen breaks lines
    assert "cuda:0: Testla, 140.0 GiB (100.0 GiB free), compute capability 9.0" in said


def test_whether_rows_can_leave_in_bulk_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for reason, told in (
        (None, "in bulk, by threads of C"),
        ("there is no C compiler", "by the GPU alone (there is no C compiler)"),
    ):
        monkeypatch.setattr(hotrow.cli.doctor, "why_not", lambda reason=reason: reason)
        assert facts()["on_cuda"]["leaving_rows"] == told


def test_a_gpu_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    one_gpu(monkeypatch, major=7)
    assert facts()["on_cuda"]["why_not"][0].startswith("no device has compute capability 8.0")


def test_a_gpu_that_is_taken_is_still_described(monkeypatch: pytest.MonkeyPatch) -> None:
    one_gpu(monkeypatch, major=9, free=None)
    assert facts()["machine"]["cuda_devices"][0]["memory_free_bytes"] is None
    assert "unknown free" in doctor_says()


def test_without_triton_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    one_gpu(monkeypatch, major=9)
    monkeypatch.setitem(sys.modules, "triton", None)
    (reason,) = facts()["on_cuda"]["why_not"]
    assert reason.startswith("triton cannot be imported")


@pytest.mark.parametrize(
    "text",
    [
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  Mon Jan  1 2026",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build",
    ],
)
def test_the_driver_is_read_from_what_it_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str
) -> None:
    (tmp_path / "version").write_text(text)
    monkeypatch.setattr("hotrow.cli.doctor.DRIVER", tmp_path / "version")
    assert facts()["machine"]["driver"] == "580.159.04"


def test_without_a_driver_there_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("hotrow.cli.doctor.DRIVER", tmp_path / "nowhere")
    monkeypatch.setattr("hotrow.cli.doctor.shutil.which", lambda command: None)
    assert facts()["machine"]["driver"] is None
