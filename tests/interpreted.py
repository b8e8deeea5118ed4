"""Kernels that are tried out on the CPU, by Triton's interpreter, or compiled for a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

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


def compiled_for_a_gpu(text: str, folder: Path) -> list[list[str]]:
    """What a program prints, by lines and words, that compiles kernels for compute capability 9.0:
    it needs no GPU, but a fresh process in which they are not interpreted."""
    where = {**os.environ, "TRITON_CACHE_DIR": str(folder)}
    where.pop(INTERPRETED, None)
    found = subprocess.run(
        [sys.executable, "-c", GPU + text], env=where, capture_output=True, text=True, check=False
    )
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
