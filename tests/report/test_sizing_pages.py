"""Pages of profile, simulate and size open in a real browser, too: from what the commands write."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from test_in_browser import assert_theme, drawn, look
from typer.testing import CliRunner

from browser import CHROMIUM, Browser, chromium
from hotrow.cli import make_app

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine"),
]
RUN = (
    "[data]\nrows = [20000, 3000, 300, 10]\nbatch_size = 64\nsamples = 3840\n"
    "names = ['item <b>', 'user', 'city', 'day']\n"
)
FEW = ["--batches", "20", "--warm-up", "20", "--depths", "2,9"]
COMMANDS = {
    "profile": [],
    "simulate": [*FEW, "--slots", "3%,5%,10%", "--strategy", "lru,lookahead", "--machine", "h200"],
    "size": [*FEW, "--machine", "h200", "--dense-ms", "0.5"],
}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    (folder / "run.toml").write_text(RUN)
    found = {}
    for command, options in COMMANDS.items():
        found[command] = folder / f"{command}.html"
        words = [command, str(folder / "run.toml"), *options, "--html", str(found[command])]
        result = CliRunner().invoke(make_app(), words)
        assert result.exit_code == 0, result.output
        assert f"page written to {found[command]}" in result.output.replace("\n", "")
    return found


@pytest.mark.parametrize(
    ("command", "width", "dark"),
    [("profile", 1280, False), ("simulate", 400, True), ("size", 1280, True), ("size", 400, False)],
)
def test_a_page_opens(
    browser: Browser, pages: dict[str, Path], command: str, width: int, dark: bool
) -> None:
    look(browser, pages[command], width=width, dark=dark, name=command)
    assert_theme(browser, dark=dark)
    found = drawn(browser)
    if command == "profile":
        coverage, hot, misses, windows, drift = found
        assert len(coverage) == 5  # all tables, and each
        assert [len(set(misses)), len(misses), len(windows), len(drift)] == [1, 3, 2, 3]
        assert hot == [10]
        assert drift == [8, 7, 7]
    elif command == "simulate":
        rows, hits, steps = found
        assert rows == hits == [3] * 4  # lru, look-ahead at two depths, belady
        assert steps == [3] * 3
    else:
        speeds, moved, parts = found
        assert len(speeds) == len(moved) + 1 == 5  # with what was asked for
        assert parts == [4] * 3
    assert browser.evaluate("document.querySelectorAll('tbody tr').length") >= 4
    assert "item <b>" in browser.evaluate("document.body.innerText") or command != "profile"
