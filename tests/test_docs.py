"""Every Python block in the README and the docs runs as printed."""

from __future__ import annotations

import json
import re
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
from typer.testing import CliRunner

from hotrow.cli import make_app
from hotrow.run.config import BUILT_IN, RunConfig, load
from hotrow.run.files import read_run
from hotrow.support import toml

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NOTEBOOKS = sorted((ROOT / "docs").glob("*.ipynb"))


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.name
)
def test_the_blocks_of_a_page_run_as_printed(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TOML blocks that begin with a file name become files; console blocks are run, too."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    fenced = re.findall(r"```(python|toml|console)\n(.*?)```", page.read_text(), re.DOTALL)
    for place, (language, block) in enumerate(fenced):
        if language == "python":
            exec(compile(block, f"{page.name}, block {place}", "exec"), names)
        elif language == "console":
            for line in block.splitlines():
                result = CliRunner().invoke(make_app(), line.removeprefix("hotrow ").split())
                assert result.exit_code == 0, f"{line}: {result.output}"
        elif name := re.match(r"# (\S+\.toml)\n", block):
            (tmp_path / name[1]).write_text(block)
    for run in tmp_path.glob("runs/*"):  # a first run must not end in a warning about chunks
        assert read_run(run).summary.chunked_batches == 0


@pytest.mark.parametrize("page", NOTEBOOKS, ids=lambda page: page.name)
def test_the_cells_of_a_notebook_run_in_order(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    threads = torch.get_num_threads()
    try:
        for place, cell in enumerate(json.loads(page.read_text())["cells"]):
            if cell["cell_type"] == "code":
                assert not cell["outputs"], "clear the outputs before you commit"
                exec(compile("".join(cell["source"]), f"{page.name}, cell {place}", "exec"), names)
    finally:
        torch.set_num_threads(threads)  # a notebook may choose


def test_the_run_file_in_the_guide_has_the_defaults(tmp_path: Path) -> None:
    (text,) = blocks(ROOT / "docs" / "guide.md", "toml")
    (tmp_path / "run.toml").write_text(text)
    assert load(tmp_path / "run.toml") == RunConfig()


def test_the_run_file_in_the_guide_names_every_key(tmp_path: Path) -> None:
    (text,) = blocks(ROOT / "docs" / "guide.md", "toml")
    (tmp_path / "run.toml").write_text(re.sub(r"^# (?=\w+ = )", "", text, flags=re.MULTILINE))
    whole = toml.read(tmp_path / "run.toml")

    def unnamed(kind: Any, section: dict[str, Any]) -> list[str]:
        hints = get_type_hints(kind)
        missing = [key for key in hints if key not in section]
        for key in hints:
            if is_dataclass(hints[key]):
                missing += unnamed(hints[key], section[key])
        return missing

    assert unnamed(RunConfig, whole) == []


def test_the_guide_says_what_the_job_without_a_file_adds() -> None:
    text = (ROOT / "docs" / "guide.md").read_text()
    for section, added in BUILT_IN.items():
        for key, value in added.items():
            assert f"`{section}.{key} = {str(value).lower()}`" in text


RUN_FILE = """
[data]
rows = [400, 60, 5]
batch_size = 16
samples = 320
eval_batches = 4
[model]
embedding_dim = 4
[embedding]
budget = '60%'
"""


@pytest.mark.parametrize(
    ("name", "made"),
    [
        (
            "guide.md",
            ("scores.parquet", "train.parquet", "report/compare.html", "runs/first/events.*"),
        ),
        ("report.md", ("runs/one/report.html", "both.html")),
    ],
)
def test_the_commands_of_a_page_run(
    name: str, made: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(RUN_FILE)
    page = (ROOT / "docs" / name).read_text()
    for command in re.findall(r"^hotrow (.*)$", page, re.MULTILINE):
        result = CliRunner().invoke(make_app(), command.split())
        assert result.exit_code == 0, f"{command}: {result.output}"
    assert all(any(tmp_path.glob(path)) for path in made)


def test_every_run_file_in_configs_can_be_read() -> None:
    paths = sorted((ROOT / "configs").glob("*.toml"))
    assert paths
    for path in paths:
        load(path)


def anchors(page: Path) -> set[str]:
    """Links to headings, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_local_links_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\((?!http)([^)#]*)(?:#([^)]+))?\)", page.read_text()):
        other = page.parent / target if target else page
        assert other.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(other), f"{page.name} links to {target}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_source_files_that_are_named_exist(page: Path) -> None:
    names = re.findall(r"`((?:\w+/)+\w+\.(?:py|c))`", page.read_text())
    folders = (ROOT, ROOT / "src", ROOT / "src" / "hotrow")
    assert [
        name for name in names if not any((folder / name).is_file() for folder in folders)
    ] == []


@pytest.mark.parametrize(("name", "lines"), [("README.md", 120), ("docs/architecture.md", 130)])
def test_the_first_pages_stay_short(name: str, lines: int) -> None:
    assert len((ROOT / name).read_text().splitlines()) <= lines
