"""A model that is there already is given a spec: its layers are numbered, what the spec learns
becomes a part of it, and there is a way back."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from attnspec.analysis.counting.figures import head_counts
from attnspec.analysis.counting.graph_heads import slots_words
from attnspec.graphs.forms.written import written_scalar
from attnspec.graphs.stack import Stack, TooMuch
from attnspec.integrations.model_advice import of_bias
from attnspec.integrations.model_attention import ModelAttention, learns
from attnspec.integrations.model_layers import (
    HELD,
    PLACE,
    PLAIN,
    Place,
    attribute_of,
    looks_up,
    place_of,
    places_in,
    setting_of,
)
from attnspec.integrations.model_sides import SidesAttention
from attnspec.integrations.model_stacks import Layer, Names, has_cross, layers_of, names_of
from attnspec.integrations.model_use import PAGE, Before, ModelUse, own_config, used_by
from attnspec.ir.crossing import crossed
from attnspec.ir.parameters import RelationError
from attnspec.ir.program import Program
from attnspec.ir.serial import plan_data
from attnspec.lower.lower import bias_tables
from attnspec.runtime.module import CompiledAttention
from attnspec.text.diagnostics import AttnSpecError, count_of

_LENGTHS = ("max_position_embeddings", "n_positions", "max_source_positions")
"""Where configs keep how long a sequence may get."""

_WRITTEN = "max_target_positions"
"""Where they keep it of what a decoder beside an encoder writes."""

_MISSING = object()
"""What stands for no value."""

_NO_WINDOW = 1 << 30
"""A window that no sequence fills."""

_COMPRESSED = {"compressed_sparse_attention", "heavily_compressed_attention"}
"""Types of layers that read a window, and keys that they make of what is before it."""


class Conversion:
    """A model whose attention layers use a spec, and what they read. Printed, it is the report;
    `undo` gives the model its own attention back, as leaving a `with` block does.

    `only` and `skip` name the layers that are meant, none for all; `causal` says whether the model
    must read no later position, None as it is; `positions` "real" counts real tokens alone.
    """

    def __init__(
        self,
        model: nn.Module,
        only: Names = None,
        skip: Names = None,
        causal: bool | None = None,
        positions: str = "absolute",
    ) -> None:
        if positions not in ("absolute", "real"):
            raise AttnSpecError(f'`positions` must be "absolute" or "real", got {positions!r}')
        if causal not in (None, True, False):
            raise TypeError(f"`causal` must be True, False or None, got {type(causal).__name__}")
        self.model, self.causal, self.real = model, causal, positions == "real"
        self.only, self.skip = names_of(only), names_of(skip)
        self._parts: list[tuple[nn.Module, SidesAttention]] = []
        self._replaced: list[str] = []
        self._back: list[Callable[[], None]] = []

    def undo(self) -> None:
        """Give the model the attention that it had; what the spec has learnt is dropped."""
        while self._back:
            self._back.pop()()

    def __enter__(self) -> Conversion:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.undo()

    @property
    def attentions(self) -> list[SidesAttention]:
        """What its parts were given."""
        return [attention for _, attention in self._parts]

    @property
    def layers(self) -> ModelUse:
        """What each attention layer of the model uses."""
        return used_by(self.model)

    def __str__(self) -> str:
        return self.report()

    def report(self, n: int | None = None) -> str:
        """What each layer uses, and what heads read of n positions, by default the model's n."""
        lines = [str(self.layers), *self._replaced]
        for part, attention in self._parts:
            where = f" in {type(part).__name__}" if len(self._parts) > 1 else ""
            for entry in attention.entries:
                length = length_of(part, entry.program) if n is None else n
                lines += _read(entry.program, length, where)
        return "\n".join(lines)

    def record(self, words: dict[str, Any], backend: str) -> None:
        """Put the texts of the specs and the arguments of `convert` that are not defaults into
        the config of the model, so that `save_pretrained` writes them."""
        names = {"only": self.only, "skip": self.skip}
        words |= {key: list(value) for key, value in names.items() if value}
        if self.causal is not None:
            words["causal"] = self.causal
        if self.real:
            words["positions"] = "real"
        self._say("attnspec", words if backend == "auto" else {**words, "backend": backend})

    def _say(self, name: str, value: object) -> None:
        """Have a config of the model's own say something."""
        model: Any = self.model
        self._set(model, "config", copy.deepcopy(model.config))
        setattr(model.config, name, value)

    def _set(self, owner: Any, name: str, value: object) -> None:
        """Set what an object itself holds under a name, until `undo`."""
        before = vars(owner).get(name, _MISSING)
        self._back.append(lambda: _put_back(owner, name, before))
        setattr(owner, name, value)

    # --- how a part is given an attention ---------------------------------------------------------

    def give(self, part: Any, name: str, attention: SidesAttention) -> None:
        """Have layers of a part of the model use the attention of a name; raises AttnSpecError, and
        leaves the whole as it was, where a layer cannot."""
        try:
            chosen = layers_of(self.model, part, self.only or None, self.skip or None)
            before = own_config(part, name, [layer.module for layer in chosen])
            for module, config in before.items():
                self._back.append(partial(_put_back, module, "config", config))
            configs = {id(x.config): x.config for x in before}
            changed = [x for x in configs.values() if x._attn_implementation == name]
            places = self._places(part, before, attention, chosen)
            kept = any(place.own and not place.crosses for place in places.values())
            self._without_windows(changed, chosen if kept else None)
            modules: dict[tuple[object, nn.Module | None], CompiledAttention] = {}
            for module, place in places.items():
                compiled = attention.for_place(place) if place.own is None else None
                if compiled is not None:
                    place = replace(place, causal=self.causal, real=self.real)
                    place = self._placed(part, module, place, compiled, modules)
                self._set(module, PLACE, place)
                if place.table is not None and hasattr(module, "compute_bias") and not kept:
                    # the table is read where the scores are: no bias [1, H, q, k] need be written
                    # down, unless for layers that keep their own attention
                    self._set(module, "compute_bias", partial(_no_bias, module_heads(module)))
            if self.causal is not None:
                readers = [module for module, place in places.items() if place.own is None]
                for reader in (*readers, *([] if kept else changed)):
                    if hasattr(reader, "is_causal") or not isinstance(reader, nn.Module):
                        self._set(reader, "is_causal", self.causal)
            self._require_used(part, name, set(places))
            self._write_by(name, chosen)
        except Exception:
            self.undo()
            raise
        self._parts.append((part, attention))

    def _places(
        self, part: nn.Module, before: Before, attention: SidesAttention, chosen: list[Layer]
    ) -> dict[nn.Module, Place]:
        """The places of layers with a spec, and of those with their own under the same config."""
        places = {layer.module: layer.place for layer in chosen}
        for _, module, place in places_in(part):
            place = places.get(module, place)
            if module in places and attention.for_place(place) is not None:
                continue
            if module in before and looks_up(type(module)):
                keeps = before[module]._attn_implementation or "eager"
                places[module] = replace(place, own=keeps)
            elif attention.for_place(place) is None:
                places.pop(module, None)
        return places

    def _without_windows(self, configs: list[Any], chosen: list[Layer] | None) -> None:
        """Have configs say that no layer has a window, unless some keep theirs and others are
        chosen, and keep what was there in words."""
        for config in configs:
            numbers = None if chosen is None else [_index(x) for x in chosen]
            words = _replaced_windows(config, numbers)
            if words and words not in self._replaced:
                self._replaced.append(words)

    def _write_by(self, name: str, chosen: list[Layer]) -> None:
        """Have `generate` make the masks of a decoder, a part of the model, by an attention."""
        model: Any = self.model
        if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
            decoder = set(model.get_decoder().modules())
            if any(layer.module in decoder for layer in chosen):
                self._say("_attn_implementation", name)

    def _placed(
        self,
        part: Any,
        module: nn.Module,
        place: Place,
        own: ModelAttention,
        held: dict[tuple[object, nn.Module | None], CompiledAttention],
    ) -> Place:
        """The place of a module with what computes there, if that is more than the spec alone."""
        if place.table is not None and any(a.scores for a in own.program.attends):
            _require_bias(own.program, module)
        elif place.table is not None:
            place = replace(place, table=None)
        if place.table is None and not learns(own.module):
            return place
        key = (own, place.table)
        if key not in held:
            held[key] = self._held(part, module, place, own)
        return replace(place, attention=held[key])

    def _held(
        self, part: Any, module: nn.Module, place: Place, own: ModelAttention
    ) -> CompiledAttention:
        if place.table is not None:
            return OwnTable(own.module, place.table)
        base = getattr(part, "base_model", part)
        if HELD in base._modules:
            raise AttnSpecError(
                f"{type(base).__name__} already has trainable parameters of a spec: call `undo()`"
                " of the earlier conversion"
            )
        plan = plan_data(own.program, own.module.backend)
        names = ("head_dim", "attention_head_size", "key_value_proj_dim")
        # where the module does not say, the size of a head is seen when it is called
        size = _number(getattr(module, name, None) for name in names)
        compiled = CompiledAttention(plan, size)
        compiled.check_finite = own.module.check_finite
        reference = next(base.parameters())
        base.add_module(HELD, compiled.to(reference.device, reference.dtype).train(base.training))
        self._back.append(lambda: base._modules.pop(HELD))
        return compiled

    def _require_used(self, part: nn.Module, name: str, modules: set[nn.Module]) -> None:
        layers, kind, inside = used_by(part), type(part).__name__, dict(part.named_modules())
        if not layers:
            raise AttnSpecError(f"{kind} has no attention layers")
        skips = any(layer.kind == "spec" for layer in layers)
        for layer in (x for x in layers if inside[x.path] in modules):
            place = place_of(inside[layer.path])
            if layer.kind != "spec" and (place is None or place.own is None):
                # a layer that asks for an attention is refused for its spec, not for its model
                page = "" if looks_up(type(inside[layer.path])) else f"; supported models: {PAGE}"
                more = f'; `skip="{layer.path}"` leaves it as it is' if skips else page
                raise AttnSpecError(f"{kind}, layer {layer.path}: {layer.what}{more}")


class OwnTable(CompiledAttention):
    """A compiled attention whose `score bias` is the table that a model has learnt, an Embedding
    [buckets, heads] under the name `relative_attention_bias`."""

    # none while the module is built
    names: frozenset[str] = frozenset()

    def __init__(self, module: CompiledAttention, table: nn.Module) -> None:
        super().__init__(plan_data(module.program, module.backend))
        self.check_finite = module.check_finite
        self.names = frozenset(bias_tables(module.program).values())
        for name in self.names:
            del self._parameters[name]
        # a part of the model already
        vars(self)["table"] = table

    def learned(self, name: str) -> Tensor:
        """A parameter by its name; the bias [layers or 1, heads, buckets] from the model."""
        if name not in self.names:
            return super().learned(name)
        weight: Tensor = vars(self)["table"].relative_attention_bias.weight
        return weight.T.expand(self.program.layers or 1, -1, -1)


def _require_bias(program: Program, module: nn.Module) -> None:
    """Raise unless the only score of every head is the bias of the model."""
    way = of_bias(module, ", and no other score")
    for attend in program.attends:
        scores = list[str]()
        for score in attend.scores:
            values = {name: written_scalar(x) for name, x in score.arguments}
            sizes = ", ".join(f"{name} = {x}" for name, x in values.items())
            scores.append(f"`score {values.get('value', f'{score.name}({sizes})')}`")
        # the way out says which bias that is
        if len(scores) != 1 or scores[0] not in way:
            raise AttnSpecError(
                f"every head of `{program.name}` must have the bias of the model as its only score,"
                f" got {' and '.join(scores) or 'none'}: {way}"
            )


def _no_bias(
    heads: int,
    query_length: int,
    key_length: int,
    device: torch.device | None = None,
    past_seen_tokens: object = 0,
) -> Tensor:
    """What stands for a bias that is read elsewhere: one zero, seen as [1, H, q, k]."""
    return torch.zeros(1, device=device).expand(1, heads, query_length, key_length)


def _put_back(owner: Any, name: str, before: object) -> None:
    if before is _MISSING:
        vars(owner).pop(name, None)
    else:
        setattr(owner, name, before)


def _index(layer: Layer) -> int | None:
    index = getattr(layer.module, "layer_idx", None)
    return index if isinstance(index, int) else layer.place.layer


def _replaced_windows(config: Any, chosen: list[int | None] | None) -> str:
    """Have a config of its own say that no layer has a window, where layers differ by that alone
    and all are given a spec, else some are `chosen` by their numbers; returns what was there, in
    words."""
    kinds, window = setting_of(config, "layer_types"), setting_of(config, "sliding_window")
    if not kinds:
        if window is not None and chosen is None:
            try:
                config.sliding_window = None
            except Exception:
                # some take numbers alone; of several kinds, by what checks the config
                config.sliding_window = _NO_WINDOW
        return "" if window is None else f"the spec replaces `sliding_window = {window}`"
    here = [kind for at, kind in enumerate(kinds) if chosen is None or at in chosen]
    cut = sorted(set(here) & ((PLAIN - {"full_attention"}) | _COMPRESSED))
    if cut and chosen is None and set(kinds) <= PLAIN:
        bases = getattr(config, "rope_parameters", None) or {}
        if not any(isinstance(bases.get(kind), dict) for kind in kinds):
            config.layer_types = ["full_attention"] * len(kinds)
        elif window is not None:
            # such layers turn positions in another way: their masks are taken for plain ones, and
            # what `generate` keeps for them must not slide
            config.sliding_window = _NO_WINDOW
    count = sum(kind in cut for kind in here)
    return f"the spec replaces {', '.join(cut)} in {count} layers" if cut else ""


def module_heads(module: nn.Module) -> int:
    """The query heads of an attention module."""
    names = ("n_heads", "num_heads", "num_attention_heads")
    heads = _number(attribute_of(module, name) for name in names)
    if heads is None:
        raise AttnSpecError(f"{type(module).__name__} does not say how many heads it has")
    return heads


def _number(values: Iterable[object]) -> int | None:
    """The first of some settings that is a whole number."""
    return next((x for x in values if isinstance(x, int)), None)


def length_of(model: Any, program: Program) -> int:
    """The length that a model, or a part of one, is made for, or the one of a grid."""
    if program.fixed_length is not None:
        return program.fixed_length
    config = getattr(model, "config", None)
    size, patch = getattr(config, "image_size", None), getattr(config, "patch_size", None)
    if isinstance(size, int) and isinstance(patch, int):
        extra = max((place.extra for *_, place in places_in(model)), default=0)
        return (size // patch) ** 2 + extra
    names = (_WRITTEN, *_LENGTHS) if has_cross(model) and not program.cross else _LENGTHS
    length = _number(getattr(config, name, None) for name in names)
    return 512 if length is None else length


def _read(program: Program, n: int, where: str) -> Iterator[str]:
    """What each head of a spec reads of n positions, in lines; `where` is the part of the model."""
    at = f", cross-attention with {n} queries and {n} keys" if program.cross else f" at n = {n}"
    yield f"`{program.name}`{where}{at}"
    program, length = crossed(program, n)
    stack = Stack(program, None, None)
    try:
        if stack.unknown is not None:
            yield f"  pairs are not counted: {stack.unknown}"
            return
        bound = stack.bound(length)
        for index, (_, _, relation) in enumerate(bound.found):
            rows = [[slot == index for slot in row] for row in bound.slots]
            counts = head_counts(relation, length, program.crossing)
            yield (
                f"  {slots_words(rows)}: {counts.edges:,} pairs in each head, density"
                f" {counts.density:.3g}, at most {count_of(counts.degree, 'key')} of a query"
            )
    except (RelationError, TooMuch) as error:
        yield f"  not counted: {error}"
