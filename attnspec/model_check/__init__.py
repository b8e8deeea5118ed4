"""A running model held against a spec: which keys influence which queries in each attention layer.

Nothing here goes by masks. `watch` finds the attention of a model while it runs; `probe` replaces
the values of one call, whose output is linear in them, by unit vectors, so that the output is the
weights themselves, or moves what goes into a whole module and looks which outputs move; `compare`
holds that against the pairs of the spec, which `wanted` puts where the call has its queries and
keys. `setting` reads the arguments of the model: padding, packed documents, caches.
"""

from __future__ import annotations

from attnspec.model_check.check import Interrupted, Question, check_model, verify_model
from attnspec.model_check.packing import documents
from attnspec.model_check.report import LayerCheck, ModelVerification

__all__ = [
    "Interrupted",
    "LayerCheck",
    "ModelVerification",
    "Question",
    "check_model",
    "documents",
    "verify_model",
]
