"""The attention of a graph: a mask as a function, what it calls, and what runs it."""

import math
from functools import lru_cache

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import dropout, scaled_dot_product_attention

CHANGED, FUSED, NORMALIZE, SCORED = True, True, "softmax", ("near",)
INPUTS = {"time": ("numbers", None)}

# --- written for each spec: here causal, the usual scale, alibi ----------------------------------


def mask_mod_of(layer, size, device, x):
    """The mask of the last n_q of n positions; `size` is (B, H, n_q, n)."""
    return lambda b, h, q, k: k <= q + (size[3] - size[2])


def scale_of(size, n, layer):
    """The factor of the scores, for heads of a size."""
    return 1 / math.sqrt(size)


def score_mod_of(q, k, layer, x, learned):
    """What changes the score of query q and key k in head h."""
    return lambda score, b, h, q, k: score - torch.exp2(-h.to(score.dtype)) * abs(q - k)


# --- what masks call -----------------------------------------------------------------------------


def required(name, value, least=0, most=2**62):
    """Refuses a size that depends on n where it has no admissible value."""
    if not least <= value <= most:
        raise ValueError(f"`{name}` must be between {least} and {most} at this length, got {value}")


def is_power(distance, base):
    """Whether a distance is 0, 1, base, base**2, …"""
    mask, power = distance == 0, 1
    while power < 2**31:
        mask, power = mask | (distance == power), power * base
    return mask


def listed(tables, h, q, k):
    """Whether k stands in row q of the table of head h, [H, rows, keys]."""
    mask = (q != q) & (k != k)
    for place in range(tables.shape[2]):
        mask = mask | (tables[h, q, q - q + place] == k)  # vmap indexes by tensors alone
    return mask


def numbers(name, x, kind=torch.float64, most=None, whole=False):
    """An input as int64 or reals, one of a real key at padding; refuses what is not exact."""
    values, real = x[name], x.get("key padding mask")
    values = values.to(kind) if values.is_floating_point() else values.long()
    if INPUTS[name][0] == "length":
        # no position lies before one below 0
        values = values.clamp(min=0)
    if INPUTS[name][0] == "numbers" and real is not None and values.numel():
        first = values.flatten()[real.flatten().to(torch.uint8).argmax()]
        values = torch.where(real, values, torch.where(real.any(), first, 1).to(values.dtype))
    if values.is_floating_point() and whole:
        raise ValueError(f"`{name}` must be of an integer type: `//` or `%` divides it")
    if most is not None and not values.is_floating_point():
        exact = ((values >= -most) & (values <= most)).all()
        words = f"integers in `{name}` must be between -{most} and {most}: subtract an offset"
        if torch.compiler.is_compiling():
            torch._assert_async(exact, words)
        elif not exact:
            raise ValueError(words)
    return values


# --- the mask ------------------------------------------------------------------------------------


def masked(layer, size, device, blocks, x=None):
    """The mask as blocks, or as a tensor that broadcasts to `size`, (B, H, n_q, n_k)."""
    with torch.inference_mode(False):
        mask_mod = mask_mod_of(layer, size, device, x or {})
        if blocks:
            return create_block_mask(mask_mod, *size, device)
        axes = [torch.arange(length, device=device) for length in size]
        at = [each.view(*[1] * axis, -1, *[1] * (3 - axis)) for axis, each in enumerate(axes)]
        return mask_mod(*at)


kept = lru_cache(maxsize=8)(masked)


def mask_of(q, k, layer, blocks, x):
    """The mask of a call, kept where no input decides it; a trace computes it, at every length."""
    at = layer, (q.shape[0] if x else 1, *q.shape[1:3], k.shape[2]), str(q.device), blocks
    return masked(*at, x) if x or torch.compiler.is_compiling() else kept(*at)


# --- what runs it --------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def flex():
    """FlexAttention, compiled."""
    return torch.compile(flex_attention, dynamic=False)


def attend(q, k, v, layer, dropout_p, x, learned):
    """The attention of the pairs of the mask; a query that reads nothing gets 0."""
    scale, kind = scale_of(q.shape[3], k.shape[2], layer), q.dtype
    if CHANGED:
        score_mod = score_mod_of(q, k, layer, x, learned)
    if SCORED:
        # what scores alone read decides no pair
        x = {name: each for name, each in x.items() if name not in SCORED}
    if NORMALIZE == "softmax":
        # FlexAttention drops no weights, and takes no float64 and no heads below 16
        blocks = q.is_cuda and kind != torch.float64 and min(q.shape[3], v.shape[3]) >= 16
        blocks = blocks and not dropout_p
        mask = mask_of(q, k, layer, blocks, x)
        if blocks:
            if CHANGED:
                return flex()(q, k, v, score_mod, mask, scale, enable_gqa=True)
            else:
                return flex()(q, k, v, block_mask=mask, scale=scale, enable_gqa=True)
    else:
        mask = mask_of(q, k, layer, False, x)
    if CHANGED or NORMALIZE != "softmax":
        # half types would round what is added to the scores of far keys
        q, k, v = (each.to(torch.promote_types(kind, torch.float32)) for each in (q, k, v))
    if CHANGED:
        b, h, rows, keys = (torch.arange(s, device=q.device) for s in (*q.shape[:3], k.shape[2]))
        at = b[:, None, None, None], h[:, None, None], rows[:, None], keys
    if FUSED:
        none = ~mask.any(-1, keepdim=True)
        mask = mask | none
        if CHANGED:
            added = score_mod(q.new_zeros(*q.shape[1:3], k.shape[2]), *at)
            mask = added.masked_fill(~mask, -torch.inf)
        out = scaled_dot_product_attention(q, k, v, mask, dropout_p, scale=scale, enable_gqa=True)
        if out.is_cuda and out.requires_grad:  # cuDNN takes gradients for laid out as the first
            out.register_hook(lambda x, at=out.stride(): x.new_empty_strided(x.shape, at).copy_(x))
        return out.masked_fill(none, 0.0).to(kind)
    else:
        k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
        scores = q * scale @ k.mT
        if CHANGED:
            # the gradient of a pair that is none may be no number, and -inf hides a pair
            scores = score_mod(scores.masked_fill(~mask, 0.0), *at)
            mask = mask & (scores != -torch.inf)
        return (dropout(weigh(scores, mask), dropout_p) @ v).to(kind)


def slopes_of(q):
    """The slopes of ALiBi for as many heads as there are."""
    power, h = 1 << (q.shape[1].bit_length() - 1), torch.arange(q.shape[1], device=q.device)
    eighths = torch.where(h < power, 8 * h + 8, 8 * (h - power) + 4)
    return torch.exp2(-eighths.to(torch.promote_types(q.dtype, torch.float32)) / power)


# --- what scores become --------------------------------------------------------------------------


def weigh(scores, mask):
    """The weights of the scores of the pairs of the mask; a row without one weighs nothing."""
    if NORMALIZE == "sigmoid":
        return torch.sigmoid(scores).masked_fill(~mask, 0.0)
    elif NORMALIZE == "relu":
        weights = torch.relu(scores).masked_fill(~mask, 0.0)
        total = weights.sum(-1, keepdim=True)
        return weights / torch.where(total > 0, total, 1.0)
    elif NORMALIZE == "softmax1":
        scores = scores.masked_fill(~mask, -torch.inf)
        # one more logit, which is 0
        zero = scores.new_zeros(*scores.shape[:-1], 1)
        return torch.cat([scores, zero], -1).softmax(-1)[..., :-1]
    else:
        none = ~mask.any(-1, keepdim=True)
        scores = scores.masked_fill(~mask, -torch.inf).masked_fill(none, 0.0)
        return scores.softmax(-1).masked_fill(none, 0.0)
