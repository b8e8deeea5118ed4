"""Triton's interpreter, for kernels that are tried out on the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import triton.language as tl
from triton.runtime import interpreter

from attnspec.backends.triton.backend import INTERPRETED


class _Patched:
    """What the interpreter asks for around each function: nothing is left to be taken back."""

    def restore(self) -> None:
        pass


@pytest.fixture(scope="module")
def interpreted() -> Iterator[None]:
    """Kernels run under the interpreter. Its words for the language, which it puts in place again
    for every function that is called, are put there once, and memory of the CPU is not copied to
    itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(INTERPRETED, "1")
        from attnspec.backends.triton import kernels

        scopes = [interpreter._patch_lang(each.fn) for each in (kernels.attend, tl.zeros)]
        patch.setattr(interpreter, "_patch_lang", lambda fn: _Patched())
        patch.setattr(interpreter.GridExecutor, "_restore_args_dev", lambda *given: None)
        yield
        for scope in reversed(scopes):
            scope.restore()
