"""Where an expression stands: what its words mean there, and what is known of the attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import singledispatch
from typing import TYPE_CHECKING, Any, NoReturn

from attnspec.elaborate.collect import Collector
from attnspec.elaborate.imports import Module
from attnspec.elaborate.names import Value
from attnspec.elaborate.weights import Weights
from attnspec.grammar import nodes
from attnspec.graphs.relation import Relation
from attnspec.ir.program import Input
from attnspec.ir.scalars import Scalar
from attnspec.text.source import Span

if TYPE_CHECKING:
    from attnspec.ir.mechanisms import MechanismDeclaration


@dataclass
class Work:
    """What is known so far of the attention that is elaborated.

    `pending` are counts that it declares, by keyword, but that are not elaborated yet, `broken`
    statements about the whole attention, by keyword, that have no meaning.
    """

    collector: Collector
    patterns: Mapping[str, type[Relation]]
    mechanisms: Mapping[str, type[MechanismDeclaration]]
    pending: set[str]
    layers: int | None = None
    heads: int | None = None
    grid: tuple[Scalar, ...] | None = None
    extra_tokens: int = 0
    causal: Span | None = None
    inputs: dict[str, Input] = field(default_factory=dict)
    broken: set[str] = field(default_factory=set)
    used_graphs: dict[tuple[int, str], tuple[nodes.Graph, Module]] = field(default_factory=dict)
    weights: Weights = field(default_factory=Weights)


@dataclass
class Scope:
    """Names in scope, None for one whose definition failed: whoever uses it fails without another
    message.

    `module` is the file in which graphs are looked up, `used` collects the names that were looked
    up, for the lints. `predicate`: inside `where`; `numbers`: nothing but numbers and truth values
    is meant here; `expanding`: the named graphs whose definitions this stands in.
    """

    work: Work
    module: Module
    names: dict[str, Value | None] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    predicate: bool = False
    numbers: bool = False
    expanding: tuple[nodes.Graph, ...] = ()

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
