"""Whether a row is the same pairs at every length, as the form of a spec shows it.

A pair (q, k) is *steady* where it is one at every n above both positions, or at none; `| & - ~`,
`transpose` and a `shift` by 0 or more keep pairs steady. A row q is *stable*, the same pairs at
every n > q, where its pairs with k <= q are steady and it has no others, as at n = q + 1.

Each rule is sound and none is complete: None is a proof for every n and every input, a fault says
where none was found. A run-time input is the same at both lengths as far as both have it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from attnspec.graphs.bind import BindError, bind, situation_of, stand_ins
from attnspec.graphs.forms.dnf import Place, place_of
from attnspec.graphs.forms.properties import asks_for_cells, never_reads_later
from attnspec.graphs.forms.written import written, written_leaf, written_mechanism, written_scalar
from attnspec.graphs.patterns import BY_NAME
from attnspec.graphs.relation import DataDependent
from attnspec.ir.mechanisms import BY_NAME as MECHANISMS_BY_NAME
from attnspec.ir.parameters import RelationError
from attnspec.ir.program import (
    ArgumentValue,
    Attend,
    Compound,
    Leaf,
    Program,
    Term,
    TokenCompound,
    Tokens,
    leaves,
    scalars_of,
)
from attnspec.ir.scalars import Apply, Scalar, ScalarError, Symbol, fold, symbols

FAR = 1 << 20
"""A length at which choices that may look ahead do."""

CAUSAL = "write the statement `causal`"
"""What mends that later keys are read."""


@dataclass(frozen=True)
class Fault:
    """The term that makes rows others at another length, as it is written, why, and the mend."""

    term: str
    why: str
    mend: str

    def __str__(self) -> str:
        return f"`{self.term}` {self.why}: {self.mend}"


def fault_of(
    program: Program, layer: int = 0, head: int = 0, *, whole: bool = True
) -> Fault | None:
    """Why no row of a head was shown to be stable, None where all are, or without `whole` why its
    pairs were not shown to be steady; a mechanism is taken for the pairs that it weighs."""
    if program.fixed_length is not None:
        # one length alone
        return None
    attend, place = program.attend(layer, head), place_of(program, layer, head)
    fault = unsteady_attend(attend, place)
    if fault is None and whole:
        fault = reads_later(attend, program.causal)
    return fault or unsteady_choice(program, layer, head, whole=whole)


def unsteady_choice(
    program: Program, layer: int, head: int, n: int = FAR, *, whole: bool = True
) -> Fault | None:
    """Why data-dependent choices were not shown to be the same at every length up to n.

    The tokens are the same as far as both lengths have them. Without `whole`, padding may follow
    them, which takes no place in any choice.
    """
    graph = program.attend(layer, head).graph
    named = () if graph is None else leaves(graph)
    for leaf in (one for one in named if issubclass(BY_NAME[one.pattern], DataDependent)):
        bound = bound_choice(program, leaf, n, layer, head)
        if bound is None:
            return Fault(written_leaf(leaf), "has no value", "write numbers as its sizes")
        if bound.counts_by_length:
            mend = "say a number, or choose in another way"
            return Fault(written_leaf(leaf), bound.counts_by_length, mend)
        ahead = bound.ahead(n)
        why = f"looks ahead: {ahead.why}" if ahead is not None else bound.waits
        if whole and why:
            mend = "let each query choose by itself among what is before it"
            return Fault(written_leaf(leaf), why, mend)
    return None


def bound_choice(
    program: Program, leaf: Leaf, n: int, layer: int = 0, head: int = 0
) -> DataDependent | None:
    """Data-dependent choices at n positions, None where they have no value there."""
    try:
        at = situation_of(program, n, layer, head, grid=(), inputs=stand_ins(program))
        choice = bind(leaf, at)
    except (BindError, RelationError, ScalarError):
        return None
    return choice if isinstance(choice, DataDependent) else None


def unsteady_attend(attend: Attend, place: Place) -> Fault | None:
    """Why the pairs of a head were not shown to be steady."""
    mechanism = attend.mechanism
    if mechanism is not None:
        for _, value in mechanism.arguments:
            if _reads_length(value):
                return _sized(written_mechanism(mechanism), value)  # type: ignore[arg-type]
    return None if attend.graph is None else unsteady(attend.graph, place)


def reads_later(attend: Attend, causal: bool) -> Fault | None:
    """Why a head was not shown to read no later key."""
    if causal:
        # every graph is intersected with k <= q, a mechanism without a causal form was refused
        return None
    if attend.mechanism is not None:
        name = attend.mechanism.name
        mend = CAUSAL if MECHANISMS_BY_NAME[name].causal else "it has no causal form"
        return Fault(name, "mixes all positions", mend)
    if attend.graph is None or never_reads_later(attend.graph):
        return None
    return Fault(written(attend.graph), "reads later keys", CAUSAL)


def unsteady(term: Term, place: Place) -> Fault | None:
    """Why the pairs of a term were not shown to be steady, None where they are."""
    if isinstance(term, Leaf):
        return unsteady_leaf(term, place)
    reason = next((fault for part in term.terms if (fault := unsteady(part, place))), None)
    if reason is None and term.op == "shift":
        return unsteady_shift(term, place)
    return reason


def unsteady_shift(term: Term, place: Place) -> Fault | None:
    """That a shift to earlier positions loses pairs at the end, wherever that is."""
    by = fold(
        term.by if not isinstance(term, Leaf) and term.by is not None else 0, dict(place.numbers)
    )
    if isinstance(by, int) and by >= 0:
        return None
    if _reads_length(by):
        return _sized(written(term), by)
    return Fault(
        written(term),
        "has no pairs at the last position, and gains them when the sequence grows",
        "shift by 0 or more",
    )


def unsteady_leaf(leaf: Leaf, place: Place) -> Fault | None:
    """The same of one pattern."""
    text = written_leaf(leaf)
    for name, value in leaf.arguments:
        if isinstance(value, Leaf | Compound):
            inner = unsteady(value, place)
            if inner is not None:
                return inner
        for _, _, scalar in scalars_of(replace(leaf, arguments=((name, value),))):
            if _reads_length(scalar):
                if "predicate" in dict(leaf.arguments):
                    return Fault(text, "reads n", "compare q and k with numbers")
                return _sized(text, scalar)
        for tokens in _token_sets(value):
            if tokens.kind == "last":
                return _last(text, tokens)
    pattern = BY_NAME[leaf.pattern]
    if issubclass(pattern, DataDependent):
        # `unsteady_choice` answers for it
        return None
    if pattern.needs_grid or asks_for_cells(leaf):
        # a cell is found by all extents of the grid but the first
        moving = [extent for extent in place.grid[1:] if _reads_length(extent)]
        if moving:
            return Fault(
                text,
                f"reads cells of a grid that is `{written_scalar(moving[0])}` wide",
                "give the grid a number there",
            )
    fact = pattern.changing(place.causal)
    return None if fact is None else Fault(text, fact.why, fact.mend)


def _sized(text: str, size: Scalar) -> Fault:
    mend = f"write a number in place of `{written_scalar(size)}`"
    return Fault(text, "depends on n, the number of positions", mend)


def _last(text: str, tokens: Tokens) -> Fault:
    count = written_scalar(tokens.values[0])
    return Fault(
        text,
        f"reads `last({count})`, which changes as the sequence grows",
        "for the latest keys write `window(before = …, after = 0)`; for keys that stay the same"
        " write `first(…)` or an input of kind `tokens`",
    )


def _reads_length(value: object) -> bool:
    return isinstance(value, Symbol | Apply) and "n" in symbols(value)


def _token_sets(value: ArgumentValue) -> Iterator[Tokens]:
    if isinstance(value, Tokens):
        yield value
    elif isinstance(value, TokenCompound):
        for term in value.terms:
            yield from _token_sets(term)


# --- what goes on, and what is padded -------------------------------------------------------------


def unsteady_layer(program: Program, layer: int, heads: int) -> Fault | None:
    """Why what the heads of a layer compute of a pair was not shown to be the same at every length,
    read off how they are written."""
    for head in range(heads):
        attend, place = program.attend(layer, head), place_of(program, layer, head)
        fault = unsteady_attend(attend, place) or changing_weights(attend)
        fault = fault or unsteady_choice(program, layer, head)
        if fault is not None:
            return fault
    return counting_queries(program, layer, heads)


def counting_queries(program: Program, layer: int, heads: int) -> Fault | None:
    """Why a call with the last queries alone gives other rows, though each length gives these."""
    for head in range(heads):
        graph = program.attend(layer, head).graph
        for leaf in () if graph is None else leaves(graph):
            bound = bound_choice(program, leaf, FAR, layer, head)
            if bound is not None and bound.counts_queries:
                mend = "remove `share_qk = false`, or pass buckets: `input x: buckets`, `lsh(x, …)`"
                return Fault(written_leaf(leaf), bound.counts_queries, mend)
    return None


def changing_weights(attend: Attend) -> Fault | None:
    """Why the weights of equal pairs are others at another length: a scale or a score reads n."""
    if attend.scale is not None and _reads_length(attend.scale):
        return _sized(f"scale {written_scalar(attend.scale)}", attend.scale)
    for score in attend.scores:
        for name, value in score.arguments:
            if _reads_length(value):
                return _sized(f"score {score.name}({name} = {written_scalar(value)})", value)
    return None


def must_be_stable(name: str, fault: Fault) -> str:
    """The reason where an attention would go on from the positions before and contradict them."""
    return f"decoding `{name}` step by step would give other results than one call, because {fault}"


def must_be_steady(name: str, fault: Fault) -> str:
    """The reason where a padded sample is another than alone."""
    return f"a padded sample of `{name}` would get other results than without padding: {fault}"
