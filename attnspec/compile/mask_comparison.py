"""A mask of somebody else's held against a spec: an array of booleans, or a mask function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from attnspec.analysis.counting.differences import Pairs, only_in, row_text
from attnspec.check.compare import Compared
from attnspec.graphs.stack import Sample, Stack
from attnspec.graphs.written_pairs import WrittenPairs
from attnspec.ir.api_checks import index_of
from attnspec.ir.crossing import crossed
from attnspec.ir.program import Crossing, Program
from attnspec.limits import LIMITS
from attnspec.text.diagnostics import AttnSpecError, first_line


def _sides(head: Compared) -> dict[str, Pairs]:
    """The pairs that the spec alone has, and the mask."""
    return {"spec": head.only_in_a or Pairs(), "mask": head.only_in_b or Pairs()}


@dataclass(frozen=True)
class MaskComparison:
    """A spec and a mask compared at n positions, of a spec with `cross` at m queries and n keys, in
    one layer; True in the mask = attends. Of each head the spec is `a` and the mask `b`.

    `turned` says that the mask is, in every head, just what the spec leaves out: then True stands
    for what is masked.
    """

    name: str
    n: int
    layer: int
    heads: tuple[Compared, ...]
    turned: bool
    m: int | None = None

    @property
    def equal(self) -> bool:
        """Whether spec and mask have the same pairs in every head."""
        return all(head.equal for head in self.heads)

    @property
    def counterexample(self) -> tuple[int, int, int] | None:
        """The first head, query and key whose pair one side alone has, None if equal."""
        for head in self.heads:
            pairs = [side.examples[0] for side in _sides(head).values() if side]
            if pairs:
                return head.slots[0][1], *min(pairs)
        return None

    def to_dict(self) -> dict[str, object]:
        return {
            "spec": self.name,
            **({} if self.m is None else {"m": self.m}),
            "n": self.n,
            "layer": self.layer,
            "equal": self.equal,
            "turned": self.turned,
            "counterexample": self.counterexample,
            "heads": [
                {
                    "head": head.slots[0][1],
                    **{f"only_in_{name}": x.to_dict() for name, x in _sides(head).items()},
                    "in_both": head.in_both,
                }
                for head in self.heads
            ],
        }

    def __str__(self) -> str:
        at = f"n = {self.n:,}" if self.m is None else f"m = {self.m:,}, n = {self.n:,}"
        lines = [f"`{self.name}` and the mask at {at}, layer {self.layer}"]
        lines[0] += "; True in the mask = attends"
        if self.equal:
            shared = sum(head.in_both or 0 for head in self.heads)
            return f"{lines[0]}\nthe same {shared:,} pairs"
        if self.turned:
            lines.append(
                "the mask is the opposite of the spec: its True marks pairs that are masked;"
                " compare with `~mask`"
            )
        for head in self.heads:
            lines += _words(head, max(self.n, self.m or 0))
        return "\n".join(lines)


def _words(head: Compared, n: int) -> list[str]:
    sides, title = _sides(head), f"head {head.slots[0][1]}"
    if head.equal or head.relations is None:
        return [f"{title}: the same {head.in_both:,} pairs"]
    first = min(x.first for x in sides.values() if x.first is not None)
    here, there = (row_text(relation, first, n) for relation in head.relations)
    return [
        f"{title}: they differ",
        *(f"  only in the {x}  {y.count:,}  {y.shown}".rstrip() for x, y in sides.items()),
        f"  in both           {head.in_both:,}",
        f"  query {first:,} reads {here} in the spec, {there} in the mask",
    ]


def compare_mask(
    program: Program,
    inputs: Sample | None,
    mask: object,
    n: int | None,
    layer: int,
    head: int | None,
    m: int | None,
) -> MaskComparison:
    """A layer of a spec, or one head of it, held against a mask or a mask function.

    The mask is bool [n, n], for every head, or [H, n, n] or [1, H, n, n], and [m, n] for [n, n]
    with `cross`; a function is f(b, h, q, k) of torch, or whatever has it as `mask_mod`. Raises
    AttnSpecError for another shape, and TypeError for what is neither.
    """
    shape = tuple(getattr(mask, "seq_lengths", ()) if _mod(mask) else _array(mask).shape)
    n = int(shape[-1]) if n is None and shape else n
    m = int(shape[-2]) if m is None and program.cross and len(shape) > 1 else m
    n = program.fixed_length if n is None else n
    if n is None:
        raise ValueError("a mask function needs a length: write `compare(mask_mod, n)`")
    whole, length = crossed(program, n, m)
    sides = whole.crossing or Crossing(length, length)
    if length > LIMITS.mask:
        raise AttnSpecError(f"masks are compared up to n = {LIMITS.mask:,}, got {length:,}")
    of_mask, declared = shape[-3] if len(shape) > 2 else None, program.heads
    wanted = [*range(declared or of_mask or 1)] if head is None else [index_of("head", head)]
    masks = given_mask(mask, (sides.queries, sides.keys), max(wanted) + 1)
    alone = 1 if head is not None else declared
    if declared is not None and of_mask not in (None, declared, alone):
        # some would not be compared
        raise AttnSpecError(
            f"the mask has {of_mask} heads, and the spec {declared}: a mask that all heads share"
            f" is [{shape[-2]}, {shape[-1]}]"
        )
    stack, heads = Stack(whole, inputs), []
    for each in wanted:
        relation, mask_here = stack.relation(length, layer, each), masks[each * (len(masks) > 1)]
        other = WrittenPairs(np.pad(mask_here, [(0, length - side) for side in mask_here.shape]))
        one, second = only_in(relation, other, length), only_in(other, relation, length)
        in_both, both = int(mask_here.sum()) - second.count, (relation, other)
        heads.append(Compared(((layer, each),), False, one, second, in_both, relations=both))
    pairs, queries = sides.queries * sides.keys, sides.queries if program.cross else None
    turned = pairs > 0 and all(
        not x.in_both and sum(side.count for side in _sides(x).values()) == pairs for x in heads
    )
    return MaskComparison(program.name, sides.keys, layer, tuple(heads), turned, queries)


def given_mask(mask: object, sides: tuple[int, int], heads: int) -> np.ndarray:
    """A mask of `compare_mask` as bool [H or 1, m, n], True = attends; `sides` are (m, n)."""
    mod = _mod(mask)
    if mod is not None:
        found = of_function(mod, sides, heads)
        if hasattr(mask, "kv_num_blocks"):
            _require_lists(mask, found)
        return found
    array = _array(mask)
    if array.dtype != np.bool_:
        raise AttnSpecError(
            f"the mask must be bool, True where a query attends, got {array.dtype}: pass `mask =="
            " 0` for a mask that is added to the scores, `mask != 0` for one in which 1 attends"
        )
    shape = list(array.shape)
    while array.ndim > 3 and len(array) == 1:
        array = array[0]
    array = array[None] if array.ndim == 2 else array
    if array.ndim != 3 or array.shape[1:] != sides or not len(array):
        own = f"{sides[0]}, {sides[1]}"
        raise AttnSpecError(f"the mask must be [{own}], or [H, {own}] for heads, got {shape}")
    if 1 < len(array) < heads:
        raise AttnSpecError(f"the mask has {len(array)} heads, and {heads} are compared")
    return array


def of_function(mask_mod: Callable[..., Any], sides: tuple[int, int], heads: int) -> np.ndarray:
    """A mask function on all pairs, bool [heads, m, n], as FlexAttention calls it.

    Raises AttnSpecError where it fails, and where samples 0 and 1 of a batch have other pairs.
    """
    from torch.nn.attention.flex_attention import create_mask

    if 0 in sides:
        return np.zeros((heads, *sides), bool)
    for batch in (2, 1):
        try:
            masks: np.ndarray = create_mask(mask_mod, batch, heads, *sides, device="cpu").numpy()
            break
        except Exception as error:
            # what it captures may have one sample, so that no other can be asked for
            if batch == 1:
                raise AttnSpecError(
                    f"the mask function fails at n = {sides[1]}: {first_line(error)}"
                ) from error
    for head, query, key in np.argwhere(masks[-1] != masks[0])[:1].tolist():
        raise AttnSpecError(
            f"the mask function depends on the sample b: samples 0 and 1 differ in head {head} at"
            f" ({query}, {key}); to compare sample 0, pass `lambda b, h, q, k: mask_mod(b * 0, h,"
            " q, k)`"
        )
    return np.asarray(masks[0])


def _require_lists(mask: Any, found: np.ndarray) -> None:
    """Raises where the block lists of a BlockMask and its function, bool [heads, m, n], have other
    pairs: compiled, FlexAttention goes by both, and uncompiled by the function alone."""
    (high, wide), (m, n) = mask.BLOCK_SIZE, mask.seq_lengths
    if (m, n) != found.shape[1:]:
        own = list(found.shape[1:])
        raise AttnSpecError(f"the BlockMask must have the shape {own}, got {[m, n]}")
    some = mask.to_dense()[0].bool().cpu().numpy()
    every, lists = np.zeros_like(some), (mask.full_kv_num_blocks, mask.full_kv_indices)
    if lists[0] is not None:
        full = type(mask).from_kv_blocks(*(x[:1] for x in lists), BLOCK_SIZE=mask.BLOCK_SIZE)
        every = full.to_dense()[0].bool().cpu().numpy()
    some, every = (x.repeat(high, 1).repeat(wide, 2)[:, :m, :n] for x in (some, every))
    for head, query, key in np.argwhere((found & ~some) | (every & ~found))[:1].tolist():
        raise AttnSpecError(
            f"the block lists of the BlockMask and its mask function disagree in head {head} at"
            f" ({query}, {key}): compiled, FlexAttention would compute other pairs than uncompiled"
        )


def _mod(mask: object) -> Callable[..., Any] | None:
    """The function of a mask that is one, or has one."""
    inner = getattr(mask, "mask_mod", None)
    if callable(inner):
        return inner  # type: ignore[no-any-return]
    return mask if callable(mask) and not hasattr(mask, "shape") else None


def _array(mask: object) -> np.ndarray:
    if hasattr(mask, "detach"):
        mask = mask.detach().cpu().numpy()
    if not hasattr(mask, "__len__") or isinstance(mask, str):
        raise TypeError(
            f"the argument must be a mask, a mask function or a spec, got {type(mask).__name__}"
        )
    return np.asarray(mask)
