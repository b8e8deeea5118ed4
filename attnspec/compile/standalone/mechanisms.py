"""The file of a spec whose heads all have one mechanism: its own kernel, linear in n where the
mechanism is."""

from __future__ import annotations

import dis
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, TypeAlias

from attnspec.compile.standalone import sources
from attnspec.compile.standalone.lifting import imported, lifted
from attnspec.compile.standalone.page import StandaloneError
from attnspec.compile.standalone.sources import features, linear, low_rank, module, sums
from attnspec.graphs.bind import Situation
from attnspec.ir.mechanisms.declaration import MechanismDeclaration, Part
from attnspec.ir.mechanisms.efficient import Efficient
from attnspec.ir.mechanisms.favor import Favor
from attnspec.ir.mechanisms.fourier import Fourier
from attnspec.ir.mechanisms.gmlp import Gmlp
from attnspec.ir.mechanisms.linear import Linear
from attnspec.ir.mechanisms.linformer import Linformer
from attnspec.ir.mechanisms.mixer import Mixer
from attnspec.ir.mechanisms.nystrom import Nystrom
from attnspec.ir.mechanisms.rbf import Rbf
from attnspec.ir.mechanisms.rfa import Rfa
from attnspec.ir.mechanisms.synthesizer import Synthesizer
from attnspec.ir.mechanisms.taylor import Taylor
from attnspec.ir.program import Program
from attnspec.ir.scalars import Apply, Symbol
from attnspec.lower.mechanism_sizes import bind_mechanism, learned_parts

Function: TypeAlias = Callable[..., Any]

_IMPORTS = """\
import math
from functools import lru_cache

import torch
from torch import nn
from torch.nn.functional import gelu, layer_norm, pad, scaled_dot_product_attention"""

KINDS = {
    "positive": features.positive,
    "hyperbolic": features.hyperbolic,
    "trig": features.trig,
    "relu": features.relu_along,
}
"""The features of `favor`."""

_FACTOR = '''def factor_of(size):
    """The root of the scale of scores."""
    return 1.0'''


@dataclass(frozen=True)
class Recipe:
    """What the file of a mechanism has: the function that mixes, the settings that it and what it
    calls read, the functions that stand in place of samples, and the factor of rows, if it is not
    the usual one."""

    mix: Function
    settings: Mapping[str, object] = field(default_factory=dict)
    instead: Mapping[Function, Function] = field(default_factory=dict)
    factor: float | None = None


def mechanism_module(program: Program, class_name: str) -> str:
    """All but the docstring; raises StandaloneError for what cannot be said."""
    attend = program.attends[0]
    if len(program.attends) > 1:
        raise StandaloneError("its heads or layers have different mechanisms")
    if attend.mechanism is None or attend.graph is not None:
        raise StandaloneError("it weighs some pairs exactly and others by a mechanism")
    if any(isinstance(value, Symbol | Apply) for _, value in attend.mechanism.arguments):
        raise StandaloneError("the arguments of its mechanism depend on n, the layer or the head")
    if isinstance(attend.scale, Symbol | Apply):
        raise StandaloneError("its scale depends on n, the layer or the head")
    at = Situation(1, {}, layers=program.layers or 1, heads=program.heads)
    declared = bind_mechanism(attend.mechanism, at)
    recipe = _recipe(declared, program.causal, attend.scale)
    parts: dict[str, tuple[object, ...]] = {
        name: (_rows(program, part) + part.shape, *_start(part))
        for (_, part), name in learned_parts(program).items()
    }
    kind = module.Learner if parts else module.Attention
    names = {old.__name__: new.__name__ for old, new in recipe.instead.items()}
    names |= {kind.__name__: class_name, recipe.mix.__name__: "mix"}
    names |= module.TWO_SEQUENCES if program.cross else {}
    *functions, mix = needed(recipe.mix, recipe.instead)
    if recipe.factor is not None:
        functions.remove(features.factor_of)
    sections = [
        _constants(program, {**recipe.settings, "LONGEST": declared.longest}, parts),
        *([] if recipe.factor is None else [_FACTOR.replace("1.0", repr(recipe.factor))]),
        *lifted([*functions, mix, linear.attend, module.given, kind], names),
    ]
    text = "\n\n\n".join(sections) + "\n"
    return f"{imported(_IMPORTS, text)}\n\n{text}"


def _constants(
    program: Program, settings: dict[str, object], parts: dict[str, tuple[object, ...]]
) -> str:
    found = {"HEADS": program.heads, "LAYERS": program.layers, "INPUTS": {}, **settings}
    lines = [f"{key} = {value!r}" for key, value in found.items()]
    if parts:
        lines += ["PARTS = {", *[f"    {key!r}: {part!r}," for key, part in parts.items()], "}"]
    return "\n".join(lines).replace("'", '"')


def _rows(program: Program, part: Part) -> tuple[int, int]:
    return 1 if part.layers else program.layers or 1, 1 if part.heads else program.heads or 1


def _start(part: Part) -> tuple[str, float]:
    """How a part starts, and by which number."""
    constant = {"zeros": 0.0, "ones": 1.0}
    if part.start in constant:
        return "constant", constant[part.start]
    return part.start, part.by


def needed(root: Function, instead: Mapping[Function, Function]) -> list[Function]:
    """The functions of the sources that one calls, each before those that call it."""
    found: list[Function] = []

    def visit(function: Function) -> None:
        plain = inspect.unwrap(function)
        for name in _globals(plain.__code__):
            called = plain.__globals__.get(name)
            if callable(called) and called.__module__.startswith(sources.__name__):
                visit(instead.get(called, called))
        if function not in found:
            found.append(function)

    visit(root)
    return found


def _globals(code: CodeType) -> Iterator[str]:
    """The global names that a function reads, in what is nested in it too."""
    for each in dis.get_instructions(code):
        if each.opname == "LOAD_GLOBAL":
            yield each.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _globals(constant)


def _recipe(declared: MechanismDeclaration, causal: bool, scale: object) -> Recipe:
    match declared:
        case Linear() | Taylor() | Favor() | Rbf() | Rfa():
            return _sums(declared, causal, scale)
        case Linformer(projection="linear"):
            return Recipe(low_rank.mix_projected, {"APART": declared.apart})
        case Linformer(projection="conv"):
            settings: dict[str, object] = {"WIDTH": declared.width, "APART": declared.apart}
            return Recipe(low_rank.mix_convolved, settings)
        case Linformer():
            pool = low_rank.maxima if declared.projection == "max" else low_rank.means
            return Recipe(low_rank.mix_pooled, {"RANK": declared.rank}, {low_rank.means: pool})
        case Nystrom():
            settings = {"LANDMARKS": declared.landmarks, "ITERATIONS": declared.iterations}
            if not declared.conv:
                return Recipe(low_rank.mix_landmarks, settings)
            return Recipe(low_rank.mix_landmarks_beside, {**settings, "CONV": declared.conv})
        case Efficient(normalize="scaling"):
            return Recipe(low_rank.mix_scaling)
        case Efficient():
            return Recipe(low_rank.mix_efficient)
        case Fourier():
            return Recipe(low_rank.mix_fourier)
        case Mixer():
            return Recipe(low_rank.mix_mlp)
        case Gmlp():
            return Recipe(low_rank.mix_gate, {"CAUSAL": causal})
        case Synthesizer():
            logits = getattr(low_rank, f"{declared.kind}_logits")
            settings = {"CAUSAL": causal, "PRODUCTS": declared.products}
            if declared.kind == "factorized_dense":
                settings["SHORT"] = declared.factors[0]
            return Recipe(low_rank.mix_synthesised, settings, {low_rank.dense_logits: logits})
    raise StandaloneError(f"`{declared.name}` is not a mechanism that it knows")


def _sums(declared: MechanismDeclaration, causal: bool, scale: object) -> Recipe:
    """A mechanism whose weights are products of features."""
    factor: float | None = None
    mix: Function = linear.mix
    feature: Function = features.elu1
    added, least, floor = 0.0, 1e-6, 0.0
    divided: Function = sums.divided
    if isinstance(scale, int | float):
        factor = math.sqrt(scale)
    match declared:
        case Linear():
            feature, factor = getattr(features, declared.feature), None
            if declared.feature != "identity":
                added, least = 1e-6, 0.0
            if declared.normalize == "none":
                divided = sums.undivided
        case Taylor():
            feature = features.first_order if declared.order == 1 else features.second_order
        case Favor():
            if declared.redraw:
                raise StandaloneError("its features are drawn anew while it is trained")
            mix, feature = linear.mix_drawn, KINDS[declared.kind]
            if declared.kind in ("positive", "hyperbolic"):
                least = 0.0
        case Rbf():
            mix, feature, least, factor = (
                linear.mix_drawn,
                features.gaussian,
                0.0,
                1 / declared.sigma,
            )
        case Rfa():
            mix, floor = linear.mix_gated if declared.gated else linear.mix_waves, declared.floor
    settings: dict[str, object] = {}
    if divided is sums.divided:
        settings = {"ADDED": added, "LEAST": least, "FLOOR": floor}
    if isinstance(declared, Favor | Rbf | Rfa):
        settings |= {"SEED": declared.seed, "FEATURES": declared.features}
    instead: dict[Function, Function] = {features.elu1: feature, sums.divided: divided}
    if mix is linear.mix_drawn:
        instead = {features.positive: feature, sums.divided: divided}
    if causal:
        instead[sums.all_sums] = sums.causal_sums
    if not getattr(declared, "orthogonal", isinstance(declared, Rbf)):
        instead[features.orthogonal] = features.independent
    if feature in (features.first_order, features.relu) and mix is linear.mix:
        factor = None
    return Recipe(mix, settings, instead, factor)
