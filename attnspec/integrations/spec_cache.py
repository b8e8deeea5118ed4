"""A cache of transformers that keeps what a spec may still read, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from attnspec.integrations.model_layers import attribute_of, crosses, place_of
from attnspec.integrations.model_mask import CACHED, ModelMask, part_of_inputs, part_of_padding
from attnspec.integrations.model_use import used_by
from attnspec.integrations.real_positions import RealRunning, RealState
from attnspec.ir.program import Program
from attnspec.runtime.module import CompiledAttention
from attnspec.runtime.streaming import StreamState
from attnspec.text.diagnostics import AttnSpecError

Tensors: TypeAlias = "tuple[Tensor, Tensor, Tensor]"


_CHOICES = ("update_indexer", "update_index", "store_compression_weights")
"""Methods of layers of a cache that keep what a choice among all positions goes by, or keys that
are made of others."""


class SpecCache(Cache):  # type: ignore[misc]
    """The cache of a model that was given a spec: for each layer the state that its attention goes
    on from. Heads with a window keep the keys of the window, first positions and marked tokens
    stay, mechanisms keep their sums; only heads that look back without a bound keep every key.

        model.generate(ids, past_key_values=SpecCache(model), max_new_tokens=100)

    Layers that choose among all positions, keep them compressed or keep no keys have what they have
    in `DynamicCache`. Beams and assisted generation work as with that. A cache serves one text, or
    batch of texts. Raises AttnSpecError for a model with a layer that does not use a spec.
    """

    def __init__(self, model: nn.Module) -> None:
        modules, config = dict(model.named_modules()), getattr(model, "config", None)
        layers = {} if config is None else dict(enumerate(DynamicCache(config=config).layers))
        for layer in used_by(model):
            module = modules[layer.path]
            place, number = place_of(module), getattr(module, "layer_idx", None)
            if number is None:
                number = 0 if place is None else place.layer or 0
            kept = layers.get(number)
            chooses = any(hasattr(kept, x) for x in _CHOICES)
            if not (chooses or attribute_of(module, "kv_lora_rank")):
                layers[number] = SpecLayer()
            if layer.kind != "spec" and not crosses(module):
                raise AttnSpecError(
                    f"every layer of the model must use a spec, got `{layer.path}`: {layer.kind},"
                    f" {layer.what}"
                )
        readers = {number: x for number, x in layers.items() if isinstance(x, SpecLayer)}
        for each in readers.values():
            each.readers = readers
        super().__init__(layers=[layers[number] for number in sorted(layers)])

    @property
    def bytes(self) -> int:
        """The memory that is held, the same memory counted once."""
        return _bytes(self.layers)

    def __repr__(self) -> str:
        sizes = ", ".join(f"{_bytes([layer]):,}" for layer in self.layers)
        length = self.get_seq_length() if self.layers else 0
        return f"SpecCache({length:,} positions, {self.bytes:,} bytes, by layer {sizes or 'none'})"


def _bytes(layers: Sequence[object]) -> int:
    """The memory that layers of a cache hold, the same memory counted once."""
    kept = [
        x.untyped_storage()
        for layer in layers
        for x in (layer.kept() if isinstance(layer, SpecLayer) else vars(layer).values())
        if isinstance(x, Tensor)
    ]
    return sum({each.data_ptr(): each.nbytes() for each in kept}.values())


Step: TypeAlias = "tuple[Callable[..., tuple[Any, Any]], Tensors, Tensor | None, Any]"
"""Some positions that a layer went on by: what computes, their queries, keys and values, padding
and inputs."""


def _stepped(step: Step, state: StreamState | RealState | None) -> tuple[Any, Any]:
    """The outputs of a step, and the state after it."""
    run, tensors, padding, inputs = step
    result: tuple[Any, Any] = run(*tensors, state, key_padding_mask=padding, inputs=inputs)
    return result


def _first(step: Step, program: Program, count: int) -> Step:
    """A step by the first positions alone."""
    (run, (q, k, v), padding, inputs), part = step, slice(count)
    parts = q[:, :, part], k[:, :, part], v[:, :, part]
    return run, parts, part_of_padding(padding, part), part_of_inputs(program, inputs, part, part)


class SpecLayer(CacheLayerMixin):  # type: ignore[misc]
    """What one layer keeps: a state, which the attention itself goes on from."""

    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, **_settings: object) -> None:
        super().__init__()
        self.state: StreamState | RealState | None = None
        self.position = 0
        self.record_past = False
        # those of one cache, by the numbers of their layers
        self.readers: Mapping[int, SpecLayer] = {}
        self._base: StreamState | RealState | None = None
        self._steps: list[tuple[Step, Program]] = []

    def of(self, module: nn.Module) -> SpecLayer:
        """What is kept for a layer that reads keys of this one, as the last layers of Gemma 3n
        do: its own, for it may read others of them."""
        number = getattr(module, "layer_idx", None)
        return self.readers.get(number if isinstance(number, int) else -1, self)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: object, **_settings: object
    ) -> tuple[Tensor, Tensor]:
        """The new keys [B, H_kv, t, d] and values, marked: the attention joins them with those that
        are kept."""
        self.lazy_initialization(key_states, value_states)
        keys = key_states.view_as(key_states)
        setattr(keys, CACHED, self)
        return keys, value_states

    def go_on(
        self,
        run: CompiledAttention | RealRunning,
        tensors: Tensors,
        mask: ModelMask,
        inputs: Any,
        settings: Mapping[str, Any],
    ) -> Any:
        """The outputs [B, H, t, d_v] of the next t positions, as steps with these settings give."""
        if mask.q_offset != self.position or tensors[1].shape[2] != mask.q_length:
            raise AttnSpecError(
                f"the call must go on at position {self.position}, got {tensors[1].shape[2]}"
                f" positions from {mask.q_offset} on"
            )
        (q, k, v), program, new = tensors, run.program, slice(mask.q_offset, None)
        run_step = partial(run.step, keep_all=True, in_place=not self.record_past, **settings)
        padding, own = part_of_padding(mask.padding, new), part_of_inputs(program, inputs, new)
        # a copy without the mark, or what is kept would keep this layer
        step = run_step, (q, k.view_as(k), v), padding, own
        if self.record_past:
            self._steps.append((step, program))
        out, state = _stepped(step, self.state)
        # one position more is joined with what is kept, in memory of its own
        first = self.state is None or q.shape[2] > 1
        self.state, self.position = state.owned() if first else state, mask.end
        return out

    def kept(self) -> list[Tensor]:
        """The tensors that are held."""
        states = [each for each in (self.state, self._base) if each is not None]
        parts = [x for each in states for x in each.kept()]
        return parts + [x for (_, tensors, *_), _ in self._steps for x in tensors]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.position + query_length, 0

    def get_seq_length(self) -> int:
        return self.position

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.state, self._base, self._steps, self.position = None, None, [], 0

    # --- back to earlier positions ----------------------------------------------------------------

    def activate_past_recording(self) -> None:
        """Keep the steps to come until `crop` says how many of their positions stand."""
        self.record_past = True
        self._base, self._steps = self.state, []

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last positions, a number below 0, of those since the last `crop`."""
        removed = abs(tokens_to_remove)
        written = sum(q.shape[2] for (_, (q, *_), *_), _ in self._steps)
        if tokens_to_remove > 0 or removed > written:
            raise RuntimeError(
                f"at most the {written} positions since `activate_past_recording` or the last"
                f" `crop` can be taken back, as a number below 0, got {tokens_to_remove}"
            )
        if removed:
            self.state, left = self._base, written - removed
            for step, program in self._steps:
                part = min(left, step[1][0].shape[2])
                if part:
                    _, self.state = _stepped(_first(step, program, part), self.state)
                left -= part
        self.position -= removed
        self._base, self._steps = self.state, []

    # --- other samples ----------------------------------------------------------------------------

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.state is not None:
            self.batch_select_indices(torch.arange(self.batch_size).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        if self._steps:
            raise RuntimeError("`crop` must come before samples are chosen while the past is kept")
        if self.state is not None:
            self.state = self._base = self.state.selected(indices)

    reorder_cache = batch_select_indices

    @property
    def batch_size(self) -> int:
        """How many samples there are, -1 before the first."""
        return -1 if self.state is None else self.state.samples
