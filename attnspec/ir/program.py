"""What a spec means, free of its text: terms whose sizes may still depend on n, head and layer.

`bind` turns a term into a `Relation` once those are known. A `Program` holds one term (or
mechanism) for each layer and head. Spans serve messages and do not count in comparisons.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import repeat
from math import prod
from typing import Any, TypeAlias

from attnspec.ir.scalars import Scalar, symbols
from attnspec.text.source import Span

ParameterValue: TypeAlias = int | float | bool | str
"""A parameter from outside; a string is an expression of the language, a list as well."""


@dataclass(frozen=True)
class InputRef:
    """A run-time input by name, and its kind."""

    name: str
    kind: str


@dataclass(frozen=True)
class Tokens:
    """A token set: kind "first", "last", "every" or "positions", with its scalars.

    `positions` has pairs (first, last), flattened.
    """

    kind: str
    values: tuple[Scalar, ...]


@dataclass(frozen=True)
class TokenCompound:
    """`| & - ~` of token sets."""

    op: str
    terms: tuple[TokenTerm, ...]


TokenTerm: TypeAlias = Tokens | TokenCompound | InputRef
ArgumentValue: TypeAlias = "Scalar | str | TokenTerm | Term | tuple[Scalar | InputRef, ...]"


@dataclass(frozen=True)
class Leaf:
    """A pattern by name with its arguments, sorted by name; `spans` are the arguments' places."""

    pattern: str
    arguments: tuple[tuple[str, ArgumentValue], ...]
    span: Span | None = field(default=None, compare=False, repr=False)
    spans: tuple[tuple[str, Span], ...] = field(default=(), compare=False, repr=False)

    def place(self, argument: str | None) -> Span | None:
        """Where an argument stands in the text, else the whole pattern."""
        return dict(self.spans).get(argument or "", self.span)


@dataclass(frozen=True)
class Compound:
    """`|`, `&`, `-`, `~`, `transpose` or `shift` (with `by`) of terms."""

    op: str
    terms: tuple[Term, ...]
    by: Scalar | None = None
    span: Span | None = field(default=None, compare=False, repr=False)


Term: TypeAlias = Leaf | Compound


@dataclass(frozen=True)
class Mechanism:
    """A mechanism by name with its arguments, sorted by name."""

    name: str
    arguments: tuple[tuple[str, ArgumentValue], ...]
    span: Span | None = field(default=None, compare=False, repr=False)


EXPRESSION = "expression"
"""What a change of scores that has no name is called."""


@dataclass(frozen=True)
class Score:
    """A change to the scaled score: "softcap", "alibi" or "bias" with its arguments, or
    `EXPRESSION` with what the score becomes, `value`; `slopes` of `alibi`, one for each head, where
    they are not those of the paper."""

    name: str
    arguments: tuple[tuple[str, Scalar], ...]
    slopes: tuple[float, ...] = ()
    span: Span | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Attend:
    """What one head of one layer does.

    `graph` and `mechanism`: one of them, or both for `GRAPH + MECHANISM`. `scale` None is
    1 / sqrt(d). `scores` apply in order. `normalize` is "softmax", "relu", "sigmoid", "softmax1".
    """

    graph: Term | None
    mechanism: Mechanism | None = None
    scale: Scalar | None = None
    scores: tuple[Score, ...] = ()
    normalize: str = "softmax"
    span: Span | None = field(default=None, compare=False, repr=False)

    @property
    def leaves(self) -> Iterator[Leaf]:
        """All patterns of the graph, if there is one."""
        return iter(()) if self.graph is None else leaves(self.graph)

    @property
    def numbers(self) -> list[Scalar]:
        """The numbers that its scores are changed by."""
        return [value for score in self.scores for _, value in score.arguments]


SIZED = ("choices", "scores")
"""Kinds of inputs about blocks of keys, which have a size."""


@dataclass(frozen=True)
class Input:
    """A declared run-time tensor; `at_most` promises a bound on the tokens marked, `size` is that
    of the blocks that choices and scores are about."""

    name: str
    kind: str
    at_most: int | None = None
    size: int = 1


POSITIONS = {"tokens": 1, "ids": 1, "numbers": 1, "choices": 2, "buckets": 3, "pairs": 2}
"""The axis of positions of inputs, by their kind: of queries those of choices and pairs, of keys
the others; lengths and scores have none."""

OF_QUERIES = ("choices", "pairs")
"""Kinds of inputs whose positions are those of the queries."""


@dataclass(frozen=True)
class Claim:
    """`require CLAIM at n = …`: `text` is canonical, `at` None for every n, or with `since`, of
    `for n >= …`, every n from there.

    `kind` is the word of the claim ("causal", "reach", "subset", "==", "edges", …); `terms` its
    graphs, `compare` and `value` its comparison with a scalar.
    """

    kind: str
    text: str
    at: tuple[int, ...] | None
    since: int | None = None
    terms: tuple[Term, ...] = ()
    compare: str | None = None
    value: Scalar | None = None
    span: Span | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Crossing:
    """Two sequences laid out as one of `length` positions: the queries from `start` on of the one
    stand from position `first` on, the keys, the other, from position 0 on.
    """

    queries: int
    keys: int
    start: int = 0
    first: int = 0

    @property
    def length(self) -> int:
        """The positions that hold both."""
        return max(self.first + self.queries, self.keys)

    @property
    def m(self) -> int:
        """How many queries there are, those before `start` too, as far as it is known."""
        return self.start + self.queries

    @property
    def empty(self) -> bool:
        """Whether there is no query, or no key, and so no pair."""
        return not (self.queries and self.keys)

    @property
    def even(self) -> bool:
        """Whether every position is the query and the key of its own number."""
        return self.queries == self.keys and not (self.start or self.first)


@dataclass(frozen=True)
class Program:
    """A whole spec.

    `attends` are the distinct contents of `slots[layer][head]`, which index them. `layers` and
    `heads` are None where the spec does not declare them: then there is one row or column, which
    serves every layer or head, and `layer` or `head` may still stand in its scalars. `grid` are the
    extents of `sequence grid(…)`. With `cross` queries and keys are two sequences; `crossing` are
    their lengths where they are settled, and until then both have as many as a length says.
    """

    name: str
    attends: tuple[Attend, ...]
    slots: tuple[tuple[int, ...], ...]
    layers: int | None = None
    heads: int | None = None
    causal: bool = False
    grid: tuple[Scalar, ...] | None = None
    extra_tokens: int = 0
    inputs: tuple[Input, ...] = ()
    claims: tuple[Claim, ...] = ()
    cross: bool = False
    crossing: Crossing | None = None

    @property
    def layer_count(self) -> int:
        """How many layers the program distinguishes; 1 where it declares none."""
        return 1 if self.layers is None else self.layers

    @property
    def head_count(self) -> int:
        """How many heads the program distinguishes; 1 where it declares none."""
        return 1 if self.heads is None else self.heads

    def row(self, layer: int = 0) -> tuple[int, ...]:
        """By head which of `attends` a layer has; IndexError where there is no such layer."""
        return self.slots[0 if self.layers is None else layer]

    def attends_of(self, layer: int = 0) -> list[Attend]:
        """What the heads of a layer do, head by head."""
        return [self.attends[slot] for slot in self.row(layer)]

    def attend(self, layer: int = 0, head: int = 0) -> Attend:
        """What a head of a layer does; raises IndexError where the spec has no such slot."""
        return self.attends[self.number(layer, head)]

    def number(self, layer: int, head: int) -> int:
        """Which of `attends` that is."""
        return self.row(layer)[0 if self.heads is None else head]

    @property
    def graphs(self) -> list[Term]:
        """The graphs of `attends`, as far as they have one."""
        return [attend.graph for attend in self.attends if attend.graph is not None]

    @property
    def mechanisms(self) -> list[Mechanism]:
        """The mechanisms of `attends`, as far as they have one."""
        return [attend.mechanism for attend in self.attends if attend.mechanism is not None]

    @property
    def leaves(self) -> Iterator[Leaf]:
        """All patterns of its graphs."""
        return (leaf for attend in self.attends for leaf in attend.leaves)

    @property
    def fixed_length(self) -> int | None:
        """The one length of a program on a grid of constant extents; None for all others."""
        extents = self.grid or ()
        numbers = [extent for extent in extents if isinstance(extent, int)]
        if not numbers or len(numbers) < len(extents):
            return None
        return prod(numbers) + self.extra_tokens


def leaves(term: Term) -> Iterator[Leaf]:
    """All patterns of a term, left to right, behind each those of graphs among its arguments."""
    if isinstance(term, Leaf):
        yield term
        for _, value in term.arguments:
            if isinstance(value, Leaf | Compound):
                yield from leaves(value)
    else:
        for child in term.terms:
            yield from leaves(child)


def inputs_of(term: Term) -> set[str]:
    """The names of the run-time inputs that a term reads."""
    names: set[str] = set()
    values: list[object] = [value for leaf in leaves(term) for _, value in leaf.arguments]
    while values:
        match values.pop():
            case InputRef(name):
                names.add(name)
            case TokenCompound(_, parts) | (tuple() as parts):
                values.extend(parts)
    return names


def scalars_of(term: Term) -> Iterator[tuple[Leaf | Compound, str, Scalar]]:
    """All scalars of a term, each with the pattern or operator whose argument it stands in and the
    argument's name; of `every` that is `step` or `offset`, of other token sets their kind."""

    def scan(owner: Leaf | Compound, name: str, value: object) -> Iterator[Any]:
        if isinstance(value, TokenCompound):
            value = value.terms
        if isinstance(value, Tokens):
            names = ("step", "offset") if value.kind == "every" else repeat(value.kind)
            for each, part in zip(names, value.values, strict=False):
                yield owner, each, part
        elif isinstance(value, tuple):
            for part in value:
                yield from scan(owner, name, part)
        elif isinstance(value, Leaf | Compound):
            yield from scalars_of(value)
        elif not isinstance(value, str | InputRef):
            yield owner, name, value

    if isinstance(term, Leaf):
        for name, value in term.arguments:
            yield from scan(term, name, value)
    else:
        if term.by is not None:
            yield term, "by", term.by
        for child in term.terms:
            yield from scalars_of(child)


def symbols_of(term: Term) -> set[str]:
    """The names of all symbols (`n`, `head`, …) in the scalars of a term."""
    return {name for _, _, scalar in scalars_of(term) for name in symbols(scalar)}
