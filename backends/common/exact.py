"""Kernels of softmax attention: a fast way without autograd, and a composed one behind it.

The fast way computes values, log-sum-exps and first derivatives. The composed one is made of
differentiable operations and stands in where the fast one cannot go: under transforms, on other
devices, for derivatives of derivatives, and mostly under dropout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, cached_property, partial
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from attnspec.backends.common.merging import LOWEST, Outputs, Partial, with_zero
from attnspec.backends.common.score_formula import scale_of, widened
from attnspec.backends.common.torch_modes import Function, apart, derivatives, is_transformed
from attnspec.limits import LIMITS
from attnspec.lower.work import Call, Work

EVERY = slice(None)

flash: Any = torch._scaled_dot_product_flash_attention_for_cpu
"""Torch's flash kernel on the CPU, a private name of torch, which takes any strides of rows in one
piece: (q, k, v, dropout_p, is_causal, *, attn_mask, scale) -> output and log-sum-exps, for q
[b, heads, n_q, d] and as many key heads or fewer. Without keys it ends the process; a row whose
bias is all -inf has the log-sum-exp 0; q, k and v need one head size."""

flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
"""(grad, q, k, v, out, lse, dropout_p, is_causal, *, attn_mask, scale) -> gradients of q, k, v."""


def clear_empty(out: Tensor, lse: Tensor) -> None:
    """Puts 0 and -inf, in place, where a mask of `LOWEST` has left a row no key."""
    empty = lse < LOWEST / 2
    if bool(empty.any()):
        out.masked_fill_(empty[..., None], 0.0)
        lse.masked_fill_(empty, -torch.inf)


class ByKeyHead:
    """A kernel whose query heads lie by the key head that they read: the one place where those of
    a call are brought into that shape, and outputs back."""

    composed: Callable[..., Outputs]
    """(q [B, K, R, n_q, d], k, v, call) -> the output [B, K, R, n_q, d_v], and its log-sum-exps if
    there are any."""

    def traced(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        """The output alone."""
        return self.composed(q, k, v, call)[0]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        return self.traced(grouped(q, k), k, v, call).flatten(1, 2)

    def partial(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Outputs:
        """The output [B, H, n_q, d_v] and its log-sum-exps [B, H, n_q], if there are any."""
        out, lse = self.composed(grouped(q, k), k, v, call)
        return out.flatten(1, 2), None if lse is None else lse.flatten(1, 2)


class SoftmaxKernel(ByKeyHead):
    """Runs a work whose weights are a softmax of its scores.

    Tensors of `forward`, `backward` and `composed` are q [B, K, R, n_q, d] for K key heads with R
    query heads each, k [B, K, n_k, d] and v [B, K, n_k, d_v]. The first two get the factor of the
    scores, and with `one_size` know one size of heads, d = d_v; without `by_key_head` they take
    what belongs to queries as calls do, [B, H, n_q, …].
    """

    work: Work
    one_size = by_key_head = True
    # devices on which derivatives go on from a call's known output and log-sum-exps
    reuses: tuple[str, ...] = ("cpu",)

    build_differentiable: Callable[[], ByKeyHead]
    """The same attention in differentiable operations."""
    forward: Callable[[Tensor, Tensor, Tensor, Call, float], Partial]
    """(q, k, v, call, scale) -> the output [B, K, R, n_q, d], and log-sum-exps [B, K, R, n_q]."""
    backward: Callable[[Tensor, Sequence[Tensor], Call, float], Sequence[Tensor]]
    """(grad, saved, call, scale) -> the gradients of q, k and v, and of the call's tables if one of
    them asks; `saved` are q, k, v and what `forward` returned."""

    @cached_property
    def scale_of(self) -> Callable[[int], float]:
        """The factor of scores for heads of a size."""
        return cache(partial(scale_of, self.work))

    @cached_property
    def differentiable(self) -> ByKeyHead:
        """The same attention in differentiable operations, built when it is first needed."""
        # it is kept, so the modes of this call must not reach it
        return apart(self.build_differentiable)

    def derivatives(
        self, saved: Sequence[Tensor], grad: Tensor, of_lse: Tensor | None, call: Call, scale: float
    ) -> Sequence[Tensor]:
        """As `backward`, from the gradients of the output and of its log-sum-exps.

        The weights of a row have the gradient P (dP - delta), delta = sum(grad out), to which that
        of its log-sum-exp adds P times as much: it is one more column of grad, where out has -1.
        """
        if of_lse is None:
            return self.backward(grad, saved, call, scale)
        q, k, v, out, lse = saved
        of_lse = of_lse.masked_fill(lse == -torch.inf, 0.0)
        q, k, v = (rows_of_size(x, x.shape[-1] + 1) for x in (q, k, v))
        out = in_rows(functional.pad(out, (0, 1), value=-1.0))
        grad = torch.cat([grad, of_lse[..., None].to(grad.dtype)], -1)
        grads = self.backward(grad, (q, k, v, out, lse), call, scale)
        return *(x[..., :-1] for x in grads[:3]), *grads[3:]

    def composed(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Partial:
        """The same in differentiable operations."""
        # which of a softmax has log-sum-exps
        return cast("Partial", self.differentiable.composed(q, k, v, call))

    def traced(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        return self.differentiable.traced(q, k, v, call)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        if self.goes_fast(q, k, v, call):
            return self._fast(q, k, v, call)[0]
        return super().__call__(q, k, v, call)

    def partial(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Partial:
        if self.goes_fast(q, k, v, call):
            return self._fast(q, k, v, call)
        return cast("Partial", super().partial(q, k, v, call))

    def goes_fast(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> bool:
        """Whether the fast way can go; where it cannot, the composed one does."""
        return q.is_cpu and not call.dropout_p and has_numbers(q, k, v)

    def _fast(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Partial:
        """As `partial`, without the composed way."""
        size, out_size = q.shape[-1], v.shape[-1]
        if self.one_size:
            # zeros change no score, and their outputs are cut off
            wide = max(size, out_size)
            q, k, v = rows_of_size(q, wide), rows_of_size(k, wide), rows_of_size(v, wide)
        if call.dropout_p and call.seed is None:
            call = replace(call, seed=torch.randint(1 << 62, (1,), device=q.device))
        tensors = q, k, v, *call.tables.values()
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            out, lse = _Differentiable.apply(self, call, size, *tensors)  # type: ignore[no-untyped-call]
        else:
            out, lse = self.of_heads(q, k, v, call, self.scale_of(size))
        return out if out.shape[-1] == out_size else out[..., :out_size], lse

    def of_heads(self, q: Tensor, k: Tensor, v: Tensor, call: Call, scale: float) -> Partial:
        """`attended` of q [B, H, n_q, d]: the output like it and the log-sum-exps [B, H, n_q]."""
        if not self.by_key_head:
            return self.attended(q, k, v, call, scale)
        out, lse = self.attended(grouped(q, k), k, v, call, scale)
        return out.flatten(1, 2), lse.flatten(1, 2)

    def attended(self, q: Tensor, k: Tensor, v: Tensor, call: Call, scale: float) -> Partial:
        """`forward` with the logit 0 of `softmax1`."""
        if self.work.normalize != "softmax1":
            return self.forward(q, k, v, call, scale)
        # the share of the other keys is rounded once, with the output
        out, lse = with_zero(self.forward(widened(q), widened(k), widened(v), call, scale))
        return out.to(q.dtype), lse


class _Differentiable(Function):
    """The fast way, with the composed one for derivatives of its derivative; `size` is that of
    heads before zeros were put behind them."""

    @staticmethod
    def forward(ctx, kernel, call, size, q, k, v, *tables):  # type: ignore[no-untyped-def]
        call = replace(call, kept={})
        if call.known is None:
            out, lse = kernel.of_heads(q, k, v, call, kernel.scale_of(size))
        else:
            out, lse = (x.detach() for x in call.known)
            out = rows_of_size(out, q.shape[-1]) if kernel.one_size else out
        ctx.save_for_backward(q, k, v, out, lse, *tables)
        ctx.set_materialize_grads(False)
        # the call would keep its tables as they are outside of this function
        bare = replace(call, tables={}, known=None) if tables or call.known else call
        ctx.given = kernel, bare, size, tuple(call.tables)
        return out, lse

    @staticmethod
    def backward(ctx, grad, of_lse):  # type: ignore[no-untyped-def]
        kernel: SoftmaxKernel
        call: Call
        kernel, call, size, names = ctx.given
        q, k, v, out, lse, *tables = ctx.saved_tensors
        asks = ctx.needs_input_grad[3:]

        def with_tables(tables: Sequence[Tensor]) -> Call:
            return replace(call, tables=dict(zip(names, tables, strict=True))) if names else call

        def run(q: Tensor, k: Tensor, v: Tensor, *tables: Tensor) -> Outputs:
            parts = q[..., :size], k[..., :size], v
            return ByKeyHead.partial(kernel, *parts, with_tables(tables))

        grads: Sequence[Tensor | None]
        if torch.is_grad_enabled():
            grads = derivatives(run, (q, k, v, *tables), asks, (grad, of_lse))
        elif grad is None and of_lse is None:
            grads = [None] * len(asks)
        else:
            grad = torch.zeros_like(out) if grad is None else in_rows(grad)
            if kernel.by_key_head:
                q, out, lse, grad = (grouped(x, k) for x in (q, out, lse, grad))
                of_lse = None if of_lse is None else grouped(of_lse, k)
            saved, scale = (q, k, v, out, lse), kernel.scale_of(size)
            of_q, *others = kernel.derivatives(saved, grad, of_lse, with_tables(tables), scale)
            grads = of_q.flatten(1, 2) if kernel.by_key_head else of_q, *others
        return None, None, None, *grads


def has_numbers(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether nothing looks on, and there is something to compute."""
    return not is_transformed() and bool(q.numel() and k.numel() and v.numel())


def fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    dropout_p: float = 0.0,
) -> Tensor:
    """Torch's own attention of q [B, K, R, n, d] and keys [B, K, w, d], under a mask bool
    [B or 1, K R or 1, n or 1, w]: [B, K, R, n, d_v]."""
    # a few rows of query heads that share a key head are more rows of one product
    few = q.shape[3] <= LIMITS.rows_looked_up and (mask is None or mask.shape[1] == 1)
    if few and mask is not None and mask.shape[2] > 1:
        mask = mask.repeat(1, 1, q.shape[2], 1)
    rows, gqa = (q.flatten(2, 3), False) if few else (q.flatten(1, 2), q.shape[2] > 1)
    out = torch_attention(rows, k, v, mask, scale, dropout_p=dropout_p, enable_gqa=gqa)
    return out.view(*q.shape[:-1], v.shape[-1])


def torch_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, **more: Any
) -> Tensor:
    """Torch's own attention of q [B, H, n, d], under a mask bool [B or 1, H or 1, n or 1, w]; some
    of its kernels give the mean of all values to a query without a key."""
    out = functional.scaled_dot_product_attention(q, k, v, mask, scale=scale, **more)
    if out.is_cuda and out.requires_grad and not torch.compiler.is_compiling():
        out.register_hook(partial(laid_out, strides=out.stride()))  # type: ignore[no-untyped-call]
    return out


def laid_out(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    """The same numbers with these strides, for the gradient of an output of torch's attention.

    cuDNN keeps its plan of a backward for the strides of q, k, v and the mask alone (torch 2.11): a
    gradient with other strides than the first one's would be read in a wrong order.
    """
    return x if x.stride() == strides else x.new_empty_strided(x.shape, strides).copy_(x)


def grouped(x: Tensor, k: Tensor) -> Tensor:
    """What belongs to query heads, [B, H, n_q, …], by key head: [B, K, R, n_q, …]."""
    return torch.unflatten(x, 1, (k.shape[1], -1))


def repeated(x: Tensor, heads: int) -> Tensor:
    """Key heads [B, K, n, d] as [B, heads, n, d], each beside the query heads that read it."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def in_rows(x: Tensor) -> Tensor:
    """The same numbers with every row in one piece."""
    return rows_of_size(x, 0)


def rows_of_size(x: Tensor, size: int) -> Tensor:
    """Rows of a size, with zeros behind, each in one piece: padding keeps the order of strides."""
    x = functional.pad(x, (0, size - x.shape[-1])) if x.shape[-1] < size else x
    return x if x.stride(-1) == 1 else x.contiguous()


def samples_of(batch: int, padding: Tensor | None) -> list[tuple[slice, Tensor | None]]:
    """Samples that follow one another and have the same real keys, with these."""
    if padding is None or bool(padding.all()):
        return [(slice(0, batch), None)]
    same = (padding[1:] == padding[:-1]).all(1).tolist()
    ends = [sample for sample in range(1, batch) if not same[sample - 1]]
    return [(slice(low, high), padding[low]) for low, high in pairwise((0, *ends, batch))]


def some_together(samples: slice, heads: int, many: int) -> Iterator[tuple[slice, slice]]:
    """Samples and heads, of which as many are computed together."""
    step, few = max(1, many // heads), max(1, min(heads, many))
    for first in range(samples.start, samples.stop, step):
        for low in range(0, heads, few):
            last = min(first + step, samples.stop)
            yield slice(first, last), slice(low, min(low + few, heads))
