"""`hotrow doctor` says what there is and what will be used."""

import json
import os

import torch
from typer.testing import CliRunner

from hotrow.cli import make_app


def test_json_names_versions_machine_and_use() -> None:
    result = CliRunner().invoke(make_app(), ["doctor", "--json"])
    facts = json.loads(result.stdout)
    assert facts["versions"]["torch"] == torch.__version__
    assert facts["machine"]["cores"] == len(os.sched_getaffinity(0))
    assert facts["machine"]["memory_bytes"] > facts["machine"]["memory_available_bytes"] > 0
    assert "page_lock_limit_bytes" in facts["machine"]
    assert facts["used"]["device"] == "cpu"


def test_people_read_the_same_facts() -> None:
    result = CliRunner().invoke(make_app(), ["doctor"])
    assert result.exit_code == 0
    for fact in ("page lock limit", "memory available", "triton", "kernels", torch.__version__):
        assert fact in result.stdout
