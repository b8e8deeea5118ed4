"""Mechanisms that project the positions, or mix them by learned maps."""

# mypy: ignore-errors
# taken over into files of users as it stands, without types
import torch
from torch.nn.functional import gelu, layer_norm, pad, scaled_dot_product_attention

PROJECTION, RANK, WIDTH, APART = "linear", 256, 16, False
LANDMARKS, ITERATIONS, CONV = 64, 6, 0
CAUSAL, NORMALIZE, PRODUCTS, SHORT = False, "softmax", False, 0


def without(x, real):
    """Rows with zeros in the place of padding."""
    return x if real is None else x.masked_fill(~real[:, None, :, None], 0.0)


def earlier(q, k, mask):
    """A mask of pairs without those of later keys, the queries being the last positions."""
    n_q, n = q.shape[2], k.shape[2]
    pairs = torch.ones(n_q, n, dtype=torch.bool, device=q.device).tril(n - n_q)
    return pairs if mask is None else mask & pairs


def attention(q, k, v, mask, scale, causal=False):
    """softmax(scale q k^T) v by torch's own call; a query that reads nothing gets 0."""
    mask = earlier(q, k, mask) if causal else mask
    none = None if mask is None else ~mask.any(-1, keepdim=True)
    mask = None if mask is None else mask | none
    out = scaled_dot_product_attention(q, k, v, mask, scale=scale)
    if out.is_cuda and out.requires_grad:  # cuDNN takes gradients for laid out as the first
        out.register_hook(lambda x, at=out.stride(): x.new_empty_strided(x.shape, at).copy_(x))
    return out if mask is None else out.masked_fill(none, 0.0)


def segments(x, count, real):
    """The segment of each position of rows, beside each number of theirs: as many of n // m as
    n % m leaves, then longer ones; padding belongs to none, which is the number `count`."""
    place, total = real.cumsum(-1) - 1, real.sum(-1, keepdim=True)
    cuts = total.clamp(1, count)
    size, short = total // cuts, cuts - total % cuts
    cut = short * size
    late = short + (place - cut) // (size + 1)
    number = torch.where(place < cut, place // size.clamp_min(1), late)
    return number.masked_fill(~real, count)[:, None, :, None].expand(x.shape)


def in_segments(x, count, pooled):
    """What is made of `count` segments of all rows, those [B, H, m, length, d] of a length."""
    size, longer = divmod(x.shape[2], count)
    cut = (count - longer) * size
    parts = [pooled(x[:, :, :cut].unflatten(2, (count - longer, size)))]
    if longer:
        parts.append(pooled(x[:, :, cut:].unflatten(2, (longer, size + 1))))
    return torch.cat(parts, 2)


def occupied(real, count):
    """Which of `count` segments have a position, beside every row: real ones fill the first."""
    if real is None:
        return None
    return (torch.arange(count, device=real.device) < real.sum(-1, keepdim=True))[:, None, None]


def means(x, count, real):
    """The mean of each of `count` segments of rows, 0 where there is none."""
    if real is None:
        # torch takes sums many times faster than means
        return in_segments(x, count, lambda parts: parts.sum(3) / parts.shape[3])
    at = segments(x, count, real)
    sums = x.new_zeros(*x.shape[:2], count + 1, x.shape[3]).scatter_add(2, at, x)[:, :, :count]
    sizes = (at[:, :1, :, 0] == torch.arange(count, device=x.device)[:, None]).sum(-1)
    return sums / sizes.clamp_min(1)[:, None, :, None]


def maxima(x, count, real):
    """The largest numbers of each of `count` segments of rows, 0 where there is none."""
    if real is None:
        return in_segments(x, count, lambda parts: parts.amax(3))
    top = x.new_full((*x.shape[:2], count + 1, x.shape[3]), -torch.inf)
    top = top.scatter_reduce(2, segments(x, count, real), x, "amax")[:, :, :count]
    return top.masked_fill(top == -torch.inf, 0.0)


def mix_linformer(q, k, v, layer, real, x):
    """softmax(q (E k)^T / sqrt(d)) F v for projections E and F of the positions."""
    scale = q.shape[3] ** -0.5
    if PROJECTION == "linear":
        # padding is projected as zeros
        by_keys = x["linformer_keys"][..., : k.shape[2]]
        if APART:
            by_values = x["linformer_values"][..., : k.shape[2]]
        else:
            by_values = by_keys
        return attention(q, by_keys @ without(k, real), by_values @ without(v, real), None, scale)
    elif PROJECTION == "conv":
        # each row of E and F is the learned kernel further on; rows of padding alone are left out
        keys = values = x["linformer_keys"][:, None, None]
        if APART:
            values = x["linformer_values"][:, None, None]
        behind, mask = -k.shape[2] % WIDTH, None
        k, v = (
            pad(without(each, real), (0, 0, 0, behind)).unflatten(2, (-1, WIDTH)) for each in (k, v)
        )
        if real is not None:
            mask = pad(real, (0, behind)).unflatten(1, (-1, WIDTH)).any(-1)[:, None, None]
        return attention(q, (keys @ k).squeeze(3), (values @ v).squeeze(3), mask, scale)
    else:
        # segments of the real positions are pooled
        count = min(RANK, k.shape[2])
        k, v = (pool_of(each, count, real) for each in (k, v))
        return attention(q, k, v, occupied(real, count), scale)


def inverse(a):
    """The pseudo-inverse of matrices whose rows are distributions, by ITERATIONS of the third
    order from A^T / (|A|_1 |A|_inf), exact for 0."""
    if ITERATIONS == 0:
        return torch.linalg.pinv(a.double()).to(a.dtype)
    else:
        bound = a.abs().sum(-1).amax(-1) * a.abs().sum(-2).amax(-1)
        one = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
        z = a.mT / bound[..., None, None]
        for _ in range(ITERATIONS):
            az = a @ z
            z = 0.25 * z @ (13 * one - az @ (15 * one - az @ (7 * one - az)))
        return z


def through_landmarks(q, k, v, real):
    """softmax(s q K^T) Z softmax(s Q k^T) v with means Q and K of segments, s = 1 / sqrt(d), and
    the inverse Z of softmax(s Q K^T); softmax itself where every position is its own segment."""
    n, scale = k.shape[2], q.shape[3] ** -0.5
    mask = None if real is None else real[:, None, None]
    if n <= LANDMARKS:
        return attention(q, k, v, mask, scale)
    if q.shape[2] != n:
        raise ValueError(
            "`nystrom` averages the queries of all positions into landmarks, so it needs all of"
            f" them, got {q.shape[2]} of {n}"
        )
    rows, keys = (means(each, LANDMARKS, real) for each in (q, k))
    values = inverse((rows * scale @ keys.mT).softmax(-1)) @ attention(rows, k, v, mask, scale)
    if real is not None:
        # where each landmark is a position, or empty, its value needs no inverse
        few = (real.sum(-1) <= LANDMARKS)[:, None, None, None]
        values = torch.where(few, means(v, LANDMARKS, real), values)
    return attention(q, keys, values, occupied(real, LANDMARKS), scale)


def with_convolution(out, x, kernel):
    """Rows and those of a convolution along the positions at the same places: of each head some
    rows at a time are a product with a band, whose row r holds the kernel from column r on."""
    (batch, heads, n, size), rows = x.shape, min(64, x.shape[2])
    x = pad(x, (0, 0, CONV // 2, CONV // 2 + -n % rows)).unfold(2, rows + CONV - 1, rows).mT
    band = pad(kernel[:, None].expand(-1, rows, -1), (0, rows)).flatten(1)[:, :-rows]
    band = band.unflatten(1, (rows, -1)).expand(heads, -1, -1)
    parts = zip(band, x.unbind(1), strict=True)
    near = [torch.bmm(b.expand(batch * y.shape[1], -1, -1), y.flatten(0, 1)) for b, y in parts]
    near = torch.stack([y.view(batch, -1, size) for y in near], 1)
    return out + near[:, :, n - out.shape[2] : n]


def mix_nystrom(q, k, v, layer, real, x):
    """Attention through landmarks, and where one is learned a convolution of the values."""
    out = through_landmarks(q, k, v, real)
    if CONV:
        out = with_convolution(out, without(v, real), x["nystrom_kernel"])
    return out


def mix_efficient(q, k, v, layer, real, x):
    """rho(q) (rho(k)^T v), where rho normalises the channels of queries and the positions of keys:
    by a softmax, or by the root of how many real positions there are."""
    if NORMALIZE == "scaling":
        count = k.new_tensor(k.shape[2]) if real is None else real.sum(-1).view(-1, 1, 1, 1)
        return q @ (k.mT @ without(v, real)) / count.clamp_min(1)
    else:
        if real is not None:
            k = k.masked_fill(~real[:, None, :, None], torch.finfo(k.dtype).min)
        return q.softmax(-1) @ (k.softmax(2).mT @ without(v, real))


def mix_fourier(q, k, v, layer, real, x):
    """Re(F_n v F_d), the unnormalised transforms along positions and channels."""
    return torch.fft.fft2(without(v, real)).real[:, :, -q.shape[2] :]


def mix_mixer(q, k, v, layer, real, x):
    """v + W_2 gelu(W_1 LayerNorm(v) + b_1) + b_2 along the positions."""
    n = v.shape[2]
    normal = layer_norm(v, v.shape[-1:]) * x["mixer_gain"][:, None] + x["mixer_shift"][:, None]
    inner = x["mixer_inner"][..., :n] @ without(normal, real) + x["mixer_inner_bias"][..., None]
    out = v + x["mixer_outer"][:, :n] @ gelu(inner) + x["mixer_outer_bias"][:, :n, None]
    return out[:, :, -q.shape[2] :]


def mix_gmlp(q, k, v, layer, real, x):
    """q * (W LayerNorm(v) + b), W lower triangular if the spec is causal."""
    if q.shape[3] != v.shape[3]:
        sizes = f"{q.shape[3]} and {v.shape[3]}"
        raise ValueError(f"`gmlp` multiplies q by v, so both must have one head size, got {sizes}")
    n_q, n = q.shape[2], v.shape[2]
    normal = layer_norm(v, v.shape[-1:]) * x["gmlp_gain"][:, None] + x["gmlp_shift"][:, None]
    weight = x["gmlp_weight"][:, n - n_q : n, :n]
    if CAUSAL:
        weight = weight.tril(n - n_q)
    return q * (weight @ without(normal, real) + x["gmlp_bias"][:, n - n_q : n, None])


def perceived(x, weight, bias):
    """relu(W x + b) of rows."""
    return torch.relu(x @ weight.mT + bias[..., None, :])


def dense(q, n, x):
    """relu(W_1 q_i + b_1) of each query, and W_2: b_2 is what a hidden unit of 1 adds."""
    hidden = perceived(q, x["synthesizer_hidden"], x["synthesizer_hidden_bias"])
    columns = x["synthesizer_weight"][:, :n], x["synthesizer_bias"][:, :n, None]
    return torch.cat([hidden, torch.ones_like(hidden[..., :1])], 3), torch.cat(columns, 2)


def factorized_random(q, n, x):
    """Two learned matrices of few columns."""
    return x["synthesizer_rows"][:, n - q.shape[2] : n], x["synthesizer_columns"][:, :n]


def mix_factors(q, k, v, layer, real, x):
    """softmax(a b^T) v of two thin matrices."""
    rows, columns = (each.expand(*q.shape[:2], -1, -1) for each in factors_of(q, k.shape[2], x))
    if PRODUCTS:
        # mixed with the scores of q and k
        share = torch.sigmoid(x["synthesizer_mix"])[..., None]
        rows = torch.cat([(1 - share) * q.shape[3] ** -0.5 * q, share * rows], 3)
        columns = torch.cat([k, columns], 3)
    mask = None if real is None else real[:, None, None]
    return attention(rows, columns, v, mask, 1.0, CAUSAL)


def random(q, n, x):
    """Learned numbers for each pair."""
    return x["synthesizer_logits"][:, n - q.shape[2] : n, :n]


def factorized_dense(q, n, x):
    """a_i[j mod SHORT] b_i[j // SHORT] of two rows that are synthesised for each query."""
    hidden = perceived(q[:, :, None], x["synthesizer_hidden"], x["synthesizer_hidden_bias"])
    weight, bias = x["synthesizer_weight"], x["synthesizer_bias"][:, None]
    a = hidden[:, :, 0] @ weight[:, :SHORT].mT + bias[..., :SHORT]
    b = hidden[:, :, 1] @ weight[:, SHORT:].mT + bias[..., SHORT:]
    return (b[..., None] * a[..., None, :]).flatten(3)[..., :n]


def by_logits(logits, v, mask):
    """softmax(logits) v; a query that reads nothing gets 0."""
    if mask is None:
        return logits.softmax(-1) @ v
    none = ~mask.any(-1, keepdim=True)
    weights = logits.masked_fill(~(mask | none), -torch.inf).softmax(-1).masked_fill(none, 0.0)
    return weights @ v


def mix_logits(q, k, v, layer, real, x):
    """softmax(logits) v."""
    logits = logits_of(q, k.shape[2], x)
    if PRODUCTS:
        share = torch.sigmoid(x["synthesizer_mix"])[..., None]
        logits = (1 - share) * (q * q.shape[3] ** -0.5 @ k.mT) + share * logits
    mask = None if real is None else real[:, None, None]
    return by_logits(logits, v, earlier(q, k, mask) if CAUSAL else mask)


pool_of, factors_of, logits_of = means, dense, random
