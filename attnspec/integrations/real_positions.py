"""Attention that counts the real tokens of each sample: what is padding takes no position.

A whole pass puts the real tokens of each sample first, in their order, which any trace can follow.
Where a cache holds earlier positions, or rows change with the length, samples that are padded alike
are computed without their padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from attnspec.backends.common.torch_modes import is_recorded
from attnspec.ir.program import Input, Program
from attnspec.runtime.call_checks import along_positions
from attnspec.runtime.module import CompiledAttention
from attnspec.runtime.streaming import StreamState
from attnspec.text.diagnostics import AttnSpecError

Inputs: TypeAlias = "Mapping[str, Tensor] | None"


@dataclass(frozen=True, eq=False)
class RealRunning:
    """What computes for a layer, over real tokens alone. `real` is bool [B, end], True for a real
    token, or None where all are; `moved` says that padding behind a sample changes its rows."""

    running: CompiledAttention
    real: Tensor | None
    moved: bool

    @property
    def program(self) -> Program:
        """The program that is computed."""
        return self.running.program

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        key_padding_mask: Tensor | None,
        inputs: Inputs,
        **settings: Any,
    ) -> Any:
        """As a call of the module; rows of padding are 0, or anything."""
        if key_padding_mask is None:
            return self.running(q, k, v, key_padding_mask=None, inputs=inputs, **settings)
        real = key_padding_mask.to(q.device)
        whole = q.shape[2] == k.shape[2]
        if whole and not self.moved:
            return self._sorted((q, k, v), real, inputs, settings)
        if is_recorded(q):
            raise AttnSpecError(
                f'with `positions="real"` a traced call of `{self.program.name}` must be a whole'
                " pass, of a spec that does not change with n"
            )
        parts = []
        for rows, row in _alike(real):
            keys = row.nonzero()[:, 0]
            before = k.shape[2] - q.shape[2]
            queries = keys[keys >= before] - before
            if len(queries):
                part = _input_part(self.program, inputs, rows, keys, queries, real)
                tensors = _taken(q, rows, queries), _taken(k, rows, keys), _taken(v, rows, keys)
                output = self.running(*tensors, key_padding_mask=None, inputs=part, **settings)
                parts.append((rows, queries, output))
        return _joined(parts, q, v, bool(settings.get("return_lse")))

    def _sorted(self, tensors: Any, real: Tensor, inputs: Inputs, settings: Any) -> Any:
        """A whole pass with real tokens first; its rows are put back."""
        order = (~real).to(torch.uint8).argsort(dim=1, stable=True)
        moved = [x.gather(2, order[:, None, :, None].expand_as(x)) for x in tensors]
        part = _input_sorted(self.program, inputs, order, real)
        first = real.gather(1, order)
        output = self.running(*moved, key_padding_mask=first, inputs=part, **settings)
        back = order.argsort(dim=1)

        def put_back(x: Tensor) -> Tensor:
            index = back.reshape(len(back), 1, -1, *[1] * (x.ndim - 3)).expand_as(x)
            return x.gather(2, index)

        return tuple(map(put_back, output)) if isinstance(output, tuple) else put_back(output)

    def step(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: RealState | None,
        *,
        key_padding_mask: Tensor | None,
        inputs: Inputs,
        **settings: Any,
    ) -> tuple[Any, RealState]:
        """As a step of the module."""
        batch, here = q.shape[0], key_padding_mask
        here = q.new_ones(batch, q.shape[2], dtype=torch.bool) if here is None else here
        groups = ((tuple(range(batch)), None),) if state is None else state.groups
        parts, after = [], []
        for rows, before in groups:
            for at, row in _alike(here[list(rows)]):
                samples, new = [rows[index] for index in at], row.nonzero()[:, 0]
                earlier = before
                if before is not None and len(at) < len(rows):
                    earlier = before.selected(torch.tensor(at))
                if len(new):
                    part = _input_part(self.program, inputs, samples, new, new, self.real)
                    mine, keys, values = (_taken(x, samples, new) for x in (q, k, v))
                    output, earlier = self.running.step(
                        mine, keys, values, earlier, key_padding_mask=None, inputs=part, **settings
                    )
                    parts.append((samples, new, output))
                after.append((tuple(samples), earlier))
        out = _joined(parts, q, v, bool(settings.get("return_lse")))
        return out, RealState(tuple(after))


@dataclass(frozen=True, eq=False)
class RealState:
    """What is kept of samples that have read other numbers of tokens: for each group its samples
    and its state, None before the first token."""

    groups: tuple[tuple[tuple[int, ...], StreamState | None], ...]

    @property
    def samples(self) -> int:
        """How many samples there are."""
        return sum(len(rows) for rows, _ in self.groups)

    def owned(self) -> RealState:
        """The same with memory of its own."""
        owned = ((rows, None if state is None else state.owned()) for rows, state in self.groups)
        return RealState(tuple(owned))

    def kept(self) -> Iterator[Tensor]:
        """The tensors that it holds."""
        for _, state in self.groups:
            if state is not None:
                yield from state.kept()

    def selected(self, samples: Tensor) -> RealState:
        """The state of some samples, by their numbers."""
        numbers, groups = samples.tolist(), []
        for rows, state in self.groups:
            at = [index for index, number in enumerate(numbers) if number in rows]
            if at:
                local = torch.tensor([rows.index(numbers[index]) for index in at])
                groups.append((tuple(at), None if state is None else state.selected(local)))
        return RealState(tuple(groups))


def _joined(
    parts: Sequence[tuple[Sequence[int], Tensor, Any]], q: Tensor, v: Tensor, with_lse: bool
) -> Any:
    """Outputs [B, H, q, d_v], and log-sum-exps `with_lse`, put together from those of some samples
    and queries; of others 0, and log-sum-exps -inf."""
    wholes = [v.new_zeros(*q.shape[:3], v.shape[-1])]
    if with_lse:
        wholes.append(v.new_full(q.shape[:3], -torch.inf, dtype=torch.float32))
    for rows, queries, output in parts:
        samples, heads = (torch.tensor(x, device=v.device) for x in (rows, range(q.shape[1])))
        index = samples[:, None, None], heads[:, None], queries.to(v.device)
        output = output if with_lse else (output,)
        wholes = [
            whole.index_put(index, x.to(whole.dtype))
            for whole, x in zip(wholes, output, strict=True)
        ]
    return tuple(wholes) if with_lse else wholes[0]


def _alike(real: Tensor) -> Iterator[tuple[list[int], Tensor]]:
    """The samples that are padded alike, bool [B, n], and how, bool [n]."""
    groups: dict[bytes, list[int]] = {}
    for index, row in enumerate(real.cpu().numpy()):
        groups.setdefault(row.tobytes(), []).append(index)
    for rows in groups.values():
        yield rows, real[rows[0]]


def _taken(x: Tensor, rows: Sequence[int], at: Tensor, axis: int = 2) -> Tensor:
    """Some samples, and positions along an axis; a view where they follow each other."""
    first, last = rows[0], rows[-1] + 1
    follow = last - first == len(rows) and list(rows) == sorted(rows)
    x = x[first:last] if follow else x[list(rows)]
    start, end = int(at[0]), int(at[-1]) + 1
    return x.narrow(axis, start, len(at)) if end - start == len(at) else x.index_select(axis, at)


def _input_part(
    program: Program,
    inputs: Inputs,
    rows: Sequence[int],
    keys: Tensor,
    queries: Tensor,
    real: Tensor | None,
) -> Inputs:
    """Run-time inputs of some samples, of the keys and queries at some positions, by numbers over
    real tokens."""

    def part(entry: Input, x: Tensor, axis: int) -> Tensor:
        chosen = entry.kind == "choices"
        x = _taken(x, range(len(rows)), queries if chosen else keys, axis)
        return _renumbered(entry, x, real[list(rows)]) if chosen and real is not None else x

    if inputs is None:
        return None
    # one sample may stand for all
    arrays = {name: x[[0] * len(rows) if len(x) == 1 else list(rows)] for name, x in inputs.items()}
    return along_positions(program, arrays, part)


def _input_sorted(program: Program, inputs: Inputs, order: Tensor, real: Tensor) -> Inputs:
    """Run-time inputs with their positions in another order, int64 [B, n]."""

    def ordered(entry: Input, x: Tensor, axis: int) -> Tensor:
        shape = [len(order), *[1] * (axis - 1), -1, *[1] * (x.ndim - axis - 1)]
        x = x.gather(axis, order.reshape(shape).expand_as(x))
        return _renumbered(entry, x, real) if entry.kind == "choices" else x

    if inputs is None:
        return None
    whole = {x: y.expand(len(order), *y.shape[1:]) if len(y) == 1 else y for x, y in inputs.items()}
    return along_positions(program, whole, ordered)


def _renumbered(entry: Input, choices: Tensor, real: Tensor) -> Tensor:
    """Keys [B, H, q, c] that were chosen, by their numbers over real tokens, -1 for none."""
    if entry.size != 1:
        raise AttnSpecError(
            f"`{entry.name}` chooses blocks of {entry.size}, counted from the start of the"
            ' padded tensor: use `positions="absolute"`'
        )
    ranks = real.to(torch.int64).cumsum(1) - 1
    ranks = ranks.masked_fill(~real, -1)[:, None, None].expand(*choices.shape[:3], -1)
    return ranks.gather(-1, choices.clamp(min=0).long()).masked_fill(choices < 0, -1)
