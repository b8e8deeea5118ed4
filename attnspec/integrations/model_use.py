"""Which attention each layer of a model uses, and giving a model, or a part of one, another.

transformers takes any registered name for any model; those that compute attention in their own
code then ignore it, or fail inside. `guard` has them refuse where they are built or switched.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TypeAlias

from torch import nn

from attnspec.integrations.model_layers import (
    attention_layers,
    attribute_of,
    keeps_its_own,
    looks_up,
    place_of,
)
from attnspec.integrations.model_sides import SidesAttention
from attnspec.runtime.module import CompiledAttention
from attnspec.text.diagnostics import AttnSpecError

PAGE = "attnspec/integrations/README.md"
"""Where the repository lists what families of models do with a spec."""


Before: TypeAlias = "dict[Any, Any]"
"""The configs that modules had."""


_WORDS = {
    "spec": "uses the spec {}",
    "dense": "uses dense attention: {}",
    "cannot": "cannot use the spec: {}",
}


@dataclass(frozen=True)
class LayerUse:
    """What one attention layer uses: `kind` is "spec", "dense" or "cannot", `what` says more."""

    path: str
    kind: str
    what: str

    def __str__(self) -> str:
        return f"{self.path}: {_WORDS[self.kind].format(self.what)}"


class ModelUse(tuple[LayerUse, ...]):
    """The attention layers of a model in the order of its modules; printed, a line for each."""

    __slots__ = ()

    def __str__(self) -> str:
        return "\n".join(map(str, self)) or "no attention layers"


def used_by(model: nn.Module) -> ModelUse:
    """What each attention layer of a model uses, looked up as the layer itself will when called.

    "spec" with its name and layer; "dense" where the layer asks for another attention, which is
    named; "cannot" with the reason, where the layer asks for none or the spec cannot stand for it.
    What only a call shows, its masks for example, is refused when it is called.
    """
    # whoever calls from outside may hand in anything
    value: object = model
    if not isinstance(value, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(value).__name__}")
    return ModelUse(_use(path, module) for path, module in attention_layers(model))


def _use(path: str, module: nn.Module) -> LayerUse:
    kind = type(module).__name__
    if isinstance(module, CompiledAttention):
        return LayerUse(path, "spec", f"`{module.program.name}`")
    if not looks_up(type(module)):
        return LayerUse(path, "cannot", f"{kind} computes attention in its own code")
    name = attribute_of(module, "_attn_implementation")
    attention = registered(name)
    if attention is None:
        return LayerUse(path, "dense", f"`{name or 'eager'}` of transformers")
    chosen = attention.of(module)
    if chosen is None:
        return LayerUse(path, "dense", "the model's own, without a spec")
    try:
        chosen.require_fit(module)
    except AttnSpecError as error:
        return LayerUse(path, "cannot", str(error))
    place = place_of(module)
    layer = getattr(module, "layer_idx", None) if place is None else place.layer
    of = "" if layer is None else f", layer {layer}"
    return LayerUse(path, "spec", f"`{chosen.program.name}`{of}")


def registered(name: object) -> SidesAttention | None:
    """The attention that `register` put under a name; None for any other."""
    if not isinstance(name, str):
        return None
    attention = import_module("transformers").AttentionInterface().get(name)
    return attention if isinstance(attention, SidesAttention) else None


def own_config(model: Any, name: str, layers: Collection[nn.Module]) -> Before:
    """Give the parts of a model that these layers are in configs of their own with this attention;
    returns the configs that modules had.

    A part, a PreTrainedModel that makes its own masks, shares its config with the whole; its layers
    and the masks that it makes go by the copy. A config of the whole holds the copy, too, unless
    another part shares what was copied.
    """
    transformers = import_module("transformers")
    if not isinstance(model, transformers.PreTrainedModel):
        what = ", which makes its masks"
        mend = "that, with `layer 0 { … }` in the spec or with `only=`"
        if not any(isinstance(x, transformers.PreTrainedModel) for x in model.modules()):
            what, mend = " of transformers", "the whole model, with `only=` for a part of it"
        raise AttnSpecError(
            f"model must be a PreTrainedModel{what}, got {type(model).__name__}: convert {mend};"
            " in a model of plain torch use `attnspec.MultiheadAttention`"
        )
    parts: dict[Any, Before] = {}
    for module, part in _parts_of(model, transformers.PreTrainedModel):
        if isinstance(vars(module).get("config"), transformers.PreTrainedConfig):
            parts.setdefault(part, {})[module] = module.config
    attention = {module for _, module in attention_layers(model)}
    switched = [part for part in parts if any(x in layers for x in parts[part])]
    before: Before = {}
    copies: dict[int, Any] = {}
    for part in switched:
        before.update(parts[part])
        memo: dict[int, Any] = {}
        for module, config in parts[part].items():
            module.config = copy.deepcopy(config, memo)
            module.config._attn_implementation = name
        copies.update(memo)
    rest = {part: configs for part, configs in parts.items() if part not in switched}
    kept = {id(config) for each in rest.values() for x, config in each.items() if x in attention}
    for part, configs in rest.items():
        if set(part.modules()).intersection(switched):
            around = {x: config for x, config in configs.items() if id(config) not in kept}
            before.update(around)
            for module, config in around.items():
                module.config = copy.deepcopy(config, copies)
    return before


def _parts_of(module: Any, kind: type, part: Any = None) -> Iterator[tuple[Any, Any]]:
    """The modules within one, each with the innermost model of this kind that it is in."""
    part = module if isinstance(module, kind) else part
    yield module, part
    for child in module.children():
        yield from _parts_of(child, kind, part)


def guard() -> None:
    """Have every model refuse a spec that its layers would never ask for; done once."""
    model = import_module("transformers").PreTrainedModel
    for method in ("get_correct_attn_implementation", "set_attn_implementation"):
        original = getattr(model, method)
        if not hasattr(original, "_guarded_by_attnspec"):
            setattr(model, method, _guarded(original))


def _guarded(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method that sets the attention of a model, refusing specs that it would ignore."""

    @functools.wraps(method)
    def guarded(model: Any, *arguments: Any, **settings: Any) -> Any:
        for asked in (*arguments, *settings.values()):
            attention = registered(asked)
            if attention is not None:
                _require_look_up(model, attention)
        return method(model, *arguments, **settings)

    guarded._guarded_by_attnspec = True  # type: ignore[attr-defined]
    return guarded


def _require_look_up(model: Any, attention: SidesAttention) -> None:
    """Raise for a model, built or about to be, with a model within whose layers ask for nothing."""
    pretrained = import_module("transformers").PreTrainedModel
    # a model that is about to be built has no modules yet, but its class
    within = model.modules() if "_modules" in vars(model) else (model,)
    for part in within:
        methods = keeps_its_own(type(part), pretrained) if isinstance(part, pretrained) else []
        if methods:
            rest = "" if part is model else ", `convert` the parts that do ask"
            raise AttnSpecError(
                f"{type(part).__name__} computes attention in its own code ({', '.join(methods)})"
                f" and would not use `{attention.program.name}`: load it with its own"
                f" attention{rest}, or take one of the supported models: {PAGE}"
            )
