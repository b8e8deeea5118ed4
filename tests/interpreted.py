"""Kernels that are tried out on the CPU, by Triton's interpreter, or compiled for a GPU."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import triton.language as tl
from triton.runtime import interpreter


class _Patched:
    """What the interpreter asks for around each function: nothing is left to be taken back."""

    def restore(self) -> None:
        pass


@pytest.fixture(scope="module")
def interpreted() -> Iterator[None]:
    """Kernels run under the interpreter, whose words for the language are put in place once, and
    memory of the CPU is not copied to itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        from attnspec.backends.triton import kernels

        patch.setattr(interpreter, "_patch_attr", _called_with_semantics)
        scopes = [interpreter._patch_lang(each.fn) for each in (kernels.attend, tl.zeros)]
        for replaced in (
            (interpreter, "_patch_lang", lambda fn: _Patched()),
            (interpreter.GridExecutor, "_restore_args_dev", lambda *given: None),
            *_kept_types(),
            *_left_alike(),
        ):
            patch.setattr(*replaced)
        yield
        for scope in reversed(scopes):
            scope.restore()


Replaced = tuple[Any, str, Any]
"""Whose attribute is replaced, its name, and what stands for it."""


def _kept_types() -> Iterator[Replaced]:
    """Block types are made once for each kind, which saves a third of the interpreter's time."""
    numpy_type, new_block = interpreter._get_np_dtype, tl.block_type.__init__
    numpy_types: dict[str, object] = {}
    blocks: dict[tuple[object, ...], dict[str, object]] = {}
    shapes: dict[tuple[int, ...], tuple[object, object]] = {}

    def numpy_type_of(kind: Any) -> object:
        name = kind.scalar.name
        if name not in numpy_types:
            numpy_types[name] = numpy_type(kind)
        return numpy_types[name]

    def block(self: Any, element: Any, shape: Any) -> None:
        key = (element.name, *(getattr(size, "value", size) for size in shape))
        if key not in blocks:
            new_block(self, element, shape)
            blocks[key] = dict(vars(self))
        vars(self).update(blocks[key])

    def tensor(self: Any, handle: object, kind: Any) -> None:
        shape = tuple(kind.shape) if kind.is_block() else ()
        if shape not in shapes:
            sizes = tl.tuple([tl.constexpr(size) for size in shape])
            shapes[shape] = tl.constexpr(math.prod(shape)), sizes
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        self.numel, self.shape = shapes[shape]

    yield interpreter, "_get_np_dtype", numpy_type_of
    yield tl.block_type, "__init__", block
    yield tl.tensor, "__init__", tensor


BUILTIN = tl.core.builtin(lambda: None).__code__
"""What Triton wraps functions of its language in, which ask for a semantics."""


def _called_with_semantics(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """What stands for a function of the language: itself, handed the interpreter's semantics."""
    run = member.__wrapped__ if getattr(member, "__code__", None) is BUILTIN else member

    def call(*given: Any, **named: Any) -> Any:
        named["_semantic"] = interpreter.interpreter_semantic
        return run(*given, **named)

    scope.set_attr(obj, name, call)


def _left_alike() -> Iterator[Replaced]:
    """Blocks of equal shape and type are not made again; overflow of 32 bits is not computed."""
    semantic, builder = interpreter.interpreter_semantic, interpreter.interpreter_builder
    broadcast, converted = semantic.broadcast_impl_value, semantic.binary_op_type_checking_impl

    def of_one_shape(one: Any, other: Any) -> tuple[Any, Any]:
        # the shapes of tensors are made once for each, above
        return (one, other) if one.shape is other.shape else broadcast(one, other)

    def of_one_type(one: Any, other: Any, *more: bool, **named: bool) -> Any:
        kind: Any = getattr(one, "dtype", None)
        # beyond whether each may be a pointer it is a division, whose type is another
        alike = kind is not None and kind is getattr(other, "dtype", None)
        if alike and len(more) <= 2 and not named and not kind.is_ptr():
            return of_one_shape(one, other)
        return converted(one, other, *more, **named)

    yield semantic, "broadcast_impl_value", of_one_shape
    yield semantic, "binary_op_type_checking_impl", of_one_type
    yield builder, "options", replace(builder.options, sanitize_overflow=False)


def compiled_for_a_gpu(text: str, folder: Path, capability: int = 90) -> list[list[str]]:
    """What a fresh process prints that compiles kernels for a capability; it needs no GPU."""
    where = {**os.environ, "TRITON_CACHE_DIR": str(folder)}
    where.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-c", GPU.replace("90", str(capability)) + text]
    found = subprocess.run(command, env=where, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr[-2000:]
    return [line.split() for line in found.stdout.splitlines()]


GPU = """
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

class Gpu:
    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

driver.set_active(Gpu())
"""
