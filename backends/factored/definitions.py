"""What each mechanism means, straight from its paper: slow, plain, for one head.

Where pairs have weights, the weights of all pairs are written out, n x n; where there are none, the
output. Nothing here shares a line with the kernels, which `verify` and the tests hold against it,
but for the directions that are drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TypeAlias, cast

import numpy as np
import torch

from attnspec.backends.common.score_formula import Formula, scale_of
from attnspec.backends.factored.features.directions import one_head
from attnspec.backends.factored.low_rank_definitions import (
    OneHead,
    fourier,
    gmlp,
    linformer,
    mixer,
    nystrom,
    synthesizer,
)
from attnspec.graphs.relation import evaluate_pairs
from attnspec.ir.mechanisms.efficient import Efficient
from attnspec.ir.mechanisms.favor import Favor
from attnspec.ir.mechanisms.linear import Linear
from attnspec.ir.mechanisms.rbf import Rbf
from attnspec.ir.mechanisms.rfa import Rfa
from attnspec.ir.mechanisms.taylor import Taylor
from attnspec.lower.work import Call, Work, mechanism_of

Tables: TypeAlias = Mapping[str, torch.Tensor]

Pairs: TypeAlias = Callable[[Work, int, torch.Tensor, torch.Tensor, Tables], torch.Tensor]
"""From a work, a head, q [n_q, d], k [n_k, d] and tables [*shape] to weights [n_q, n_k], before
anything is left out or divided."""

Outputs: TypeAlias = Callable[[OneHead], torch.Tensor]
"""From one head to its output [n_q, d_v]."""


def defined(
    work: Work, head: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tables: Tables
) -> torch.Tensor:
    """The output [n_q, d_v] of a head for q [n_q, d], k [n_k, d], v [n_k, d_v] and what it has
    learned, [*shape] each."""
    if mechanism_of(work).name in OUTPUTS:
        return OUTPUTS[mechanism_of(work).name](OneHead(work, q, k, v, tables))
    return weights_of(work, head, q, k, tables) @ v


def has_weights(work: Work) -> bool:
    """Whether the mechanism has weights of single pairs."""
    return work.mechanism is not None and work.mechanism.name in PAIRS


def weights_of(
    work: Work,
    head: int,
    q: torch.Tensor,
    k: torch.Tensor,
    tables: Tables,
    *,
    steady: bool = False,
) -> torch.Tensor:
    """The weights [n_q, n_k] of all pairs; `steady` ones are divided by constants, as far as
    gradients are concerned."""
    weights = undivided(work, head, q, k, tables)
    total = weights.sum(-1, keepdim=True)
    return divided(work, weights, total.detach() if steady else total)


def totals_of(
    work: Work, head: int, q: torch.Tensor, k: torch.Tensor, tables: Tables
) -> torch.Tensor:
    """The sums [n_q, 1] of the weights that each query divides by."""
    return undivided(work, head, q, k, tables).sum(-1, keepdim=True)


def undivided(
    work: Work, head: int, q: torch.Tensor, k: torch.Tensor, tables: Tables
) -> torch.Tensor:
    """The weights [n_q, n_k] of all pairs before they are divided."""
    weights = PAIRS[mechanism_of(work).name](work, head, q, k, tables)
    if work.causal:
        weights = weights.tril(len(k) - len(q))
    if work.hybrid:
        held = exact_pairs(work, len(q), len(k))
        weights = torch.where(held, exact_weights(work, head, q, k, tables), weights)
    return weights


def divided(work: Work, weights: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Weights divided by what the mechanism makes of their sums [n_q, 1]."""
    match work.mechanism:
        case Linear(normalize="none"):
            return weights
        case Linear(feature="identity"):
            return weights / _away(total, 1e-6)
        case Linear() if not work.hybrid:
            return weights / (total + 1e-6)
        case Efficient():
            return weights
        case Favor(kind="positive" | "hyperbolic") | Rbf():
            return weights / total
        case Linear() | Taylor() | Favor(kind="relu") if work.hybrid:
            # no exact weight is too small to be divided by
            return weights / torch.where(total == 0, 1.0, total)
        case Rfa(floor=floor) if floor:
            return weights / total.clamp(min=floor)
        case _:
            return weights / _away(total, 1e-6)


def magnitudes_of(
    work: Work, head: int, q: torch.Tensor, k: torch.Tensor, tables: Tables
) -> torch.Tensor:
    """How large the numbers are whose sums are the weights [n_q, n_k] before they are divided, and
    which may cancel: those of waves are at most 1, times what stands before them."""
    match work.mechanism:
        case Linear(feature="identity"):
            found = q.abs() @ k.abs().T
        case Favor(kind="trig"):
            scale = q.shape[1] ** -0.5 if work.scale is None else work.scale
            halves = [(x * x).sum(1) * scale / 2 for x in (q, k)]
            found = torch.exp(halves[0][:, None] + halves[1])
        case Rfa():
            found = _gates(work, len(q), k, tables)
        case _:
            found = PAIRS[mechanism_of(work).name](work, head, q, k, tables).abs()
    if work.causal:
        found = found.tril(len(k) - len(q))
    if work.hybrid:
        # what the kernel gave a pair of the graph is taken away again
        held = exact_pairs(work, len(q), len(k))
        found = found + exact_weights(work, head, q, k, tables).masked_fill(~held, 0.0)
    return found


def _away(total: torch.Tensor, least: float) -> torch.Tensor:
    """Sums kept at least so far from 0, with their sign."""
    return torch.where(total < 0, total.clamp(max=-least), total.clamp(min=least))


def _linear(
    work: Work, head: int, q: torch.Tensor, k: torch.Tensor, tables: Tables
) -> torch.Tensor:
    maps: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "elu1": lambda x: torch.where(x > 0, x + 1, torch.exp(x)),
        "relu": torch.relu,
        "squared_relu": lambda x: torch.relu(x) ** 2,
        "exp": torch.exp,
        "identity": lambda x: x,
    }
    feature = maps[cast(Linear, work.mechanism).feature]
    return feature(q) @ feature(k).T


def _directions(work: Work, head: int, size: int, like: torch.Tensor) -> torch.Tensor:
    declared = cast("Favor | Rfa | Rbf", work.mechanism)
    orthogonal = getattr(declared, "orthogonal", isinstance(declared, Rbf))
    drawn = one_head(declared.seed, work.layer, head, 0, declared.features, size, orthogonal)
    return torch.from_numpy(drawn).to(like.dtype)


def _favor(work: Work, head: int, q: torch.Tensor, k: torch.Tensor, tables: Tables) -> torch.Tensor:
    declared = cast(Favor, work.mechanism)
    w = _directions(work, head, q.shape[1], q)
    scale = q.shape[1] ** -0.5 if work.scale is None else work.scale

    def feature(x: torch.Tensor) -> torch.Tensor:
        x = x * math.sqrt(scale)
        u, square = x @ w.T, (x * x).sum(1, keepdim=True)
        match declared.kind:
            case "positive":
                return torch.exp(-square / 2) * torch.exp(u)
            case "hyperbolic":
                both = torch.cat([torch.exp(u), torch.exp(-u)], 1)
                return torch.exp(-square / 2) * both / math.sqrt(2)
            case "trig":
                return torch.exp(square / 2) * torch.cat([torch.sin(u), torch.cos(u)], 1)
            case _:
                return torch.relu(u)

    return feature(q) @ feature(k).T / declared.features


def _rbf(work: Work, head: int, q: torch.Tensor, k: torch.Tensor, tables: Tables) -> torch.Tensor:
    declared = cast(Rbf, work.mechanism)
    w = _directions(work, head, q.shape[1], q)

    def feature(x: torch.Tensor) -> torch.Tensor:
        x = x / declared.sigma
        return torch.exp(x @ w.T - (x * x).sum(1, keepdim=True))

    return feature(q) @ feature(k).T / declared.features


def _rfa(work: Work, head: int, q: torch.Tensor, k: torch.Tensor, tables: Tables) -> torch.Tensor:
    declared = cast(Rfa, work.mechanism)
    w = _directions(work, head, q.shape[1], q) * tables["spread"]

    def feature(x: torch.Tensor) -> torch.Tensor:
        u = (x / x.norm(dim=1, keepdim=True)) @ w.T
        return torch.cat([torch.sin(u), torch.cos(u)], 1)

    weights = feature(q) @ feature(k).T / declared.features
    return weights * _gates(work, len(q), k, tables)


def _gates(work: Work, rows: int, k: torch.Tensor, tables: Tables) -> torch.Tensor:
    """What the gates of rfa leave of each pair [rows, n_k]."""
    if not cast(Rfa, work.mechanism).gated:
        return k.new_ones(rows, len(k))
    gate = torch.sigmoid(k @ tables["gate"] + tables["gate_bias"])
    found = []
    kept = k.new_zeros(0)
    for i in range(len(k)):
        kept = torch.cat([kept * gate[i], (1 - gate[i])[None]])
        found.append(torch.cat([kept, kept.new_zeros(len(k) - i - 1)]))
    return torch.stack(found)[len(k) - rows :]


def _taylor(
    work: Work, head: int, q: torch.Tensor, k: torch.Tensor, tables: Tables
) -> torch.Tensor:
    if cast(Taylor, work.mechanism).order == 1:
        cosines: torch.Tensor = (q / q.norm(dim=1, keepdim=True)) @ (
            k / k.norm(dim=1, keepdim=True)
        ).T
        return 1 + cosines
    scores: torch.Tensor = q @ k.T * (q.shape[1] ** -0.5 if work.scale is None else work.scale)
    return 1 + scores + scores * scores / 2


def _efficient(
    work: Work, head: int, q: torch.Tensor, k: torch.Tensor, tables: Tables
) -> torch.Tensor:
    if cast(Efficient, work.mechanism).normalize == "scaling":
        return (q / math.sqrt(len(k))) @ (k / math.sqrt(len(k))).T
    return torch.softmax(q, 1) @ torch.softmax(k, 0).T


PAIRS: dict[str, Pairs] = {
    "linear": _linear,
    "favor": _favor,
    "rfa": _rfa,
    "taylor": _taylor,
    "efficient": _efficient,
    "rbf": _rbf,
}
"""The weights of pairs, where a mechanism has them."""

OUTPUTS: dict[str, Outputs] = {
    "linformer": linformer,
    "nystrom": nystrom,
    "fourier": fourier,
    "synthesizer": synthesizer,
    "mixer": mixer,
    "gmlp": gmlp,
}
"""The outputs of mechanisms without weights of single pairs, or with divisors of their own."""


def exact_pairs(work: Work, n_q: int, n_k: int) -> torch.Tensor:
    """bool [n_q, n_k]: the pairs of the graph."""
    rows, columns = np.arange(n_k - n_q, n_k)[:, None], np.arange(n_k)[None]
    held = evaluate_pairs(work.relation, rows, columns, n_k)
    return torch.from_numpy(np.broadcast_to(held, (n_q, n_k)).copy())


def exact_weights(
    work: Work, head: int, q: torch.Tensor, k: torch.Tensor, tables: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """exp of the scores [n_q, n_k] of q [n_q, d] and k [n_k, d], with their changes."""
    scores = (q @ k.T) * scale_of(work, q.shape[1])
    formula = Formula(work, (head,), q.device)
    distance = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
    call = Call(tables={name: table[None] for name, table in tables.items()})
    changed = formula.changed(scores[None, None, None, None], distance[None], call)
    return torch.exp(changed[0, 0, 0, 0])


def weights_array(
    work: Work, head: int, q: np.ndarray, k: np.ndarray, learned: Mapping[str, np.ndarray]
) -> np.ndarray:
    """The weights [n_q, n_k] of one head of a mechanism, also of one that never forms them: the
    output for values that are the rows of the identity."""
    rows, keys = torch.from_numpy(q), torch.from_numpy(k)
    parts = {name: torch.from_numpy(each) for name, each in learned.items()}
    values = torch.eye(len(k), dtype=keys.dtype)
    return np.asarray(defined(work, head, rows, keys, values, parts).numpy())
