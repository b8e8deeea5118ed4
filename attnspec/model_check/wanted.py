"""The pairs that a spec allows, put where a call of a model has its queries and keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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
    position `keys` [n_k], -1 for a slot that nothing was written to yet. `queries_real` [B, n_q]
    and `keys_real` [B, n_k] say which are no padding, None where all are."""

    first: int
    end: int
    keys: torch.Tensor
    queries_real: torch.Tensor | None
    keys_real: torch.Tensor | None


class Wanted:
    """The pairs of a spec for the samples of one call of a model.

    Raises AttnSpecError for run-time inputs that are missing; documents are taken from
    `position_ids` where they are. `notes` says what to know of them.
    """

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
        graphs = [attend.graph for attend in self.program.attends]
        self.mixes = None in graphs
        """Whether the spec has no pairs to hold a model against."""
        self.decided = any(g is not None and decides(g) and not inputs_of(g) for g in graphs)
        """Whether queries and keys decide pairs."""

    def _completed(self, inputs: dict[str, object]) -> dict[str, torch.Tensor]:
        declared = {entry.name: entry.kind for entry in self.program.inputs}
        given, documents = self.setting.arguments.get("attnspec_inputs"), self.setting.documents
        inputs = {**(dict(given) if isinstance(given, Mapping) else {}), **inputs}
        ids = [name for name, kind in declared.items() if kind == "ids" and name not in inputs]
        if len(ids) == 1 and documents is not None:
            inputs[ids[0]] = documents
            self.notes.append(f"`{ids[0]}` was taken from `position_ids`")
        if documents is not None and "ids" not in declared.values():
            self.notes.append(
                f"`position_ids` show packed documents, which `{self.program.name}` does not tell"
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
        found = {name: torch.as_tensor(value).cpu() for name, value in inputs.items()}
        Stack(self.program, found)
        return found

    def place(self, n_q: int, n_k: int, path: str) -> Place:
        """Where a call has its tokens; raises NoPlace."""
        cross, past = self.program.cross, self.setting.past
        queries_real, keys_real = self.setting.real(path, cross)
        if past is None and n_q > n_k and not cross:
            raise NoPlace(f"{n_q} queries and {n_k} keys are not those of one sequence")
        first = 0 if cross else max(0, n_k - n_q) if past is None else past
        end, keys = first + n_q, torch.arange(n_k)
        if not cross:
            # fewer keys are the last ones: those of a window that moves on
            keys += max(0, end - n_k)
            keys[keys >= end] = -1
        if queries_real is not None:
            queries_real = self._padded(queries_real, end)[:, first:end]
        if keys_real is not None:
            keys_real = self._padded(keys_real, n_k if cross else end)[:, keys.clamp_min(0)]
        return Place(first, end, keys, queries_real, keys_real)

    def _padded(self, real: torch.Tensor, n: int) -> torch.Tensor:
        """Which of n positions are real: what a mask is too short for is padding."""
        if real.shape[1] > n and self.setting.past is None and not bool(real.all()):
            raise NoPlace(f"padding is told of {real.shape[1]} positions, and it has {n}")
        return torch.nn.functional.pad(real[:, :n], (0, max(0, n - real.shape[1])))

    def allowed(self, place: Place, layer: int, batch: int, heads: int | None) -> torch.Tensor:
        """bool [B | 1, H | 1, n_q, n_k]: the pairs of a layer; with `heads` None those of any head.

        Keys at padding and in slots that nothing was written to belong to no pair.
        """
        alike = not self.inputs and self.positions == "absolute"
        found = torch.stack(
            [
                torch.stack(
                    [
                        torch.from_numpy(self._mask(place, layer, head, sample))
                        for head in range(self.program.heads or 1)
                    ]
                )
                for sample in range(1 if alike else batch)
            ]
        )
        if heads is None:
            found = found.any(1, keepdim=True)
        found = found[:, :, place.first : place.end, place.keys.clamp_min(0)] & (place.keys >= 0)
        return found if place.keys_real is None else found & place.keys_real[:, None, None]

    def of_tensors(self, call: Call, place: Place, layer: int) -> torch.Tensor:
        """The pairs that the queries and keys of a call decide, bool [B, H, n_q, n_k]."""
        device = call.q.device
        padding = None if place.keys_real is None else place.keys_real.to(device)
        given = {name: x.to(device) for name, x in self.inputs.items()} or None
        module = self.spec.compile(device=device)
        settings = {"layer": layer, "inputs": given, "key_padding_mask": padding}
        return module.pairs(call.q, call.k, **settings).cpu()  # type: ignore[arg-type]

    def _mask(self, place: Place, layer: int, head: int, sample: int) -> np.ndarray:
        """bool [end, end] of a sample, of a spec with `cross` [n_q, n_k]."""
        real, at = self.setting.real("", crosses=False)[0], np.arange(place.end)
        if self.positions == "real" and real is not None:
            at = np.flatnonzero(self._padded(real, place.end)[sample].numpy())
        program, length = self.program, len(at)
        if program.cross:
            program, length = crossed(program, len(place.keys), place.end)
        inputs = self._sample(sample, at)
        key = (length, len(place.keys), layer, head, sample if inputs else None)
        if key not in self._masks:
            self._masks[key] = Stack(program, inputs).mask(length, layer, head)
        mask = self._masks[key]
        if program.cross:
            return mask[: place.end, : len(place.keys)]
        whole = np.zeros((place.end, place.end), bool)
        whole[np.ix_(at, at)] = mask
        return whole

    def _sample(self, sample: int, at: np.ndarray) -> Sample | None:
        """The run-time inputs of one sample, at some positions."""
        found = {}
        for entry in self.program.inputs:
            value, axis = self.inputs[entry.name], POSITIONS.get(entry.kind)
            if axis is not None and value.ndim > axis and not self.program.cross:
                if value.shape[axis] <= at.max(initial=-1):
                    raise AttnSpecError(
                        f"the input `{entry.name}` must have {at.max() + 1} positions, got"
                        f" {value.shape[axis]}"
                    )
                value = value.index_select(axis, torch.from_numpy(at))
            found[entry.name] = (
                value[min(sample, len(value) - 1)] if value.ndim else value
            ).numpy()
        return found or None
