"""Triton's interpreter, without the work that it repeats.

It looks through all members of triton.language for each launch, and again whenever a kernel calls
another function, to replace what is built in: a third of the time of a launch. What it replaces is
the same each time. So are the types and shapes of values, which it computes for each of them. Its
sums that show whether integers overflow are used only if it debugs: a third of the rest.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any


def install() -> None:
    """Let the interpreter do once what it would do again for each launch and each value."""
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_LangPatchScope"):
        return  # another version of Triton: it works, and takes longer
    _find_builtins_once(interpreter)
    _describe_types_once(interpreter)
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)


def _find_builtins_once(interpreter: Any) -> None:
    """Find what is replaced once, and replace that for each launch."""
    find, tl = interpreter._patch_lang, interpreter.tl
    found: list[tuple[object, str, object]] = []
    running: list[Any] = []

    class Scope(interpreter._LangPatchScope):  # type: ignore[misc]
        def restore(self) -> None:
            running.remove(self)
            super().restore()

    def patch(fn: Any) -> Any:
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

    interpreter._patch_lang = patch
    interpreter.InterpretedFunction.__call__ = call


def _describe_types_once(interpreter: Any) -> None:
    """Compute what follows from a type or a shape once, and not for each value."""
    core = interpreter.tl.core
    numpy_types: dict[str, Any] = {}
    blocks: dict[tuple[Any, ...], dict[str, Any]] = {}
    shapes: dict[str, tuple[Any, Any]] = {}  # by the name of a type
    numpy_type, make_block = interpreter._get_np_dtype, core.block_type.__init__
    make_tensor, equal = core.tensor.__init__, core.dtype.__eq__
    broadcast = interpreter.TritonSemantic.broadcast_impl_value

    def numpy_type_of(dtype: Any) -> Any:
        if dtype.name not in numpy_types:
            numpy_types[dtype.name] = numpy_type(dtype)
        return numpy_types[dtype.name]

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        if not all(type(size) is int for size in shape):
            return make_block(self, element_ty, shape)
        key = (element_ty.name, *shape)
        if key not in blocks:
            make_block(self, element_ty, shape)
            blocks[key] = dict(self.__dict__)
        self.__dict__.update(blocks[key], element_ty=element_ty)

    def tensor(self: Any, handle: Any, type: Any) -> None:
        name = type.name if type.is_block() else ""
        if name not in shapes:
            make_tensor(self, handle, type)
            shapes[name] = self.numel, self.shape
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = shapes[name]

    def same_type(self: Any, other: Any) -> Any:
        return self.name == other.name if type(other) is core.dtype else equal(self, other)

    def broadcast_together(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        left, right = lhs.type, rhs.type
        if left.is_block() and right.is_block() and left.shape.values == right.shape.values:
            return lhs, rhs
        together: tuple[Any, Any] = broadcast(self, lhs, rhs)
        return together

    interpreter._get_np_dtype = numpy_type_of
    core.dtype.__eq__ = same_type
    interpreter.TritonSemantic.broadcast_impl_value = broadcast_together
    core.block_type.__init__ = block_type
    core.tensor.__init__ = tensor
