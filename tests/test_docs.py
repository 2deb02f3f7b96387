"""Every Python block in the README and the docs runs as printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCKS = [
    pytest.param(block, id=f"{page.name}-{place}")
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    for place, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
]


def test_there_are_blocks_to_run() -> None:
    assert BLOCKS


@pytest.mark.parametrize("block", BLOCKS)
def test_a_block_runs_as_printed(block: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(block, "documentation", "exec"), {"__name__": "__main__"})


def test_local_links_lead_somewhere() -> None:
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
