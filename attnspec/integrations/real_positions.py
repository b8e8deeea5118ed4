"""Attention that counts the real tokens of each sample: what is padding takes no position.

A whole pass puts the real tokens of each sample first, in their order, which any trace can follow.
Where a cache holds earlier positions, or rows change with the length, samples that are padded alike
are computed without their padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

from attnspec.backends.common.torch_modes import is_recorded
from attnspec.integrations.model_choices import Running
from attnspec.integrations.model_mask import axis_of
from attnspec.ir.program import Program
from attnspec.runtime.streaming import StreamState
from attnspec.text.diagnostics import AttnSpecError

Inputs: TypeAlias = "Mapping[str, torch.Tensor] | None"


@dataclass(frozen=True, eq=False)
class RealRunning:
    """What computes for a layer, over real tokens alone. `real` is bool [B, end], True for a real
    token, or None where all are; `moved` says that padding behind a sample changes its rows."""

    running: Running
    real: torch.Tensor | None
    moved: bool

    @property
    def module(self) -> Any:
        """The module that computes."""
        return self.running.module

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        key_padding_mask: torch.Tensor | None,
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
                f"a whole pass of a spec whose rows do not change with n is needed where calls are"
                f' traced, got another of `{self.module.program.name}` with `positions="real"`'
            )
        result = _Rows(q, v, settings)
        for rows, row in _alike(real):
            keys = row.nonzero()[:, 0]
            before = k.shape[2] - q.shape[2]
            queries = keys[keys >= before] - before
            if len(queries):
                part = _input_part(self.module.program, inputs, rows, keys, queries, real)
                tensors = _taken(q, rows, queries), _taken(k, rows, keys), _taken(v, rows, keys)
                found = self.running(*tensors, key_padding_mask=None, inputs=part, **settings)
                result.put(rows, queries, found)
        return result.all()

    def _sorted(self, tensors: Any, real: torch.Tensor, inputs: Inputs, settings: Any) -> Any:
        """A whole pass with real tokens first; its rows are put back."""
        order = (~real).to(torch.uint8).argsort(dim=1, stable=True)
        moved = [x.gather(2, order[:, None, :, None].expand_as(x)) for x in tensors]
        part = _input_sorted(self.module.program, inputs, order, real)
        found = self.running(
            *moved, key_padding_mask=real.gather(1, order), inputs=part, **settings
        )
        back = order.argsort(dim=1)

        def put_back(x: torch.Tensor) -> torch.Tensor:
            index = back.reshape(len(back), 1, -1, *[1] * (x.ndim - 3)).expand_as(x)
            return x.gather(2, index)

        return tuple(map(put_back, found)) if isinstance(found, tuple) else put_back(found)

    def step(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        state: RealState | None,
        *,
        key_padding_mask: torch.Tensor | None,
        inputs: Inputs,
        **settings: Any,
    ) -> tuple[Any, RealState]:
        """As a step of the module."""
        batch = q.shape[0]
        real = key_padding_mask
        here = q.new_ones(batch, q.shape[2], dtype=torch.bool) if real is None else real
        groups = ((tuple(range(batch)), None),) if state is None else state.groups
        result, after = _Rows(q, v, settings), []
        for rows, before in groups:
            for at, row in _alike(here[list(rows)]):
                samples, new = [rows[index] for index in at], row.nonzero()[:, 0]
                own = before
                if before is not None and len(at) < len(rows):
                    own = before.selected(torch.tensor(at))
                if len(new):
                    part = _input_part(self.module.program, inputs, samples, new, new, self.real)
                    tensors = [_taken(x, samples, new) for x in (q, k, v)]
                    found, own = self.running.step(
                        *tensors, own, key_padding_mask=None, inputs=part, **settings
                    )
                    result.put(samples, new, found)
                after.append((tuple(samples), own))
        return result.all(), RealState(tuple(after))


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
        return self._mapped(lambda state: state.owned())

    def kept(self) -> Iterator[torch.Tensor]:
        """The tensors that it holds."""
        for _, state in self.groups:
            if state is not None:
                yield from state.kept()

    def selected(self, samples: torch.Tensor) -> RealState:
        """The state of some samples, by their numbers."""
        numbers, groups = samples.tolist(), []
        for rows, state in self.groups:
            at = [index for index, number in enumerate(numbers) if number in rows]
            if at:
                local = torch.tensor([rows.index(numbers[index]) for index in at])
                groups.append((tuple(at), None if state is None else state.selected(local)))
        return RealState(tuple(groups))

    def _mapped(self, of: Any) -> RealState:
        groups = ((rows, None if state is None else of(state)) for rows, state in self.groups)
        return replace(self, groups=tuple(groups))


class _Rows:
    """Outputs [B, H, q, d_v], and log-sum-exps if they are asked for, that are put together."""

    def __init__(self, q: torch.Tensor, v: torch.Tensor, settings: Mapping[str, Any]) -> None:
        self.parts: list[tuple[Any, torch.Tensor, tuple[torch.Tensor, ...]]] = []
        self.shape, self.size, self.like = q.shape[:3], v.shape[-1], v
        self.pair = bool(settings.get("return_lse"))

    def put(self, rows: Sequence[int], queries: torch.Tensor, found: Any) -> None:
        """Rows of some samples and queries."""
        self.parts.append((rows, queries, found if self.pair else (found,)))

    def all(self) -> Any:
        """All of them; where nothing was put 0, and log-sum-exps -inf."""
        out = self.like.new_zeros(*self.shape, self.size)
        lse = self.like.new_full(self.shape, -torch.inf, dtype=torch.float32)
        for rows, queries, found in self.parts:
            samples, heads = (
                torch.tensor(x, device=out.device) for x in (rows, range(out.shape[1]))
            )
            index = samples[:, None, None], heads[:, None], queries.to(out.device)
            out = out.index_put(index, found[0])
            if self.pair:
                lse = lse.index_put(index, found[1].to(lse.dtype))
        return (out, lse) if self.pair else out


def _alike(real: torch.Tensor) -> Iterator[tuple[list[int], torch.Tensor]]:
    """The samples that are padded alike, bool [B, n], and how, bool [n]."""
    groups: dict[bytes, list[int]] = {}
    for index, row in enumerate(real.cpu().numpy()):
        groups.setdefault(row.tobytes(), []).append(index)
    for rows in groups.values():
        yield rows, real[rows[0]]


def _taken(x: torch.Tensor, rows: Sequence[int], at: torch.Tensor, axis: int = 2) -> torch.Tensor:
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
    keys: torch.Tensor,
    queries: torch.Tensor,
    real: torch.Tensor | None,
) -> Inputs:
    """Run-time inputs of some samples, of the keys and queries at some positions, by numbers over
    real tokens."""
    result = {}
    for name, x in (inputs or {}).items():
        kind = _kind(program, name)
        x = x.expand(max(rows) + 1, *x.shape[1:]) if len(x) == 1 else x
        axis = axis_of(kind, x)
        if axis is None:
            result[name] = x[list(rows)]
            continue
        taken = _taken(x, rows, queries if kind == "choices" else keys, axis)
        if kind == "choices" and real is not None:
            taken = _renumbered(program, name, taken, real[list(rows)])
        result[name] = taken
    return result if inputs is not None else None


def _input_sorted(
    program: Program, inputs: Inputs, order: torch.Tensor, real: torch.Tensor
) -> Inputs:
    """Run-time inputs with their positions in another order, int64 [B, n]."""
    result = {}
    for name, x in (inputs or {}).items():
        kind = _kind(program, name)
        x = x.expand(len(order), *x.shape[1:]) if len(x) == 1 else x
        axis = axis_of(kind, x)
        if axis is not None:
            shape = [len(order), *[1] * (axis - 1), -1, *[1] * (x.ndim - axis - 1)]
            x = x.gather(axis, order.reshape(shape).expand_as(x))
            x = _renumbered(program, name, x, real) if kind == "choices" else x
        result[name] = x
    return result if inputs is not None else None


def _renumbered(
    program: Program, name: str, choices: torch.Tensor, real: torch.Tensor
) -> torch.Tensor:
    """Keys [B, H, q, c] that were chosen, by their numbers over real tokens, -1 for none."""
    size = next(entry.size for entry in program.inputs if entry.name == name)
    if size != 1:
        raise AttnSpecError(
            f"choices of single keys are needed, `{name}` chooses blocks of {size}, which begin"
            ' where the padded tensor does: `positions="absolute"`'
        )
    ranks = real.to(torch.int64).cumsum(1) - 1
    ranks = ranks.masked_fill(~real, -1)[:, None, None].expand(*choices.shape[:3], -1)
    return ranks.gather(-1, choices.clamp(min=0).long()).masked_fill(choices < 0, -1)


def _kind(program: Program, name: str) -> str | None:
    return next((entry.kind for entry in program.inputs if entry.name == name), None)
