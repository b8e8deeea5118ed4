"""Random keys and directions by the counter-based generator that `attnspec.graphs.counter_rng`
writes down."""

# mypy: ignore-errors
# taken over into files of users as it stands, without types
import math
from functools import lru_cache

import torch

SEED, FEATURES, ORTHOGONAL = 0, 256, True


def philox(row, place, seed, place_of):
    """The four words [4, …] of Philox 4x32-10 (Salmon et al. 2011), drawn for rows and places under
    a purpose, a layer and a head: the same on every machine."""
    purpose, layer, head = place_of
    word = 0xFFFFFFFF
    tail = torch.full_like(row, layer | head << 16), torch.full_like(row, purpose)
    x, key = (row, place, *tail), (seed & word, seed >> 32)
    for _ in range(10):
        # products wrap modulo 2**64, whose halves are what is meant all the same
        p, r = 0xD2511F53 * x[0], 0xCD9E8D57 * x[2]
        high = (r >> 32) & word, (p >> 32) & word
        x = high[0] ^ x[1] ^ key[0], r & word, high[1] ^ x[3] ^ key[1], p & word
        key = (key[0] + 0x9E3779B9) & word, (key[1] + 0xBB67AE85) & word
    return torch.stack(x)


def distinct(n, keys, seed, place_of, causal=False):
    """Distinct random keys of each row [n, keys], by Floyd's algorithm; where there are too few,
    all of them and negative ones."""
    number, row = torch.meshgrid(torch.arange(min(keys, n)), torch.arange(n), indexing="ij")
    top = (row + 1 if causal else n) - len(number) + number
    drawn, left, attempt = torch.zeros_like(row), torch.ones_like(row, dtype=torch.bool), 0
    while left.any():
        words = philox(row, number // 4 + (attempt << 24), seed, place_of)
        product = words.gather(0, (number % 4)[None])[0] * (top + 1).clamp_min(1)
        drawn = torch.where(left, product >> 32, drawn)
        left &= (product & 0xFFFFFFFF) < 2**32 % (top + 1).clamp_min(1)
        attempt += 1
    for t in range(1, len(number)):
        drawn[t] = torch.where((drawn[:t] == drawn[t]).any(0), top[t], drawn[t])
    return torch.where(top > number, drawn, top).T


def cycles(n, degree, seed, place_of):
    """The neighbours of each position on degree / 2 random cycles, [n, degree]."""
    table, row = torch.empty(n, degree, dtype=torch.int64), torch.arange(n)
    for index in range(degree // 2):
        words = philox(row, torch.full_like(row, index), seed, place_of)
        # in the order of words[0] + 2**32 words[1] without a sign
        cycle = torch.sort(words[0] + ((words[1] - 2**31) << 32), stable=True)[1]
        table[cycle, 2 * index] = cycle.roll(-1)
        table[cycle, 2 * index + 1] = cycle.roll(1)
    return table


# --- random directions ---------------------------------------------------------------------------


def normals(rows, count, seed, place_of):
    """Gaussian numbers [rows, count] by Box and Muller: of two words of a counter, one is the
    length and the other the angle of two numbers."""
    row, place = torch.meshgrid(torch.arange(rows), torch.arange(-(-count // 4)), indexing="ij")
    words = philox(row, place, seed, place_of).double()
    length = torch.sqrt(-2 * torch.log((words[::2] + 1) / 2**32))
    angle = 2 * math.pi / 2**32 * words[1::2]
    z = torch.stack([length * angle.cos(), length * angle.sin()], 1).flatten(0, 1)
    return z.permute(1, 2, 0).flatten(1)[:, :count]


def drawn(head, layer, size):
    """Gaussian rows [FEATURES, size] of a head; where they are orthogonal, those of `size` rows at
    a time, with the lengths of other Gaussian rows."""
    if ORTHOGONAL:
        z = normals(-(-FEATURES // size) * size, 2 * size, SEED, (2**31, layer, head))
        orthogonal, upper = torch.linalg.qr(z[:, :size].unflatten(0, (-1, size)))
        rows = orthogonal * torch.sign(torch.diagonal(upper, dim1=1, dim2=2))[:, None]
        lengths = torch.linalg.vector_norm(z[:, size:], dim=1, keepdim=True)
        return (rows.mT.flatten(0, 1) * lengths)[:FEATURES]
    else:
        return normals(FEATURES, size, SEED, (2**31, layer, head))


@torch.compiler.assume_constant_result
@lru_cache(maxsize=64)
def all_drawn(layer, heads, size, kind, device):
    """The rows [H, FEATURES, size] of a layer, the same on every machine."""
    with torch.inference_mode(False):
        return torch.stack([drawn(h, layer, size) for h in range(heads)]).to(device, kind)


def directions(x, layer):
    """The rows [H, FEATURES, d] for rows x [B, H, n, d]."""
    return all_drawn(layer, x.shape[1], x.shape[3], x.dtype, str(x.device))
