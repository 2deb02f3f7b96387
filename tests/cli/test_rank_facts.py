"""`hotrow doctor` says what ranks would use on this machine."""

from __future__ import annotations

import json
import os
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hotrow.cli._rank_facts as rank_facts_module
from commands import hotrow, refused, succeeds
from hotrow.cli._rank_facts import in_words, output_of, rank_facts

NO_GPU = SimpleNamespace(is_available=lambda: False)
GLOO = SimpleNamespace(
    is_available=lambda: True, is_gloo_available=lambda: True, is_nccl_available=lambda: False
)
BOTH = SimpleNamespace(
    is_available=lambda: True, is_gloo_available=lambda: True, is_nccl_available=lambda: True
)
NEITHER = SimpleNamespace(is_available=lambda: False)
TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "first", "MASTER_PORT": "29500", "OMP_NUM_THREADS": "1",
    "TORCHELASTIC_RESTART_COUNT": "2",
}  # fmt: skip
# As drivers print it: names are underlined, columns are tabs apart.
TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tPIX\t0-31,64-95\t0\t\tN/A
GPU1\tNV18\t X \tSYS\t32-63\t1\t\tN/A
NIC0\tPIX\tSYS\t X \t\t\t\t

Legend:

  NV#  = Connection traversing a bonded set of # NVLinks
"""
BUS = "0, 5, 16\n1, 5, 8\n"


def gpus(count: int, direct: bool = True) -> Any:
    return SimpleNamespace(
        is_available=lambda: count > 0,
        device_count=lambda: count,
        can_device_access_peer=lambda a, b: direct,
    )


def printed(*command: str) -> str:
    return TOPOLOGY if "topo" in command else BUS


def silent(*command: str) -> str:
    return ""


def words_of(count: int | None, **options: Any) -> dict[str, str]:
    facts = rank_facts(count, **{"variables": {}, "output": silent, **options})
    assert json.loads(json.dumps(facts)) == facts
    return in_words(facts)


def test_without_a_gpu_ranks_use_gloo_and_share_the_cores() -> None:
    cores = len(os.sched_getaffinity(0))
    words = words_of(cores, cuda=NO_GPU, distributed=GLOO)
    assert words["backends"] == "gloo"
    assert words[f"--ranks {cores} on cpu"] == "gloo, 1 core for each rank"
    assert words[f"--ranks {cores} on cuda"] == "not possible: torch sees no GPU"
    assert words["started by torchrun"] == "no"
    assert not {"GPU to GPU", "GPU to host"} & words.keys()
    words = words_of(2 * cores, cuda=NO_GPU, distributed=GLOO)
    assert words[f"--ranks {2 * cores} on cpu"].endswith(f"{2 * cores} ranks share fewer cores")
    assert words_of(2, cuda=NO_GPU, distributed=NEITHER)["backends"].startswith("none")


@pytest.mark.parametrize(
    ("count", "have", "distributed", "expected"),
    [
        (2, 2, BOTH, "nccl; rank 0 cuda:0, rank 1 cuda:1"),
        (
            3, 2, BOTH,
            "gloo: 2 GPUs for 3 ranks, and ranks of nccl need one each; "
            "rank 0 cuda:0, rank 1 cuda:1, rank 2 cuda:0",
        ),
        (2, 2, GLOO, "gloo: there is no nccl; rank 0 cuda:0, rank 1 cuda:1"),
        (None, 4, BOTH, "nccl; rank 0 cuda:0, rank 1 cuda:1, rank 2 cuda:2, rank 3 cuda:3"),
        (None, 1, BOTH, "gloo: 1 GPU for 2 ranks, and ranks of nccl need one each; "
         "rank 0 cuda:0, rank 1 cuda:0"),
    ],
)  # fmt: skip
def test_ranks_of_nccl_have_a_gpu_each(
    count: int | None, have: int, distributed: Any, expected: str
) -> None:
    words = words_of(count, cuda=gpus(have), distributed=distributed)
    assert words[f"--ranks {count or max(2, have)} on cuda"] == expected


def test_links_of_gpus_are_those_that_the_driver_prints() -> None:
    words = words_of(2, cuda=gpus(2), distributed=BOTH, output=printed)
    assert words["GPU to GPU"] == "cuda:0 and cuda:1: NV18 (NVLink), read directly"
    assert words["GPU to host"].splitlines() == [
        "cuda:0: PCIe 5, 16 lanes, near cores 0-31,64-95 (NUMA node 0)",
        "cuda:1: PCIe 5, 8 lanes, near cores 32-63 (NUMA node 1)",
    ]
    words = words_of(2, cuda=gpus(2, direct=False), distributed=BOTH)
    assert words["GPU to GPU"] == "cuda:0 and cuda:1: link unknown, read through the host"
    assert words["GPU to host"].splitlines()[0] == "cuda:0: bus unknown"


@pytest.mark.parametrize(
    "text", ["no GPU0 here", "GPU0", "\tGPU0\nGPU0\t X", "\n\n", TOPOLOGY[:60]]
)
def test_what_is_not_understood_is_unknown(text: str) -> None:
    words = words_of(3, cuda=gpus(3), distributed=BOTH, output=lambda *_: text)
    assert words["GPU to GPU"].count("link unknown") == 3


def test_torchruns_variables_are_shown() -> None:
    words = words_of(None, cuda=NO_GPU, distributed=GLOO, variables=TORCHRUN)
    assert words["started by torchrun"] == (
        "rank 3 of 4 (1 of 2 on this machine), meeting at first:29500, OMP_NUM_THREADS 1, "
        "restarted 2 times"
    )
    assert "--ranks 2 on cpu" in words  # those of this machine


def test_a_command_that_hangs_or_fails_prints_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_facts_module, "_SECONDS", 0.5)
    started = time.perf_counter()
    assert output_of(sys.executable, "-c", "import time; time.sleep(30)") == ""
    assert time.perf_counter() - started < 10
    assert output_of(sys.executable, "-c", "print('half'); raise SystemExit(1)") == ""
    assert output_of("no-such-command-anywhere") == ""
    assert output_of(sys.executable, "-c", "print('whole')") == "whole\n"


def test_the_command_says_it_once_for_each_machine() -> None:
    facts = json.loads(succeeds("doctor", "--ranks", "3", "--json").stdout)["ranks"]
    assert facts["ranks"] == 3
    assert "gloo" in facts["backends"]
    assert "--ranks 3 on cpu" in succeeds("doctor", "--ranks", "3").stdout
    started = {**TORCHRUN, "LOCAL_RANK": "0"}
    assert "rank 3 of 4 (0 of 2 on this machine)" in hotrow("doctor", **started).stdout
    other = hotrow("doctor", **TORCHRUN)
    assert (other.exit_code, other.stdout) == (0, "")
    assert "--ranks" in refused("doctor", "--ranks", "0")


@pytest.mark.gpu
def test_ranks_of_this_machine_are_placed_on_its_gpus() -> None:
    count = torch.cuda.device_count()
    facts = json.loads(succeeds("doctor", "--ranks", str(count + 1), "--json").stdout)["ranks"]
    assert facts["backend_on_cuda"] == "gloo"
    assert facts["devices_on_cuda"][0] == facts["devices_on_cuda"][-1] == "cuda:0"
    assert facts["backends"]["nccl"].split(".")[0].isdecimal()
    assert len(facts["host_links"]) == count
    assert rank_facts(count)["backend_on_cuda"] == "nccl"
