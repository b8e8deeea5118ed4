"""The meaning of expressions: what kind of thing they are and what they denote."""

from __future__ import annotations

import re

from attnspec.diagnostics import did_you_mean
from attnspec.elaborate.collect import Failed
from attnspec.elaborate.names import (
    COORDINATES,
    POSITIONS,
    SCALARS,
    TOKEN_SETS,
    Bound,
    Environment,
    type_of,
)
from attnspec.elaborate.operators import Operators
from attnspec.grammar import nodes
from attnspec.ir import ArgumentValue, Term, TokenTerm
from attnspec.relations import Parameter
from attnspec.scalars import FUNCTIONS, Scalar, Symbol


class Expressions(Operators):
    """Elaborates expressions of one spec; `Calls` adds what stands before a bracket."""

    def expression(self, node: nodes.Expression, env: Environment) -> Bound:
        """What an expression stands for."""
        match node:
            case nodes.Integer(value) | nodes.Real(value) | nodes.Boolean(value):
                return Bound("scalar", value, node.span)
            case nodes.Name():
                return self.word(node, env)
            case nodes.Attribute():
                return self._coordinate(node, env)
            case nodes.Call():
                return self.call(node, env)
            case nodes.Prefix():
                return self.prefix(node, env)
            case nodes.Chain():
                return self.chain(node, env)
            case _:
                self.collector.fail(
                    "A311", "a range or a set in braces can stand only after `in`", node.span
                )

    # --- what the places in the language ask for -------------------------------------------------

    def scalar(self, node: nodes.Expression, env: Environment, what: str = "") -> Scalar:
        """A scalar, with its constant parts computed."""
        bound = self.expression(node, env)
        self.require(bound, "scalar", node.span, what)
        return self.folded(bound.value, node.span)  # type: ignore[arg-type]

    def integer(self, node: nodes.Expression, env: Environment, what: str) -> Scalar:
        """An integer scalar."""
        value = self.scalar(node, env, what)
        kind = type_of(value)
        if kind != "integer":
            shown = str(value) if isinstance(value, float) else f"a {kind}"
            self.collector.fail(
                "A305",
                f"{what} must be an integer, got {shown}",
                node.span,
                help="`//` divides and rounds down" if kind == "real" else None,
            )
        return value

    def graph(self, node: nodes.Expression, env: Environment) -> Term:
        """A graph."""
        bound = self.expression(node, env)
        self.require(bound, "graph", node.span)
        return bound.value  # type: ignore[return-value]

    def tokens(self, node: nodes.Expression, env: Environment) -> TokenTerm:
        """A token set; an input of kind `tokens` is one."""
        bound = self.expression(node, env)
        return self.as_tokens(bound, node.span)

    def argument(
        self, parameter: Parameter, name: str, node: nodes.Expression, env: Environment
    ) -> ArgumentValue:
        """The value of an argument of a pattern or mechanism, as its `Parameter` asks."""
        match parameter.kind:
            case "tokens":
                return self.tokens(node, env)
            case "ids" | "length":
                return self.input_of(parameter, name, node, env)
            case "choice":
                return self._choice(parameter, name, node)
            case "predicate":
                return self._predicate(node, env)
            case "boolean":
                value = self.scalar(node, env, f"`{name}`")
            case "real":
                value = self.scalar(node, env, f"`{name}`")
            case _:
                value = self.integer(node, env, f"`{name}`")
        self.check_constant(parameter, name, value, node.span)
        return value

    # --- words ---------------------------------------------------------------------------------

    def word(self, node: nodes.Name, env: Environment) -> Bound:
        """What a bare word stands for."""
        name = node.name
        if name in env.names:
            env.used.add(name)
            found = env.names[name]
            if found.kind == "broken":
                raise Failed
            return Bound(found.kind, found.value, node.span)
        if name in SCALARS:
            return self._scalar_word(node)
        if env.predicate and name in POSITIONS:
            return Bound("scalar", Symbol(name), node.span)
        if name in self.module.broken:
            raise Failed
        if name in self.module.graphs or name in self.patterns or name in self.mechanisms:
            call = nodes.Call(name, (), span=node.span, name_span=node.span)
            return self.call(call, env, bare=True)
        if name in POSITIONS:
            self.collector.fail("A205", f"`{name}` has a meaning only inside `where(…)`", node.span)
        if name in FUNCTIONS or name in TOKEN_SETS or name in ("transpose", "shift"):
            self.collector.fail("A206", f"`{name}` needs its arguments: `{name}(…)`", node.span)
        words = [*env.names, *SCALARS, "true", "false"]
        if env.predicate:
            advice = did_you_mean(name, [*words, *POSITIONS]) or _in_predicates(name)
        else:
            if not env.numbers:
                words += [*self.patterns, *self.module.graphs, *self.mechanisms]
            advice = did_you_mean(name, words)
        self.collector.fail("A201", f"`{name}` is not defined", node.span, help=advice)

    def _scalar_word(self, node: nodes.Name) -> Bound:
        name = node.name
        if name not in ("layers", "heads"):
            return Bound("scalar", Symbol(name), node.span)
        if name in self.broken:
            raise Failed
        if name in self.pending:
            self.collector.fail(
                "A207",
                f"`{name}` has no value before the statement `{name} N`",
                node.span,
                help="parameters come first, then `let` and the counts in the order of the text",
            )
        if name == "layers":
            return Bound("scalar", self.layers if self.layers is not None else 1, node.span)
        if self.heads is None:
            self.collector.fail(
                "A207",
                "`heads` has a value only in a spec that declares it",
                node.span,
                help="add `heads N` before it",
            )
        return Bound("scalar", self.heads, node.span)

    def _coordinate(self, node: nodes.Attribute, env: Environment) -> Bound:
        if not env.predicate or node.base.name not in POSITIONS:
            self.collector.fail(
                "A205",
                "a coordinate such as `q.row` belongs to `q` or `k` inside `where(…)`",
                node.span,
            )
        if self.grid_rank is None:
            if "sequence" in self.broken:
                raise Failed
            self.collector.fail(
                "A208",
                f"`{node.base.name}.{node.attribute}` needs positions on a grid",
                node.span,
                help="add `sequence grid(H, W)`",
            )
        names = COORDINATES[self.grid_rank]
        if node.attribute not in names:
            self.collector.fail(
                "A209",
                f"a position of this grid has {', '.join(names)}, not `{node.attribute}`",
                node.span,
                help=did_you_mean(node.attribute, names),
            )
        return Bound("scalar", Symbol(f"{node.base.name}.{node.attribute}"), node.span)

    def _choice(self, parameter: Parameter, name: str, node: nodes.Expression) -> str:
        if not isinstance(node, nodes.Name) or node.name not in parameter.choices:
            found = node.name if isinstance(node, nodes.Name) else "an expression"
            self.collector.fail(
                "A309",
                f"`{name}` is one of {', '.join(parameter.choices)}, got {found}",
                node.span,
                help=did_you_mean(found, parameter.choices)
                if isinstance(node, nodes.Name)
                else None,
            )
        return node.name

    def _predicate(self, node: nodes.Expression, env: Environment) -> Scalar:
        inner = env.child()
        inner.predicate = True
        value = self.scalar(node, inner, "the predicate of `where`")
        if type_of(value) != "boolean":
            self.collector.fail(
                "A314",
                "the predicate of `where` must be a comparison, got a number",
                node.span,
                help="for example `where((q - k) % 2 == 0)`",
            )
        return value


_POSITION = re.compile(r"[A-Za-z]|(q|k|kv)_\w+|\w*(query|key|idx|index|pos)\w*", re.IGNORECASE)
"""What other languages call a position."""


def _in_predicates(name: str) -> str | None:
    """What a predicate calls what another language calls otherwise."""
    if name in COORDINATES[3]:
        return f"on a grid write `q.{name}` or `k.{name}`"
    if _POSITION.fullmatch(name):
        return "in a predicate `q` is the position of the query, `k` that of the key"
    return None
