"""One compiled call of FlexAttention for all graphs and lengths.

What a graph is comes in tensors: block lists say which blocks are visited, and the mask by itself
says of every pair of places whether it holds. So one compilation serves every spec of a kind.
Positions are never multiplied with one another, and products of blocks stay small, so that no
index is beyond 32 bits at any length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from inspect import signature
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from attnspec.backends.common.scores import changed
from attnspec.backends.flex.steps import BLOCK
from attnspec.ir.scalars import PAIR, Scalar
from attnspec.ir.scores import TABLE
from attnspec.lower.work import BackendError

RECOMPILES = 32
"""How often one kind is compiled at most: for types, sizes of heads, and devices."""

WORDS = BLOCK // 32
"""Of a row of a mask."""

_flex: Any = flex_attention
_block_mask: Any = BlockMask

Mod = Callable[..., Tensor]
"""What FlexAttention asks of a sample, a head, and a pair of places."""


class Kind(NamedTuple):
    """What is compiled apart.

    `changes` are what scores become, one after the other, without numbers, and `names` the symbols
    in them, each with a tuple of tensors in a call, `bounded` that they are numbers at pairs alone;
    `padded` says that keys may be missing, `own` that each sample has masks of its own; `lse`, on
    GPUs, that log-sum-exps are asked for; `small` that larger kernels do not fit.
    """

    scale: float
    changes: tuple[Scalar, ...] = ()
    names: tuple[str, ...] = ()
    padded: bool = False
    own: bool = False
    lse: bool = True
    bounded: bool = False
    small: bool = False


class Blocks(NamedTuple):
    """What is visited and what holds there, in tensors on a device, for each sample or for all of
    them.

    `lists` are FlexAttention's, of `tall` times `wide` blocks. Block (i, j) has the mask
    `numbers[i * wide + j]`, sample after sample; mask m holds at place (a, c) of its block where
    bit c % 32 of `bits[(m * 128 + a) * 4 + c // 32]` is set; `runs` are none where masks are read.
    `real` says which keys there are, bool [samples * k places]; `labels` are those of the places of
    queries and of keys, int64 [samples * places]; `q_at` and `k_at` the positions at the places,
    int32, -1 for none.
    """

    lists: tuple[Tensor, ...]
    tall: Tensor
    wide: Tensor
    numbers: Tensor
    bits: Tensor
    real: Tensor
    q_at: Tensor
    k_at: Tensor
    runs: tuple[Tensor, ...] = ()
    labels: tuple[tuple[Tensor, Tensor], ...] = ()


Heads = tuple[Tensor, Tensor]
"""How many key heads stand beside one another in a sample's place, and query heads for each."""

Changes = tuple[tuple[Tensor, ...], ...]
"""The tensors behind the names in scores: a number; a list; a number of each head; of a table the
numbers of all heads one after the other, and how many a head has; of inputs the numbers of all
samples, and how many a sample has; of those of pairs the numbers, the samples, queries and keys,
the first query, and 1, or 0 where all heads have the same."""


def attend(
    kind: Kind, parts: Sequence[Tensor], blocks: Blocks, heads: Heads, changes: Changes
) -> tuple[Tensor, Tensor | None]:
    """The output [b, R, q places, d_v] of q [b, R, q places, d] and k, v [b, K, k places, …] and,
    if the kind asks, its log-sum-exps [b, R, q places]; b counts samples, and for each of them key
    heads where these stand beside one another.

    Raises BackendError where torch does not compile it: uncompiled, it would compute every score.
    """
    this = kind, *((x.dtype, x.shape[-1]) for x in parts)
    small = this in _too_large
    try:
        return _compiled(kind._replace(small=small))(*parts, *blocks, heads, changes)
    except FailOnRecompileLimitHit:
        raise BackendError(
            f"the backend 'flex' refuses: FlexAttention was compiled {RECOMPILES} times for other"
            " types, head sizes and devices in this process, and uncompiled it would compute every"
            " score; torch.compiler.reset() forgets them"
        ) from None
    except TorchDynamoException as error:
        if "out of resource" in str(error) and not small:
            _too_large.add(this)
            return attend(kind, parts, blocks, heads, changes)
        reason = str(error).strip().partition("\n")[0]
        raise BackendError(
            f"the backend 'flex' refuses: torch does not compile FlexAttention here: {reason:.300}"
        ) from error


_too_large: set[tuple[object, ...]] = set()
"""The kinds, types and head sizes whose kernels need more shared memory than a program may have."""


@lru_cache(maxsize=1 << 10)
def number_on(device: torch.device, number: int, use: str) -> Tensor:
    """A number as a tensor, int32, filled on the device: nothing waits for a copy. Each use has one
    of its own, or calls in which two uses have one tensor would be compiled apart."""
    with torch.inference_mode(False):
        return torch.full((), number, dtype=torch.int32, device=device)


@cache
def _compiled(kind: Kind) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The call of a kind, compiled; nothing stands in for it uncompiled."""
    run = call_of(kind)

    def compiled(*arguments: Any) -> tuple[Tensor, Tensor | None]:
        if not torch.compiler.is_compiling():
            raise BackendError(
                "the backend 'flex' refuses: torch.compile is switched off in this process, and"
                " uncompiled FlexAttention would compute every score"
            )
        return run(*arguments)

    limits: dict[str, Any] = {}
    if "isolate_recompiles" in signature(torch.compile).parameters:
        limits = {"recompile_limit": RECOMPILES, "isolate_recompiles": True}
    else:
        # before 2.13 torch counts for each code object, at most 8
        code = compiled.__code__.replace()
        compiled = FunctionType(code, globals(), closure=compiled.__closure__)
    # with `fullgraph` torch raises where it would go on uncompiled
    return torch.compile(compiled, fullgraph=True, dynamic=True, **limits)


def options_of(kind: Kind, by_bits: bool = False) -> dict[str, Any]:
    """What torch is told of the kernels of a kind; `by_bits` says that masks are read."""
    # both sides are whole blocks, which of lengths that change torch does not know;
    # ROWS_GUARANTEED_SAFE asks for more than rows without empties: a key among the first that a
    # row reads, as many as a tile of its kernel has
    options: dict[str, Any] = {"IS_DIVISIBLE": True} if kind.lse else {}
    reads_table = any(name.endswith((TABLE, PAIR)) for name in kind.names)
    if reads_table or kind.small or (by_bits and kind.padded and kind.lse):
        # what is read of a table for every pair leaves no room for keys to be fetched ahead
        options["num_stages"] = 1
    if kind.small:
        options |= {"BLOCK_M": 64, "BLOCK_N": 64}
    return options


def call_of(kind: Kind) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """FlexAttention of a kind as a function of tensors."""
    by_runs, by_bits = (options_of(kind, by_bits) or None for by_bits in (False, True))

    def run(q: Tensor, k: Tensor, v: Tensor, *given: Any) -> tuple[Tensor, Tensor | None]:
        blocks, (heads, changes) = Blocks(*given[:-2]), given[-2:]
        sizes = q.shape[2], k.shape[2]
        result = _flex(
            q,
            k,
            v,
            score_mod(kind, blocks, heads, changes) if kind.changes else None,
            _block_mask(
                sizes, *blocks.lists, BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=mask_mod(kind, blocks)
            ),
            kind.scale,
            enable_gqa=True,
            kernel_options=by_runs if blocks.runs else by_bits,
            return_aux=AuxRequest(lse=True) if kind.lse else None,
        )
        return (result[0], result[1].lse) if kind.lse else (result, None)

    return run


def mask_mod(kind: Kind, blocks: Blocks) -> Mod:
    """Whether a pair of places holds in a block that is visited: by the bit of the block's mask, or
    by the runs of the query; of real keys, and pairs whose labels agree, alone."""
    runs, tall, wide = blocks.runs, blocks.tall, blocks.wide

    def holds(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        if runs:
            mask = (k >= at(runs[0], q)) & (k < at(runs[1], q))
            for low, high in zip(runs[2::2], runs[3::2], strict=True):
                mask = mask | ((k >= at(low, q)) & (k < at(high, q)))
        else:
            row = b * tall + (q >> 7) if kind.own else q >> 7
            number = at(blocks.numbers, row * wide + (k >> 7))
            word = at(blocks.bits, (number * BLOCK + (q & 127)) * WORDS + ((k & 127) >> 5))
            mask = ((word >> (k & 31)) & 1) != 0
        if kind.padded:
            mask = mask & at(blocks.real, b * wide * BLOCK + k)
        if kind.bounded:
            mask = mask & (at(blocks.q_at, q) >= 0)
        for of_q, of_k in blocks.labels:
            mask = mask & (at(of_q, b * tall * BLOCK + q) == at(of_k, b * wide * BLOCK + k))
        return mask

    return holds


def score_mod(kind: Kind, blocks: Blocks, heads: Heads, changes: Changes) -> Mod:
    """The score of a pair of places with all changes."""
    # FlexAttention masks gradients of scores, not those of what they read, nor any in whole blocks
    holds = mask_mod(kind, blocks) if kind.bounded else None

    def of_pair(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        sample, head = b // heads[0], (b % heads[0]) * heads[1] + h
        values: dict[str, Any] = {"q": at(blocks.q_at, q).long(), "k": at(blocks.k_at, k).long()}
        place = sample, head, values["q"], values["k"]
        for name, tensors in zip(kind.names, changes, strict=True):
            values[name] = _read(name, tensors, *place)
        pairs = holds and holds(b, h, q, k)
        scores = changed(kind.changes, score.float(), values, pairs)
        return scores if pairs is None else torch.where(pairs, scores, score)

    return of_pair


def _read(
    name: str, tensors: tuple[Tensor, ...], sample: Tensor, head: Tensor, q: Tensor, k: Tensor
) -> Any:
    """What a name in scores stands for at a pair."""
    first, *sizes = tensors
    if name.startswith("*"):
        return lambda index: at(first, index)
    if name.startswith("@"):
        return at(first, head)
    if name.endswith(TABLE):
        return lambda index: at(first, head * sizes[0] + index)
    if name.endswith(PAIR):
        samples, queries, keys, start, each = sizes
        # a place without a query has position -1
        row = (head * each * samples + sample) * queries + (q - start).clamp(min=0)
        return at(first, row * keys + k)
    if name.endswith(")"):
        position = q if name.endswith("(q)") else k if name.endswith("(k)") else 0
        return at(first, sample * sizes[0] + position)
    return first


def at(table: Tensor, index: Tensor) -> Tensor:
    """An entry of a table [m] that is there."""
    if table.is_cpu:
        # for C++ torch mixes up the names of sizes that an index is compared with
        return torch.ops.aten._unsafe_masked_index(table, index >= 0, [index], 0)  # type: ignore[no-any-return]
    return table[index]
