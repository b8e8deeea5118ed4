"""One compiled call of FlexAttention for all graphs and lengths.

What a graph is comes in tensors: block lists say which blocks are visited, and the mask by itself
says of every pair of places whether it holds. So one compilation serves every spec of a kind.
Positions are never multiplied with one another, and products of blocks stay small, so that no
index is beyond 32 bits at any length.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from inspect import signature
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from attnspec.backends.flex.block_lists import BLOCK, EVERYTHING, NOTHING, BlockLists
from attnspec.backends.flex.conditions import Shape
from attnspec.lower.work import BackendError

RECOMPILES = 32
"""How often one kind is compiled at most: for types, sizes of heads, and devices."""

BYTES = BLOCK // 8
"""Of a row of a mask."""

_flex: Any = flex_attention
_block_mask: Any = BlockMask

Mod = Callable[..., torch.Tensor]
"""What FlexAttention asks of a pair of places."""


class Kind(NamedTuple):
    """What is compiled apart.

    `changes` are the kinds of score changes in their order, each with a tuple of tensors in a call;
    `padded` says that keys may be missing, `condition` is the shape of what inputs ask of pairs, ()
    for nothing; `runs` counts those of the keys of each query, 0 where masks are read; `options` is
    what is proved of the blocks.
    """

    scale: float
    changes: tuple[str, ...] = ()
    padded: bool = False
    condition: Shape = ()
    lse: bool = True
    runs: int = 0
    options: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Sides:
    """What a call has beside q [b, R, q places, d], k and v [b, K, k places, d], in tensors.

    b counts samples, and for each of them key heads if `keys` of these are apart; `repeat` is R.
    `q_at` and `k_at` are the positions at the places, int32; `real` says which keys there are, bool
    [samples * k places]. `given` are the numbers of a condition, [samples * places] or one alone;
    `parts` are the numbers and bits of the masks of a condition's parts.
    """

    keys: torch.Tensor
    repeat: torch.Tensor
    q_at: torch.Tensor
    k_at: torch.Tensor
    real: torch.Tensor
    changes: tuple[tuple[torch.Tensor, ...], ...]
    given: tuple[torch.Tensor, ...] = ()
    parts: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()


class Blocks(NamedTuple):
    """Block lists as tensors on a device; `runs` are none where masks are read."""

    numbers: torch.Tensor
    width: torch.Tensor
    bits: torch.Tensor
    lists: tuple[torch.Tensor, ...]
    runs: tuple[torch.Tensor, ...] = ()

    def decided(self, some: torch.Tensor, whole: torch.Tensor) -> Blocks:
        """The same of which a call leaves `some`, and `whole` as they are, for every sample: bool
        [samples, q blocks, k blocks]. Nothing waits for the device."""
        numbers = self.numbers.view(-1, some.shape[2])
        some = some & (numbers != NOTHING)
        whole = some & whole & (numbers == EVERYTHING)
        masked = some & ~whole
        pairs = [listed(x) for x in (masked, whole, masked.mT, whole.mT)]
        return self._replace(lists=tuple(part[:, None] for pair in pairs for part in pair))


def listed(held: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How many columns each row has, and which, ascending, those that it has first; contiguous, as
    FlexAttention reads them whatever their strides are."""
    order = torch.argsort(~held, dim=-1, stable=True)
    return held.sum(-1, dtype=torch.int32).contiguous(), order.to(torch.int32).contiguous()


def blocks_of(found: BlockLists, device: torch.device) -> Blocks:
    """The lists on a device, those of FlexAttention for all samples and heads."""
    lists = [
        torch.from_numpy(part)[None, None].to(device)
        for pair in (found.masked, found.full, found.q_masked, found.q_full)
        for part in pair
    ]
    width = torch.tensor(found.width, device=device)
    numbers, bits = (torch.from_numpy(x).to(device) for x in (found.numbers, found.bits))
    runs = () if found.runs is None else tuple(torch.from_numpy(found.runs).to(device))
    return Blocks(numbers, width, bits, tuple(lists), runs)


def attend(
    kind: Kind, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocks: Blocks, sides: Sides
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The output [b, R, q places, d_v] and, if the kind asks, its log-sum-exps [b, R, q places].

    Raises BackendError where torch does not compile it: uncompiled, it would compute every score.
    """
    places = [number_on(q.device, x.shape[2]) for x in (q, k)]
    tensors = (*blocks[:3], sides.keys, sides.repeat, sides.q_at, sides.k_at, sides.real, *places)
    try:
        found: tuple[torch.Tensor, torch.Tensor | None] = _compiled(kind)(
            q, k, v, blocks.lists, blocks.runs, sides.changes, sides.given, sides.parts, *tensors
        )
    except FailOnRecompileLimitHit:
        raise BackendError(
            f"the backend flex refuses: FlexAttention was compiled {RECOMPILES} times for other"
            " types, head sizes and devices in this process, and uncompiled it would compute every"
            " score; torch.compiler.reset() forgets them"
        ) from None
    except TorchDynamoException as error:
        reason = str(error).strip().partition("\n")[0]
        raise BackendError(
            f"the backend flex refuses: torch does not compile FlexAttention here: {reason:.300}"
        ) from error
    return found


@lru_cache(maxsize=1 << 10)
def number_on(device: torch.device, number: int) -> torch.Tensor:
    """A number as a tensor, int32, filled on the device: nothing waits for a copy."""
    with torch.inference_mode(False):
        return torch.full((), number, dtype=torch.int32, device=device)


@cache
def _compiled(kind: Kind) -> Callable[..., Any]:
    """The call of a kind, compiled; nothing stands in for it uncompiled."""
    run = call_of(kind)

    def compiled(*arguments: Any) -> Any:
        if not torch.compiler.is_compiling():
            raise BackendError(
                "the backend flex refuses: torch.compile is switched off in this process, and"
                " uncompiled FlexAttention would compute every score"
            )
        return run(*arguments)

    limits: dict[str, Any] = {}
    if "isolate_recompiles" in signature(torch.compile).parameters:
        limits = {"recompile_limit": RECOMPILES, "isolate_recompiles": True}
    else:
        # before 2.13 torch counts for each code object, at most 8
        own = compiled.__code__.replace()
        compiled = FunctionType(own, globals(), closure=compiled.__closure__)
    # with `fullgraph` torch raises where it would go on uncompiled
    return torch.compile(compiled, fullgraph=True, dynamic=True, **limits)


def call_of(kind: Kind) -> Callable[..., tuple[torch.Tensor, torch.Tensor | None]]:
    """FlexAttention of a kind as a function of tensors."""
    options: dict[str, Any] = dict.fromkeys(kind.options, True)
    if "bias" in kind.changes:
        # what is read of a table for every pair leaves no room for keys to be fetched ahead
        options["num_stages"] = 1

    def run(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        lists: tuple[torch.Tensor, ...],
        runs: tuple[torch.Tensor, ...],
        changes: tuple[tuple[torch.Tensor, ...], ...],
        given: tuple[torch.Tensor, ...],
        parts: tuple[tuple[torch.Tensor, torch.Tensor], ...],
        numbers: torch.Tensor,
        width: torch.Tensor,
        bits: torch.Tensor,
        keys: torch.Tensor,
        repeat: torch.Tensor,
        q_at: torch.Tensor,
        k_at: torch.Tensor,
        real: torch.Tensor,
        *places: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        holds = run_mod(runs) if kind.runs else mask_mod(numbers, width, bits)
        if kind.padded:
            holds = with_padding(holds, real, keys, places[1])
        if kind.condition:
            static = tuple(mask_mod(part[0], width, part[1]) for part in parts)
            holds = with_condition(holds, kind.condition, given, static, keys, *places)
        sizes = q.shape[2], k.shape[2]
        blocks = _block_mask(sizes, *lists, BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=holds)
        found = _flex(
            q,
            k,
            v,
            score_mod(kind.changes, changes, keys, repeat, q_at, k_at) if changes else None,
            blocks,
            kind.scale,
            enable_gqa=True,
            kernel_options=options or None,
            return_aux=AuxRequest(lse=True) if kind.lse else None,
        )
        return (found[0], found[1].lse) if kind.lse else (found, None)

    return run


def mask_mod(numbers: torch.Tensor, width: torch.Tensor, bits: torch.Tensor) -> Mod:
    """Whether a pair of places holds: the bit of its block's mask."""

    def holds(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        mask = at(numbers, (q >> 7) * width + (k >> 7))
        byte = at(bits, (mask * BLOCK + (q & 127)) * BYTES + ((k & 127) >> 3))
        return ((byte >> (k & 7)) & 1) != 0

    return holds


def run_mod(runs: tuple[torch.Tensor, ...]) -> Mod:
    """Whether a pair of places holds in a masked block: the key is in a run of the query's."""

    def holds(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        found = (k >= at(runs[0], q)) & (k < at(runs[1], q))
        for low, high in zip(runs[2::2], runs[3::2], strict=True):
            found = found | ((k >= at(low, q)) & (k < at(high, q)))
        return found

    return holds


def with_padding(mod: Mod, real: torch.Tensor, keys: torch.Tensor, places: torch.Tensor) -> Mod:
    """The same of real keys alone."""

    def holds(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return mod(b, h, q, k) & at(real, (b // keys) * places + k)

    return holds


def with_condition(
    mod: Mod,
    shape: Shape,
    given: tuple[torch.Tensor, ...],
    parts: tuple[Mod, ...],
    keys: torch.Tensor,
    q_places: torch.Tensor,
    k_places: torch.Tensor,
) -> Mod:
    """The same of pairs for which a condition holds."""

    def holds(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        sample = b // keys
        q_place, k_place = sample * q_places + q, sample * k_places + k

        def value(shape: Shape) -> torch.Tensor:
            op, *operands = shape
            if op == "part":
                return parts[operands[0]](b, h, q, k)
            if op == "one":
                return given[operands[0]]
            if op in ("q", "k"):
                return at(given[operands[0]], q_place if op == "q" else k_place)
            found: torch.Tensor = op(*[value(each) for each in operands])
            return found

        return mod(b, h, q, k) & value(shape)

    return holds


def score_mod(
    kinds: tuple[str, ...],
    changes: tuple[tuple[torch.Tensor, ...], ...],
    keys: torch.Tensor,
    repeat: torch.Tensor,
    q_at: torch.Tensor,
    k_at: torch.Tensor,
) -> Mod:
    """The score of a pair of places with all changes: `scale` has its factor, `softcap` its cap,
    `alibi` the slopes of all heads, `bias` the bucket of every distance, the farthest of these, and
    the number of buckets, with the numbers of all heads and buckets."""

    def changed(
        score: torch.Tensor, b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor
    ) -> torch.Tensor:
        head = (b % keys) * repeat + h
        for kind, tensors in zip(kinds, changes, strict=True):
            if kind == "scale":
                score = score * tensors[0]
                continue
            if kind == "softcap":
                score = tensors[0] * torch.tanh(score / tensors[0])
                continue
            distance = at(q_at, q) - at(k_at, k)
            if kind == "alibi":
                score = score - at(tensors[0], head) * distance.abs()
            else:
                buckets, most, count, table = tensors
                near = torch.minimum(torch.maximum(distance, -most), most) + most
                score = score + at(table, head * count + at(buckets, near))
        return score

    return changed


def at(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """An entry of a table [m] that is there."""
    if table.is_cpu:
        # for C++ torch mixes up the names of sizes that an index is compared with
        return torch.ops.aten._unsafe_masked_index(table, index >= 0, [index], 0)  # type: ignore[no-any-return]
    return table[index]
