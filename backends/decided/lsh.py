"""`lsh`: positions sorted by bucket and cut into chunks, round after round.

Near vectors fall into one bucket more often than others.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import torch
from torch import Tensor

from attnspec.backends.common.torch_modes import apart, is_transformed
from attnspec.backends.decided.choice import TILE, Choice, CodeChoice, Given, rising_places
from attnspec.graphs.counter_rng import HASHES, Stream, normals
from attnspec.graphs.patterns.lsh import Lsh
from attnspec.limits import LIMITS
from attnspec.lower.cache import DRAWS, Cache
from attnspec.lower.work import Heads


def codes_of(bucket: Tensor, real: Tensor, leaf: Lsh, n_k: int) -> tuple[Tensor, Tensor]:
    """The chunk of positions with buckets [B, H or 1, R, n], of which some are real, [B, n], and
    their codes: of two that may meet that of the key is that of the query, or less by the chunks
    between them; of others it is not. Both are -1 for padding."""
    padding = (~real)[:, None, None].expand_as(bucket)
    # sorted by (bucket, position), padding last
    most = int(bucket.max()) if bucket.numel() else 0
    order = rising_places(bucket.masked_fill(padding, most + 1))
    along = bucket.gather(-1, order)
    place = torch.arange(bucket.shape[-1], device=bucket.device).expand_as(bucket)
    fresh = torch.ones_like(along, dtype=torch.bool)
    fresh[..., 1:] = along[..., 1:] != along[..., :-1]
    inside = place
    if leaf.cut == "bucket":
        inside = place - torch.where(fresh, place, 0).cummax(-1).values
    chunk = (inside // leaf.chunk).masked_fill(padding.gather(-1, order), -1)
    code = chunk
    if leaf.bucket_mask:
        if _one_order(leaf):
            # numbered as they come, with a gap between buckets
            step = chunk.diff(dim=-1, prepend=chunk[..., :1]).clamp_min(0)
            code = torch.where(fresh, leaf.look + 1, step).cumsum(-1)
        else:
            code = along * (n_k // leaf.chunk + leaf.look + 2) + chunk
        code = torch.where(chunk < 0, -1, code)
    chunk, code = (torch.empty_like(order).scatter_(-1, order, x) for x in (chunk, code))
    return chunk, code


def _one_order(leaf: Lsh) -> bool:
    """Whether queries stand in the order of the keys."""
    return leaf.share_qk or leaf.given is not None


@torch.no_grad()
def decide(leaf: Lsh, given: Given) -> Choice:
    """The buckets of all positions; raises ValueError if keys must be the queries, and are not."""
    if leaf.share_qk:
        _require_shared(given)
    if leaf.given is None:
        count = leaf.buckets_at(given.n_k)
        bucket = buckets_of(leaf, given.keys_by_head, given.heads, count)
    else:
        name = leaf.given.name  # type: ignore[attr-defined]
        bucket = given.data[name].to(torch.int64)
        if not bucket.shape[2]:
            raise ValueError(
                f"`{name}` must have 1 round or more, on axis 2, got {list(bucket.shape)}"
            )
    chunk, k = codes_of(bucket, given.real, leaf, given.n_k)
    named = {"buckets": bucket, "chunks": chunk}
    span, q = (x[..., -given.n_q :] for x in (chunk, k))
    if not _one_order(leaf):
        buckets = buckets_of(leaf, given.q, given.heads, count)
        span, q = codes_of(buckets, given.real[:, given.first_query :], leaf, given.n_k)
    alone = ~has_other(k, leaf)[..., -given.n_q :] if leaf.share_qk else None
    return CodeChoice.of(
        q,
        k,
        tuple((turn, turn) for turn in range(bucket.shape[2])),
        named,
        leaf.look,
        tile=leaf.chunk * max(1, TILE // leaf.chunk),
        alone=alone,
        counted=leaf.multiplicity and leaf.combine != "mean",
        averaged=leaf.combine == "mean",
        # chunks of the whole order are fewer tiles than a bucket may have
        spans=(span, chunk) if leaf.cut == "order" else None,
    )


def _require_shared(given: Given) -> None:
    if given.ratio > 1:
        raise ValueError(
            "`lsh` uses the queries as keys, so k must have as many heads as q, got"
            f" {given.q.shape[1]} and {given.k.shape[1]}: pass k = q, or write `lsh(share_qk ="
            " false)`"
        )
    shared_keys = given.k[:, :, given.first_query :]
    if shared_keys.is_cpu and shared_keys.is_set_to(given.q):
        return
    # what is not a number is alike in both
    alike = (shared_keys == given.q) | (shared_keys != shared_keys) & (given.q != given.q)
    if not bool(alike.all()):
        raise ValueError(
            "`lsh` uses the queries as keys, so q must be k or the last rows of k: pass k = q, or"
            " write `lsh(share_qk = false)`"
        )


def has_other(code: Tensor, leaf: Lsh) -> Tensor:
    """Which positions with codes [B, H or 1, R, n] find a key that is another one in some round,
    bool [B, H or 1, n]."""
    n, count = code.shape[-1], 1 + max(0, int(code.max()) if code.numel() else 0)
    real, codes = code >= 0, code.clamp_min(0)
    place = torch.arange(n, device=code.device).expand_as(code)
    # of every code the first position, and whether it has one or several
    first = code.new_full((*code.shape[:-1], count), n)
    first.scatter_reduce_(-1, codes, torch.where(real, place, n), "amin")
    many = torch.zeros_like(first).scatter_add_(-1, codes, real.to(code.dtype))
    for _ in range(min(leaf.look, count)):
        first[..., 1:] = torch.minimum(first[..., 1:], first[..., :-1].clone())
        many[..., 1:] = torch.maximum(many[..., 1:], 2 * (many[..., :-1] > 0).to(many.dtype))
    other = first.gather(-1, codes) < place if leaf.causal else many.gather(-1, codes) > 1
    return (other & real).any(2)


# --- hashes --------------------------------------------------------------------------------------

_kept: Cache[tuple[object, ...], Tensor] = Cache(LIMITS.draws, DRAWS)


def rotations(leaf: Lsh, heads: Heads, size: int, columns: int, device: torch.device) -> Tensor:
    """Gaussian numbers float32 [heads, rounds, columns, size]: place i of the vectors of round r is
    row r * size + i of the stream of its layer and head."""

    def build() -> Tensor:
        rows = np.arange(leaf.rounds * size)
        streams = (Stream(leaf.seed, HASHES, leaf.layer, head) for head in heads)
        drawn = torch.from_numpy(np.stack([normals(each, rows, columns) for each in streams]))
        matrices = torch.unflatten(drawn, 1, (leaf.rounds, size)).mT
        return matrices.to(device, torch.float32).contiguous()

    wanted = leaf.seed, leaf.layer, heads, leaf.rounds, size, columns, str(device)
    return _kept.get(wanted, lambda: apart(build))


def buckets_of(leaf: Lsh, x: Tensor, heads: Heads, count: int) -> Tensor:
    """The bucket of every vector of x [B, H, n, d] in every round, int64 [B, H, rounds, n]; ties go
    to the lower bucket."""
    batch, _, n, size = x.shape
    columns = count.bit_length() - 1 if leaf.hash == "hyperplanes" else count // 2
    drawn = rotations(leaf, heads, size, columns, x.device)
    turns = min(leaf.rounds, max(1, LIMITS.columns // max(1, columns)))
    together = max(1, LIMITS.product // max(1, turns * columns))
    buckets = x.new_empty(batch, len(heads), leaf.rounds, n, dtype=torch.int64)
    room = x.new_empty(min(n, together) * turns * columns, dtype=torch.float32)
    parts = product(range(batch), range(len(heads)), range(0, leaf.rounds, turns))
    for sample, head, first in parts:
        some = drawn[head, first : first + turns]
        sides = some.flatten(0, 1)
        for low in range(0, n, together):
            rows = x[sample, head, low : low + together].float()
            y = room[: len(rows) * len(sides)].view(-1, len(rows))
            # forward mode takes no `out`
            y = torch.mm(sides, rows.T, out=None if is_transformed() else y)
            y = y.view(*some.shape[:2], -1)
            if leaf.hash == "hyperplanes":
                # the sides of planes as the bits of one number
                bits = 2 ** torch.arange(y.shape[1], device=y.device)[:, None]
                mine = ((y > 0) * bits).sum(1)
            else:
                mine = farthest(y)
            buckets[sample, head, first : first + turns, low : low + together] = mine
    return buckets


def farthest(y: Tensor) -> Tensor:
    """argmax([y; -y]) of each column of y [rounds, c, m], the first of several, 0 where a number is
    none; y is written over."""
    top, most = _first_greatest(y)
    bottom, least = _first_greatest(y.neg_())
    code = torch.where(top >= bottom, most, least + y.shape[1])
    return code.masked_fill_(top.isnan(), 0)


def _first_greatest(y: Tensor) -> tuple[Tensor, Tensor]:
    """The greatest number of each column of y [rounds, c, m], and where it first stands."""
    if not y.is_cpu:
        return y.max(1)
    # pooling over channels that lie together is torch's one search for a place in vectors: a
    # seventh of the time
    images = y[:, :, None].permute(0, 3, 1, 2)
    greatest = torch.ops.aten.max_pool2d_with_indices(images, [y.shape[1], 1])
    top, most = (x.flatten(1) for x in greatest)
    return top, most
