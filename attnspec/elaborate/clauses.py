"""The meaning of `require`: which claim it makes, about which graphs, at which lengths."""

from __future__ import annotations

from attnspec.elaborate.collect import Failed
from attnspec.elaborate.expressions import Expressions
from attnspec.elaborate.names import METRICS, NORMALIZERS, PROPERTIES, SCORES, Environment, type_of
from attnspec.grammar import nodes
from attnspec.grammar.printer import print_expression
from attnspec.ir.parameters import Parameter
from attnspec.ir.program import Claim, Score
from attnspec.ir.scalars import Scalar
from attnspec.text.diagnostics import did_you_mean

CAP = Parameter("real", "what no score goes beyond")

_FLIPPED = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "==": "==", "!=": "!="}


class Claims(Expressions):
    """Elaborates the claims of a spec."""

    def claim(self, statement: nodes.Require, env: Environment) -> list[Claim]:
        """The claims of one `require`; a chain such as `1 <= degree <= 4` makes two."""
        at = self._lengths(statement)
        node = statement.claim
        text = print_expression(node)
        if isinstance(node, nodes.Name) and node.name in PROPERTIES:
            return [Claim(node.name, text, at, span=statement.span)]
        if isinstance(node, nodes.Call) and node.name == "reach":
            return [self._reach(node, env, text, at, statement)]
        if isinstance(node, nodes.Chain) and node.operators[0] in (*_FLIPPED, "subset"):
            return self._comparison(node, env, text, at, statement)
        self._unknown(node, env)
        raise Failed

    def _lengths(self, statement: nodes.Require) -> tuple[int, ...] | None:
        if statement.at is None:
            return None
        for length in statement.at:
            if not 1 <= length.value <= 2**31 - 1:
                self.collector.add(
                    "A603",
                    f"a claim is checked at lengths from 1 to 2**31 - 1, got {length.value}",
                    length.span,
                )
        return tuple(length.value for length in statement.at)

    def _reach(
        self,
        node: nodes.Call,
        env: Environment,
        text: str,
        at: tuple[int, ...] | None,
        statement: nodes.Require,
    ) -> Claim:
        if len(node.arguments) != 1 or node.arguments[0].name != "layers":
            self.collector.fail("A602", "`reach` takes `layers = L`", node.span)
        value = self.integer(node.arguments[0].value, env, "`layers`")
        if isinstance(value, int) and value < 0:
            self.collector.fail(
                "A306", f"`layers` must be at least 0, got {value}", node.arguments[0].value.span
            )
        return Claim("reach", text, at, value=value, span=statement.span)

    def _comparison(
        self,
        node: nodes.Chain,
        env: Environment,
        text: str,
        at: tuple[int, ...] | None,
        statement: nodes.Require,
    ) -> list[Claim]:
        metrics = [
            index
            for index, operand in enumerate(node.operands)
            if isinstance(operand, nodes.Name) and operand.name in METRICS
        ]
        if not metrics:
            return [self._about_graphs(node, env, text, at, statement)]
        if len(metrics) > 1:
            self.collector.fail("A604", "a claim compares one figure with numbers", node.span)
        (place,) = metrics
        name = node.operands[place].name  # type: ignore[union-attr]
        claims = []
        for index, operator in enumerate(node.operators):
            if place not in (index, index + 1):
                self.collector.fail(
                    "A604",
                    f"a claim compares one figure with numbers; this part is not about `{name}`",
                    node.operands[index].span.to(node.operands[index + 1].span),
                )
            other = node.operands[index + 1 if place == index else index]
            value = self.scalar(other, env, f"what `{name}` is compared with")
            if type_of(value) == "boolean":
                self.collector.fail("A314", f"`{name}` is compared with numbers", other.span)
            compare = operator if place == index else _FLIPPED.get(operator, operator)
            if compare == "subset" or (name == "order" and compare != "<="):
                self.collector.fail(
                    "A605",
                    "`order` is compared by `<=`"
                    if name == "order"
                    else "`subset` compares graphs",
                    node.span,
                )
            claims.append(Claim(name, text, at, compare=compare, value=value, span=statement.span))
        return claims

    def _about_graphs(
        self,
        node: nodes.Chain,
        env: Environment,
        text: str,
        at: tuple[int, ...] | None,
        statement: nodes.Require,
    ) -> Claim:
        operator = node.operators[0]
        if operator not in ("subset", "==") or len(node.operands) != 2:
            self._unknown(node, env)
        bounds = self.each(node.operands, lambda operand: self.expression(operand, env))
        if all(bound.kind == "scalar" for bound in bounds):
            self._unknown(node, env)
        for bound, operand in zip(bounds, node.operands, strict=True):
            self.require(bound, "graph", operand.span, f"what stands beside `{operator}`")
        terms = tuple(bound.value for bound in bounds)
        return Claim(operator, text, at, terms=terms, span=statement.span)  # type: ignore[arg-type]

    def _unknown(self, node: nodes.Expression, env: Environment) -> None:
        words = (*PROPERTIES, *METRICS, "reach")
        candidates = [node, *node.operands] if isinstance(node, nodes.Chain) else [node]
        word = next((c.name for c in candidates if isinstance(c, nodes.Name | nodes.Call)), "")
        span = next(
            (c.span for c in candidates if isinstance(c, nodes.Name) and c.name == word), node.span
        )
        self.collector.fail(
            "A601",
            "this is no claim: a property, `reach(layers = L)`, a figure compared with a number,"
            " or two graphs with `subset` or `==` is needed",
            span,
            notes=(f"properties: {', '.join(PROPERTIES)}", f"figures: {', '.join(METRICS)}"),
            help=did_you_mean(word, words) if word and word not in words else None,
        )


MOST_BUCKETS = 4096
"""The most buckets of a learned bias: a table holds that many numbers for each head."""


class Scores(Claims):
    """Elaborates what changes the scores of a graph."""

    def score(self, value: nodes.Expression, env: Environment) -> Score:
        """What a `score` statement says."""
        if not isinstance(value, nodes.Call) or value.name not in SCORES:
            found = value.name if isinstance(value, nodes.Call | nodes.Name) else "an expression"
            self.collector.fail(
                "A317",
                f"a score change is one of {', '.join(SCORES)}, got {found}",
                value.name_span if isinstance(value, nodes.Call) else value.span,
                help=did_you_mean(found, SCORES),
            )
        known = SCORES[value.name]
        given: dict[str, Scalar] = {}
        for argument in value.arguments:
            if argument.name is None:
                self.collector.fail(
                    "A301",
                    f"the arguments of `{value.name}` need their names",
                    argument.span,
                    help=f"write `{next(iter(known))} = …`" if known else None,
                )
            if argument.name not in known or argument.name in given:
                name = argument.name
                self.unknown_argument(value, argument, tuple(known), name, name in given)
            given[argument.name] = self._score_argument(value.name, argument, env)
        for name, default in known.items():
            if name not in given:
                if default is None:
                    self.collector.fail("A303", f"`{value.name}` needs `{name}`", value.span)
                given[name] = default
        if value.name == "bias" and self.heads is None:
            if "heads" in self.broken:
                raise Failed
            self.collector.fail(
                "A407",
                "`score bias` learns a table for each head, so the spec must say `heads N`",
                value.span,
            )
        return Score(value.name, tuple(sorted(given.items())), value.span)

    def _score_argument(self, name: str, argument: nodes.Argument, env: Environment) -> Scalar:
        what = f"`{argument.name}`"
        if name == "bias":
            least, most = (4, MOST_BUCKETS) if argument.name == "buckets" else (2, 2**31 - 1)
            return self.count(argument.value, env, what, least, most)
        cap = self.scalar(argument.value, env, what)
        if type_of(cap) == "boolean" or (isinstance(cap, int | float) and cap <= 0):
            self.collector.fail("A306", f"{what} must be a number above 0", argument.value.span)
        self.check_constant(CAP, "cap", cap, argument.value.span)
        return cap

    def normalizer(self, value: nodes.Expression) -> str:
        """What a `normalize` statement says."""
        if not isinstance(value, nodes.Name) or value.name not in NORMALIZERS:
            found = value.name if isinstance(value, nodes.Name | nodes.Call) else "an expression"
            self.collector.fail(
                "A309",
                f"`normalize` is one of {', '.join(NORMALIZERS)}, got {found}",
                value.span,
                help=did_you_mean(found, NORMALIZERS),
            )
        return value.name

    def count(
        self, node: nodes.Expression, env: Environment, what: str, least: int, most: int
    ) -> int:
        """An integer between two bounds that does not depend on n."""
        value = self.integer(node, env, what)
        if not isinstance(value, int):
            self.collector.fail(
                "A315",
                f"{what} must be known when the spec is compiled, so it cannot use n",
                node.span,
            )
        if not least <= value <= most:
            code = "A194" if value > most else "A306"
            self.collector.fail(
                code, f"{what} must be between {least} and {most:,}, got {value}", node.span
            )
        return value
