"""attnspec: the attention compiler.

Write an attention pattern in a few lines of `.attn`, ask what it reaches and costs, and get a
PyTorch module. Importing this package loads neither torch nor the compiler: names are resolved when
they are first used, so an emitted module pays only for the run time it needs.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from attnspec._version import __version__

if TYPE_CHECKING:
    from attnspec.advice import Advice, advise
    from attnspec.analysis.report import Report
    from attnspec.diagnostics import AttnSpecError, Diagnostic, InternalError, SpecError
    from attnspec.differing import Difference, diff
    from attnspec.self_attention import SelfAttention
    from attnspec.spec import Spec, load, parse

__all__ = [
    "Advice",
    "AttnSpecError",
    "Diagnostic",
    "Difference",
    "InternalError",
    "Report",
    "SelfAttention",
    "Spec",
    "SpecError",
    "__version__",
    "advise",
    "diff",
    "load",
    "parse",
]

_HOMES = {
    "Advice": "attnspec.advice",
    "advise": "attnspec.advice",
    "AttnSpecError": "attnspec.diagnostics",
    "Diagnostic": "attnspec.diagnostics",
    "InternalError": "attnspec.diagnostics",
    "SpecError": "attnspec.diagnostics",
    "Difference": "attnspec.differing",
    "diff": "attnspec.differing",
    "Report": "attnspec.analysis.report",
    "SelfAttention": "attnspec.self_attention",
    "Spec": "attnspec.spec",
    "load": "attnspec.spec",
    "parse": "attnspec.spec",
}


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'attnspec' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
