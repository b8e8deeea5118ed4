"""attnspec: the attention compiler.

Write an attention pattern in a few lines of `.attn`, ask what it reaches and costs, and get a
PyTorch module. Importing this package loads neither torch nor the compiler: names are resolved when
they are first used, so an emitted module pays only for the run time it needs.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from attnspec.awaited import when_imported
from attnspec.version import __version__

if TYPE_CHECKING:
    from attnspec.analysis.report.report import Report
    from attnspec.interchange.explained import Explanation, explain_mask
    from attnspec.interchange.hf_configs import from_hf_config
    from attnspec.interchange.mask_mods import from_mask_mod
    from attnspec.interchange.score_mods import from_score_mod
    from attnspec.interchange.zoo import zoo
    from attnspec.model_check import ModelVerification, verify_model
    from attnspec.runtime.layers import MultiheadAttention, SelfAttention
    from attnspec.runtime.packed import packed
    from attnspec.show.differences import Difference
    from attnspec.spec import Spec, diff, load, parse
    from attnspec.text.diagnostics import AttnSpecError, Diagnostic, InternalError, SpecError

__all__ = [
    "AttnSpecError",
    "Diagnostic",
    "Difference",
    "Explanation",
    "InternalError",
    "ModelVerification",
    "MultiheadAttention",
    "Report",
    "SelfAttention",
    "Spec",
    "SpecError",
    "__version__",
    "diff",
    "explain_mask",
    "from_hf_config",
    "from_mask_mod",
    "from_score_mod",
    "load",
    "packed",
    "parse",
    "verify_model",
    "zoo",
]

_HOMES = {
    "AttnSpecError": "attnspec.text.diagnostics",
    "Diagnostic": "attnspec.text.diagnostics",
    "InternalError": "attnspec.text.diagnostics",
    "SpecError": "attnspec.text.diagnostics",
    "Difference": "attnspec.show.differences",
    "diff": "attnspec.spec",
    "Explanation": "attnspec.interchange.explained",
    "explain_mask": "attnspec.interchange.explained",
    "from_hf_config": "attnspec.interchange.hf_configs",
    "from_mask_mod": "attnspec.interchange.mask_mods",
    "from_score_mod": "attnspec.interchange.score_mods",
    "zoo": "attnspec.interchange.zoo",
    "ModelVerification": "attnspec.model_check",
    "verify_model": "attnspec.model_check",
    "MultiheadAttention": "attnspec.runtime.layers",
    "packed": "attnspec.runtime.packed",
    "Report": "attnspec.analysis.report.report",
    "SelfAttention": "attnspec.runtime.layers",
    "Spec": "attnspec.spec",
    "load": "attnspec.spec",
    "parse": "attnspec.spec",
}

_GONE = {
    "from_deepspeed": "`attnspec.zoo()` lists DeepSpeed's layouts by name, and the table in"
    " `examples/README.md` says what corresponds to its configurations",
    "from_xformers": "the table in `examples/README.md` says what corresponds to xFormers' masks",
    "advise": "`spec.check()` names one change in the help of a claim that fails",
    "Advice": "`spec.check()` names one change in the help of a claim that fails",
}
"""Names that were public, each with what to use instead."""


# an exported program names the operator before anything else of this package is asked for
when_imported("torch", lambda: import_module("attnspec.runtime.operator"))
# a model that was saved with a spec is loaded with it
when_imported(
    "transformers.modeling_utils",
    lambda: import_module("attnspec.integrations.model_files").watch_files(),
)


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    way_out = f": {_GONE[name]}" if name in _GONE else ""
    raise AttributeError(f"module 'attnspec' has no attribute {name!r}{way_out}")


def __dir__() -> list[str]:
    return sorted(__all__)
