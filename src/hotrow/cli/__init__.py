"""The `hotrow` command. Every module here without a leading underscore is one subcommand.

A subcommand is the function named like its module; adding a file adds a command.
"""

from __future__ import annotations

import functools
import os
import pkgutil
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from hotrow.cli._output import one_line_warnings
from hotrow.cli._process import INTERRUPTED, USER_ERROR, refuse_ranks
from hotrow.support.messages import settings_written
from hotrow.support.startup import interrupts_raise
from hotrow.support.version import __version__

# Commands that several ranks may run: they only read, or share their work.
_ANYWHERE = ("compare", "doctor", "report", "train", "verify")


def main() -> None:
    """Entry point of the console script and of `python -m hotrow`."""
    interrupts_raise()
    make_app()()


class _PlainFlags:
    """Shows flags without the `<bool>` that typer adds, as if they took a value."""

    def get_params(self, ctx: Any) -> Any:
        params = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
        return params


class _Command(_PlainFlags, TyperCommand): ...


class _Group(_PlainFlags, TyperGroup): ...


def make_app() -> typer.Typer:
    app = typer.Typer(
        name="hotrow",
        cls=_Group,
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode="markdown",
        # A bug shows Python's own traceback, without the values of tensors.
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_without_command)
    for name in sorted(module.name for module in pkgutil.iter_modules(__path__)):
        if not name.startswith("_"):
            command = getattr(import_module(f"{__name__}.{name}"), name)
            app.command(name, cls=_Command)(_in_plain_words(command))
    return app


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"hotrow {__version__}")
        raise typer.Exit


def _without_command(
    version: bool = typer.Option(
        False, "--version", callback=_show_version, is_eager=True, help="Print the version."
    ),
) -> None:
    """Train recommendation models whose embedding tables exceed fast memory.

    **hotrow train** runs a built-in job on generated data in under a minute.

    **hotrow doctor** says what this machine has and what will be used.

    **hotrow COMMAND --help** teaches one command, with examples.
    """


class _Steady:
    """A stream that does not stop a command when its reader has gone or its disk is full: the files
    of a command are worth more than its output."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.full: OSError | None = None  # why output was lost

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> Any:
        return self._try(self._stream.write, text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, call: Callable[..., Any], *args: Any) -> Any:
        try:
            return call(*args)
        except OSError as error:
            self.full = None if isinstance(error, BrokenPipeError) else error
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
            return call(*args)


def _in_plain_words(command: Callable[..., None]) -> Callable[..., None]:
    """Print errors of users as one sentence, with exit code 2; other errors are bugs and show."""

    @functools.wraps(command)
    def wrapped(*args: Any, **options: Any) -> None:
        out, err = _Steady(sys.stdout), _Steady(sys.stderr)
        with redirect_stdout(out), redirect_stderr(err):
            try:
                if command.__name__ not in _ANYWHERE:
                    refuse_ranks(command.__name__)
                with one_line_warnings(), settings_written("--set embedding.{}={}".format):
                    command(*args, **options)
                out.flush()
                if out.full is not None:
                    raise OSError(f"not all that was said could be written: {out.full.strerror}")
            except (ValueError, OSError) as error:
                typer.echo(f"error: {error}", err=True)
                raise typer.Exit(USER_ERROR) from error
            except KeyboardInterrupt as error:
                typer.echo("; ".join(["interrupted", *map(str, error.args)]), err=True)
                raise typer.Exit(INTERRUPTED) from None

    return wrapped
