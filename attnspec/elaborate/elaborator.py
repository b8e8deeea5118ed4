"""What the parts of the elaborator share: its state, and checks that fail with a diagnostic."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from attnspec.elaborate.collect import Collector, Failed
from attnspec.elaborate.imports import Module
from attnspec.elaborate.names import ARTICLES, Bound, Environment, Kind, type_of
from attnspec.grammar import nodes
from attnspec.graphs.relation import Relation
from attnspec.ir.parameters import Parameter
from attnspec.ir.program import (
    ArgumentValue,
    Compound,
    InputRef,
    Leaf,
    Term,
    TokenCompound,
    Tokens,
    TokenTerm,
    leaves,
)
from attnspec.ir.scalars import LARGEST, Apply, Scalar, ScalarError, Symbol, fold
from attnspec.text.source import Span

if TYPE_CHECKING:
    from attnspec.ir.mechanisms import MechanismDeclaration

T = TypeVar("T")
R = TypeVar("R")

MOST_TERMS = 100_000
"""Patterns and operators of one graph, names written out."""

MOST_OPERATIONS = 1000
"""Operators and functions of one scalar or token set, names written out."""

MOST_DEEP = 100
"""Patterns, operators and functions inside one another, names written out."""

MOST_WORK = 1_000_000
"""What building all terms of a spec may cost: the sum of the sizes of the terms on the way."""

CALL = 32
"""What a call of a named graph, or a copy for one head, costs beside its result, in that unit."""


class Elaborator:
    """One elaboration. `Expressions` supplies the abstract methods; the other parts use them."""

    collector: Collector
    module: Module
    patterns: Mapping[str, type[Relation]]
    mechanisms: Mapping[str, type[MechanismDeclaration]]
    layers: int | None = None
    heads: int | None = None
    grid_rank: int | None = None
    inputs: dict[str, InputRef]
    used_graphs: dict[tuple[int, str], tuple[nodes.Graph, Module]]
    pending: set[str]
    """Counts that the attention declares, by keyword, but that are not elaborated yet."""
    broken: set[str]
    """Statements about the whole attention, by keyword, that have no meaning."""

    def __init__(self) -> None:
        self.inputs = {}
        self.used_graphs = {}
        self.pending = set()
        self.broken = set()
        self._weights = Weights()
        self._work = 0

    @abstractmethod
    def expression(self, node: nodes.Expression, env: Environment) -> Bound:
        """What an expression stands for."""

    @abstractmethod
    def scalar(self, node: nodes.Expression, env: Environment, what: str = "") -> Scalar:
        """A scalar, with its constant parts computed."""

    @abstractmethod
    def integer(self, node: nodes.Expression, env: Environment, what: str) -> Scalar:
        """An integer scalar."""

    @abstractmethod
    def graph(self, node: nodes.Expression, env: Environment) -> Term:
        """A graph."""

    @abstractmethod
    def argument(
        self, parameter: Parameter, name: str, node: nodes.Expression, env: Environment
    ) -> ArgumentValue:
        """The value of an argument of a pattern or mechanism, as its `Parameter` asks."""

    def each(self, items: Sequence[T], elaborate: Callable[[T], R]) -> list[R]:
        """Elaborate every item, so that independent errors come together, then fail if any did."""
        results: list[R] = []
        failed = False
        for item in items:
            try:
                results.append(elaborate(item))
            except Failed:
                failed = True
        if failed:
            raise Failed
        return results

    def folded(self, scalar: Scalar, span: Span | None) -> Scalar:
        """The scalar, computed if it is constant; its arguments are folded already."""
        if isinstance(scalar, Apply) and not any(
            isinstance(argument, Symbol | Apply) for argument in scalar.args
        ):
            try:
                scalar = fold(scalar, {})
            except ScalarError as error:
                self.collector.fail("A308", f"this expression has no value: {error}", span)
        if isinstance(scalar, int) and abs(scalar) > LARGEST:
            self.collector.fail("A308", "this expression has no value: a number above 2**62", span)
        self._limited(scalar, MOST_OPERATIONS, "operations of one expression", span)
        return scalar

    def token_compound(self, op: str, terms: tuple[TokenTerm, ...], span: Span | None) -> TokenTerm:
        """A compound token set."""
        compound = TokenCompound(op, terms)
        self._limited(compound, MOST_OPERATIONS, "parts of one token set", span)
        return compound

    def compound(
        self, op: str, terms: tuple[Term, ...], span: Span | None, by: Scalar | None = None
    ) -> Term:
        """A compound term, flattened where an operator repeats, without repeated operands."""
        whole = Compound(op, terms, by, span=span)
        # before anything walks the term
        self._limited(whole, MOST_TERMS, "patterns and operators of one graph", span)
        if op not in ("|", "&"):
            return whole
        flat: dict[Term, None] = {}
        for term in terms:
            inner = term.terms if isinstance(term, Compound) and term.op == op else (term,)
            flat.update(dict.fromkeys(inner))
        return next(iter(flat)) if len(flat) == 1 else Compound(op, tuple(flat), span=span)

    def leaf(
        self,
        name: str,
        arguments: dict[str, ArgumentValue],
        spans: dict[str, Span],
        span: Span,
    ) -> Leaf:
        """A pattern with its arguments."""
        leaf = Leaf(
            name, tuple(sorted(arguments.items())), span, tuple(sorted(spans.items(), key=_first))
        )
        self._limited(leaf, MOST_TERMS, "patterns and operators of one graph", span)
        return leaf

    def as_tokens(self, bound: Bound, span: Span) -> TokenTerm:
        """The token set that something stands for; an input of kind `tokens` is one."""
        if bound.kind == "input":
            if bound.value.kind != "tokens":  # type: ignore[union-attr]
                self.collector.fail(
                    "A313",
                    f"a token set is needed, got an input of kind `{bound.value.kind}`",  # type: ignore[union-attr]
                    span,
                    help="declare it as `tokens`",
                )
            return bound.value  # type: ignore[return-value]
        self.require(bound, "tokens", span)
        return bound.value  # type: ignore[return-value]

    def require(self, bound: Bound, kind: Kind, span: Span, what: str = "") -> None:
        """Fail unless something is of the kind that is needed."""
        if bound.kind == kind:
            return
        help_text = None
        if kind == "graph" and bound.kind in ("tokens", "input"):
            help_text = "`global(T)`, `columns(T)` and `rows(T)` make graphs of token sets"
        elif kind == "graph" and bound.kind == "mechanism":
            help_text = "a mechanism stands alone or as `GRAPH + MECHANISM`"
        elif kind == "tokens" and bound.kind == "scalar":
            help_text = "`first(c)`, `last(c)`, `every(step)` and `positions(0, 5)` are token sets"
        subject = f"{what} must be {ARTICLES[kind]}" if what else f"{ARTICLES[kind]} is needed here"
        self.collector.fail("A310", f"{subject}, got {ARTICLES[bound.kind]}", span, help=help_text)

    def typed(self, value: Scalar, wanted: str, operator: str, span: Span) -> None:
        """Fail unless a scalar is a number, or a comparison, as an operator wants it."""
        is_boolean = type_of(value) == "boolean"
        if is_boolean != (wanted == "boolean"):
            found = "a comparison" if is_boolean else "a number"
            needed = "comparisons" if wanted == "boolean" else "numbers"
            self.collector.fail("A314", f"`{operator}` works on {needed}, got {found}", span)

    def known_now(self, term: Term, span: Span, where: str) -> None:
        """Fail if the data decide a part of a term."""
        for leaf in leaves(term):
            if getattr(self.patterns[leaf.pattern], "data_dependent", False):
                self.collector.fail(
                    "A703",
                    f"`{leaf.pattern}` is decided by the data and cannot stand {where}",
                    span,
                )

    def spend(self, work: int, span: Span | None) -> None:
        """Count work against the limit, so that names cannot multiply it without end."""
        self._work += work
        if self._work > MOST_WORK:
            self.collector.stop(
                "A196", "this spec is too large when its names are written out", span
            )

    def copied(self, term: Term, span: Span | None) -> None:
        """Count a copy of a term, made for one layer and head, against the limit."""
        self.spend(self._weights.of(term).size + CALL, span)

    def _limited(self, item: object, most: int, what: str, span: Span | None) -> None:
        weight = self._weights.of(item)
        if weight.size > most:
            self.collector.stop(
                "A196",
                f"at most {most:,} {what} are allowed, names written out, got {weight.size:,}",
                span,
            )
        if weight.depth > MOST_DEEP:
            self.collector.stop(
                "A197",
                f"operators and patterns may be nested at most {MOST_DEEP} deep, names written out",
                span,
            )
        self.spend(weight.size, span)


def _first(pair: tuple[str, Span]) -> str:
    return pair[0]


class Weight(NamedTuple):
    """Operators and patterns in all, and how many stand inside one another."""

    size: int
    depth: int


_NOTHING = Weight(0, 0)


class Weights:
    """The weights of terms, token sets and scalars, remembered for each object."""

    def __init__(self) -> None:
        # the object is kept beside its weight, so that no other gets its identity
        self._known: dict[int, tuple[object, Weight]] = {}

    def of(self, item: object) -> Weight:
        """The weight of a term, a token set, a scalar or an argument; constants weigh nothing."""
        if isinstance(item, tuple):
            return _sum([self.of(part) for part in item])
        if not isinstance(item, Apply | Compound | Leaf | Tokens | TokenCompound):
            return _NOTHING
        known = self._known.get(id(item))
        if known is not None:
            return known[1]
        parts = _sum([self.of(part) for part in _parts(item)])
        weight = Weight(parts.size + 1, parts.depth + 1)
        self._known[id(item)] = (item, weight)
        return weight


def _parts(item: Apply | Compound | Leaf | Tokens | TokenCompound) -> tuple[object, ...]:
    match item:
        case Apply(_, args):
            return args
        case Leaf(_, arguments):
            return tuple(value for _, value in arguments)
        case Tokens(_, values):
            return values
        case Compound(_, terms, by):
            return (*terms, by)
        case TokenCompound(_, members):
            return members


def _sum(weights: list[Weight]) -> Weight:
    return Weight(
        sum(weight.size for weight in weights), max((weight.depth for weight in weights), default=0)
    )
