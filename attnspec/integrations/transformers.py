"""Hugging Face transformers: a spec as the attention of a model.

    name = register(attnspec.load("longformer.attn", radius=64))
    model = AutoModel.from_pretrained(path, attn_implementation=name)

The spec takes the place of the model's own pattern. Padding (a 2-D `attention_mask`), the cache
and the layer index come from the model; positions are those of the padded tensor. What a spec would
silently drop or change is refused: masks of the user's own, sliding windows, packed sequences,
extra terms of the score, and a spec that reads the future in a model that must not.

`model(..., attnspec_inputs={"important": mask})` hands over the run-time inputs of a spec.
"""

from __future__ import annotations

import re
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, cast

from attnspec.diagnostics import AttnSpecError
from attnspec.integrations.model_attention import ModelAttention
from attnspec.integrations.model_mask import model_mask
from attnspec.spec import Spec

if TYPE_CHECKING:
    from torch import nn

    from attnspec.runtime import CompiledAttention

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
    return name


def _transformers() -> ModuleType:
    try:
        return import_module("transformers")
    except ImportError as error:
        raise ImportError(
            "this integration needs transformers 5 or newer: pip install 'attnspec[hf]'"
        ) from error


def _compiled(spec: Spec | nn.Module | type[nn.Module], backend: str) -> CompiledAttention:
    from attnspec.runtime import CompiledAttention

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
