"""Hugging Face transformers: a spec as the attention of a model.

    name = register(attnspec.load("longformer.attn", radius=64))
    model = AutoModel.from_pretrained(path, attn_implementation=name)

    print(convert(model, spec))      # or a model that is there already

The spec takes the place of the model's own pattern. Padding (a 2-D `attention_mask`), the cache
and the layer index come from the model; positions are those of the padded tensor. What a spec would
silently drop or change is refused: masks of the user's own, sliding windows, packed sequences,
extra terms of the score, a spec that reads the future in a model that must not, and one whose rows
change with the length beside a cache that holds earlier positions.

`model(..., attnspec_inputs={"important": mask})` hands over the run-time inputs of a spec, and
`with_inputs` those of calls that take no such argument, as `generate`. `convert` gives a spec to a
model that is there already, to a part of one, or specs to an encoder and a decoder; it replaces
windows, counts class tokens, has the model hold what the spec learns, and undoes. `used_by` says
what each layer of a model uses. `SpecCache` keeps what a spec may still read while a model writes.
Which models take a spec stands in README.md beside this file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from itertools import chain, count
from os import PathLike
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from attnspec.integrations.conversion import Conversion
from attnspec.integrations.model_attention import ModelAttention
from attnspec.integrations.model_files import COMPILED, loaded, watch_files
from attnspec.integrations.model_mask import model_mask
from attnspec.integrations.model_sides import CrossAttention, SidesAttention
from attnspec.integrations.model_stacks import Names, part_of
from attnspec.integrations.model_use import LayerUse, ModelUse, guard, registered, used_by
from attnspec.integrations.model_weights import bert_of_bigbird, roberta_of_longformer
from attnspec.spec import Spec
from attnspec.text.diagnostics import AttnSpecError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from attnspec.integrations.spec_cache import SpecCache
    from attnspec.runtime.module import CompiledAttention

__all__ = [
    "Conversion",
    "LayerUse",
    "ModelUse",
    "SpecCache",
    "bert_from_bigbird",
    "convert",
    "from_pretrained",
    "register",
    "roberta_from_longformer",
    "used_by",
    "with_inputs",
]

Given: TypeAlias = "Spec | nn.Module | type[nn.Module]"
"""A spec, or the class (or an instance) that `attnspec compile` wrote."""

_OWNERS: dict[str, tuple[object, str]] = {}
"""What was registered here under each name: the spec, class or module, and the backend. Specs
compare by meaning, modules and classes by identity."""

_SPECIAL = ("eager", "flash", "flex_attention", "paged", "sdpa")
"""Words in a name that make transformers treat an attention as one of its own."""


def register(
    spec: Given, name: str | None = None, *, backend: str = "auto", override: bool = False
) -> str:
    """Make a spec available as `attn_implementation` and return the name it has there.

    `spec` is a Spec, compiled here for `backend`, or the class (or an instance) that `attnspec
    compile` wrote. `name` defaults to `attnspec_` and the spec's name. Attention and mask function
    are registered together: without the second, transformers would drop padding without a word.

    From then on a model that computes attention in code of its own, and would ignore the name,
    raises AttnSpecError where it is built with it or switched to it.

    Raises AttnSpecError for a name that is taken by something else (unless `override`) or that
    means something to transformers, and for specs that only a model that is there already can
    hold, by `convert`; ImportError without transformers.
    """
    _transformers()
    module = _compiled(spec, backend)
    attention = ModelAttention(module)
    attention.require_held(None)
    attention.require_one_sequence()
    name = _default(module.program.name) if name is None else name
    _enter(name, SidesAttention(attention), (spec, backend), override)
    return name


def convert(
    model: nn.Module,
    spec: Given | None = None,
    name: str | None = None,
    *,
    encoder: Given | None = None,
    decoder: Given | None = None,
    cross: Given | None = None,
    backend: str = "auto",
    causal: bool | None = None,
    only: Names = None,
    skip: Names = None,
    positions: str = "absolute",
) -> Conversion:
    """Give every attention layer of a model this spec, in place.

        print(convert(model, spec))                       # what each layer uses and each head reads
        convert(model, encoder=near, decoder=recent, cross=band)  # BART, T5, Whisper: some, or all
        convert(llava, spec, only="model.language_model")         # of several stacks of layers, one

    Layers are numbered as they come; the spec takes the place of windows that the model has of its
    own, and keeps what its layers do besides (their rotations, for example). `extra_tokens` of a
    spec are tokens that the model puts first (class tokens, registers). `score bias` is read from
    the table that a model has (T5); what else a spec learns becomes a part of the model, `attnspec`
    in its state dict. `cross`, a spec that says so, is for the layers of the decoder that read the
    encoder; sides that are given none keep their own attention. `model` may be a part of another;
    it goes by a config of its own from then on, a copy. `name` and `backend` are those of
    `register`.

    `only` and `skip` are dotted names of modules, one or several; all layers below are meant, and
    the spec's layers count over those that are chosen. `causal=False` is for a decoder that shall
    read later positions, those of a prompt for example: its own switches are set. With
    `positions="real"` padding takes no position, and changes nothing; with "absolute" it counts.

    The Conversion that is returned has `model`, `layers`, `report(n)` and `undo()`; it prints
    as its report, and undoes itself at the end of a `with` block. Raises AttnSpecError, and leaves
    the model as it was, where a layer cannot use the spec.
    """
    _transformers()
    done = Conversion(model, only, skip, causal, positions)
    specs = _sides(spec, name, {"encoder": encoder, "decoder": decoder, "cross": cross})
    if cross is not None and done.real:
        raise AttnSpecError(
            '`cross=` joins the positions of two sequences: leave `positions="real"` out'
        )
    if spec is not None:
        done.give(model, *_entered(spec, None, name, backend))
    for side, own, joins in (("encoder", encoder, None), ("decoder", decoder, cross)):
        if own is not None or joins is not None:
            done.give(part_of(model, side), *_entered(own, joins, None, backend))
    done.record(_texts_of(specs), backend)
    return done


def from_pretrained(path: str | PathLike[str], kind: Any = None, **settings: Any) -> Conversion:
    """A model that was converted and saved by `save_pretrained`, with what its specs have learnt.

    `kind` is its class, by default the one that was saved; `settings` are those of the class's own
    `from_pretrained`. Raises AttnSpecError for a model that was not converted.
    """
    transformers = _transformers()
    config = transformers.AutoConfig.from_pretrained(path)
    if not getattr(config, "attnspec", None):
        raise AttnSpecError(
            f"the config in {path} names no spec: call `convert(model, spec)` before"
            " `save_pretrained`"
        )
    kind = kind or getattr(transformers, config.architectures[0])
    done: Conversion = loaded(kind, path, **settings)[1]
    return done


def _sides(
    spec: Given | None, name: str | None, sides: Mapping[str, Given | None]
) -> dict[str, Given]:
    """One spec, or those of the sides of a model that has two, by the arguments of `convert`."""
    specs = {side: each for side, each in sides.items() if each is not None}
    if specs and (spec is not None or name is not None):
        raise AttnSpecError(
            "pass either one spec, which may have a `name`, or some of `encoder=`, `decoder=` and"
            " `cross=`"
        )
    if specs:
        return specs
    if spec is None:
        raise AttnSpecError("pass a spec: `convert(model, spec)`")
    return {"spec": spec}


def _texts_of(specs: Mapping[str, Given]) -> dict[str, str]:
    """What a config can hold of specs: their texts, or the name of one that is not a Spec."""
    for spec in specs.values():
        if not isinstance(spec, Spec):
            kind = spec if isinstance(spec, type) else type(spec)
            return {COMPILED: kind.__name__}
    return {side: spec.source for side, spec in specs.items() if isinstance(spec, Spec)}


def roberta_from_longformer(
    model: nn.Module, important: str | None = None, *, backend: str = "auto"
) -> Conversion:
    """A RoBERTa with the weights of a Longformer, converted to the spec of its windows; `model` of
    what is returned is the new one.

        done = roberta_from_longformer(longformer, important="important")
        done.model(ids, attnspec_inputs={"important": first_tokens})

    `important` names the input of kind `tokens` that marks global tokens; without it there are
    none. Their own projections (`query_global` and its kind) must be those of all tokens, RoBERTa
    has no others: AttnSpecError where they are not, and for a head that RoBERTa has not.
    """
    made, spec = roberta_of_longformer(model, important)
    return convert(made, spec, backend=backend)


def bert_from_bigbird(model: nn.Module, *, backend: str = "auto") -> Conversion:
    """A BERT with the weights of a BigBird, converted to the spec of its blocks; `model` of what is
    returned is the new one.

    Random blocks are drawn by the language's generator, other ones than those of transformers,
    which draws anew in training, and in evaluation takes the first block every time and counts its
    keys once more. Raises AttnSpecError for what BERT cannot do.
    """
    made, spec = bert_of_bigbird(model)
    return convert(made, spec, backend=backend)


@contextmanager
def with_inputs(name: str | Conversion, inputs: Mapping[str, Tensor]) -> Iterator[None]:
    """The run-time inputs of a spec, by the name that it is registered under or by what `convert`
    returned, for every call within.

        with with_inputs(name, {"important": mask}):
            model.generate(ids, max_new_tokens=20)

    `tokens`, `ids` and `numbers` are [B, length], `choices` [B, H or 1, length, c] and `buckets`
    [B, H or 1, rounds, length], and as long as the sequence will get, or longer: positions are
    those of the padded tensor, and a call takes what it has reached. Beams are samples of their
    own: `x.repeat_interleave(num_beams, 0)`. Raises AttnSpecError for a name without a spec; calls
    raise for tensors that do not fit.
    """
    if isinstance(name, Conversion):
        entries = [each for attention in name.attentions for each in attention.entries]
    else:
        attention = registered(name)
        entries = [] if attention is None else list(attention.entries)
    if not entries:
        raise AttnSpecError(f"name must be that of a registered spec, got {name!r}")
    before = [each.standing for each in entries]
    for each in entries:
        each.standing = inputs
    try:
        yield
    finally:
        for each, kept in zip(entries, before, strict=True):
            each.standing = kept


def _entered(
    own: Given | None, cross: Given | None, name: str | None, backend: str
) -> tuple[str, SidesAttention]:
    """Specs under a name, for a model that holds what they learn."""
    within = None if own is None else ModelAttention(_compiled(own, backend))
    joins = None if cross is None else CrossAttention(_compiled(cross, backend))
    attention = SidesAttention(within, joins)
    owner = own if joins is None else (own, cross)
    if name is None:
        plain = _default(*(each.program.name for each in attention.entries))
        names = chain([plain], (f"{plain}_{number}" for number in count(2)))
        taken = (owner, backend)
        # one that is free, or the owner's already
        name = next(x for x in names if registered(x) is None or _OWNERS.get(x) == taken)
    return name, _enter(name, attention, (owner, backend), False)


def _default(*words: str) -> str:
    """The name for specs of these names; what transformers gives a meaning is broken up."""
    name = "_".join(("attnspec", *words))
    return re.sub("|".join(_SPECIAL), lambda found: f"{found[0][0]}_{found[0][1:]}", name)


def _enter(
    name: str, attention: SidesAttention, owner: tuple[object, str], override: bool
) -> SidesAttention:
    """Put an attention under a name, with its mask function; what is there already, if it is of the
    same owner."""
    transformers = _transformers()
    _check_name(name)
    there = registered(name)
    if name in transformers.AttentionInterface().valid_keys() and not override:
        if there is not None and _OWNERS.get(name) == owner:
            return there
        raise AttnSpecError(
            f"the name `{name}` must be free, it is registered for another attention: "
            "give another `name`, or `override=True`"
        )
    _OWNERS[name] = owner
    transformers.AttentionInterface.register(name, attention)
    transformers.AttentionMaskInterface.register(name, model_mask)
    guard()
    watch_files()
    return attention


def __getattr__(name: str) -> Any:
    """`SpecCache`, which derives from a class of transformers, when it is first asked for."""
    if name == "SpecCache":
        _transformers()
        return import_module("attnspec.integrations.spec_cache").SpecCache
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _transformers() -> ModuleType:
    try:
        return import_module("transformers")
    except ImportError as error:
        raise ImportError(
            "this integration needs transformers 5 or newer: pip install 'attnspec[hf]'"
        ) from error


def _compiled(spec: Given, backend: str) -> CompiledAttention:
    from attnspec.runtime.module import CompiledAttention

    if isinstance(spec, Spec):
        return spec.compile(backend=backend)
    kind = spec if isinstance(spec, type) else type(spec)
    if not issubclass(kind, CompiledAttention):
        raise TypeError(
            "spec must be a Spec (`attnspec.parse(text)`, `attnspec.load(path)`), a compiled module"
            " (`spec.compile()`) or the class that `attnspec compile` wrote (without"
            f" `--standalone`), got {kind.__name__}"
        )
    if backend != "auto":
        raise AttnSpecError(
            f"`backend` must be left out for a compiled module, got {backend!r}: "
            "it was chosen when the module was compiled"
        )
    return cast(CompiledAttention, spec() if isinstance(spec, type) else spec)


def _check_name(name: str) -> None:
    # whoever calls from outside may hand in anything
    value: object = name
    if not isinstance(value, str):
        raise TypeError(f"a name must be a str, got {type(value).__name__}")
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
