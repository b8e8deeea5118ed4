"""What a layer reads held against the pairs that the spec allows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from attnspec.model_check.plain import Weights
from attnspec.model_check.probe import (
    READ,
    Call,
    groups_at_fault,
    moved_rows,
    rows_differ,
    weights_of,
)
from attnspec.model_check.report import LayerCheck, Pair
from attnspec.model_check.wanted import Place, Wanted
from attnspec.model_check.watch import Seen, Whole
from attnspec.text.diagnostics import AttnSpecError

LISTED = 1000
"""So many leaks, and as many missing pairs, of a layer are listed."""

FEW = 16
"""Up to so many calls all weights are asked for, unless another way is chosen."""

ROWS = 64
"""So many of the rows that differ are looked at, where not all are."""

LONGEST_WHOLE = 2048
"""The longest sequence of a module that is looked at as a whole, in a call for each position."""


def compared(
    seen: Seen, wanted: Wanted, check: LayerCheck, samples: int | None, exact: bool | None
) -> LayerCheck:
    """A layer with what was found; `check` has its number and names. Raises NoPlace, and
    AttnSpecError for heads that are not those of the spec."""
    layer = check.layer or 0
    if isinstance(seen, Whole):
        return _of_whole(seen, wanted, check, layer)
    batch, heads, n_q, n_k = seen.sizes if isinstance(seen, Call) else tuple(seen.sizes.shape)
    declared = wanted.program.heads
    if declared is not None and declared != heads:
        raise AttnSpecError(
            f"`{wanted.program.name}` has {declared} heads, the model {heads} in {check.path}"
        )
    place = wanted.place(n_q, n_k)
    if isinstance(seen, Weights):
        allowed = wanted.allowed(place, layer, batch, heads)
        found = seen.sizes.cpu()
        return _judged(replace(check, heads=heads), wanted, place, allowed, found > READ, found)
    for name, x in (("queries", seen.q), ("keys", seen.k), ("values", seen.v)):
        if not bool(x.isfinite().all()):
            where = [int(i) for i in (~x.isfinite()).nonzero()[0]]
            return replace(check, reason=f"its {name} are not finite, first at {where}")
    check = replace(check, heads=heads, faults=tuple(groups_at_fault(seen)))
    if wanted.decided:
        allowed = wanted.of_tensors(seen, place, layer)
    else:
        allowed = wanted.allowed(place, layer, batch, heads)
    done = _of_call(seen, wanted, check, place, allowed, exact)
    return replace(done, passes=seen.passes)


def _of_call(
    call: Call,
    wanted: Wanted,
    check: LayerCheck,
    place: Place,
    allowed: torch.Tensor,
    exact: bool | None,
) -> LayerCheck:
    """A call of queries, keys and values: first all rows at once where that is cheaper, then, where
    rows differ or it is exact, weight by weight."""
    every = exact if exact is not None else call.k.shape[2] <= FEW * call.v.shape[3]
    differing = None
    if not every and not wanted.decided:
        differing = rows_differ(call, allowed.to(call.q.device))
    if differing is None:
        found = weights_of(call).cpu()
        reads = found > READ
        if bool((allowed & ~reads).any()):
            # weights that a score makes tiny are read all the same
            reads |= weights_of(call, double=True).cpu() > 0
        check = _with_sums(check, call, found)
        return _judged(check, wanted, place, allowed, reads, found)
    valid = _compared(wanted, place, allowed.new_ones(*call.sizes))
    rows = (differing.cpu() & valid.any(-1)).nonzero()
    pairs = int((allowed & valid).sum())
    if not len(rows):
        return replace(check, pairs=pairs)
    some = rows[:ROWS]
    sizes = weights_of(call, some, double=True).cpu()
    shape = call.sizes
    at = tuple(some.T)
    found = torch.zeros(shape, dtype=sizes.dtype)
    found[at] = sizes
    chosen = torch.zeros(shape, dtype=torch.bool)
    chosen[at] = True
    # a bias leaves weights uneven, and no pair wrong
    judged = _judged(check, wanted, place, allowed, found > 0, found, chosen)
    least = len(rows) > len(some)
    if not (judged.leak_count or judged.missing_count) and least:
        return _of_call(call, wanted, check, place, allowed, True)
    return replace(judged, pairs=pairs, at_least=least)


def _with_sums(check: LayerCheck, call: Call, found: torch.Tensor) -> LayerCheck:
    """Notes rows whose weights do not sum to 1: something else stands in their denominators."""
    sums = found.sum(-1)
    odd = (sums > READ) & ((sums - 1).abs() > 0.02)
    if call.sink or not bool(odd.any()):
        return check
    sample, head, query = (int(x) for x in odd.nonzero()[0])
    words = (
        f"weights of a row sum to {float(sums[sample, head, query]):.3g}, first in sample {sample},"
        f" head {head}, row {query}: something is in the denominator that is not read"
    )
    return replace(check, notes=(*check.notes, words))


def _of_whole(whole: Whole, wanted: Wanted, check: LayerCheck, layer: int) -> LayerCheck:
    """A module as a whole: heads together, and not what a token reads of itself."""
    if whole.run is None or whole.x is None:
        return replace(check, reason=whole.reason)
    if wanted.program.cross:
        return replace(check, reason="a module as a whole has one sequence")
    n = whole.x.shape[1]
    if n > LONGEST_WHOLE:
        return replace(check, reason=f"as a whole it takes a call for each of {n:,} positions")
    place = wanted.place(n, n)
    if wanted.decided:
        return replace(check, reason="its queries and keys, which decide pairs, are not seen")
    allowed = wanted.allowed(place, layer, whole.x.shape[0], None)
    reads = moved_rows(whole.run, whole.x).cpu()[:, None]
    note = "heads are compared together, and (q, q) is not: no query stands still there"
    check = replace(check, notes=(*check.notes, note), passes=n + 1)
    others = ~torch.eye(n, dtype=torch.bool).expand(reads.shape)
    return _judged(check, wanted, place, allowed, reads, reads.float(), others)


def _compared(wanted: Wanted, place: Place, chosen: torch.Tensor) -> torch.Tensor:
    """Of pairs [B, H, n_q, n_k] those that are compared: not those of queries at padding."""
    real = wanted.real(place.end)
    return chosen if real is None else chosen & real[:, None, place.first : place.end, None]


def _judged(
    check: LayerCheck,
    wanted: Wanted,
    place: Place,
    allowed: torch.Tensor,
    reads: torch.Tensor,
    sizes: torch.Tensor,
    chosen: torch.Tensor | None = None,
) -> LayerCheck:
    """Pairs bool [B, H, n_q, n_k] that are read, held against those allowed, of the `chosen`."""
    chosen = torch.ones_like(reads) if chosen is None else chosen
    valid = _compared(wanted, place, chosen)
    leaks, missing = reads & ~allowed & valid, allowed & ~reads & valid
    first = leaks.nonzero()[:1]
    return replace(
        check,
        pairs=int((allowed & valid).sum()),
        leaks=_listed(check, place, leaks),
        leak_count=int(leaks.sum()),
        weight=float(sizes[tuple(first.T)].item()) if len(first) else 0.0,
        causes=tuple(_causes(wanted, place, leaks)),
        missing=_listed(check, place, missing),
        missing_count=int(missing.sum()),
    )


def _listed(check: LayerCheck, place: Place, pairs: torch.Tensor) -> tuple[Pair, ...]:
    """The first pairs, with positions; a slot that nothing was written to by its own number."""
    keys = torch.where(place.keys < 0, torch.arange(len(place.keys)), place.keys)
    found = []
    for b, h, q, k in pairs.nonzero()[:LISTED].tolist():
        head = None if check.heads is None else h
        found.append((b, check.layer or 0, head, place.first + q, int(keys[k])))
    return tuple(found)


def _causes(wanted: Wanted, place: Place, leaks: torch.Tensor) -> Iterator[tuple[str, int]]:
    """How many leaks read what is never to be read."""
    if wanted.program.cross or not bool(leaks.any()):
        return
    keys = place.keys.clamp_min(0)
    queries = torch.arange(place.first, place.end)
    unused = place.keys < 0
    kinds = [("a later position", (keys > queries[:, None]) & ~unused)]
    kinds.append(("a slot of the cache that nothing was written to", unused.expand(1, -1)))
    real, documents = wanted.real(place.end), wanted.setting.documents
    if real is not None:
        kinds.append(("padding", ~real[:, None, None, keys] & ~unused))
    if documents is not None and documents.shape[1] == place.end:
        ids = documents.cpu()
        other = ids[:, keys][:, None] != ids[:, place.first :][:, :, None]
        kinds.append(("another document", other[:, None] & ~unused))
    for what, where in kinds:
        count = int((leaks & where).sum())
        if count:
            yield f"{what} is read", count
