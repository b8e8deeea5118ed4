"""The meaning of operators between graphs, token sets and scalars."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from attnspec.elaborate.calls import Calls
from attnspec.elaborate.hybrids import regrouped
from attnspec.elaborate.names import ARTICLES, Bound, Environment, type_of
from attnspec.grammar import nodes
from attnspec.ir import Mechanism, Term, TokenTerm
from attnspec.scalars import Apply, Scalar

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
