"""The file of a spec whose heads all have one mechanism: its own kernel, linear in n where the
mechanism is."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from attnspec.compile.standalone.lifting import file_of
from attnspec.compile.standalone.page import StandaloneError
from attnspec.compile.standalone.sources import drawing, low_rank, module, sums
from attnspec.graphs.bind import Situation
from attnspec.ir.mechanisms.favor import Favor
from attnspec.ir.mechanisms.linear import Linear
from attnspec.ir.mechanisms.rbf import Rbf
from attnspec.ir.mechanisms.rfa import Rfa
from attnspec.ir.mechanisms.taylor import Taylor
from attnspec.ir.program import Program
from attnspec.ir.scalars import Apply, Symbol
from attnspec.lower.mechanism_sizes import bind_mechanism, learned_parts

STARTS = {"zeros": ("constant", 0.0), "ones": ("constant", 1.0)}
"""How a part starts, and by which number, where it says so in one word."""


def mechanism_module(program: Program, class_name: str, refusal: str = "") -> str:
    """All but the docstring; `refusal` is a statement that refuses a trace, where there is one.

    Raises StandaloneError for what cannot be said.
    """
    attend = program.attends[0]
    if len(program.attends) > 1:
        raise StandaloneError("its heads or layers have different mechanisms")
    if attend.mechanism is None or attend.graph is not None:
        raise StandaloneError("it weighs some pairs exactly and others by a mechanism")
    if any(isinstance(value, Symbol | Apply) for _, value in attend.mechanism.arguments):
        raise StandaloneError("the arguments of its mechanism depend on n, the layer or the head")
    if isinstance(attend.scale, Symbol | Apply):
        raise StandaloneError("its scale depends on n, the layer or the head")
    layers, heads = program.layers or 1, program.heads or 1
    at = Situation(1, {}, layers=layers, heads=program.heads)
    declared: Any = bind_mechanism(attend.mechanism, at)
    if getattr(declared, "redraw", 0):
        raise StandaloneError("its features are drawn anew while it is trained")
    parts = {}
    for (_, part), name in learned_parts(program).items():
        shape = 1 if part.layers else layers, 1 if part.heads else heads, *part.shape
        parts[name] = (shape, *STARTS.get(part.start, (part.start, part.by)))
    scale = attend.scale
    settings: dict[str, object] = {
        "HEADS": program.heads,
        "LAYERS": program.layers,
        "INPUTS": {},
        "CAUSAL": program.causal,
        "FACTOR": None if scale is None else math.sqrt(scale),
        **{"ADDED": 0.0, "LEAST": 0.0, "FLOOR": 0.0},
        **{"GATED": False, "ORTHOGONAL": True, "NORMALIZE": ""},
        **{name.upper(): value for name, value in asdict(declared).items()},
        **{name.upper(): getattr(declared, name, None) for name in ("longest", "apart", "width")},
        "PARTS": parts,
        "SIZED": any(isinstance(x, str) for shape, _, _ in parts.values() for x in shape),
        "DRAWN": any(start != "constant" for _, start, _ in parts.values()),
        "CROSS": program.cross,
        "REFUSED": bool(refusal),
    }
    names = {"Attention": class_name, "mix": f"mix_{declared.name}", "exportable(k)": refusal}
    names |= module.TWO_SEQUENCES if program.cross else {}
    if not declared.sums and names["mix"] not in vars(low_rank):
        raise StandaloneError(f"`{declared.name}` is not a mechanism that it knows")
    if declared.name == "linformer":
        names["pool_of"] = "maxima" if declared.projection == "max" else "means"
    elif declared.name == "synthesizer":
        names["logits_of"] = declared.kind
        settings["SHORT"] = declared.factors[0]
    elif declared.sums:
        names["mix"], (names["feature_of"], more) = "mix_sums", _sums(declared)
        settings |= more
    modules = (drawing, sums, low_rank, module)
    return file_of(("Attention",), modules, {}, settings, names)


def _sums(declared: object) -> tuple[str, dict[str, object]]:
    """The features of rows, and what keeps the divisor away from 0."""
    away: dict[str, object] = {"LEAST": 1e-6}
    match declared:
        case Linear(feature="identity"):
            return "identity", away
        case Linear(feature=feature):
            return feature, {"ADDED": 1e-6}
        case Taylor(order=order):
            return "first_order" if order == 1 else "second_order", away
        case Favor(kind="positive" | "hyperbolic" as kind):
            return kind, {}
        case Favor(kind=kind):
            return "trig" if kind == "trig" else "relu_along", away
        case Rbf(sigma=sigma):
            return "gaussian", {"FACTOR": 1 / sigma}
        case Rfa(floor=floor):
            return "waves", {"FLOOR": floor, **away, "ORTHOGONAL": False}
    raise StandaloneError("its mechanism is not one that it knows")
