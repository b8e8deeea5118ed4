"""What an elaboration carries along: diagnostics, what is known so far, the words in scope."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import singledispatch
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar

from attnspec.elaborate.names import GRAPH_FUNCTIONS, TOKEN_SETS, Value
from attnspec.grammar import nodes
from attnspec.graphs.relation import Relation
from attnspec.ir.program import Compound, Input, Leaf, TokenCompound, Tokens
from attnspec.ir.scalars import FUNCTIONS, Apply, Scalar
from attnspec.limits import LIMITS
from attnspec.text.diagnostics import Diagnostic
from attnspec.text.source import Source, Span

if TYPE_CHECKING:
    from attnspec.ir.mechanisms import MechanismDeclaration


class Weight(NamedTuple):
    """Operators and patterns in all, and how many stand inside one another."""

    size: int
    depth: int


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
            return Weight(0, 0)
        cached = self._known.get(id(item))
        if cached is not None:
            return cached[1]
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


T = TypeVar("T")
R = TypeVar("R")

# --- independent errors of one text come together ------------------------------------------------


class Failed(Exception):
    """This part of the text has no meaning; its diagnostics are collected already."""


class Stopped(Exception):
    """The whole elaboration ends here, because a limit is reached; a diagnostic says which."""


class Collector:
    """The diagnostics of one elaboration; `LIMITS.problems` of them end it."""

    def __init__(self) -> None:
        self.diagnostics: list[Diagnostic] = []

    def has_errors(self) -> bool:
        """Whether anything was wrong so far, warnings aside."""
        return any(d.severity == "error" for d in self.diagnostics)

    def add(self, code: str, message: str, span: Span | None, **more: Any) -> None:
        """Record a diagnostic, `more` being its other fields, and go on."""
        self.diagnostics.append(Diagnostic(code, message, span, **more))
        if sum(d.severity == "error" for d in self.diagnostics) >= LIMITS.problems:
            raise Stopped

    def fail(self, code: str, message: str, span: Span | None, **more: Any) -> NoReturn:
        """Record an error and give up the part of the text that it stands in."""
        self.add(code, message, span, **more)
        raise Failed

    def add_twice(self, name: str, span: Span, first: Span) -> None:
        """Record that a name is defined again."""
        related = (("first defined here", first),)
        self.add("A203", f"`{name}` is defined twice", span, related=related)

    def stop(self, code: str, message: str, span: Span | None) -> NoReturn:
        """Record an error and end the elaboration."""
        self.add(code, message, span)
        raise Stopped


def each(items: Sequence[T], elaborate: Callable[[T], R]) -> list[R]:
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


# --- where an expression stands -------------------------------------------------------------------


@dataclass(eq=False)
class Module:
    """One file: its own definitions, and for each visible graph the module that defines it.

    `broken` are names whose import failed.
    """

    source: Source
    file: nodes.File
    attentions: dict[str, nodes.Attention] = field(default_factory=dict)
    graphs: dict[str, tuple[nodes.Graph, Module]] = field(default_factory=dict)
    broken: set[str] = field(default_factory=set)


@dataclass
class Work:
    """What is known so far of the attention that is elaborated.

    `pending` are counts that it declares, by keyword, but that are not elaborated yet, `broken`
    statements about the whole attention, by keyword, that have no meaning, `spent` the sum of the
    sizes of the terms on the way.
    """

    collector: Collector
    patterns: Mapping[str, type[Relation]]
    mechanisms: Mapping[str, type[MechanismDeclaration]]
    pending: dict[str, nodes.Setting]
    layers: int | None = None
    heads: int | None = None
    grid: tuple[Scalar, ...] | None = None
    extra_tokens: int = 0
    causal: Span | None = None
    cross: Span | None = None
    inputs: dict[str, Input] = field(default_factory=dict)
    broken: set[str] = field(default_factory=set)
    used_graphs: dict[tuple[int, str], tuple[nodes.Graph, Module]] = field(default_factory=dict)
    weights: Weights = field(default_factory=Weights)
    spent: int = 0

    @property
    def callable(self) -> list[str]:
        """The patterns that a text may name."""
        return [name for name, pattern in self.patterns.items() if not pattern.word]


@dataclass
class Scope:
    """Names in scope, None for one whose definition failed: whoever uses it fails without another
    message.

    `module` is the file in which graphs are looked up, `used` collects the names that were looked
    up, for the lints. `predicate`: inside `where` or `score`; `score`: inside that; `numbers`:
    nothing but numbers and truth values is meant here; `wanted`: the kind of input that may stand
    here by its name; `default`: in the default of a parameter; `expanding`: the named graphs whose
    definitions this stands in.
    """

    work: Work
    module: Module
    names: dict[str, Value | None] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    predicate: bool = False
    score: bool = False
    numbers: bool = False
    wanted: str = ""
    default: bool = False
    expanding: tuple[nodes.Graph, ...] = ()

    @property
    def callable(self) -> list[str]:
        """What may have brackets behind its name."""
        work, graphs = self.work, self.module.graphs
        words = [*work.callable, *graphs, *work.mechanisms, *FUNCTIONS, *TOKEN_SETS]
        return [*words, *GRAPH_FUNCTIONS]

    def child(self, **changes: Any) -> Scope:
        """A scope inside this one: sees the same names, adds its own, shares what was used."""
        return replace(self, **{"names": dict(self.names), **changes})

    def fail(self, code: str, message: str, span: Span | None, **more: Any) -> NoReturn:
        """Record an error and give up the part of the text that it stands in."""
        self.work.collector.fail(code, message, span, **more)


@singledispatch
def meaning(node: nodes.Expression, scope: Scope) -> Value:
    """What an expression stands for."""
    message = "a range or a set in braces can stand only after `in`"
    scope.fail("A311", message, node.span)
