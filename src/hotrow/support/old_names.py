"""Modules that moved stay importable under the names that were documented before."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

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


def keep() -> None:
    """Let imports of old names find the modules where they are now."""
    if not any(isinstance(finder, _OldNames) for finder in sys.meta_path):
        sys.meta_path.append(_OldNames())
