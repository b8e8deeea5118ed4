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
from attnspec.graphs.relation import evaluate_pairs
from attnspec.ir.mechanisms.efficient import Efficient
from attnspec.ir.mechanisms.favor import Favor
from attnspec.ir.mechanisms.linear import Linear
from attnspec.ir.mechanisms.linformer import Linformer
from attnspec.ir.mechanisms.nystrom import Nystrom
from attnspec.ir.mechanisms.rbf import Rbf
from attnspec.ir.mechanisms.rfa import Rfa
from attnspec.ir.mechanisms.synthesizer import Synthesizer
from attnspec.ir.mechanisms.taylor import Taylor
from attnspec.lower.work import Call, Work, mechanism_of

Tables: TypeAlias = Mapping[str, torch.Tensor]

Pairs: TypeAlias = Callable[[Work, int, torch.Tensor, torch.Tensor, Tables], torch.Tensor]
"""From a work, a head, q [n_q, d], k [n_k, d] and tables [*shape] to weights [n_q, n_k], before
anything is left out or divided."""

Outputs: TypeAlias = Callable[
    [Work, torch.Tensor, torch.Tensor, torch.Tensor, Tables], torch.Tensor
]
"""From a work, q [n_q, d], k [n, d], v [n, d_v] and tables to the output [n_q, d_v]."""


def defined(
    work: Work, head: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tables: Tables
) -> torch.Tensor:
    """The output [n_q, d_v] of a head for q [n_q, d], k [n_k, d], v [n_k, d_v] and what it has
    learned, [*shape] each."""
    if mechanism_of(work).name in OUTPUTS:
        return OUTPUTS[mechanism_of(work).name](work, q, k, v, tables)
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


# --- low ranks and mixings -----------------------------------------------------------------------


def _linformer(
    work: Work, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tables: Tables
) -> torch.Tensor:
    declared, n = cast(Linformer, work.mechanism), len(k)
    if declared.projection in ("mean", "max"):
        pool = _means if declared.projection == "mean" else _maxima
        keys, values = pool(k, declared.rank), pool(v, declared.rank)
    else:
        maps = [tables["keys"], tables["values" if declared.apart else "keys"]]
        if declared.projection == "conv":
            # a stride as long as the kernel: each row has it further on
            count = -(-n // declared.width)
            maps = [torch.kron(torch.eye(count, dtype=x.dtype), x) for x in maps]
        keys, values = (by[:, :n] @ x for by, x in zip(maps, (k, v), strict=True))
    return _softmax(q @ keys.T / math.sqrt(q.shape[1])) @ values


def _nystrom(
    work: Work, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tables: Tables
) -> torch.Tensor:
    declared, n, scale = cast(Nystrom, work.mechanism), len(k), 1 / math.sqrt(q.shape[1])
    if declared.landmarks >= n:
        # each position is its own landmark, and the inverse undoes one of the factors
        out = _softmax(scale * q @ k.T) @ v
    else:
        q_marks, k_marks = _means(q, declared.landmarks), _means(k, declared.landmarks)
        left, right = _softmax(scale * q @ k_marks.T), _softmax(scale * q_marks @ k.T)
        middle = _softmax(scale * q_marks @ k_marks.T)
        out = left @ _inverse(middle, declared.iterations) @ right @ v
    if not declared.conv:
        return out
    edge = v.new_zeros(declared.conv // 2, v.shape[1])
    padded = torch.cat([edge, v, edge])
    for t in range(declared.conv):
        out = out + tables["kernel"][t] * padded[t : t + n][n - len(q) :]
    return out


def _inverse(matrix: torch.Tensor, iterations: int) -> torch.Tensor:
    """Z of A [m, m] after so many iterations; the pseudo-inverse for 0."""
    if iterations == 0:
        exact: torch.Tensor = torch.linalg.pinv(matrix)
        return exact
    one = torch.eye(len(matrix), dtype=matrix.dtype)
    z = matrix.T / (matrix.abs().sum(0).max() * matrix.abs().sum(1).max())
    for _ in range(iterations):
        az = matrix @ z
        z = z @ (13 * one - az @ (15 * one - az @ (7 * one - az))) / 4
    return z


def _segments(x: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
    """n rows in `count` runs, the first count - n mod count of n // count, the others one more; in
    n runs of one where there are fewer."""
    n, count = len(x), min(len(x), count)
    return torch.split(x, [n // count + (at >= count - n % count) for at in range(count)])


def _means(x: torch.Tensor, count: int) -> torch.Tensor:
    return torch.stack([part.sum(0) / len(part) for part in _segments(x, count)])


def _maxima(x: torch.Tensor, count: int) -> torch.Tensor:
    return torch.stack([part.amax(0) for part in _segments(x, count)])


def _synthesizer(
    work: Work, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tables: Tables
) -> torch.Tensor:
    declared, n, first = cast(Synthesizer, work.mechanism), len(k), len(k) - len(q)
    match declared.kind:
        case "dense":
            hidden = torch.relu(q @ tables["hidden"].T + tables["hidden_bias"])
            logits = hidden @ tables["weight"].T + tables["bias"]
        case "random":
            logits = tables["logits"][first:n]
        case "factorized_random":
            logits = (tables["rows"] @ tables["columns"].T)[first:n]
        case _:
            short, long = declared.factors
            networks = zip(
                tables["hidden"],
                tables["hidden_bias"],
                torch.split(tables["weight"], [short, long]),
                torch.split(tables["bias"], [short, long]),
                strict=True,
            )
            a, b = (torch.relu(q @ w.T + c) @ x.T + y for w, c, x, y in networks)
            logits = a.repeat(1, long) * b.repeat_interleave(short, 1)
    logits = logits[:, :n]
    if declared.products:
        share = torch.sigmoid(tables["mix"])
        logits = (1 - share) * (q @ k.T) / math.sqrt(q.shape[1]) + share * logits
    if work.causal:
        logits = logits.masked_fill(torch.ones(len(q), n).tril(first) == 0, -torch.inf)
    return _softmax(logits) @ v


def _fourier(
    work: Work, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tables: Tables
) -> torch.Tensor:
    """Re(F_n X F_d) = C_n X C_d - S_n X S_d with matrices of cosines and sines."""

    def angles(count: int) -> torch.Tensor:
        at = torch.arange(count, dtype=torch.float64)
        return 2 * math.pi * (at[:, None] * at % count) / count

    rows, columns = (angles(count) for count in v.shape)
    cosines = rows.cos().to(v.dtype) @ v @ columns.cos().to(v.dtype)
    out = cosines - rows.sin().to(v.dtype) @ v @ columns.sin().to(v.dtype)
    return out[len(k) - len(q) :]


def _mixer(
    work: Work, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tables: Tables
) -> torch.Tensor:
    """X + W_2 gelu(W_1 LayerNorm(X) + b_1) + b_2."""
    n = len(v)
    hidden = tables["inner"][:, :n] @ _normalised(v, tables) + tables["inner_bias"][:, None]
    hidden = hidden * (1 + torch.erf(hidden / math.sqrt(2))) / 2
    out = v + tables["outer"][:n] @ hidden + tables["outer_bias"][:n, None]
    return out[n - len(q) :]


def _gmlp(
    work: Work, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tables: Tables
) -> torch.Tensor:
    """Z_1 * (W LayerNorm(Z_2) + b), Z_1 = q and Z_2 = v."""
    n, weight = len(v), tables["weight"][: len(v), : len(v)]
    weight = torch.tril(weight) if work.causal else weight
    gate = weight @ _normalised(v, tables) + tables["bias"][:n, None]
    return q * gate[n - len(q) :]


def _normalised(x: torch.Tensor, tables: Tables) -> torch.Tensor:
    middle = x.mean(1, keepdim=True)
    spread = (x - middle).square().mean(1, keepdim=True)
    return (x - middle) / torch.sqrt(spread + 1e-5) * tables["gain"] + tables["shift"]


def _softmax(scores: torch.Tensor) -> torch.Tensor:
    weights = torch.exp(scores - scores.amax(1, keepdim=True))
    return weights / weights.sum(1, keepdim=True)


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
    "linformer": _linformer,
    "nystrom": _nystrom,
    "fourier": _fourier,
    "synthesizer": _synthesizer,
    "mixer": _mixer,
    "gmlp": _gmlp,
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
