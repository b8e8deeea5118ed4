"""From a program to works: what each group of heads of a layer computes at one length."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from attnspec.bind import BindError, Situation, bind_attended, integer_of
from attnspec.ir import Attend, Program, Score, Term, inputs_of, leaves
from attnspec.patterns import BY_NAME
from attnspec.relations import RelationError
from attnspec.scalars import Scalar, ScalarError, evaluate
from attnspec.source import Span
from attnspec.target import Alibi, Bias, Change, Softcap, StandIn, Work


def stand_ins(program: Program) -> dict[str, StandIn]:
    """What stands in relations for the tensors of a call, one for each input."""
    return {entry.name: StandIn(entry.name) for entry in program.inputs}


def unbuilt(program: Program) -> list[tuple[str, Span | None]]:
    """What no backend can run yet: mechanisms, and patterns whose pairs the data decide."""
    found: list[tuple[str, Span | None]] = []
    for attend in program.attends:
        if attend.mechanism is not None:
            found.append((attend.mechanism.name, attend.mechanism.span))
        if attend.graph is not None:
            found.extend(
                (leaf.pattern, leaf.span)
                for leaf in leaves(attend.graph)
                if BY_NAME[leaf.pattern].data_dependent
            )
    return found


def bias_tables(program: Program) -> dict[tuple[int, Score], str]:
    """The learned tables of a program: their names by place among the scores and by the score.

    Layers and heads with the same score in the same place share a table, each with its own rows.
    """
    found = dict.fromkeys(
        (place, score)
        for attend in program.attends
        for place, score in enumerate(attend.scores)
        if score.name == "bias"
    )
    return {entry: f"bias_{index}" for index, entry in enumerate(found)}


def buckets_of(score: Score) -> int:
    """How many numbers a learned table has for each head."""
    return int(dict(score.arguments)["buckets"])  # type: ignore[arg-type]


def works_of(
    program: Program, layer: int, heads: int, n_q: int, n_k: int, inputs: Mapping[str, StandIn]
) -> list[tuple[Work, tuple[int, ...]]]:
    """The distinct works of a layer with the heads that share each.

    Raises ValueError where a size has no admissible value at n_k positions.
    """
    groups: dict[Work, list[int]] = {}
    grid = grid_of(program, n_k)
    for head in range(heads):
        at = Situation(
            n=n_k,
            patterns=BY_NAME,
            layer=layer,
            head=head,
            layers=1 if program.layers is None else program.layers,
            heads=program.heads,
            causal=program.causal,
            grid=grid,
            extra_tokens=program.extra_tokens,
            inputs=inputs,
        )
        groups.setdefault(_work(program, at, heads, n_q), []).append(head)
    return [(work, tuple(members)) for work, members in groups.items()]


def grid_of(program: Program, n: int) -> tuple[int, ...]:
    """The extents of the grid at n positions, () for a line; ValueError where n does not fit."""
    if program.grid is None:
        return ()
    at = Situation(n, BY_NAME, layers=program.layers or 1, heads=program.heads)
    extents = tuple(integer_of(part, at, "an extent of the grid", None) for part in program.grid)
    cells = prod(extents)
    if min(extents) < 1 or cells + program.extra_tokens != n:
        shape = " x ".join(str(extent) for extent in extents)
        extra = f" and {program.extra_tokens} extra tokens" if program.extra_tokens else ""
        raise BindError(
            f"the grid of `{program.name}` has {shape} = {cells} cells{extra}, got n = {n}"
        )
    return extents


def _work(program: Program, at: Situation, heads: int, n_q: int) -> Work:
    index = program.slots[0 if program.layers is None else at.layer][
        0 if program.heads is None else at.head
    ]
    attend = program.attends[index]
    tables = bias_tables(program)
    try:
        return Work(
            relation=bind_attended(_graph(attend), at),
            n_q=n_q,
            n_k=at.n,
            scale=None if attend.scale is None else _number(attend.scale, at, "scale"),
            changes=tuple(
                _change(score, at, heads, tables.get((place, score), ""), not program.causal)
                for place, score in enumerate(attend.scores)
            ),
            normalize=attend.normalize,
            reads=tuple(sorted(inputs_of(_graph(attend)))),
        )
    except RelationError as error:
        raise BindError(f"{error.message} at n = {at.n}") from None


def _graph(attend: Attend) -> Term:
    if attend.graph is None or attend.mechanism is not None:
        raise BindError("a mechanism has no graph to run")
    return attend.graph


def _change(score: Score, at: Situation, heads: int, table: str, two_sided: bool) -> Change:
    values = {name: _number(value, at, f"{score.name}: {name}") for name, value in score.arguments}
    match score.name:
        case "softcap":
            if not values["cap"] > 0:
                raise BindError(f"`cap` must be above 0, got {values['cap']} at n = {at.n}")
            return Softcap(values["cap"])
        case "alibi":
            return Alibi(heads)
        case _:
            return Bias(int(values["buckets"]), int(values["max_distance"]), two_sided, table)


def _number(scalar: Scalar, at: Situation, name: str) -> float:
    try:
        return float(evaluate(scalar, at.values))
    except ScalarError as error:
        raise BindError(f"`{name}` has no value at n = {at.n}: {error}") from None
