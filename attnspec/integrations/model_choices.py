"""What layers that choose keys by themselves hand over: lists of keys or blocks, masks of them, and
the logit of a sink.

A layer then reads the pairs of its spec that are also chosen; a spec that declares one input of
kind `choices` takes them there instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import Tensor

from attnspec.backends.common.merging import with_zero
from attnspec.integrations.model_layers import attribute_of
from attnspec.ir.program import Attend, Compound, Input, InputRef, Leaf, Program
from attnspec.ir.serial import plan_data
from attnspec.runtime.module import CompiledAttention
from attnspec.text.diagnostics import AttnSpecError

INDICES, BLOCKS, SINK = "indices", "block_indices", "s_aux"
"""The keywords of transformers: keys [B, q, c] and blocks [B, H_kv, q, r] that are read, -1 for
none, and the logit [H] of a key whose value is 0."""

INPUT = "chosen_by_the_model"
"""The input that a spec gets where it declares none for choices."""


Lists: TypeAlias = tuple[int, Tensor]
"""A size, and for every query and head the key blocks of so many positions, int
[B, H or H_kv or 1, q, c], that it may read, -1 for none."""


def lists_of(
    module: torch.nn.Module, terms: Mapping[str, object], selected: Tensor | None
) -> Lists | None:
    """What a layer chose: by keyword, or as a mask bool [B, 1 or H, q, k]; None for nothing."""
    keys, blocks = terms.get(INDICES), terms.get(BLOCKS)
    if isinstance(keys, Tensor) and isinstance(blocks, Tensor):
        raise AttnSpecError(
            f"the model passes both `{INDICES}` and `{BLOCKS}`, and a spec takes only one of them:"
            " keep the model's own attention"
        )
    if isinstance(keys, Tensor):
        _require_axes(INDICES, keys, 3, "[batch, queries, keys]")
        # made of a mask that knows its facts, which concern this layer alone
        return 1, keys.as_subclass(Tensor)[:, None]
    if isinstance(blocks, Tensor):
        _require_axes(BLOCKS, blocks, 4, "[batch, key heads, queries, blocks]")
        size = attribute_of(module, "index_block_size")
        if not isinstance(size, int):
            raise AttnSpecError(
                f"{type(module).__name__} passes `{BLOCKS}`, and its config does not say how large"
                " they are: set `index_block_size`"
            )
        return size, blocks
    if selected is None:
        return None
    most = int(selected.sum(-1).max()) if selected.numel() else 0
    order = torch.argsort(selected.to(torch.int8), dim=-1, descending=True, stable=True)[..., :most]
    return 1, torch.where(selected.gather(-1, order), order, -1)


def chooses(module: torch.nn.Module) -> bool:
    """Whether a layer has an indexer, or takes what that of another layer chose."""
    return hasattr(module, "indexer") or hasattr(module, "skip_topk")


def own_input(program: Program) -> Input | None:
    """The input of a program that takes choices, if it declares just one."""
    entries = [entry for entry in program.inputs if entry.kind == "choices"]
    return entries[0] if len(entries) == 1 else None


def variant(module: CompiledAttention, size: int | None, sink: bool) -> CompiledAttention:
    """A module of the same parameters whose program has its pairs cut to lists of blocks of a
    `size`, None for no lists, and plain softmax where a `sink` is added to its weights."""
    program = module.program
    if sink:
        wrong = [a.normalize for a in program.attends if a.normalize not in ("softmax", "softmax1")]
        mechanisms = program.mechanisms
        if wrong or mechanisms:
            what = f"`normalize {wrong[0]}`" if wrong else f"the mechanism `{mechanisms[0].name}`"
            mend = f"{'remove' if wrong else 'attend a graph in place of'} {what}"
            raise AttnSpecError(
                f"the model passes `{SINK}`, an extra logit of a softmax, and `{program.name}` has"
                f" {what} instead of a softmax: {mend}, or keep the model's own attention"
            )
        attends = tuple(replace(attend, normalize="softmax") for attend in program.attends)
        program = replace(program, attends=attends)
    taken = own_input(program)
    if size is not None and taken is not None and taken.size != size:
        raise AttnSpecError(
            f"the input `{taken.name}` of `{program.name}` has blocks of {taken.size} keys, and"
            f" the model chooses blocks of {size}: write `choices(size = {size})`"
        )
    if size is not None and taken is None:
        attends = tuple(_cut(program.name, attend) for attend in program.attends)
        inputs = (*program.inputs, Input(INPUT, "choices", size=size))
        program = replace(program, attends=attends, inputs=inputs)
    return module.replanned((size, sink), lambda: plan_data(program, module.backend))


def _cut(name: str, attend: Attend) -> Attend:
    if attend.graph is None or attend.mechanism is not None:
        raise AttnSpecError(
            f"the model chooses which keys a query reads, and the mechanism of `{name}` leaves out"
            " no keys: write a graph such as `attend full`, from which the model can choose"
        )
    chosen = Leaf("chosen", (("choices", InputRef(INPUT, "choices")),))
    return replace(attend, graph=Compound("&", (attend.graph, chosen)))


def with_sink(out: Tensor, lse: Tensor, logits: Tensor) -> Tensor:
    """Outputs [B, H, q, d] with log-sum-exps [B, H, q] beside a key of value 0 with logits [H]."""
    return with_zero((out, lse), logits.to(lse.dtype)[:, None])[0]


def _require_axes(name: str, tensor: Tensor, axes: int, wanted: str) -> None:
    if tensor.ndim != axes:
        raise AttnSpecError(f"`{name}` must be {wanted}, got {list(tensor.shape)}")
