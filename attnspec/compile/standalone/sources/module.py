"""The module of a file: the checks of a call, and what is learned."""

import torch
from torch import nn

from attnspec.backends.factored.text_of_sums import attend

HEADS, LAYERS, CROSS, REFUSED, SCALED = None, None, False, True, True
PAIRS = True
INPUTS = {"important": ("bool", 64)}
PARTS = {"bias_0": ((1, 1, 32), "constant_", 0.0)}

TWO_SEQUENCES = {"the last n_q positions": "another sequence than keys", ", n_q <= n_k": ""}
"""Other names where queries are not positions of the sequence of keys."""


def given(q, k, v, layer, inputs, padding):
    """The inputs and the padding of a call; raises unless all fits together and to the spec."""
    if q.dtype != k.dtype or k.dtype != v.dtype:
        raise ValueError(f"q, k, v must be of one type, got {q.dtype}, {k.dtype}, {v.dtype}")
    fit = q.dim() == k.dim() == v.dim() == 4 and q.shape[1] == (HEADS or q.shape[1])
    fit = fit and k.shape[:3] == v.shape[:3] and q.shape[::3] == k.shape[::3]
    if not CROSS:
        fit = fit and q.shape[2] <= k.shape[2]
    if not fit or not k.shape[1] or q.shape[1] % k.shape[1]:
        got = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
        shapes = f"[B, {HEADS or 'H'}, n_q, d], [B, H_kv, n_k, d], [B, H_kv, n_k, d_v], n_q <= n_k"
        needed = "heads of k and v that divide those of q" if fit else f"q, k, v {shapes}"
        raise ValueError(f"a call takes {needed}; got {got}")
    if not 0 <= layer < (LAYERS or layer + 1):
        raise ValueError(f"layer must be at least 0, and below {LAYERS}, got {layer}")
    x = {**(inputs or {}), **({} if padding is None else {"key padding mask": padding})}
    if {*x, "key padding mask"} != {*INPUTS, "key padding mask"}:
        raise ValueError(f"`inputs` must have the names {list(INPUTS)}, got {list(inputs or {})}")
    for name, t in x.items():
        kind, most = INPUTS.get(name, ("bool", None))
        shape = k.shape[:1] if kind == "length" else k.shape[::2]
        if PAIRS:
            if kind == "pairs":
                heads = 1 if t.shape[1:2] == (1,) else q.shape[1]
                shape = q.shape[0], heads, q.shape[2], k.shape[2]
        if t.shape != shape or (t.dtype == torch.bool) != (kind == "bool"):
            raise ValueError(f"{name} must be {kind} {list(shape)}, got {t.dtype} {list(t.shape)}")
        if most is not None and int(t.sum(-1).amax()) > most:
            raise ValueError(f"{name} may mark at most {most} tokens per sequence")
    return x


def exportable(k):
    """Stands for a statement that refuses a trace of torch.export before torch does."""


class Attention(nn.Module):
    """q [B, H, n_q, d], k [B, H_kv, n_k, d], v [B, H_kv, n_k, d_v] -> [B, H, n_q, d_v]; queries
    are the last n_q positions, `key_padding_mask` is bool [B, n_k], True for a real key."""

    if PARTS:

        def __init__(self, head_size=None):
            super().__init__()
            for name, (shape, *_) in PARTS.items():
                shape = [head_size if isinstance(size, str) else size for size in shape]
                if None in shape:
                    raise TypeError("head_size must be given: the size of a head")
                self.register_parameter(name, nn.Parameter(torch.empty(shape)))
            self.reset_parameters()

        def reset_parameters(self):
            """Starts what is learned anew, as PARTS says."""
            for name, (_, start, *by) in PARTS.items():
                part = self.get_parameter(name)
                if SCALED:
                    if start == "scaled_":
                        start, by = "normal_", (0.0, *(x * part.shape[-1] ** -0.5 for x in by))
                getattr(nn.init, start)(part, *by)

    def forward(self, q, k, v, *, layer=0, key_padding_mask=None, dropout_p=0.0, inputs=None):
        if REFUSED:
            exportable(k)
        x = given(q, k, v, layer, inputs, key_padding_mask)
        if PARTS:
            # the rows of this layer, [heads or 1, ...]
            learned = {name: getattr(self, name) for name in PARTS}
            learned = {name: x[layer if len(x) > 1 else 0] for name, x in learned.items()}
        else:
            learned = {}
        return attend(q, k, v, layer, dropout_p, x, learned)
