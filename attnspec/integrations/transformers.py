"""Hugging Face transformers: a spec as the attention of a model.

    name = register(attnspec.load("longformer.attn", radius=64))
    model = AutoModel.from_pretrained(path, attn_implementation=name)

The spec takes the place of the model's own pattern. Padding (a 2-D `attention_mask`), the cache
and the layer index come from the model; positions are those of the padded tensor. What a spec would
silently drop or change is refused: masks of the user's own, sliding windows, packed sequences,
extra terms of the score, a spec that reads the future in a model that must not, and one whose rows
change with the length beside a cache that holds earlier positions.

`model(..., attnspec_inputs={"important": mask})` hands over the run-time inputs of a spec, and
`with_inputs` those of calls that take no such argument, as `generate`. `convert` gives a spec to a
model that is there already, or to a part of one; `used_by` says what each layer of a model uses.
Which models take a spec stands in README.md beside this file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, cast

from attnspec.integrations.model_attention import ModelAttention
from attnspec.integrations.model_mask import model_mask
from attnspec.integrations.model_use import LayerUse, ModelUse, guard, point, registered, used_by
from attnspec.spec import Spec
from attnspec.text.diagnostics import AttnSpecError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from attnspec.runtime.module import CompiledAttention

__all__ = ["LayerUse", "ModelUse", "convert", "register", "used_by", "with_inputs"]

_OWNERS: dict[str, tuple[object, str]] = {}
"""What was registered here under each name: the spec, class or module, and the backend."""

_SPECIAL = ("eager", "flash", "flex_attention", "paged", "sdpa")
"""Words in a name that make transformers treat an attention as one of its own."""


def register(
    spec: Spec | nn.Module | type[nn.Module],
    name: str | None = None,
    *,
    backend: str = "auto",
    override: bool = False,
) -> str:
    """Make a spec available as `attn_implementation` and return the name it has there.

    `spec` is a Spec, compiled here for `backend`, or the class (or an instance) that `attnspec
    compile` wrote. `name` defaults to `attnspec_` and the spec's name. Attention and mask function
    are registered together: without the second, transformers would drop padding without a word.

    From then on a model that computes attention in code of its own, and would ignore the name,
    raises AttnSpecError where it is built with it or switched to it.

    Raises AttnSpecError for a name that is taken by something else (unless `override`) or that
    means something to transformers, and for specs that a model cannot hold; ImportError without
    transformers.
    """
    transformers = _transformers()
    module = _compiled(spec, backend)
    if name is None:
        name = f"attnspec_{module.program.name}"
    _check_name(name)
    owner = (spec, backend)
    attention = ModelAttention(module)
    taken = name in transformers.AttentionInterface().valid_keys()
    if taken and not override and not _same(_OWNERS.get(name), owner):
        raise AttnSpecError(
            f"the name `{name}` must be free, it is registered for another attention: "
            "give another `name`, or `override=True`"
        )
    _OWNERS[name] = owner
    transformers.AttentionInterface.register(name, attention)
    transformers.AttentionMaskInterface.register(name, model_mask)
    guard()
    return name


def convert(
    model: nn.Module,
    spec: Spec | nn.Module | type[nn.Module],
    name: str | None = None,
    *,
    backend: str = "auto",
) -> nn.Module:
    """Give every attention layer of a model this spec; returns the model itself.

    `model` is a PreTrainedModel, or one within another: `convert(bart.get_encoder(), spec)` leaves
    the decoder as it was. The model goes by a config of its own from then on, a copy. The other
    arguments are those of `register`.

    Raises AttnSpecError, and leaves the model as it was, where a layer cannot use the spec.
    """
    point(model, register(spec, name, backend=backend))
    return model


@contextmanager
def with_inputs(name: str, inputs: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """The run-time inputs of the spec registered under a name, for every call within.

        with with_inputs(name, {"important": mask}):
            model.generate(ids, max_new_tokens=20)

    `tokens` and `ids` are [B, length] and as long as the sequence will get, or longer: positions
    are those of the padded tensor, and a call takes what it has reached. Raises AttnSpecError for
    a name without a spec; calls raise for tensors that do not fit.
    """
    attention = registered(name)
    if attention is None:
        raise AttnSpecError(f"the name of a registered spec is needed, got {name!r}")
    before, attention.standing = attention.standing, inputs
    try:
        yield
    finally:
        attention.standing = before


def _transformers() -> ModuleType:
    try:
        return import_module("transformers")
    except ImportError as error:
        raise ImportError(
            "this integration needs transformers 5 or newer: pip install 'attnspec[hf]'"
        ) from error


def _compiled(spec: Spec | nn.Module | type[nn.Module], backend: str) -> CompiledAttention:
    from attnspec.runtime.module import CompiledAttention

    if isinstance(spec, Spec):
        return spec.compile(backend=backend)
    given = spec if isinstance(spec, type) else type(spec)
    if not issubclass(given, CompiledAttention):
        raise TypeError(
            "a Spec, or the class that `attnspec compile` wrote (without `--standalone`), is "
            f"needed, got {given.__name__}"
        )
    if backend != "auto":
        raise AttnSpecError(
            f"`backend` must be left out for a compiled module, got {backend!r}: "
            "it was chosen when the module was compiled"
        )
    return cast(CompiledAttention, spec() if isinstance(spec, type) else spec)


def _check_name(name: str) -> None:
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name):
        raise AttnSpecError(
            f"a name must be a letter, then letters, digits and underscores, got {name!r}"
        )
    for word in _SPECIAL:
        if word in name:
            raise AttnSpecError(
                f"a name must not contain `{word}`, which transformers gives a meaning, "
                f"got {name!r}: give another `name`"
            )


def _same(a: tuple[object, str] | None, b: tuple[object, str]) -> bool:
    """Specs compare by meaning, modules and classes by identity."""
    if a is None or a[1] != b[1]:
        return False
    return a[0] == b[0] if isinstance(a[0], Spec) else a[0] is b[0]
