"""The pairs that a spec allows, put where a call of a model has its queries and keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch

from attnspec.graphs.stack import Sample, Stack, decides, influence
from attnspec.ir.crossing import crossed
from attnspec.ir.program import POSITIONS, Program, inputs_of
from attnspec.model_check.probe import Call
from attnspec.model_check.setting import Setting
from attnspec.text.diagnostics import AttnSpecError

if TYPE_CHECKING:
    from attnspec.spec import Spec


class NoPlace(Exception):
    """A call whose queries and keys are not those of the sequence that the spec speaks of."""


@dataclass(frozen=True)
class Place:
    """Where a call has its tokens: queries from position `first` on, up to `end`; for each key its
    position `keys` [n_k], -1 for a slot that nothing was written to yet."""

    first: int
    end: int
    keys: torch.Tensor

    @classmethod
    def of(cls, n_q: int, n_k: int, past: int | None) -> Place:
        """The place of a call beside a cache that holds `past` positions, None where none tells."""
        first = max(0, n_k - n_q) if past is None else past
        end = first + n_q
        if past is None and n_q > n_k:
            raise NoPlace(f"{n_q} queries and {n_k} keys are not those of one sequence")
        # fewer keys are the last ones: those of a window that moves on
        keys = torch.arange(n_k) + min(0, n_k - end) * -1
        return cls(first, end, torch.where(keys < end, keys, -1))


class Wanted:
    """The pairs of a spec for the samples of one call of a model."""

    def __init__(
        self, spec: Spec, setting: Setting, inputs: Mapping[str, object] | None, positions: str
    ) -> None:
        if positions not in ("absolute", "real"):
            raise AttnSpecError(f'`positions` must be "absolute" or "real", got {positions!r}')
        self.spec, self.setting, self.positions = spec, setting, positions
        self.program: Program = influence(spec.program)
        self.notes: list[str] = []
        self.inputs = self._completed(dict(inputs or {}))
        self._masks: dict[object, np.ndarray] = {}

    def _completed(self, inputs: dict[str, object]) -> dict[str, torch.Tensor]:
        """The run-time inputs, documents taken from `position_ids` where they are not given."""
        declared = {entry.name: entry.kind for entry in self.program.inputs}
        given = self.setting.arguments.get("attnspec_inputs")
        inputs = {**(dict(given) if isinstance(given, Mapping) else {}), **inputs}
        documents = self.setting.documents
        ids = [name for name, kind in declared.items() if kind == "ids" and name not in inputs]
        if len(ids) == 1 and documents is not None:
            inputs[ids[0]] = documents
            self.notes.append(f"`{ids[0]}` was taken from `position_ids`")
        if documents is not None and "ids" not in declared.values():
            self.notes.append(
                f"`position_ids` show packed documents, and `{self.program.name}` does not tell them"
                " apart: `input document: ids`, `attend … & same(document)`"
            )
        missing = [name for name in declared if name not in inputs]
        if missing:
            names = ", ".join(f"`{name}` ({declared[name]})" for name in missing)
            raise AttnSpecError(
                f"`{self.program.name}` reads run-time inputs that are not given: {names}; pass"
                f" `inputs={{{missing[0]!r}: …}}`, [B, n]"
            )
        # refuses names that the spec does not declare
        Stack(self.program, inputs)
        return {name: torch.as_tensor(value) for name, value in inputs.items()}

    @cached_property
    def decided(self) -> bool:
        """Whether queries and keys decide pairs."""
        graphs = [attend.graph for attend in self.program.attends if attend.graph is not None]
        return any(decides(graph) and not inputs_of(graph) for graph in graphs)

    @property
    def mixes(self) -> bool:
        """Whether the spec has no pairs to hold a model against."""
        return any(attend.graph is None for attend in self.program.attends)

    def place(self, n_q: int, n_k: int) -> Place:
        """Where a call has its tokens; raises NoPlace."""
        if self.program.cross:
            return Place(0, n_q, torch.arange(n_k))
        return Place.of(n_q, n_k, self.setting.past)

    def real(self, end: int) -> torch.Tensor | None:
        """Which positions up to `end` are real, bool [B, end]; None where all are."""
        real = self.setting.real
        if real is None or self.program.cross or real.shape[1] < end:
            return None
        return real[:, :end].cpu()

    def allowed(self, place: Place, layer: int, batch: int, heads: int | None) -> torch.Tensor:
        """bool [B | 1, H | 1, n_q, n_k]: the pairs of a layer; with `heads` None those of any head.

        Keys at padding and in slots that nothing was written to belong to no pair.
        """
        real = self.real(place.end)
        alike = not self.inputs and (real is None or self.positions == "absolute")
        declared = range(self.program.heads or 1)
        masks = []
        for sample in range(1 if alike else batch):
            each = [torch.from_numpy(self._mask(place, layer, h, sample)) for h in declared]
            masks.append(torch.stack(each))
        found = torch.stack(masks)
        if heads is None:
            found = found.any(1, keepdim=True)
        if real is not None:
            found = found & real[:, None, None]
        used = place.keys >= 0
        if not self.program.cross:
            found = found[:, :, place.first : place.end]
        return found[..., place.keys.clamp_min(0)] & used

    def of_tensors(self, call: Call, place: Place, layer: int) -> torch.Tensor:
        """The pairs that the queries and keys of a call decide, bool [B, H, n_q, n_k]."""
        real = self.real(place.end)
        padding = None if real is None else real.to(call.q.device)
        given = {name: x.to(call.q.device) for name, x in self.inputs.items()}
        module = self.spec.compile(device=call.q.device)
        pairs = module.pairs(
            call.q, call.k, layer=layer, inputs=given or None, key_padding_mask=padding
        )
        return pairs.cpu()

    def _mask(self, place: Place, layer: int, head: int, sample: int) -> np.ndarray:
        """bool [end, end] of a sample, of a spec with `cross` [n_q, n_k]."""
        real = self.real(place.end) if self.positions == "real" else None
        at = None if real is None else np.flatnonzero(real[sample].numpy())
        n = place.end if at is None else len(at)
        inputs = self._sample(sample, n, at)
        key = (n, len(place.keys), layer, head, None if not inputs else (sample, place.end))
        if key not in self._masks:
            if self.program.cross:
                program, length = crossed(self.program, len(place.keys), place.end)
                mask = Stack(program, inputs).mask(length, layer, head)
                self._masks[key] = mask[: place.end, : len(place.keys)]
            else:
                self._masks[key] = Stack(self.program, inputs).mask(n, layer, head)
        if at is None:
            return self._masks[key]
        whole = np.zeros((place.end, place.end), bool)
        whole[np.ix_(at, at)] = self._masks[key]
        return whole

    def _sample(self, sample: int, n: int, at: np.ndarray | None) -> Sample | None:
        """The run-time inputs of one sample, of its real positions alone where `at` has these."""
        found = {}
        for entry in self.program.inputs:
            value = self.inputs[entry.name].cpu()
            axis = POSITIONS.get(entry.kind)
            if axis is not None and value.ndim > axis:
                length = value.shape[axis]
                if length < (n if at is None else int(at.max(initial=-1)) + 1):
                    raise AttnSpecError(
                        f"the input `{entry.name}` must have {n} positions, got {length}"
                    )
                chosen = torch.arange(n) if at is None else torch.from_numpy(at)
                value = value.index_select(axis, chosen)
            one = value[min(sample, len(value) - 1)] if value.ndim else value
            found[entry.name] = one.numpy()
        return found or None
