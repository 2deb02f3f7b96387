"""What importing hotrow changes in Python, before torch is imported.

Ctrl-C while the `hotrow` command is still importing torch ends it in silence: Python would show
where in torch it was, in dozens of lines. Programs that import hotrow keep Python's own behaviour.
Modules that moved stay importable under the names that were documented before.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


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


MOVED = {
    "hotrow.calibrate": "hotrow.systems.calibrate",
    "hotrow.cost": "hotrow.sizing.cost",
    "hotrow.hotset": "hotrow.inputs.hotset",
    "hotrow.loggers": "hotrow.systems.hotline.popularity",
    "hotrow.machine": "hotrow.sizing.machines",
    "hotrow.reuse": "hotrow.sizing.reuse",
    "hotrow.run.compare": "hotrow.study.compare",
    "hotrow.run.lookups": "hotrow.study.lookups",
    "hotrow.run.profiling": "hotrow.study.profiling",
    "hotrow.run.sizing": "hotrow.study.sizing",
    "hotrow.run.systems": "hotrow.study.systems",
    "hotrow.run.trained": "hotrow.run.open_run",
    "hotrow.strategy": "hotrow.engine.strategy",
}


class _OldNames(MetaPathFinder, Loader):
    """Finds a moved module: the same object, so that a class is never defined twice."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name in MOVED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(MOVED[spec.name])
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the import system has put the old name's there


# At import, because torch's comes next.
_interrupts_end()
sys.meta_path.append(_OldNames())
