"""The pairs that a spec allows at the positions of a call of a model. The arguments of the model
show padding, packed documents and a cache."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from attnspec.graphs.stack import Stack, decides, influence
from attnspec.ir.crossing import crossed
from attnspec.ir.program import POSITIONS, Program, inputs_of
from attnspec.model_check.call import Call
from attnspec.runtime.call_checks import check_names
from attnspec.text.diagnostics import AttnSpecError

if TYPE_CHECKING:
    from attnspec.spec import Spec

Named: TypeAlias = "Mapping[str, Any]"


class NotComparable(Exception):
    """Why a call cannot be compared with the spec."""


class Pairs(NamedTuple):
    """The pairs `allowed` in one call, bool [B | 1, H | 1, n_q, n_k], and those `compared`. Queries
    are at positions from `first` on, keys at `keys` [n_k]. `never` has pairs that no query may
    read, by what their keys are."""

    first: int
    keys: Tensor
    allowed: Tensor
    compared: Tensor
    never: Mapping[str, Tensor]


class Wanted:
    """The pairs of a spec for the samples of one call of a model with `arguments`, by name.

    `own`, `decoder` and `other` are bool [B, positions], True = real: of the sequence, of a decoder
    beside an encoder, and of what cross-attention reads. `past` counts positions in a cache. Each
    is None where no argument says it. `decided`: queries and keys decide pairs. `words` describe
    the setting. Raises AttnSpecError for specs without pairs and for missing run-time inputs.
    """

    def __init__(self, spec: Spec, arguments: Named, inputs: Named, positions: str) -> None:
        if positions not in ("absolute", "real"):
            raise AttnSpecError(f'`positions` must be "absolute" or "real", got {positions!r}')
        self.arguments, self.words = arguments, list[str]()
        torch_own = "src_key_padding_mask", "key_padding_mask"
        self.own = self._real("attention_mask", "padding_mask", *torch_own)
        self.decoder = self._real("decoder_attention_mask", "tgt_key_padding_mask")
        self.other = self._real("encoder_attention_mask", "memory_key_padding_mask")
        self.documents = self._documents()
        cache = next(filter(is_cache, self.arguments.values()), None)
        self.past = None if cache is None else int(cache.get_seq_length())
        if self.documents is not None:
            count = int(self.documents.max()) + 1
            self.words += [f"up to {count} packed documents a sample, by `position_ids`"]
        if self.own is not None:
            self.words.append(f"a 2-D mask, {'no ' * bool(self.own.all())}padding")
        if cache is not None:
            self.words.append(f"{type(cache).__name__} with {self.past:,} positions")
        self.spec, self.counts_real = spec, positions == "real"
        self.program: Program = influence(spec.program)
        self.inputs = self._inputs(inputs)
        graphs = [attend.graph for attend in self.program.attends]
        if None in graphs:
            raise AttnSpecError(f"`{self.program.name}` is a formula without pairs")
        self.decided = any(g is not None and decides(g) and not inputs_of(g) for g in graphs)

    def _real(self, *names: str) -> Tensor | None:
        """The first of these arguments that is a mask [B, n]; torch's are True at padding."""
        for name in names:
            mask = self.arguments.get(name)
            if isinstance(mask, Tensor) and mask.ndim == 2:
                return (mask == 0 if name.endswith("key_padding_mask") else mask != 0).cpu()
        return None

    def _documents(self) -> Tensor | None:
        """The documents that `position_ids` show; None where every sample is one document."""
        positions = self.arguments.get("position_ids")
        if positions is None or positions.ndim < 2 or positions.is_floating_point():
            return None
        # of the axes of several rotations that of the text comes first
        positions = positions if positions.ndim == 2 else positions.flatten(0, -3)[0]
        if self.own is not None and self.own.shape[-1] != positions.shape[-1]:
            return None
        numbers = documents(positions, self.own)
        return numbers if bool(numbers.any()) else None

    def _inputs(self, inputs: Named) -> dict[str, Tensor]:
        """The run-time inputs; missing documents are taken from `position_ids`."""
        arrays = self.arguments.get("attnspec_inputs")
        every = {**(arrays if isinstance(arrays, Mapping) else {}), **inputs}
        try:
            check_names(self.program, every)
        except ValueError as error:
            raise AttnSpecError(str(error)) from None
        missing = {x.name: x.kind for x in self.program.inputs if x.name not in every}
        if self.documents is not None and list(missing.values()) == ["ids"]:
            every |= dict.fromkeys(missing, self.documents)
            self.words += [f"`{name}` taken from `position_ids`" for name in missing]
        elif missing:
            names = ", ".join(f"`{name}` ({kind})" for name, kind in missing.items())
            raise AttnSpecError(f"run-time inputs are missing: {names}; pass `inputs`, [B, n]")
        tensors = {name: torch.as_tensor(value).cpu() for name, value in every.items()}
        for entry in self.program.inputs:
            shape = list(tensors[entry.name].shape)
            if POSITIONS.get(entry.kind) == 1 and len(shape) != 2:
                raise AttnSpecError(f"the input `{entry.name}` must be [B, n], got {shape}")
        return tensors

    def pairs(self, call: Call, path: str, layer: int) -> Pairs:
        """The pairs of a call; raises NotComparable."""
        (batch, _, n_q, n_k), cross, past = call.shape, self.program.cross, self.past
        finite = all(bool(x.isfinite().all()) for x in (call.q, call.k, call.v))
        for reason, applies in (
            (call.reason, call.reason),
            ("a module as a whole has one sequence, the spec two", call.together and cross),
            ("queries and keys decide pairs, and are not seen", call.sizes and self.decided),
            ("its queries, keys or values are not finite", not finite),
            ("it has more queries than keys", past is None and n_q > n_k and not cross),
        ):
            if applies:
                raise NotComparable(reason)
        first = 0 if cross else max(0, n_k - n_q) if past is None else past
        # fewer keys are the last ones: those of a window that moves on
        end = first + n_q
        keys = torch.arange(n_k) + (0 if cross else max(0, end - n_k))
        used = (keys < end) | cross
        at = keys * used
        pair = "decoder_input_ids" in self.arguments or "tgt" in self.arguments
        queries_real = self.decoder if pair and (cross or "decoder" in path) else self.own
        keys_real = self.own if self.other is None and pair else self.other
        real = self._padded(*((keys_real, n_k) if cross else (queries_real, end)))[:, at]
        compared = self._padded(queries_real, end)[:, None, first:end, None]
        if call.together:
            # no query stands still while its own key moves
            compared = compared & ~torch.eye(n_q, dtype=torch.bool)
        if self.decided:
            module, device = self.spec.compile(device=call.q.device), call.q.device
            inputs = {name: x.to(device) for name, x in self.inputs.items()} or None
            padding: Any = {"key_padding_mask": real.expand(batch, -1).to(device)}
            allowed = module.pairs(call.q, call.k, layer=layer, inputs=inputs, **padding).cpu()
        else:
            samples = range(batch if self.inputs or self.counts_real else 1)
            heads = range(self.program.head_count)
            masks = [[self._mask(end, n_k, layer, h, b) for h in heads] for b in samples]
            allowed = torch.from_numpy(np.array(masks))[:, :, first:end, at]
            allowed = allowed.any(1, keepdim=True) if call.together else allowed
        allowed = allowed & (real & used)[:, None, None]
        later, packed = used & (keys > torch.arange(first, end)[:, None]), self.documents
        never = {"an empty slot of the cache": ~used, "padding": (~real & used)[:, None, None]}
        if not bool((allowed & later).any()):
            never["a later position"] = later
        if packed is not None and packed.shape[1] == end:
            others = packed[:, first:, None] != packed[:, None, at]
            never["another document"] = (others & used)[:, None]
        return Pairs(first, keys, allowed, compared, {} if cross else never)

    def _padded(self, real: Tensor | None, n: int) -> Tensor:
        """Which of n positions are real; those beyond the end of a mask are padding."""
        if real is None:
            return torch.ones(1, n, dtype=torch.bool)
        if real.shape[1] > n and self.past is None and not bool(real.all()):
            raise NotComparable(f"the padding mask has {real.shape[1]} positions, the call {n}")
        return torch.nn.functional.pad(real[:, :n], (0, max(0, n - real.shape[1])))

    def _mask(self, end: int, n_k: int, layer: int, head: int, sample: int) -> np.ndarray:
        """bool [end, end] of a sample, of a spec with `cross` [n_q, n_k]."""
        at, inputs, cross = np.arange(end), {}, self.program.cross
        if self.counts_real:
            real = self._padded(self.own, end)
            at = np.flatnonzero(real[min(sample, len(real) - 1)].numpy())
        for entry in self.program.inputs:
            value, axis = self.inputs[entry.name].numpy(), POSITIONS.get(entry.kind)
            if not cross and axis is not None and value.ndim > axis:
                # one that is too short is refused with the lengths
                value = value.take(at[at < value.shape[axis]], axis)
            inputs[entry.name] = value[min(sample, len(value) - 1)] if value.ndim else value
        if cross:
            program, length = crossed(self.program, n_k, end)
            return Stack(program, inputs or None).mask(length, layer, head)[:end, :n_k]
        whole = np.zeros((end, end), bool)
        whole[np.ix_(at, at)] = Stack(self.program, inputs or None).mask(len(at), layer, head)
        return whole


def copied(value: Any) -> Any:
    """An argument; a cache is copied, so that a run does not change it."""
    if not is_cache(value):
        return value
    # keys that were computed with gradients are copied, too
    with patch.object(Tensor, "__deepcopy__", lambda x, memo: x.detach().clone()):
        return copy.deepcopy(value)


def is_cache(value: object) -> bool:
    return callable(getattr(value, "get_seq_length", None))


def documents(position_ids: Tensor, real: Tensor | None = None) -> Tensor:
    """The number of each token's document, int64 [B, n]. A document begins where positions start
    again, at 0 or below the position before, and at `real` tokens, bool [B, n]."""
    starts = (position_ids[:, 1:] == 0) | (position_ids[:, 1:] < position_ids[:, :-1])
    if real is not None:
        starts = starts & real[:, 1:] & real[:, :-1]
    return torch.nn.functional.pad(starts.long().cumsum(1), (1, 0))
