"""A running model compared with a spec: which keys influence which queries in each layer.

No mask is trusted. `watch` finds the attention calls of a running model. Each `Call` measures its
weights. `wanted` has the pairs of the spec at the positions of a call, and `check` compares them.
"""

from __future__ import annotations

from attnspec.model_check.check import Run, verify_model
from attnspec.model_check.report import LayerCheck, ModelVerification

__all__ = ["LayerCheck", "ModelVerification", "Run", "verify_model"]
