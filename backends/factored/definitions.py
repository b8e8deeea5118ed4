"""What each mechanism means, for one head: the text that `--standalone` writes, with its features
multiplied pair by pair where pairs have weights, n x n.

Kernels, all of which `verify` holds against it, share the directions that are drawn here, and run
parts of the text where nothing is faster: gates, norms, learned logits. What is independent of both
is the oracle of the tests.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from types import FunctionType
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from attnspec.backends.common.score_formula import scale_of
from attnspec.backends.common.scores import ScoreFunction
from attnspec.backends.factored import text_of_matrices, text_of_sums
from attnspec.backends.factored.directions import directions
from attnspec.graphs.relation import evaluate_pairs
from attnspec.ir.mechanisms.declaration import MechanismDeclaration
from attnspec.ir.mechanisms.efficient import Efficient
from attnspec.ir.mechanisms.favor import Favor
from attnspec.ir.mechanisms.linear import Linear
from attnspec.ir.mechanisms.rbf import Rbf
from attnspec.ir.mechanisms.rfa import Rfa
from attnspec.ir.mechanisms.taylor import Taylor
from attnspec.lower.work import Work, mechanism_of

Tables: TypeAlias = Mapping[str, Tensor]

TEXTS = text_of_sums, text_of_matrices


def settings_of(
    declared: Any, causal: bool, scale: float | None
) -> tuple[dict[str, object], dict[str, str]]:
    """The settings of a mechanism in the text, by their names, and which function of it stands for
    `mix`, and for what that calls."""
    root = math.sqrt(scale) if scale is not None and declared.scaled else None
    settings: dict[str, object] = {
        **{"CAUSAL": causal, "FACTOR": root, "ADDED": 0.0, "LEAST": 0.0, "FLOOR": 0.0},
        **{"GATED": False, "ORTHOGONAL": True, "NORMALIZE": ""},
        **{name.upper(): value for name, value in asdict(declared).items()},
        **{name.upper(): getattr(declared, name, None) for name in ("longest", "apart", "width")},
    }
    names = {"mix": f"mix_{declared.name}"}
    match declared.name:
        case "linformer":
            names["pool_of"] = "maxima" if declared.projection == "max" else "means"
        case "synthesizer":
            thin = declared.kind in ("dense", "factorized_random")
            called = "factors" if thin else "logits"
            names = {"mix": f"mix_{called}", f"{called}_of": declared.kind}
            settings["SHORT"] = declared.factors[0]
        case _ if declared.sums:
            feature, more = _features(declared)
            names |= {"mix": "mix_sums", "feature_of": feature}
            settings |= more
    return settings, names


def _features(declared: MechanismDeclaration) -> tuple[str, dict[str, object]]:
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
        case Rfa():
            return "waves", {**away, "ORTHOGONAL": False}
    return declared.name, {}


def text_of(work: Work, head: int, **changes: object) -> dict[str, Any]:
    """The functions of the text by name, for the mechanism of a work, with some settings or
    functions in place of its own."""
    declared: Any = mechanism_of(work)
    settings, names = settings_of(declared, work.causal, work.scale)
    if work.hybrid:
        # no exact weight is too small to be divided by
        settings |= {"ADDED": 0.0, "LEAST": settings["LEAST"] if cancels(declared) else 0.0}
    space: dict[str, Any] = {}
    for text in map(vars, TEXTS):
        for name, x in text.items():
            from_text = isinstance(x, FunctionType) and x.__globals__ is text
            space[name] = FunctionType(x.__code__, space, name, x.__defaults__) if from_text else x
    space |= {called: space[name] for called, name in names.items()}
    space["directions"] = lambda x, layer: directions(declared, layer, (head,), 0, x)
    space |= {**settings, **changes}
    return space


def cancels(declared: MechanismDeclaration) -> bool:
    """Whether weights may be negative."""
    return declared.sums and declared.no_logarithm({**vars(declared), "normalize": "sum"}) != ""


def defined(work: Work, head: int, q: Tensor, k: Tensor, v: Tensor, tables: Tables) -> Tensor:
    """The output [n_q, d_v] of a head for q [n_q, d], k [n_k, d], v [n_k, d_v] and what it has
    learned, [*shape] each."""
    if mechanism_of(work).sums:
        return weights_of(work, head, q, k, tables) @ v
    return _mixed(work, text_of(work, head), q, k, v, tables)


def has_weights(work: Work) -> bool:
    """Whether the mechanism has weights of single pairs."""
    declared = work.mechanism
    return declared is not None and (declared.sums or isinstance(declared, Efficient))


def weights_of(
    work: Work,
    head: int,
    q: Tensor,
    k: Tensor,
    tables: Tables,
    *,
    steady: bool = False,
    sized: bool = False,
) -> Tensor:
    """The weights [n_q, n_k] of all pairs, or `sized` the sizes of their parts, some of which may
    cancel; `steady` ones are divided by constants, as far as gradients are concerned."""
    declared, text, eye = mechanism_of(work), text_of(work, head), torch.eye(len(k), dtype=k.dtype)
    divides = declared.sums and text["NORMALIZE"] != "none"
    if declared.sums:
        text["NORMALIZE"] = "none"
    # before they are divided: what values that are rows of the identity become
    weights = parts = _mixed(work, text, q, k, eye, tables)
    if sized and cancels(declared):
        feature_of = text["feature_of"]

        def sizes(x: Tensor, *more: Any) -> tuple[Tensor, Tensor]:
            rows, log = feature_of(x, *more)
            one_by_one = isinstance(declared, Linear)
            return rows.abs() if one_by_one else rows.norm(dim=-1, keepdim=True), log

        text["feature_of"] = sizes
        parts = _mixed(work, text, q, k, eye, tables)
    if work.hybrid:
        pairs, exact = _of_graph(work, head, q, k, tables)
        weights = torch.where(pairs, exact, weights)
        # what the kernel gave a pair of the graph is taken away again
        parts = parts.abs() + exact.masked_fill(~pairs, 0.0) if sized else weights
    if not divides:
        return parts
    total = weights.sum(-1, keepdim=True)
    if not (work.hybrid or text["ADDED"] or text["LEAST"]):
        # of weights above 0 that are too small for their type nothing is known
        total = total.masked_fill(total == 0, torch.nan)
    total = total.detach() if steady else total
    return parts / torch.as_tensor(text["divisor"](total, torch.zeros_like(total)))


def _mixed(
    work: Work, text: Mapping[str, Any], q: Tensor, k: Tensor, v: Tensor, tables: Tables
) -> Tensor:
    """The output of one head by its text."""
    parts, name = (x[None, None] for x in (q, k, v)), mechanism_of(work).name
    learned = {f"{name}_{part}": x[None] for part, x in tables.items()}
    output: Tensor = text["mix"](*parts, work.layer, None, learned)
    return output[0, 0]


def _of_graph(work: Work, head: int, q: Tensor, k: Tensor, tables: Tables) -> tuple[Tensor, Tensor]:
    """The pairs of the graph, bool [n_q, n_k], and exp of the scores of all pairs, with their
    changes, which other pairs need not have; `tables` also has the inputs that scores read, by
    their symbols."""
    at = torch.arange(len(k))
    rows, n_k = at[len(k) - len(q) :, None], len(k)
    pairs = evaluate_pairs(work.relation, rows.numpy(), at[None].numpy(), n_k)
    scores = (q @ k.T) * scale_of(work, q.shape[1])
    placed = {"q": rows, "k": at}
    placed |= {name: x for name, x in tables.items() if name in work.changes.symbols}
    change = ScoreFunction(work.changes, (head,), n_k, q.device)
    learned = {name: tables[name][None] for name in work.changes.tables}
    held = torch.from_numpy(np.broadcast_to(pairs, scores.shape).copy())
    scores = change(scores[None, None, None, None], placed, learned, pairs=held)
    return held, torch.exp(scores[0, 0, 0, 0])


def weights_array(
    work: Work, q: np.ndarray, k: np.ndarray, learned: Mapping[str, np.ndarray]
) -> np.ndarray:
    """The weights [n_q, n_k] of the first head of a mechanism, also of one that never forms them:
    the output for values that are the rows of the identity."""
    rows, keys = torch.from_numpy(q), torch.from_numpy(k)
    parts = {name: torch.from_numpy(each) for name, each in learned.items()}
    values = torch.eye(len(k), dtype=keys.dtype)
    return np.asarray(defined(work, 0, rows, keys, values, parts).numpy())
