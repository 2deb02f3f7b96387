"""Commands as tests call them, and small runs for them to train."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from hotrow.cli import make_app

SMALL = """
[run]
name = "small"
[data]
rows = [400, 60, 5]
batch_size = 16
samples = 160
eval_batches = 4
[model]
embedding_dim = 4
bottom = [8]
top = [8]
[embedding]
budget = "60%"
"""


def hotrow(*words: str | Path, **environment: str) -> Result:
    return CliRunner().invoke(make_app(), [str(word) for word in words], env=environment)


def settings(*given: str) -> list[str]:
    """As options of a command."""
    return [word for setting in given for word in ("--set", setting)]


def events(result: Result) -> list[dict[str, Any]]:
    return [json.loads(line) for line in result.stdout.splitlines()]
