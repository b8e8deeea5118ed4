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


def compared(seen: Seen, wanted: Wanted, check: LayerCheck, exact: bool | None) -> LayerCheck:
    """A layer with what was found; `check` has its number and names. Raises NoPlace, and
    AttnSpecError for heads that are not those of the spec."""
    if isinstance(seen, Whole):
        return _of_whole(seen, wanted, check)
    batch, heads, n_q, n_k = seen.shape
    declared = wanted.program.heads
    if declared is not None and declared != heads:
        raise AttnSpecError(
            f"`{wanted.program.name}` has {declared} heads, the model {heads} in {check.path}"
        )
    check = replace(check, heads=heads)
    judge = Judge(wanted, wanted.place(n_q, n_k, check.path), check)
    if isinstance(seen, Weights):
        allowed = wanted.allowed(judge.place, judge.layer, batch, heads)
        reads = seen.sizes.cpu() > READ
        if bool((allowed & ~reads).any()):
            reads |= seen.tiny().cpu()
        return judge.judged(allowed, reads, seen.sizes.cpu())
    for name, x in (("queries", seen.q), ("keys", seen.k), ("values", seen.v)):
        if not bool(x.isfinite().all()):
            where = (~x.isfinite()).nonzero()[0].tolist()
            return replace(check, reason=f"its {name} are not finite, first at {where}")
    if wanted.decided:
        allowed = wanted.of_tensors(seen, judge.place, judge.layer)
    else:
        allowed = wanted.allowed(judge.place, judge.layer, batch, heads)
    few = n_k <= FEW * seen.v.shape[3] if exact is None else exact
    done = None if few or wanted.decided else judge.by_rows(seen, allowed)
    done = done or judge.by_weights(seen, allowed)
    return replace(done, passes=seen.passes)


def _of_whole(whole: Whole, wanted: Wanted, check: LayerCheck) -> LayerCheck:
    """A module as a whole: heads together, and not what a token reads of itself."""
    if whole.run is None or whole.x is None:
        return replace(check, reason=whole.reason)
    batch, n, _ = whole.x.shape
    if wanted.program.cross or wanted.decided or n > LONGEST_WHOLE:
        reasons = {
            "it has one sequence": wanted.program.cross,
            "queries and keys, which decide pairs, are not seen": wanted.decided,
            f"{n:,} positions take as many calls": True,
        }
        reason = next(words for words, holds in reasons.items() if holds)
        return replace(check, reason=f"as a whole: {reason}")
    judge = Judge(wanted, wanted.place(n, n, check.path), check)
    allowed = wanted.allowed(judge.place, judge.layer, batch, None)
    reads = moved_rows(whole.run, whole.x).cpu()[:, None]
    note = "heads are compared together, and (q, q) is not: no query stands still there"
    judge.check = replace(check, notes=(note,), passes=n + 1)
    return judge.judged(allowed, reads, reads.float(), ~torch.eye(n, dtype=torch.bool))


class Judge:
    """Holds one layer, at its place, against the pairs that are allowed."""

    def __init__(self, wanted: Wanted, place: Place, check: LayerCheck) -> None:
        self.wanted, self.place, self.check = wanted, place, check
        self.layer = check.layer or 0

    def by_weights(self, call: Call, allowed: torch.Tensor) -> LayerCheck:
        """Weight by weight."""
        found = weights_of(call).cpu()
        reads = found > READ
        if bool((allowed & ~reads).any()):
            # weights that a score makes tiny are read all the same
            reads |= weights_of(call, double=True).cpu() > 0
        sums = found.sum(-1)
        odd = ((sums > READ) & ((sums - 1).abs() > 0.02)).nonzero()
        notes = self.check.notes
        if len(odd) and not call.sink:
            notes += (
                f"weights of {len(odd):,} rows do not sum to 1: keys that are not read, or a sink,"
                " are in the denominator",
            )
        faults = tuple(groups_at_fault(call))
        self.check = replace(self.check, notes=notes, faults=faults)
        return self.judged(allowed, reads, found)

    def by_rows(self, call: Call, allowed: torch.Tensor) -> LayerCheck | None:
        """All rows at once, and weight by weight those that differ; None where that tells
        nothing."""
        differing = rows_differ(call, allowed.to(call.q.device))
        if differing is None:
            return None
        valid = self._valid(torch.ones_like(differing[..., None]).cpu())
        rows = (differing.cpu() & valid[..., 0]).nonzero()
        self.check = replace(self.check, faults=tuple(groups_at_fault(call)))
        pairs = int((allowed & valid).sum())
        if not len(rows):
            return replace(self.check, pairs=pairs)
        at = tuple(rows[:ROWS].T)
        sizes = torch.zeros(*differing.shape, call.k.shape[2], dtype=torch.float64)
        sizes[at] = weights_of(call, rows[:ROWS], double=True).cpu().double()
        chosen = torch.zeros_like(valid)
        chosen[at] = True
        found = self.judged(allowed, sizes > 0, sizes, chosen)
        if len(rows) > ROWS and not (found.leak_count or found.missing_count):
            # a bias leaves weights uneven, and no pair wrong
            return None
        return replace(found, pairs=pairs, at_least=len(rows) > ROWS)

    def judged(
        self,
        allowed: torch.Tensor,
        reads: torch.Tensor,
        sizes: torch.Tensor,
        chosen: torch.Tensor | bool = True,
    ) -> LayerCheck:
        """Pairs bool [B, H, n_q, n_k] that are read, with their weights, held against those that
        are allowed, of the `chosen`."""
        valid = self._valid(torch.ones_like(reads) & chosen)
        leaks, missing = reads & ~allowed & valid, allowed & ~reads & valid
        first = leaks.nonzero()[:1]
        return replace(
            self.check,
            pairs=int((allowed & valid).sum()),
            leaks=self._listed(leaks),
            leak_count=int(leaks.sum()),
            weight=float(sizes[tuple(first.T)]) if len(first) else 0.0,
            causes=tuple(self._causes(leaks, allowed)),
            missing=self._listed(missing),
            missing_count=int(missing.sum()),
        )

    def _valid(self, chosen: torch.Tensor) -> torch.Tensor:
        """Of pairs [B, H, n_q, …] those that are compared: not those of queries at padding."""
        real = self.place.queries_real
        return chosen if real is None else chosen & real[:, None, :, None]

    def _listed(self, pairs: torch.Tensor) -> tuple[Pair, ...]:
        """The first pairs, by positions; a slot that nothing was written to by its own number."""
        keys = torch.where(self.place.keys < 0, torch.arange(pairs.shape[3]), self.place.keys)
        told = self.check.heads is not None
        return tuple(
            (b, self.layer, h if told else None, self.place.first + q, int(keys[k]))
            for b, h, q, k in pairs.nonzero()[:LISTED].tolist()
        )

    def _causes(self, leaks: torch.Tensor, allowed: torch.Tensor) -> Iterator[tuple[str, int]]:
        """How many leaks read what no query may read."""
        place, documents = self.place, self.wanted.setting.documents
        if self.wanted.program.cross or not bool(leaks.any()):
            return
        queries, used = torch.arange(place.first, place.end)[:, None], place.keys >= 0
        later = place.keys > queries
        kinds = {"a slot that nothing is in": ~used}
        if not bool((allowed & later).any()):
            kinds["a later position"] = later
        if place.keys_real is not None:
            kinds["padding"] = ~place.keys_real[:, None, None] & used
        if documents is not None and documents.shape[1] == place.end:
            own, others = documents[:, place.first :], documents[:, place.keys.clamp_min(0)]
            kinds["another document"] = (own[:, None, :, None] != others[:, None, None]) & used
        for what, where in kinds.items():
            count = int((leaks & where).sum())
            if count:
                yield f"{what} is read", count
