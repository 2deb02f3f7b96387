"""Ctrl-C while the `hotrow` command is still importing torch ends it in silence.

Python would show where in torch it was, in dozens of lines. Only the command itself does this:
programs that import hotrow keep Python's own behaviour.
"""

from __future__ import annotations

import os
import signal
import sys
import threading


def is_the_command(argv: list[str], original: list[str]) -> bool:
    """Return whether the process is `hotrow ...` or `python -m hotrow ...`."""
    module = original[original.index("-m") + 1 :][:1] if "-m" in original else []
    return module == ["hotrow"] or os.path.basename(argv[0] if argv else "") == "hotrow"


def _interrupts_end() -> None:
    """Let Ctrl-C end the command at once, without a traceback."""
    if (
        is_the_command(getattr(sys, "argv", []), sys.orig_argv)
        and threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    ):
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def interrupts_raise() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again, when everything is imported."""
    if (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    ):
        signal.signal(signal.SIGINT, signal.default_int_handler)


_interrupts_end()  # at import, because torch's comes next
