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
from attnspec.model_check.call import Call
from attnspec.model_check.report import LayerCheck
from attnspec.model_check.setting import Setting
from attnspec.text.diagnostics import AttnSpecError

if TYPE_CHECKING:
    from attnspec.spec import Spec


class NoPlace(Exception):
    """A call whose queries and keys are not those of the sequence that the spec speaks of."""


@dataclass(frozen=True)
class Pairs:
    """The pairs of one call: those `allowed`, bool [B | 1, H | 1, n_q, n_k], of those `compared`.

    Queries stand from position `first` on, the keys at `keys` [n_k], -1 for a slot that nothing was
    written to yet. `never` has the pairs that no query may read, by what their keys are.
    """

    first: int
    keys: torch.Tensor
    allowed: torch.Tensor
    compared: torch.Tensor
    never: Mapping[str, torch.Tensor]


class Wanted:
    """The pairs of a spec for the samples of one call of a model.

    Raises AttnSpecError for run-time inputs that are missing; documents are taken from
    `position_ids` where they are. `notes` says what to know of them, `mixes` whether the spec has
    no pairs to hold a model against, `decided` whether queries and keys decide them.
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
        graphs = [attend.graph for attend in self.program.attends]
        self.mixes = None in graphs
        self.decided = any(g is not None and decides(g) and not inputs_of(g) for g in graphs)

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

    def pairs(self, call: Call, check: LayerCheck) -> Pairs:
        """The pairs of a call; raises NoPlace. Keys at padding and in slots that nothing was
        written to belong to none; those of queries at padding are not compared, and of a module as
        a whole not what a token reads of itself."""
        (batch, _, n_q, n_k), cross, past = call.shape, self.program.cross, self.setting.past
        if past is None and n_q > n_k and not cross:
            raise NoPlace(f"{n_q} queries and {n_k} keys are not those of one sequence")
        first = 0 if cross else max(0, n_k - n_q) if past is None else past
        end, keys = first + n_q, torch.arange(n_k)
        if not cross:
            # fewer keys are the last ones: those of a window that moves on
            keys += max(0, end - n_k)
            keys[keys >= end] = -1
        at, used = keys.clamp_min(0), keys >= 0
        queries_real, keys_real = self.setting.real(check.path, cross)
        keys_real = self._padded(keys_real, n_k if cross else end)[:, at]
        compared = self._padded(queries_real, end)[:, None, first:end, None]
        if call.together:
            compared = compared & ~torch.eye(n_q, dtype=torch.bool)
        layer = check.layer or 0
        if self.decided:
            allowed = self._of_tensors(call, keys_real, layer)
        else:
            samples = batch if self.inputs or self.positions == "real" else 1
            heads = range(self.program.heads or 1)
            masks = [[self._mask(end, n_k, layer, h, b) for h in heads] for b in range(samples)]
            allowed = torch.from_numpy(np.array(masks))[:, :, first:end, at]
            allowed = allowed.any(1, keepdim=True) if call.together else allowed
        allowed = allowed & (keys_real & used)[:, None, None]
        never = {} if cross else {"a slot that nothing is in": ~used}
        later = keys > torch.arange(first, end)[:, None]
        if not cross and not bool((allowed & later).any()):
            never["a later position"] = later
        if not cross:
            never["padding"] = (~keys_real & used)[:, None, None]
        documents = self.setting.documents
        if documents is not None and documents.shape[1] == end and not cross:
            others = documents[:, first:, None] != documents[:, None, at]
            never["another document"] = (others & used)[:, None]
        return Pairs(first, keys, allowed, compared, never)

    def _padded(self, real: torch.Tensor | None, n: int) -> torch.Tensor:
        """Which of n positions are real: what a mask is too short for is padding."""
        if real is None:
            return torch.ones(1, n, dtype=torch.bool)
        if real.shape[1] > n and self.setting.past is None and not bool(real.all()):
            raise NoPlace(f"padding is told of {real.shape[1]} positions, and it has {n}")
        return torch.nn.functional.pad(real[:, :n], (0, max(0, n - real.shape[1])))

    def _of_tensors(self, call: Call, keys_real: torch.Tensor, layer: int) -> torch.Tensor:
        """The pairs that the queries and keys of a call decide, bool [B, H, n_q, n_k]."""
        if call.q is None or call.k is None:
            raise NoPlace("its queries and keys, which decide pairs, are not seen")
        device, padding = call.q.device, keys_real.expand(len(call.q), -1)
        given = {name: x.to(device) for name, x in self.inputs.items()} or None
        return (
            self.spec.compile(device=device)
            .pairs(call.q, call.k, layer=layer, inputs=given, key_padding_mask=padding.to(device))
            .cpu()
        )

    def _mask(self, end: int, n_k: int, layer: int, head: int, sample: int) -> np.ndarray:
        """bool [end, end] of a sample, of a spec with `cross` [n_q, n_k]."""
        at = np.arange(end)
        if self.positions == "real" and not self.program.cross:
            real = self._padded(self.setting.own, end)
            at = np.flatnonzero(real[min(sample, len(real) - 1)].numpy())
        program, length = self.program, len(at)
        if program.cross:
            program, length = crossed(program, n_k, end)
            return Stack(program, self._sample(sample, at)).mask(length, layer, head)[:end, :n_k]
        whole = np.zeros((end, end), bool)
        whole[np.ix_(at, at)] = Stack(program, self._sample(sample, at)).mask(length, layer, head)
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
            value = value[min(sample, len(value) - 1)] if value.ndim else value
            found[entry.name] = value.numpy()
        return found or None
