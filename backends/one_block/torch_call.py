"""Torch's flash kernel on the CPU in one call for all samples and heads, or in a few.

A mask is kept as what is added to scores. Padding that leaves every sample one range of keys cuts
the call to that range; other padding, and that of short sequences, is part of the mask.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, cast
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from attnspec.backends.common.exact import (
    EVERY,
    ByKeyHead,
    SoftmaxKernel,
    clear_empty,
    flash,
    flash_backward,
    samples_of,
    torch_attention,
)
from attnspec.backends.common.masks import added_by
from attnspec.backends.common.merging import LOWEST, Partial, wide_type
from attnspec.backends.common.remembered import Remembered
from attnspec.backends.common.scores import ScoreFunction, masked
from attnspec.backends.common.torch_modes import apart, is_transformed
from attnspec.backends.one_block.dense import DenseKernel
from attnspec.backends.one_block.row_keys import Form, all_pairs, form_of
from attnspec.limits import LIMITS
from attnspec.lower.work import Call, Work, Works


class Part(NamedTuple):
    """Some samples, queries and keys that one call computes, `EVERY` sample with all of both; and
    what is added to their scores [B or 1, H or 1, n_q or 1, n_k], None for nothing."""

    samples: slice = EVERY
    rows: slice = EVERY
    keys: slice = EVERY
    causal: bool = False
    bias: Tensor | None = None

    def read(self, rows: Sequence[Tensor], keys: Sequence[Tensor]) -> list[Tensor]:
        """[B, H, n_q, …] of these samples and queries, [B, K, n_k, d] of these and keys."""
        of_rows = [x[self.samples, :, self.rows] for x in rows]
        return [*of_rows, *(x[self.samples, :, self.keys] for x in keys)]

    def attended(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Partial:
        """The output and log-sum-exps of these queries and keys."""
        out, lse = flash(q, k, v, 0.0, self.causal, attn_mask=self.bias, scale=scale)
        if self.bias is not None:
            clear_empty(out, lse)
        return out, lse

    def differentiated(self, tensors: Sequence[Tensor], scale: float) -> list[Tensor]:
        """The gradients of q, k and v from that of the output, q, k, v, the output and its sums."""
        return list(flash_backward(*tensors, 0.0, self.causal, attn_mask=self.bias, scale=scale))


class TorchCallKernel(SoftmaxKernel):
    """Attention by torch's own call; heads of several graphs, one after the other, by masks."""

    by_key_head = False

    def __init__(self, groups: Works, device: torch.device) -> None:
        self.groups, self.work, self.device = groups, groups[0][0], device
        self.heads = tuple(head for _, members in groups for head in members)
        self.form = form_of(self.work) if len(groups) == 1 else Form.MASK
        # those of the masks of a sample
        several = self.work.changes or self.work.decided or len(groups) > 1
        self.numbers = (len(self.heads) if several else 1) * self.work.n_q * self.work.n_k
        self._biases: dict[torch.dtype, Tensor] = {}
        self._read: Remembered[tuple[Part, ...]] = Remembered()
        self._padded: Remembered[tuple[Part, ...] | None] = Remembered(LIMITS.paddings_laid_out)
        # what torch's call gets on other devices
        self._added: Remembered[tuple[Tensor, Tensor | None]] = Remembered()

    def build_differentiable(self) -> ByKeyHead:
        kernel = DenseKernel(self.work, self.heads, self.device)
        if len(self.groups) > 1:
            mask = (self._bias(torch.float32) == 0).to(self.device)
            kernel.plan = lambda data: mask
        return kernel

    # --- the fast way --------------------------------------------------------------------------

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call, scale: float) -> Partial:
        parts = self._parts(q, call)
        if parts and parts[0].samples is EVERY:
            return parts[0].attended(q, k, v, scale)
        out = q.new_zeros(q.shape)
        lse = q.new_full(q.shape[:-1], -math.inf, dtype=wide_type(q))
        for part in parts:
            rows, *into, keys, values = part.read((q, out, lse), (k, v))
            for target, x in zip(into, part.attended(rows, keys, values, scale), strict=True):
                target.copy_(x)
        return out, lse

    def backward(
        self, grad: Tensor, saved: Sequence[Tensor], call: Call, scale: float
    ) -> Sequence[Tensor]:
        parts, (q, k, v, out, lse) = self._parts(grad, call), saved
        # a query without a key has weights 0 whatever its log-sum-exp, as long as it is finite
        lse = lse.masked_fill(lse == -math.inf, 0.0)
        if parts and parts[0].samples is EVERY:
            return parts[0].differentiated((grad, q, k, v, out, lse), scale)
        # no key is in more than two parts: of two numbers the sum is rounded once in any type
        into = [x.new_zeros(x.shape) for x in (q, k, v)]
        for part in parts:
            above, rows, its, sums, keys, values = part.read((grad, q, out, lse), (k, v))
            tensors = above, rows, keys, values, its, sums.contiguous()
            targets = part.read(into[:1], into[1:])
            for target, share in zip(targets, part.differentiated(tensors, scale), strict=True):
                target.add_(share)
        return into

    def _parts(self, q: Tensor, call: Call) -> tuple[Part, ...]:
        """What is computed, every pair once, for queries of this type."""
        kind = wide_type(q)
        if self.work.reads or self.work.decided:
            return self._of_inputs(call, kind)
        if call.padding is None or bool(call.padding.all()):
            return (self._part(EVERY, EVERY, kind),)
        padding = call.padding
        parts = self._padded.get(
            [padding], lambda: apart(lambda: self._of_padding(padding, kind)), kind
        )
        # masks as large as this are not kept
        return self._masked(padding, kind) if parts is None else parts

    def _of_inputs(self, call: Call, kind: torch.dtype) -> tuple[Part, ...]:
        """One call with the mask that inputs make, kept while the same ones come again."""

        def build() -> tuple[Part, ...]:
            return (Part(bias=self._sloped(added_by(self._pairs(call), kind, LOWEST))),)

        read, keeps = self._inputs(call)
        return self._read.get(read, build, kind, call.padding is None) if keeps else build()

    def _of_padding(self, padding: Tensor, kind: torch.dtype) -> tuple[Part, ...] | None:
        """The parts for real keys bool [B, n_k]: one call with a mask for every sample where these
        are small, else calls without; None where real keys are in several ranges."""
        if len(padding) * self.numbers <= LIMITS.mask_kept:
            return self._masked(padding, kind)
        parts = list[Part]()
        for samples, real in samples_of(len(padding), padding):
            at = torch.arange(padding.shape[1]) if real is None else real.nonzero()[:, 0]
            first, last = (int(at[0]), int(at[-1]) + 1) if len(at) else (0, 0)
            if last - first != len(at):
                return None
            keys, causal = slice(first, last), self.form is Form.CAUSAL and not self.work.changes
            if first < last and not causal:
                parts.append(self._part(samples, keys, kind))
            elif first < last:
                parts.append(Part(samples, keys, keys, causal=True))
                if last < self.work.n_q:
                    parts.append(Part(samples, slice(last, None), keys))
        return tuple(parts)

    def _masked(self, padding: Tensor, kind: torch.dtype) -> tuple[Part, ...]:
        """One call with a mask for every sample."""
        real = padding[:, None, None]
        if self.form is Form.NOTHING and not self.work.changes:
            return (Part(bias=added_by(real, kind, LOWEST)),)
        return (Part(bias=torch.where(real, self._bias(kind), LOWEST)),)

    def _part(self, samples: slice, keys: slice, kind: torch.dtype) -> Part:
        """All queries of some samples over a range of keys."""
        if self.work.changes or self.form is Form.MASK:
            return Part(samples, EVERY, keys, bias=self._bias(kind)[..., keys])
        return Part(samples, EVERY, keys, causal=self.form is Form.CAUSAL)

    def _bias(self, kind: torch.dtype) -> Tensor:
        """What is added to all scores [1, H or 1, n_q, n_k]."""

        def build() -> Tensor:
            if len(self.groups) == 1:
                return self._sloped(_mask_of(self.work, kind))
            masks = ((_mask_of(work, kind), len(heads)) for work, heads in self.groups)
            return torch.cat([mask.expand(-1, count, -1, -1) for mask, count in masks], 1)

        if kind not in self._biases:
            self._biases[kind] = apart(build)
        return self._biases[kind]

    def _sloped(self, added: Tensor) -> Tensor:
        """What is added to scores with their changes, which add constants."""
        if not self.work.changes:
            return added
        change = ScoreFunction(self.work.changes, self.heads, self.work.length, torch.device("cpu"))
        q, k = (torch.from_numpy(at) for at in self.work.positions)
        heads = torch.arange(len(self.heads)).view(-1, 1, 1)
        more = change.added_to(added.dtype, {"q": q[:, None], "k": k}, {}, heads)
        return masked(more, added, self.work.changes).clamp(min=LOWEST)

    # --- where it cannot go --------------------------------------------------------------------

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        large = q.is_cuda or q.shape[:-1].numel() * self.work.n_k >= LIMITS.fused
        whole = self.work.plain and large and q.shape[-1] and v.shape[-1]
        if not whole or is_transformed() or self.goes_fast(q, k, v, call):
            return super().__call__(q, k, v, call)
        mask, empty = self._plain_mask(call, q.dtype)
        scale, gqa = self.scale_of(q.shape[-1]), q.shape[1] > k.shape[1]
        more = {"is_causal": mask is None and self.form is Form.CAUSAL, "enable_gqa": gqa}
        out = torch_attention(q, k, v, mask, scale, dropout_p=call.dropout_p, **more)
        # some of torch's kernels give the mean of all values to a query without a key
        return out if empty is None else out.masked_fill(empty, 0.0)

    def _pairs(self, call: Call) -> Tensor:
        """Which pairs attend, bool, broadcastable to [B, H, n_q, n_k]."""
        return cast(Tensor, cast(DenseKernel, self.differentiable).mask(call))

    def _plain_mask(self, call: Call, kind: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
        """What is added to all scores of a call [B or 1, H or 1, n_q, n_k], and the queries without
        a key, bool [B or 1, H or 1, n_q, 1]; None for nothing, and where every query has one."""
        if self.form is not Form.MASK and call.padding is None:
            return None, None
        read, keeps = self._inputs(call)

        def build() -> tuple[Tensor, Tensor | None]:
            mask, groups = self._pairs(call), self.groups
            if not (read or self.work.decided):
                pairs = (all_pairs(work.relation, work.n_q, work.n_k) for work, _ in groups)
                if all(each.any(1).all() for each in pairs):
                    return added_by(mask, kind), None
            return added_by(mask, kind), ~mask.any(-1, keepdim=True)

        return self._added.get(read, build, kind) if keeps else build()

    def _inputs(self, call: Call) -> tuple[list[Tensor], bool]:
        """What the mask of a call is made of, and whether it is kept while that comes again."""
        read = [call.data[name] for name in self.work.reads]
        if call.padding is not None:
            read.append(call.padding)
        numbers = self.numbers * max([1, *map(len, read)])
        by_inputs = all(leaf.by_inputs for leaf in self.work.decided)
        return read, by_inputs and numbers <= LIMITS.mask_call


_masks: WeakValueDictionary[tuple[object, ...], Tensor] = WeakValueDictionary()
"""The masks of kernels that live: the layers of a model share one."""


def _mask_of(work: Work, kind: torch.dtype) -> Tensor:
    """0 for a pair of a work, `LOWEST` for another: [1, 1, n_q, n_k]."""
    key = work.relation, work.n_q, work.n_k, kind
    mask = _masks.get(key)
    if mask is None:
        pairs = torch.from_numpy(np.array(all_pairs(work.relation, work.n_q, work.n_k)))
        mask = _masks[key] = added_by(pairs[None, None], kind, LOWEST)
    return mask
