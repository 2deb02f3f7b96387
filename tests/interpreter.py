"""Triton's interpreter, without the work that it repeats.

It looks through all members of triton.language for each launch, and again whenever a kernel calls
another function, to replace what is built in: a third of the time of a launch. What it replaces is
the same each time.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def install() -> None:
    """Find what is replaced once, and replace that for each launch."""
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_LangPatchScope"):
        return  # another version of Triton: it works, and takes longer
    find, tl = interpreter._patch_lang, interpreter.tl
    found: list[tuple[object, str, object]] = []
    running: list[Any] = []

    class Scope(interpreter._LangPatchScope):  # type: ignore[misc]
        def restore(self) -> None:
            running.remove(self)
            super().restore()

    def replace(fn: Any) -> Any:
        if not found:
            # Kernels name the language, and triton's own functions name its core.
            scope = find(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
            changed = {(id(of), name): (of, name) for of, name, _ in scope._changes}
            found.extend((of, name, getattr(of, name)) for of, name in changed.values())
            scope.restore()
        scope = Scope()
        running.append(scope)
        for of, name, value in found:
            scope.set_attr(of, name, value)
        return scope

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function of a kernel, whose launch has replaced the language."""
        assert running
        try:
            return self.rewrite()(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    interpreter._patch_lang = replace
    interpreter.InterpretedFunction.__call__ = call
