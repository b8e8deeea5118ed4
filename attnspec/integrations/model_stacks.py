"""The stacks of attention layers of a model, and those of their layers that are given a spec."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from torch import nn

from attnspec.integrations.model_advice import CROSS
from attnspec.integrations.model_layers import Place, looks_up, places_in
from attnspec.runtime.module import CompiledAttention
from attnspec.text.diagnostics import AttnSpecError

Names: TypeAlias = "str | Sequence[str] | None"
"""One or several dotted names of modules, all below is meant."""


@dataclass(frozen=True, eq=False)
class Layer:
    """An attention module of a model, where it is and what place it has."""

    path: str
    module: nn.Module
    place: Place

    @property
    def stack(self) -> str:
        """The list of layers that it is in; the module itself where it is in none."""
        match = re.match(r"(.+?)\.\d+(\.|$)", self.path)
        return match[1] if match else self.path

    @property
    def asks(self) -> bool:
        """Whether another attention can take its place."""
        return looks_up(type(self.module)) or isinstance(self.module, CompiledAttention)


def layers_of(
    model: nn.Module, part: nn.Module, only: Names = None, skip: Names = None
) -> list[Layer]:
    """The attention layers of a part of a model that are given a spec; names are those of the
    model, and with them layers are numbered as they come, over what is chosen.

    Raises AttnSpecError for a name with no attention below, and for several stacks where `only`
    names none.
    """
    every, inside = [Layer(*each) for each in places_in(model)], set(part.modules())
    for name in (*names_of(only), *names_of(skip)):
        if not any(_below(layer.path, (name,)) for layer in every):
            raise AttnSpecError(
                f"{name!r} is not a part of {type(model).__name__} with attention: its stacks are"
                f" {_listed(every)}"
            )
    layers, kind = [x for x in every if x.module in inside], type(part).__name__
    chosen = layers if only is None else [x for x in layers if _below(x.path, names_of(only))]
    if only is not None or skip is not None:
        chosen = numbered([x for x in chosen if not _below(x.path, names_of(skip))])
    if layers and not chosen:
        raise AttnSpecError(f"`skip=` leaves no layer of {kind}: it has {_listed(layers)}")
    # what computes attention in its own code is refused with that reason
    if only is None and len({layer.stack for layer in chosen if layer.asks}) > 1:
        reads_back = (x for x in chosen if getattr(x.module, "is_causal", False))
        example = next(reads_back, chosen[0]).stack
        both = getattr(getattr(part, "config", None), "is_encoder_decoder", False)
        raise AttnSpecError(
            f"{kind} has several stacks of attention layers, {_listed(chosen)}: choose one by"
            f' `only=` or `skip=`, as in `only="{example}"`' + (f", or {CROSS}" if both else "")
        )
    return chosen


def names_of(names: Names) -> tuple[str, ...]:
    """Dotted names as they are given, one or several."""
    return (names,) if isinstance(names, str) else tuple(names or ())


def numbered(layers: list[Layer]) -> list[Layer]:
    """Layers with numbers as they come, those that read another sequence by themselves."""
    result = []
    for layer in layers:
        row = [x.module for x in layers if x.place.crosses == layer.place.crosses]
        place = layer.place
        if place.layer is not None:
            place = replace(place, layer=row.index(layer.module), layers=len(row))
        result.append(replace(layer, place=place))
    return result


def _below(path: str, names: Iterable[str]) -> bool:
    return any(path == name or path.startswith(f"{name}.") for name in names)


def _listed(layers: list[Layer]) -> str:
    rows: dict[str, list[Layer]] = {}
    for layer in layers:
        rows.setdefault(layer.stack, []).append(layer)
    return ", ".join(
        f"`{stack}` ({len(row)} of {type(row[0].module).__name__})" for stack, row in rows.items()
    )


def part_of(model: Any, side: str) -> Any:
    """The "encoder" or the "decoder" of a model that has both, or of one that is a decoder whose
    layers can read an encoder, that model."""
    get = getattr(model, f"get_{side}", None)
    both = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    if get is not None and both:
        return get()
    if side == "decoder" and has_cross(model):
        return model
    raise AttnSpecError(
        f"`{side}=` is for models with an encoder and a decoder, got {type(model).__name__}: use"
        " `convert(model, spec)`"
    )


def has_cross(part: nn.Module) -> bool:
    """Whether layers of a part read another sequence."""
    return any(place.crosses for _, _, place in places_in(part))
