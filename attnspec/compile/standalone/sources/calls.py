"""The checks of a call."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

HEADS: int | None = None
LAYERS: int | None = None
INPUTS: dict[str, tuple[str, int | None]] = {"important": ("tokens", 64)}

Inputs = Mapping[str, Tensor] | None


def given(
    q: Tensor, k: Tensor, v: Tensor, layer: int, inputs: Inputs, padding: Tensor | None
) -> dict[str, Tensor]:
    """The inputs and the padding of a call; raises unless all fits together and to the spec."""
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    fit = q.dim() == k.dim() == v.dim() == 4 and q.dtype == k.dtype == v.dtype
    fit = fit and k.shape[:3] == v.shape[:3] and q.shape[::3] == k.shape[::3]
    fit = fit and q.shape[2] <= k.shape[2] and HEADS in (None, q.shape[1])
    if not fit or not k.shape[1] or q.shape[1] % k.shape[1]:
        needed = f"[B, {HEADS or 'H'}, n_q, d], [B, H_kv, n_k, d] and [B, H_kv, n_k, d_v]"
        raise ValueError(f"{needed} of one type are needed, H_kv dividing H, got {shapes}")
    if not 0 <= layer < (LAYERS or layer + 1):
        raise ValueError(f"layer must be from 0 on and below {LAYERS}, got {layer}")
    x = {**(inputs or {}), **({} if padding is None else {"key padding": padding})}
    if {*x, "key padding"} != {*INPUTS, "key padding"}:
        raise ValueError(f"the inputs are {list(INPUTS)}, got {list(inputs or {})}")
    for name, tensor in x.items():
        kind, most = INPUTS.get(name, ("tokens", None))
        shape = k.shape[:1] if kind == "length" else k.shape[::2]
        if tensor.shape != shape or (tensor.dtype == torch.bool) != (kind == "tokens"):
            raise ValueError(f"{name} must be {kind} {list(shape)}, got {list(tensor.shape)}")
        if most is not None and int(tensor.sum(-1).amax()) > most:
            raise ValueError(f"`{name}` promises at most {most} tokens")
    return x
