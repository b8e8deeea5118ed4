"""The module that computes a compiled attention, the layer around it, and going on from a state.

`CompiledAttention` and `FORMAT` are what emitted modules import from here; under `composed()` what
is exported holds plain operations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnspec.ir.serial import FORMAT

if TYPE_CHECKING:
    from attnspec.backends.common.torch_modes import composed
    from attnspec.runtime.module import CompiledAttention

__all__ = ["FORMAT", "CompiledAttention", "composed"]


def __getattr__(name: str) -> object:
    if name == "CompiledAttention":
        # torch is loaded where a module is made, not where a plan is
        from attnspec.runtime.module import CompiledAttention

        return CompiledAttention
    if name == "composed":
        from attnspec.backends.common.torch_modes import composed

        return composed
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
