"""A graph for FlexAttention as it stands in torch: a mask function, and block masks from covers.

The mask function is the formula of `--standalone`, traced from the relations that define it, and
says by itself which pairs there are; block masks are classified in closed form, where
`create_block_mask` would look at every pair.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from attnspec.compile.exports.block_rows import tiles_of
from attnspec.compile.standalone.graphs import mask_text
from attnspec.compile.standalone.lifting import Text
from attnspec.compile.standalone.page import StandaloneError
from attnspec.compile.standalone.scores import score_text
from attnspec.graphs.patterns import BY_NAME
from attnspec.graphs.predicates.inputs import inputs_read
from attnspec.graphs.relation import chosen_text
from attnspec.graphs.stack import Stack
from attnspec.ir.api_checks import index_of, length_of
from attnspec.ir.crossing import QUERIES, crossed
from attnspec.ir.program import Crossing, Program, inputs_of
from attnspec.ir.scalars import Apply, Symbol, symbols
from attnspec.layout.tables import FULL_TILE
from attnspec.layout.tile_layout import StepLayout
from attnspec.limits import LIMITS
from attnspec.lower.lower import decided_leaves
from attnspec.text.diagnostics import AttnSpecError

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128
"""Queries and keys of a block, as FlexAttention has them."""

Mod = Callable[..., Any]
"""Whether query q reads key k in head h of sample b, f(b, h, q, k); or the score of that pair,
changed, f(score, b, h, q, k)."""


@dataclass(frozen=True, eq=False)
class FlexMask:
    """The pairs of one layer as `flex_attention` takes them.

    `program` has the layer's graphs in every layer; `n` is the length, None for a mask of every
    length, and `m` that of the queries where these are another sequence, n if it is None; `heads`
    how many heads are distinguished; `inputs` has the run-time inputs as tensors, [B, n] or, of a
    length, [B].
    """

    program: Program
    layer: int
    n: int | None
    heads: int
    inputs: Mapping[str, Tensor]
    device: torch.device
    m: int | None = None

    def __repr__(self) -> str:
        length = "every n" if self.n is None else f"n = {self.n:,}"
        return f"<FlexMask {self.program.name}, layer {self.layer}, {length}>"

    @property
    def mask_mod(self) -> Mod:
        """The mask function f(b, h, q, k) -> bool; by itself the full truth.

        ValueError where pairs depend on n and no n was given.
        """
        if self.n is not None:
            return self._mod(self._sides(self.n, self.m))
        text = self._mask_text
        # a pattern may be another one at another length, or the formula ask for n or m
        changes = any(BY_NAME[leaf.pattern].changes for leaf in self.program.leaves)
        if text is None or changes or text.settings["BY_LENGTH"]:
            length = "(n, m=m)" if self.program.cross else "(n)"
            raise ValueError(
                f"the pairs of `{self.program.name}` depend on n: write `to_flex{length}`"
            )
        # a length that every position of the inputs has, or the longest of the language
        lengths = [tensor.shape[1] for tensor in self.inputs.values() if tensor.dim() == 2]
        longest = self.program.fixed_length or min(lengths, default=LIMITS.length)
        return self._mod(Crossing(longest, longest))

    @property
    def score_mod(self) -> Mod | None:
        """What changes the scores, f(score, b, h, q, k), None where nothing does.

        Raises AttnSpecError where a table is learned, where heads weigh scores in different ways,
        and where weights are not softmax, which is all that FlexAttention knows.
        """
        first = self.program.attends[0]
        if first.normalize != "softmax":
            raise self._no_score_mod(f"weights must be softmax, not `normalize {first.normalize}`")
        if any(score.name == "bias" for score in first.scores):
            raise self._no_score_mod(
                "the learned table of `score bias()` exists only in a compiled module"
            )
        made = self._weighing["score_mod_of"]
        if not first.scores:
            return None
        asked = {name for value in first.numbers for name in symbols(value)}
        if self.n is None and asked & {"n", QUERIES}:
            raise ValueError(f"the scores of `{self.program.name}` depend on n: write `to_flex(n)`")
        missing = [x.name for x in self.program.inputs if x.name not in self.inputs]
        if missing:
            raise AttnSpecError(f"`inputs=` must have {', '.join(missing)}, which the scores read")
        sides = Crossing(1, 1) if self.n is None else self._sides(self.n, self.m)
        q, k = (
            torch.empty(1, self.heads, count, 0, device=self.device)
            for count in (sides.queries, sides.keys)
        )
        usual, exact = (made(x, k, self.layer, self.inputs, {}) for x in (q.float(), q.double()))

        def score_mod(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
            return (exact if score.dtype == torch.float64 else usual)(score, b, h, q, k)

        return score_mod

    def scale(self, size: int) -> float:
        """The factor of the scores for heads of a size, before they are changed. Raises
        AttnSpecError where heads have several, ValueError where it depends on n and no n was
        given."""
        scale = self.program.attends[0].scale
        if self.n is None and isinstance(scale, Symbol | Apply) and "n" in symbols(scale):
            raise ValueError(f"the scale of `{self.program.name}` depends on n: write `to_flex(n)`")
        return float(self._weighing["scale_of"](size, self.n, self.layer))

    @cached_property
    def _weighing(self) -> dict[str, Any]:
        """The functions that change scores."""
        try:
            return _executed(self.program, score_text(self.program))
        except StandaloneError as error:
            raise self._no_score_mod(str(error)) from None

    @cached_property
    def _mask_text(self) -> Text | None:
        """The functions that say the mask; None where no formula does."""
        try:
            return mask_text(self.program)
        except StandaloneError:
            return None

    def _no_score_mod(self, why: str) -> AttnSpecError:
        return AttnSpecError(f"`to_flex` has no `score_mod` for this spec: {why}; compile the spec")

    def block_mask(self, n: int | None = None, m: int | None = None) -> BlockMask:
        """The BlockMask at n positions, of m queries and n keys where they are two sequences, with
        the mask function of these lengths; its lists are those of `create_block_mask`, computed
        from closed forms.

        [1, heads, …] without inputs, [B, heads, …] with them.
        """
        from torch.nn.attention.flex_attention import BlockMask

        length = n if n is not None else self.n or self.program.fixed_length
        if length is None:
            raise ValueError("a BlockMask needs a length: write `block_mask(n)`")
        sides = self._sides(length_of(length), self.m if m is None else m)
        both = np.zeros((2, *self._blocks(sides)), bool)
        for sample, head, layout in self._tiles(sides):
            rows = layout.rows
            # a short block is not FULL for those who look at all of its places
            full = (layout.kinds == FULL_TILE) & ((rows + 1) * BLOCK <= sides.length)
            both[full.astype(int), sample, head, rows, layout.keys] = True
        # of each row of blocks how many columns it has, and which, ascending, before the others
        order = np.argsort(~both, axis=-1, kind="stable").astype(np.int32)
        counts, columns = (
            torch.from_numpy(x).to(self.device) for x in (both.sum(-1, dtype=np.int32), order)
        )
        lists = counts[0], columns[0], counts[1], columns[1]
        lengths = sides.queries, sides.keys
        return BlockMask.from_kv_blocks(*lists, BLOCK, self._mod(sides), lengths)

    def _blocks(self, sides: Crossing) -> tuple[int, int, int, int]:
        """How many samples, heads, and blocks of queries and of keys there are."""
        batch = max((len(tensor) for tensor in self.inputs.values()), default=1)
        return batch, self.heads, -(-sides.queries // BLOCK), -(-sides.keys // BLOCK)

    def _sides(self, n: int, m: int | None) -> Crossing:
        program, length = crossed(self.program, n, m)
        return program.crossing or Crossing(length, length)

    def _tiles(self, sides: Crossing) -> Iterator[tuple[int, int, StepLayout]]:
        """The blocks of each sample and head that hold a pair."""
        program = replace(self.program, crossing=sides) if self.program.cross else self.program
        for sample in range(self._blocks(sides)[0]):
            arrays = {name: tensor[sample].cpu().numpy() for name, tensor in self.inputs.items()}
            stack = Stack(program, arrays)
            for head in range(self.heads):
                relation = stack.relation(sides.length, self.layer, head)
                yield sample, head, tiles_of(relation, sides.length, BLOCK)

    def _mod(self, sides: Crossing) -> Mod:
        batch, heads, down, along = self._blocks(sides)
        if self._mask_text is not None:
            made = _executed(self.program, self._mask_text)["mask_mod_of"]
            size = batch, heads, sides.queries, sides.keys
            return cast(Mod, made(self.layer, size, self.device, self.inputs))
        # no formula says the pairs: they are looked up, block by block
        masks = [np.zeros((1, BLOCK, BLOCK), bool), np.ones((1, BLOCK, BLOCK), bool)]
        numbers, count = np.zeros((batch, heads, down, along), np.int64), 2
        for sample, head, layout in self._tiles(sides):
            kinds = np.where(layout.kinds == FULL_TILE, 1, count + layout.kinds)
            numbers[sample, head, layout.rows, layout.keys] = kinds
            masks.append(layout.masks)
            count += len(layout.masks)
        table = torch.from_numpy(np.concatenate(masks)).to(self.device)
        number = torch.from_numpy(numbers).to(self.device)

        def mask_mod(b: Any, h: Any, q: Any, k: Any) -> Any:
            return table[number[b, h, q // BLOCK, k // BLOCK], q % BLOCK, k % BLOCK]

        return mask_mod


def _executed(program: Program, text: Text) -> dict[str, Any]:
    """The names of the file of some functions."""
    space: dict[str, Any] = {}
    body = text.file(program, tuple(text.functions))
    exec(compile(body, program.name, "exec", dont_inherit=True), space)
    return space


def flex_mask(
    program: Program,
    n: int | None,
    layer: int,
    heads: int | None,
    inputs: Mapping[str, Any] | None,
    device: str,
    m: int | None,
) -> FlexMask:
    """The pairs of one layer for FlexAttention; of a spec with `cross` for m queries and n keys.

    Raises SpecError where they are not known before run time, AttnSpecError for a missing input.
    """
    if m is not None and n is None:
        raise ValueError(f"m = {m} needs n, the number of keys: write `to_flex(n, m={m})`")
    single = _of_layer(program, layer)
    given, declared = inputs or {}, {entry.name for entry in program.inputs}
    needed = {name for graph in single.graphs for name in inputs_of(graph)}
    if not needed <= given.keys() <= declared:
        raise AttnSpecError(
            f"`inputs` must have the names that `{program.name}` declares"
            f" ({', '.join(sorted(needed)) or 'none'}), got {', '.join(sorted(given)) or 'none'}"
        )
    tensors = {
        x.name: _batched(x.name, x.kind, given[x.name]).to(device)
        for x in single.inputs
        if x.name in given
    }
    if program.heads is not None and heads not in (None, program.heads):
        raise AttnSpecError(f"`{program.name}` has {program.heads} heads, got heads = {heads}")
    count, length = program.heads or heads or 1, None if n is None else length_of(n)
    mask = FlexMask(single, layer, length, count, tensors, torch.device(device), m)
    if length is not None:
        # raises where the spec has no such lengths
        mask._sides(length, m)
    return mask


def _batched(name: str, kind: str, value: Any) -> Tensor:
    """An input of a batch, [B, n] or, of a length, [B]; one sample is a batch of one."""
    tensor = torch.as_tensor(value)
    axis = {"length": 0, "pairs": 3}.get(kind, 1)
    if tensor.dim() not in (axis, axis + 1):
        shape = {0: "[B]", 1: "[B, n]", 3: "[B, H or 1, n_q, n]"}[axis]
        raise AttnSpecError(
            f"`{name}` must have the shape {shape}, or that without B, got {list(tensor.shape)}"
        )
    if kind == "length":
        # no position lies before one below 0
        tensor = tensor.clamp(min=0)
    return tensor[None] if tensor.dim() == axis else tensor


def _of_layer(program: Program, layer: int) -> Program:
    """The program with one layer's graphs in every layer, and the inputs that it reads."""
    layer = index_of("layer", layer)
    if not 0 <= layer < (program.layers or layer + 1):
        raise AttnSpecError(f"`layer` must be between 0 and {program.layer_count - 1}, got {layer}")
    row = program.row(layer)
    kept = [*dict.fromkeys(row)]
    attends = tuple(program.attends[index] for index in kept)
    for attend in attends:
        if attend.mechanism is not None:
            raise AttnSpecError(
                f"layer {layer} of `{program.name}` has the mechanism `{attend.mechanism.name}`,"
                " which has no mask: use `spec.compile()`"
            )
    read = {name for each in attends for leaf in each.leaves for name in inputs_of(leaf)}
    read.update(*(inputs_read(value) for attend in attends for value in attend.numbers))
    found = replace(
        program,
        attends=attends,
        slots=(tuple(map(kept.index, row)),) * len(program.slots),
        inputs=tuple(entry for entry in program.inputs if entry.name in read),
        claims=(),
    )
    for leaf in decided_leaves(found):
        raise AttnSpecError(
            f"`{program.name}` has no mask before a call: {chosen_text(leaf.pattern)};"
            " `module.pairs(q, k)` of the compiled module gives them"
        )
    return found
