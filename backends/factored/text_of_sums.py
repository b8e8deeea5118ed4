"""Attention as sums of features, linear in n: out_i = f_i . sum_j g_j v_j / f_i . sum_j g_j.

Features of rows x [B, H, n, d] are values, and the logarithm of what multiplies them.
"""

# mypy: ignore-errors
# taken over into files of users as it stands, without types
import math

import torch

LONGEST, CAUSAL, GATED, FACTOR = None, True, True, None
NORMALIZE, ADDED, LEAST, FLOOR = "sum", 1e-6, 0.0, 0.0


def attend(q, k, v, layer, dropout_p, x, learned):
    """mix(q, k, v) in float32 at least, with a head of keys for each of queries."""
    if dropout_p:
        raise ValueError(f"dropout_p must be 0, got {dropout_p}: no weights are computed")
    if LONGEST is not None:
        if k.shape[2] > LONGEST:
            raise ValueError(f"n may be at most {LONGEST}, as the spec says, got {k.shape[2]}")
    wide, repeat = torch.promote_types(q.dtype, torch.float32), q.shape[1] // k.shape[1]
    k, v = (each.to(wide).repeat_interleave(repeat, 1) for each in (k, v))
    if 0 in (q.shape[0], q.shape[2], k.shape[2]):
        return q @ (k.mT @ v).to(q.dtype)
    learned = {name: each.to(wide) for name, each in learned.items()}
    return mix(q.to(wide), k, v, layer, x.get("key padding mask"), learned).to(q.dtype)


def mix_sums(q, k, v, layer, real, x):
    """Sums of the features of keys, divided by those of the weights."""
    f, log = feature_of(q, layer, x)
    w = torch.cat([v, torch.ones_like(v[..., :1])], -1)
    if GATED:
        # padding passes on what is kept
        gate = k @ x["rfa_gate"][..., None] + x["rfa_gate_bias"][:, None, None]
        if real is not None:
            gate = gate.masked_fill(~real[:, None, :, None], torch.inf)
        return divided(gated_sums(f, feature_of(k, layer, x)[0], w, gate), log)
    else:
        g, top = together(*feature_of(k, layer, x), real)
        if CAUSAL:
            output = causal_sums(f, g, w)
        else:
            output = f @ (g.mT @ w)
        return divided(output, log + top)


def divided(sums, log):
    """Sums of values, the last of them of the weights, divided by that one, which is kept away from
    0. Sums times exp(log) are what is meant."""
    if NORMALIZE == "none":
        return sums[..., :-1] * torch.exp(log)
    else:
        return sums[..., :-1] / divisor(sums[..., -1:], log)


def divisor(total, log):
    """What sums of weights divide by; exp(log) times as much is meant."""
    if ADDED:
        total = total + ADDED * torch.exp(-log)
    elif FLOOR:
        total = torch.maximum(total, FLOOR * torch.exp(-log))
    elif LEAST:
        least = LEAST * torch.exp(-log)
        total = torch.where(total.abs() >= least, total, torch.where(total < 0, -least, least))
    return torch.where(total == 0, 1.0, total)


def together(g, log, real):
    """Features times exp(log) in one frame, those of padding 0, and the frame, [B, H, 1, 1]."""
    if real is not None:
        g, log = (each.masked_fill(~real[:, None, :, None], 0.0) for each in (g, log))
        log = log.masked_fill(~real[:, None, :, None], -torch.inf)
    top = log.detach().amax(2, keepdim=True)
    top = top.masked_fill(top == -torch.inf, 0.0)
    return g * torch.exp(log - top), top


def causal_sums(f, g, w):
    """f_i . sum_j g_j w_j over j <= i, the queries being the last positions; some at a time."""
    state, first = g.new_zeros(*g.shape[:2], g.shape[3], w.shape[3]), w.shape[2] - f.shape[2]
    outs = []
    for low in range(0, w.shape[2], 128):
        some, more = g[:, :, low : low + 128], w[:, :, low : low + 128]
        rows = f[:, :, max(0, low - first) : max(0, low + 128 - first)]
        before = max(0, first - low)
        outs.append(rows @ state + (rows @ some.mT).tril(before) @ more)
        state = state + some.mT @ more
    return torch.cat(outs, 2)


def gated_sums(f, g, w, gate):
    """f_i . S_i with S_i = a_i S_(i-1) + (1 - a_i) g_i w_i and a = sigmoid(gate) [B, H, n, 1]."""
    state, first = g.new_zeros(*g.shape[:2], g.shape[3], w.shape[3]), w.shape[2] - f.shape[2]
    outs = []
    g, kept = g * torch.sigmoid(-gate), torch.nn.functional.logsigmoid(gate)
    for low in range(0, w.shape[2], 128):
        some, more = g[:, :, low : low + 128], w[:, :, low : low + 128]
        rows = f[:, :, max(0, low - first) : max(0, low + 128 - first)]
        # what is left of the state, and of each key, when a position is reached
        left = kept[:, :, low : low + 128].cumsum(2)
        mine = left[:, :, left.shape[2] - rows.shape[2] :]
        before = max(0, first - low)
        decay = torch.exp((mine - left.mT).tril(before)).tril(before)
        outs.append(rows * torch.exp(mine) @ state + (rows @ some.mT * decay) @ more)
        end = left[:, :, -1:]
        state = state * torch.exp(end) + (some * torch.exp(end - left)).mT @ more
    return torch.cat(outs, 2)


# --- features ------------------------------------------------------------------------------------


def unframed(values):
    """Features as they are."""
    return values, torch.zeros_like(values[..., :1])


def elu1(x, layer, learned):
    """elu(x) + 1, which does not round to 0."""
    # torch's versions differ about the slope of a clamp at its bound, which 0 must not be
    return unframed(torch.exp(x.clamp(max=1e-38)) + torch.relu(x))


def relu(x, layer, learned):
    """The positive part."""
    return unframed(torch.relu(x))


def squared_relu(x, layer, learned):
    """The square of the positive part."""
    return unframed(torch.relu(x).square())


def exp(x, layer, learned):
    """The exponential."""
    return exponentials(x, torch.zeros_like(x[..., :1]), 0.0)


def identity(x, layer, learned):
    """The row as it is."""
    return unframed(x)


def first_order(x, layer, learned):
    """(1, x / |x|), whose products are 1 + the cosine."""
    return unframed(torch.cat([torch.ones_like(x[..., :1]), unit(x)], -1))


def second_order(x, layer, learned):
    """(the products of two channels, x, 1) of scaled rows, whose products are 1 + s + s^2 / 2: each
    eight channels times themselves, over the root of 2, and times all channels behind them."""
    x, products = x * factor_of(x.shape[3]), []
    for low in range(0, x.shape[3], 8):
        one, behind = x[..., low : low + 8], x[..., low + 8 :]
        rest = torch.cat([one / math.sqrt(2), behind], -1)
        products.append((one[..., None] * rest[..., None, :]).flatten(-2))
    return unframed(torch.cat([*products, x, torch.ones_like(x[..., :1])], -1))


def waves(x, layer, learned):
    """(sin, cos)(w . x) / sqrt(m) of rows of length 1."""
    w = directions(x, layer) * learned["rfa_spread"][:, None]
    along = unit(x) @ w.mT
    return unframed(torch.cat([along.sin(), along.cos()], -1) / math.sqrt(w.shape[1]))


def projected(x, layer):
    """w . x and |x|^2 / 2 of scaled rows, and how many directions w there are."""
    x, w = x * factor_of(x.shape[3]), directions(x, layer)
    return x @ w.mT, x.square().sum(-1, keepdim=True) / 2, w.shape[1]


def positive(x, layer, learned):
    """exp(w . x - |x|^2 / 2) / sqrt(m)."""
    along, half, count = projected(x, layer)
    return exponentials(along, half, -math.log(count) / 2)


def gaussian(x, layer, learned):
    """exp(w . x - |x|^2) / sqrt(m), whose products estimate exp(-|x - y|^2 / 2)."""
    along, half, count = projected(x, layer)
    return exponentials(along, 2 * half, -math.log(count) / 2)


def hyperbolic(x, layer, learned):
    """(exp(w . x), exp(-w . x)) exp(-|x|^2 / 2) / sqrt(2 m)."""
    along, half, count = projected(x, layer)
    return exponentials(torch.cat([along, -along], -1), half, -math.log(2 * count) / 2)


def trig(x, layer, learned):
    """(sin, cos)(w . x) exp(|x|^2 / 2) / sqrt(m)."""
    along, half, count = projected(x, layer)
    top = half.detach()
    values = torch.cat([along.sin(), along.cos()], -1) * torch.exp(half - top)
    return values, top - math.log(count) / 2


def relu_along(x, layer, learned):
    """relu(w . x) / sqrt(m)."""
    x, w = x * factor_of(x.shape[3]), directions(x, layer)
    return unframed(torch.relu(x @ w.mT) / math.sqrt(w.shape[1]))


def exponentials(x, less, log):
    """exp(x - less + log), the largest of each row in its frame."""
    top = x.detach().amax(-1, keepdim=True)
    values = torch.exp(x - (top + (less - less.detach())))
    return values, top - less.detach() + log


def unit(x):
    """Rows of length 1; a row of zeros stays one."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x / length.masked_fill(length < torch.finfo(x.dtype).tiny ** 0.5, math.inf)


def factor_of(size):
    """The root of the scale of scores."""
    if FACTOR is None:
        return size**-0.25
    else:
        return FACTOR


def directions(x, layer):
    """Stands for the function that draws rows [H, FEATURES, d] for rows x [B, H, n, d]."""


mix, feature_of = mix_sums, elu1
