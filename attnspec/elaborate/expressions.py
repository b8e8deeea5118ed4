"""The meaning of expressions: what kind of thing they are and what they denote."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import cast

from attnspec.elaborate.collect import Failed
from attnspec.elaborate.hybrids import regrouped
from attnspec.elaborate.names import (
    ARTICLES,
    COORDINATES,
    POSITIONS,
    SCALARS,
    TOKEN_SETS,
    Bound,
    Environment,
    type_of,
)
from attnspec.elaborate.pattern_arguments import Calls
from attnspec.grammar import nodes
from attnspec.ir.parameters import Parameter
from attnspec.ir.program import ArgumentValue, Mechanism, Term, TokenTerm
from attnspec.ir.scalars import FUNCTIONS, Apply, Scalar, Symbol
from attnspec.text.diagnostics import did_you_mean

_COMPARISONS = ("==", "!=", "<", "<=", ">", ">=")
_SETS = ("|", "&", "-", "~")
_ALONE = {
    "|": "`GRAPH + MECHANISM` has exact weights on the graph's pairs, the mechanism's elsewhere",
    "&": "`causal` before `attend` leaves out later keys, `key_padding_mask` single ones",
    "+": "heads and layers may have a mechanism of their own each: `head 0 { attend … }`",
}
"""What to write instead of a mechanism under an operator."""


class Operators(Calls):
    """Elaborates prefixes and chains of operators."""

    def prefix(self, node: nodes.Prefix, env: Environment) -> Bound:
        """What `-x`, `~g` or `not p` stands for."""
        operand = self.expression(node.operand, env)
        if node.operator == "~":
            if operand.kind in ("tokens", "input"):
                term = self.as_tokens(operand, node.operand.span)
                return Bound("tokens", self.token_compound("~", (term,), node.span), node.span)
            self.require(operand, "graph", node.operand.span, "what `~` stands before")
            self.known_now(operand.value, node.span, "under `~`")  # type: ignore[arg-type]
            return Bound("graph", self.compound("~", (operand.value,), node.span), node.span)  # type: ignore[arg-type]
        if operand.kind == "graph" and node.operator == "not":
            self.collector.fail(
                "A310",
                "what `not` stands before must be a comparison, got a graph",
                node.operand.span,
                help="`~` is the complement of a graph",
            )
        self.require(operand, "scalar", node.operand.span, f"what `{node.operator}` stands before")
        wanted = "boolean" if node.operator == "not" else "number"
        self.typed(operand.value, wanted, node.operator, node.operand.span)  # type: ignore[arg-type]
        op = "not" if node.operator == "not" else "neg"
        return Bound("scalar", self.folded(Apply(op, (operand.value,)), node.span), node.span)  # type: ignore[arg-type]

    def chain(self, node: nodes.Chain, env: Environment) -> Bound:
        """What operands joined by operators of one level stand for."""
        if node.operators[0] == "in":
            return self._membership(node, env)
        operands = self.each(node.operands, lambda operand: self.expression(operand, env))
        kinds = {operand.kind for operand in operands}
        if kinds == {"scalar"}:
            return Bound("scalar", self._scalar_chain(node, operands), node.span)
        if "mechanism" in kinds or "hybrid" in kinds:
            return self._hybrid(node, operands)
        for operator, span in zip(node.operators, node.operator_spans, strict=False):
            if operator not in _SETS:
                self.collector.fail(
                    "A312",
                    f"`{operator}` stands between numbers, got {ARTICLES[operands[0].kind]}"
                    f" and {ARTICLES[operands[-1].kind]}",
                    span,
                    help="graphs and token sets are combined by `|`, `&` and `-`"
                    if operator in ("+", "*", "and", "or")
                    else "`#` starts a comment"
                    if operator == "//"
                    else None,
                )
        if "graph" in kinds:
            for operand, part in zip(operands, node.operands, strict=True):
                self.require(operand, "graph", part.span, "what stands beside a graph")
            return Bound("graph", self._graph_chain(node, operands), node.span)
        terms = [
            self.as_tokens(b, part.span) for b, part in zip(operands, node.operands, strict=True)
        ]
        return Bound("tokens", self._token_chain(node, terms), node.span)

    def _token_chain(self, node: nodes.Chain, terms: Sequence[TokenTerm]) -> TokenTerm:
        result = terms[0]
        group = [result]
        for index, operator in enumerate(node.operators):
            group.append(terms[index + 1])
            if index + 1 == len(node.operators) or node.operators[index + 1] != operator:
                result = self.token_compound(operator, tuple(group), node.span)
                group = [result]
        return result

    def _graph_chain(self, node: nodes.Chain, operands: Sequence[Bound]) -> Term:
        terms: list[Term] = [operand.value for operand in operands]  # type: ignore[misc]
        result = terms[0]
        group: list[Term] = [result]
        for index, operator in enumerate(node.operators):
            term = terms[index + 1]
            if operator == "-":
                self.known_now(term, node.operands[index + 1].span, "on the right of `-`")
            group.append(term)
            if index + 1 == len(node.operators) or node.operators[index + 1] != operator:
                result = self.compound(operator, tuple(group), node.span)
                group = [result]
        return result

    def _hybrid(self, node: nodes.Chain, operands: Sequence[Bound]) -> Bound:
        span = node.operator_spans[0] if node.operator_spans else node.span
        kinds = sorted(operand.kind for operand in operands)
        if node.operators != ("+",) or kinds != ["graph", "mechanism"]:
            meant = regrouped(node, operands)
            self.collector.fail(
                "A701",
                "a mechanism stands alone or as `GRAPH + MECHANISM`, "
                f"got {' and '.join(ARTICLES[operand.kind] for operand in operands)}"
                f" with `{node.operators[0]}`",
                span if meant is None else meant.span,
                help=_ALONE.get(node.operators[0]) if meant is None else meant.help,
            )
        graph = next(o.value for o in operands if o.kind == "graph")
        mechanism = cast(Mechanism, next(o.value for o in operands if o.kind == "mechanism"))
        declaration = self.mechanisms[mechanism.name]
        alone = declaration.alone(dict(mechanism.arguments))
        if alone:
            able = sorted(name for name, m in self.mechanisms.items() if m.combines)
            self.collector.fail(
                "A702",
                f"`{mechanism.name}` {alone}, so no graph can be added",
                span,
                help=None
                if declaration.combines
                else f"`GRAPH + MECHANISM` works with {', '.join(able)}",
            )
        return Bound("hybrid", (graph, mechanism), node.span)  # type: ignore[arg-type]

    def _scalar_chain(self, node: nodes.Chain, operands: Sequence[Bound]) -> Scalar:
        values: list[Scalar] = [operand.value for operand in operands]  # type: ignore[misc]
        operators = node.operators
        if operators[0] in ("and", "or"):
            for value, part in zip(values, node.operands, strict=True):
                self.typed(value, "boolean", operators[0], part.span)
            return self.folded(Apply(operators[0], tuple(values)), node.span)
        for operator, span in zip(operators, node.operator_spans, strict=False):
            if operator in ("|", "&", "subset"):
                self.collector.fail(
                    "A312",
                    f"`{operator}` stands between graphs, got numbers",
                    span,
                    help={"|": "write `or`", "&": "write `and`"}.get(operator),
                )
        wanted = "number"
        if operators[0] in ("==", "!=") and type_of(values[0]) == "boolean":
            wanted = "boolean"
        for value, part in zip(values, node.operands, strict=True):
            self.typed(value, wanted, operators[0], part.span)
        if operators[0] in _COMPARISONS:
            links = tuple(
                self.folded(Apply(operator, (values[i], values[i + 1])), node.span)
                for i, operator in enumerate(operators)
            )
            return self.folded(links[0] if len(links) == 1 else Apply("and", links), node.span)
        result = values[0]
        for operator, value in zip(operators, values[1:], strict=True):
            result = self.folded(Apply(operator, (result, value)), node.span)
        return result

    def _membership(self, node: nodes.Chain, env: Environment) -> Bound:
        def number(part: nodes.Expression) -> Scalar:
            value = self.scalar(part, env, "what stands beside `in`")
            self.typed(value, "number", "in", part.span)
            return value

        value = number(node.operands[0])
        where = node.operands[1]
        if isinstance(where, nodes.Range):
            ends = self.each((where.first, where.last), number)
            return Bound(
                "scalar", self.folded(Apply("within", (value, *ends)), node.span), node.span
            )
        if isinstance(where, nodes.Members):
            members = self.each(where.items, number)
            return Bound(
                "scalar", self.folded(Apply("one_of", (value, *members)), node.span), node.span
            )
        self.collector.fail(
            "A311",
            "after `in` stands a range `a..b` or a set `{1, 2, 4}`",
            where.span,
        )


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
