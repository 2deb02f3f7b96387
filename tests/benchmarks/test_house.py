"""house.py measures a checkout from its text."""

from __future__ import annotations

from pathlib import Path

import pytest

FILES = {
    "src/hotrow/__init__.py": '"""Root."""\nfrom hotrow.top import walls\n',
    "src/hotrow/low/floor.py": "class Plank:\n    size = 1\n",
    "src/hotrow/top/walls.py": "from hotrow.low import floor\n\n\ndef paint():\n    return floor\n",
    "tests/test_walls.py": "def test_paint():\n    pass\n",
}


def test_packages_are_listed_from_the_lowest_layer_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], load
) -> None:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    load("house").show(tmp_path)
    _, _, *packages, _, _, source, tests, _ = capsys.readouterr().out.splitlines()
    assert [" ".join(line.split()) for line in packages] == [
        "low 1 2 low/floor.py 2 Plank 2 -",
        "top 1 5 top/walls.py 5 - 0 low",
        "(root) 1 2 __init__.py 2 - 0 top",
    ]
    assert " ".join(source.split()) == "src 3 9 2 / 2 / 5 2 / 2 / 2 12 / 28 / 28"
    assert " ".join(tests.split()) == "tests 1 2 2 / 2 / 2 2 / 2 / 2 8 / 8 / 17"
