"""The command line teaches itself."""

import subprocess
import sys
from importlib.metadata import version

import pytest
from typer.testing import CliRunner, Result

from hotrow.cli import make_app


def hotrow(*arguments: str) -> Result:
    return CliRunner().invoke(make_app(), arguments)


def test_help_names_every_command() -> None:
    result = hotrow("--help")
    assert result.exit_code == 0
    for command in ("train", "prepare", "doctor"):
        assert command in result.stdout


@pytest.mark.parametrize("command", ["train", "prepare", "doctor"])
def test_help_of_a_command_has_examples(command: str) -> None:
    result = hotrow(command, "--help")
    assert result.exit_code == 0
    assert "Examples" in result.stdout
    assert f"hotrow {command}" in result.stdout


def test_without_a_command_help_is_shown() -> None:
    assert "Usage" in hotrow().output


def test_version_is_the_installed_one() -> None:
    assert hotrow("--version").stdout.strip() == f"hotrow {version('hotrow')}"


def test_an_unknown_command_is_an_error() -> None:
    assert hotrow("trian").exit_code == 2


def test_python_dash_m_is_the_same_command() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "hotrow", "--version"], capture_output=True, text=True, check=True
    )
    assert result.stdout == f"hotrow {version('hotrow')}\n"
