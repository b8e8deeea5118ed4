"""The pairs that a spec allows, put where a call of a model has its queries and keys: by the
arguments of the model, which show padding, packed documents and a cache."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
import torch
from torch import nn

from attnspec.graphs.stack import Sample, Stack, decides, influence
from attnspec.ir.crossing import crossed
from attnspec.ir.program import POSITIONS, Program, inputs_of
from attnspec.model_check.call import Call
from attnspec.text.diagnostics import AttnSpecError

if TYPE_CHECKING:
    from attnspec.spec import Spec

_OWN = ("attention_mask", "padding_mask", "src_key_padding_mask", "key_padding_mask")
_DECODER = ("decoder_attention_mask", "tgt_key_padding_mask")
_OTHER = ("encoder_attention_mask", "memory_key_padding_mask")
"""Arguments [B, n] that say which tokens are real; those of torch, `…key_padding_mask`, say which
are padding."""


class NotComparable(Exception):
    """Why a call cannot be held against the spec."""


@dataclass(frozen=True)
class Pairs:
    """The pairs of one call: those `allowed`, bool [B | 1, H | 1, n_q, n_k], of those `compared`.

    Queries stand from position `first` on, the keys at `keys` [n_k]. `never` has the pairs that no
    query may read, by what their keys are.
    """

    first: int
    keys: torch.Tensor
    allowed: torch.Tensor
    compared: torch.Tensor
    never: Mapping[str, torch.Tensor]


class Wanted:
    """The pairs of a spec for the samples of one call of a model.

    `arguments` are those of the model, by name. `own`, `decoder` and `other` are bool
    [B, positions], True = real, of the sequence, of a decoder beside an encoder, and of what
    cross-attention reads, `past` is how many positions a cache holds; None where nothing tells.
    `decided` says that queries and keys decide pairs. `words` describe all that.

    Raises TypeError for arguments that the model does not take, AttnSpecError for specs without
    pairs and run-time inputs that are missing.
    """

    def __init__(
        self,
        spec: Spec,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        inputs: Mapping[str, object] | None,
        positions: str,
    ) -> None:
        if positions not in ("absolute", "real"):
            raise AttnSpecError(f'`positions` must be "absolute" or "real", got {positions!r}')
        signature = inspect.signature(model.forward)
        self.arguments: dict[str, Any] = {}
        for name, value in signature.bind(*args, **kwargs).arguments.items():
            many = signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
            self.arguments.update(value if many else {name: value})
        self.own, self.decoder, self.other = map(self._real, (_OWN, _DECODER, _OTHER))
        self.documents = documents(self.arguments.get("position_ids"), self.own)
        cache = next(filter(is_cache, self.arguments.values()), None)
        self.past = None if cache is None else int(cache.get_seq_length())
        implementation = getattr(getattr(model, "config", None), "_attn_implementation", None)
        self.words = [f"attn_implementation = {implementation!r}"] * bool(implementation)
        if self.documents is not None:
            count = int(self.documents.max()) + 1
            self.words += [f"up to {count} packed documents a sample, by `position_ids`"]
        if self.own is not None:
            self.words.append(f"a 2-D mask, {'no ' * bool(self.own.all())}padding")
        if cache is not None:
            self.words.append(f"{type(cache).__name__} with {self.past:,} positions")
        self.spec, self.counts_real = spec, positions == "real"
        self.program: Program = influence(spec.program)
        self.inputs = self._inputs(inputs or {})
        graphs = [attend.graph for attend in self.program.attends]
        if None in graphs:
            raise AttnSpecError(f"`{self.program.name}` is a formula without pairs")
        self.decided = any(g is not None and decides(g) and not inputs_of(g) for g in graphs)

    def _real(self, names: tuple[str, ...]) -> torch.Tensor | None:
        for name in names:
            mask = self.arguments.get(name)
            if isinstance(mask, torch.Tensor) and mask.ndim == 2:
                return (mask == 0 if name.endswith("key_padding_mask") else mask != 0).cpu()
        return None

    def _inputs(self, inputs: Mapping[str, object]) -> dict[str, torch.Tensor]:
        """The run-time inputs, documents from `position_ids` where they are not given."""
        own = self.arguments.get("attnspec_inputs")
        every = {**(own if isinstance(own, Mapping) else {}), **inputs}
        missing = {x.name: x.kind for x in self.program.inputs if x.name not in every}
        if self.documents is not None and list(missing.values()) == ["ids"]:
            every |= dict.fromkeys(missing, self.documents)
            self.words += [f"`{name}` taken from `position_ids`" for name in missing]
        elif missing:
            names = ", ".join(f"`{name}` ({kind})" for name, kind in missing.items())
            raise AttnSpecError(f"run-time inputs are not given: {names}; pass `inputs`, [B, n]")
        tensors = {name: torch.as_tensor(value).cpu() for name, value in every.items()}
        # refuses names that the spec does not declare
        Stack(self.program, tensors)
        return tensors

    def pairs(self, call: Call, path: str, layer: int) -> Pairs:
        """The pairs of a call; raises NotComparable."""
        (batch, _, n_q, n_k), cross, past = call.shape, self.program.cross, self.past
        tensors = {"queries": call.q, "keys": call.k, "values": call.v}
        reasons = (
            call.reason,
            "as a whole it has one sequence" * (call.together and cross),
            "queries and keys, which decide pairs, are not seen"
            * bool(call.sizes and self.decided),
            *(
                f"its {what} are not finite"
                for what, x in tensors.items()
                if not x.isfinite().all()
            ),
            "it has more queries than keys" * (past is None and n_q > n_k and not cross),
        )
        for reason in filter(None, reasons):
            raise NotComparable(reason)
        first = 0 if cross else max(0, n_k - n_q) if past is None else past
        # fewer keys are the last ones: those of a window that moves on
        end, keys = first + n_q, torch.arange(n_k)
        keys += 0 if cross else max(0, first + n_q - n_k)
        used = (keys < end) | cross
        at = keys * used
        pair = "decoder_input_ids" in self.arguments or "tgt" in self.arguments
        queries_real = self.decoder if pair and (cross or "decoder" in path) else self.own
        read = self.own if self.other is None and pair else self.other
        real = self._padded(*((read, n_k) if cross else (queries_real, end)))[:, at]
        compared = self._padded(queries_real, end)[:, None, first:end, None]
        if call.together:
            # no query stands still while its own key moves
            compared = compared & ~torch.eye(n_q, dtype=torch.bool)
        if self.decided:
            allowed = self._of_tensors(call.q, call.k, real, layer)
        else:
            samples = range(batch if self.inputs or self.counts_real else 1)
            heads = range(self.program.heads or 1)
            masks = [[self._mask(end, n_k, layer, h, b) for h in heads] for b in samples]
            allowed = torch.from_numpy(np.array(masks))[:, :, first:end, at]
            allowed = allowed.any(1, keepdim=True) if call.together else allowed
        allowed = allowed & (real & used)[:, None, None]
        later, labelled = keys > torch.arange(first, end)[:, None], self.documents
        never = {"a slot that nothing is in": ~used, "padding": (~real & used)[:, None, None]}
        if not bool((allowed & later).any()):
            never["a later position"] = later
        if labelled is not None and labelled.shape[1] == end:
            others = labelled[:, first:, None] != labelled[:, None, at]
            never["another document"] = (others & used)[:, None]
        return Pairs(first, keys, allowed, compared, {} if cross else never)

    def _padded(self, real: torch.Tensor | None, n: int) -> torch.Tensor:
        """Which of n positions are real: what a mask is too short for is padding."""
        if real is None:
            return torch.ones(1, n, dtype=torch.bool)
        if real.shape[1] > n and self.past is None and not bool(real.all()):
            raise NotComparable(f"padding is told of {real.shape[1]} positions, and it has {n}")
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
            real = self._padded(self.own, end)
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


def copied(value: Any) -> Any:
    """An argument, a cache as a copy, so that a run leaves what was handed in as it was."""
    if not is_cache(value):
        return value
    # keys that were computed with gradients are copied, too
    with patch.object(torch.Tensor, "__deepcopy__", lambda x, memo: x.detach().clone()):
        return copy.deepcopy(value)


def is_cache(value: object) -> bool:
    return callable(getattr(value, "get_seq_length", None))


def labels(position_ids: torch.Tensor, real: torch.Tensor | None = None) -> torch.Tensor:
    """int64 [B, n], the number of the document that each token belongs to.

    A document begins where positions start again: at 0, or below the position before. Tokens that
    are not `real`, bool [B, n], begin none.
    """
    starts = (position_ids[:, 1:] == 0) | (position_ids[:, 1:] < position_ids[:, :-1])
    if real is not None:
        starts = starts & real[:, 1:] & real[:, :-1]
    return torch.nn.functional.pad(starts.long().cumsum(1), (1, 0))


def documents(
    position_ids: torch.Tensor | None, real: torch.Tensor | None = None
) -> torch.Tensor | None:
    """The labels of packed documents; None where every sample is one document."""
    if position_ids is None or position_ids.ndim < 2 or position_ids.is_floating_point():
        return None
    # of the axes of several rotations that of the text comes first
    positions = position_ids if position_ids.ndim == 2 else position_ids.flatten(0, -3)[0]
    if real is None or real.shape[-1] == positions.shape[-1]:
        numbers = labels(positions, real)
        return numbers if bool(numbers.any()) else None
    return None
