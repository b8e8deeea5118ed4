"""What a layer reads held against the pairs that the spec allows."""

from __future__ import annotations

from dataclasses import replace

import torch

from attnspec.model_check.call import NARROWEST, READ, Call
from attnspec.model_check.report import LayerCheck, Pair
from attnspec.model_check.wanted import Pairs, Wanted
from attnspec.text.diagnostics import AttnSpecError

LISTED = 1000
"""So many leaks, and as many missing pairs, of a layer are listed."""

FEW = 16
"""Up to so many calls all weights are asked for, unless another way is chosen."""


def compared(call: Call, wanted: Wanted, check: LayerCheck, exact: bool | None) -> LayerCheck:
    """A layer with what was found; `check` has its number and names. Raises NotComparable, and
    AttnSpecError for heads that are not those of the spec."""
    reason = call.reason or _obstacle(call, wanted)
    if reason is not None:
        return replace(check, reason=reason)
    heads, declared = call.shape[1], wanted.program.heads
    if declared not in (None, heads) and not call.together:
        raise AttnSpecError(
            f"`{wanted.program.name}` has {declared} heads, the model {heads} in {check.path}"
        )
    pairs = wanted.pairs(call, check.path, check.layer or 0)
    check = replace(
        check,
        heads=None if call.together else heads,
        pairs=int((pairs.allowed & pairs.compared).expand(call.shape).sum()),
        notes=("note: (q, q) is not compared: no query stands still there",) * call.together,
        faults=call.grouped_wrongly(),
    )
    n_k, width = (0, 0) if call.sizes else call.v.shape[2:]
    few = n_k <= FEW * width if exact is None else exact
    if not few and width >= NARROWEST and not wanted.decided:
        differing = call.rows_differ(pairs.allowed.to(call.q.device)).cpu()
        if not bool((differing[..., None] & pairs.compared).any()):
            return replace(check, passes=call.passes)
    return replace(_by_weights(call, pairs, check), passes=call.passes)


def _obstacle(call: Call, wanted: Wanted) -> str | None:
    """Why a call cannot be compared with the spec, if it cannot."""
    if call.together and wanted.program.cross:
        return "as a whole it has one sequence"
    if call.sizes and wanted.decided:
        return "its queries and keys, which decide pairs, are not seen"
    named = {"queries": call.q, "keys": call.k, "values": call.v}
    odd = (what for what, x in named.items() if not bool(x.isfinite().all()))
    return next((f"its {what} are not finite" for what in odd), None)


def _by_weights(call: Call, pairs: Pairs, check: LayerCheck) -> LayerCheck:
    """Weight by weight."""
    sizes, allowed = call.weights().cpu(), pairs.allowed
    reads = sizes > READ
    if bool((allowed & ~reads).any()) and not call.together:
        # weights that a score makes tiny are read all the same
        reads |= call.weights(double=True).cpu() > 0
    leaks, missing = reads & ~allowed & pairs.compared, allowed & ~reads & pairs.compared
    counts = {what: int((leaks & where).sum()) for what, where in pairs.never.items()}
    return replace(
        check,
        leaks=_listed(leaks, pairs, check),
        leak_count=int(leaks.sum()),
        weight=float(sizes[tuple(leaks.nonzero()[0])]) if bool(leaks.any()) else 0.0,
        causes=tuple((f"{what} is read", count) for what, count in counts.items() if count),
        missing=_listed(missing, pairs, check),
        missing_count=int(missing.sum()),
    )


def _listed(differing: torch.Tensor, pairs: Pairs, check: LayerCheck) -> tuple[Pair, ...]:
    """The first pairs, by positions."""
    return tuple(
        (
            b,
            check.layer or 0,
            None if check.heads is None else h,
            pairs.first + q,
            int(pairs.keys[k]),
        )
        for b, h, q, k in differing.nonzero()[:LISTED].tolist()
    )
