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
        self.spec, self.setting, self.counts_real = spec, setting, positions == "real"
        self.program: Program = influence(spec.program)
        self.notes: list[str] = []
        self.inputs = self._completed(inputs or {})
        graphs = [attend.graph for attend in self.program.attends]
        self.mixes = None in graphs
        self.decided = any(g is not None and decides(g) and not inputs_of(g) for g in graphs)

    def _completed(self, inputs: Mapping[str, object]) -> dict[str, torch.Tensor]:
        given, documents = self.setting.arguments.get("attnspec_inputs"), self.setting.documents
        every = {**(dict(given) if isinstance(given, Mapping) else {}), **inputs}
        missing = {x.name: x.kind for x in self.program.inputs if x.name not in every}
        if documents is not None and list(missing.values()) == ["ids"]:
            every |= {name: documents for name in missing}
            self.notes += [f"`{name}` was taken from `position_ids`" for name in missing]
        elif missing:
            names = ", ".join(f"`{name}` ({kind})" for name, kind in missing.items())
            raise AttnSpecError(
                f"`{self.program.name}` reads run-time inputs that are not given: {names}; pass"
                f" `inputs={{{next(iter(missing))!r}: …}}`, [B, n]"
            )
        found = {name: torch.as_tensor(value).cpu() for name, value in every.items()}
        # refuses names that the spec does not declare
        Stack(self.program, found)
        return found

    def pairs(self, call: Call, path: str, layer: int) -> Pairs:
        """The pairs of a call; raises NoPlace. Keys at padding and in slots that nothing was
        written to belong to none; those of queries at padding are not compared, and of a module as
        a whole not what a token reads of itself."""
        (batch, _, n_q, n_k), cross, past = call.shape, self.program.cross, self.setting.past
        if past is None and n_q > n_k and not cross:
            raise NoPlace(f"{n_q} queries and {n_k} keys are not those of one sequence")
        first = 0 if cross else max(0, n_k - n_q) if past is None else past
        # fewer keys are the last ones: those of a window that moves on
        end, keys = first + n_q, torch.arange(n_k)
        keys += 0 if cross else max(0, first + n_q - n_k)
        used = (keys < end) | cross
        at = keys * used
        queries_real, keys_real = self.setting.real(path, cross)
        keys_real = self._padded(keys_real, n_k if cross else end)[:, at]
        compared = self._padded(queries_real, end)[:, None, first:end, None]
        if call.together:
            compared = compared & ~torch.eye(n_q, dtype=torch.bool)
        if self.decided and call.q is not None and call.k is not None:
            allowed = self._of_tensors(call.q, call.k, keys_real, layer)
        else:
            samples = range(batch if self.inputs or self.counts_real else 1)
            heads = range(self.program.heads or 1)
            masks = [[self._mask(end, n_k, layer, h, b) for h in heads] for b in samples]
            allowed = torch.from_numpy(np.array(masks))[:, :, first:end, at]
            allowed = allowed.any(1, keepdim=True) if call.together else allowed
        allowed = allowed & (keys_real & used)[:, None, None]
        later, documents = keys > torch.arange(first, end)[:, None], self.setting.documents
        never = {"a slot that nothing is in": ~used, "padding": (~keys_real & used)[:, None, None]}
        if not bool((allowed & later).any()):
            never["a later position"] = later
        if documents is not None and documents.shape[1] == end:
            others = documents[:, first:, None] != documents[:, None, at]
            never["another document"] = (others & used)[:, None]
        return Pairs(first, keys * used - ~used * 1, allowed, compared, {} if cross else never)

    def _padded(self, real: torch.Tensor | None, n: int) -> torch.Tensor:
        """Which of n positions are real: what a mask is too short for is padding."""
        if real is None:
            return torch.ones(1, n, dtype=torch.bool)
        if real.shape[1] > n and self.setting.past is None and not bool(real.all()):
            raise NoPlace(f"padding is told of {real.shape[1]} positions, and it has {n}")
        return torch.nn.functional.pad(real[:, :n], (0, max(0, n - real.shape[1])))

    def _of_tensors(
        self, q: torch.Tensor, k: torch.Tensor, real: torch.Tensor, layer: int
    ) -> torch.Tensor:
        """The pairs that queries and keys decide, bool [B, H, n_q, n_k]."""
        inputs = {name: x.to(q.device) for name, x in self.inputs.items()} or None
        real, module = real.expand(len(q), -1).to(q.device), self.spec.compile(device=q.device)
        return module.pairs(q, k, layer=layer, inputs=inputs, key_padding_mask=real).cpu()

    def _mask(self, end: int, n_k: int, layer: int, head: int, sample: int) -> np.ndarray:
        """bool [end, end] of a sample, of a spec with `cross` [n_q, n_k]."""
        at = np.arange(end)
        if self.counts_real:
            real = self._padded(self.setting.own, end)
            at = np.flatnonzero(real[min(sample, len(real) - 1)].numpy())
        if self.program.cross:
            program, length = crossed(self.program, n_k, end)
            return Stack(program, self._sample(sample, None)).mask(length, layer, head)[:end, :n_k]
        whole, stack = np.zeros((end, end), bool), Stack(self.program, self._sample(sample, at))
        whole[np.ix_(at, at)] = stack.mask(len(at), layer, head)
        return whole

    def _sample(self, sample: int, at: np.ndarray | None) -> Sample | None:
        """The run-time inputs of one sample, at some positions."""
        found = {}
        for entry in self.program.inputs:
            value, axis = self.inputs[entry.name].numpy(), POSITIONS.get(entry.kind)
            if at is not None and axis is not None and value.ndim > axis:
                # one that is too short is refused with the lengths
                value = value.take(at[at < value.shape[axis]], axis)
            found[entry.name] = value[min(sample, len(value) - 1)] if value.ndim else value
        return found or None
