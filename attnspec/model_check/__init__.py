"""A running model held against a spec: which keys influence which queries in each attention layer.

Nothing here goes by masks. `watch` finds the attention of a model while it runs. Each `Call` of it
is asked for its weights, or moved where it is a whole module. `check` holds that against the pairs
of the spec, which `wanted` puts where the call has its queries and keys, by the model's arguments.
"""

from __future__ import annotations

from attnspec.model_check.check import Interrupted, Run, verify_model
from attnspec.model_check.report import LayerCheck, ModelVerification
from attnspec.model_check.wanted import documents

__all__ = ["Interrupted", "LayerCheck", "ModelVerification", "Run", "documents", "verify_model"]
