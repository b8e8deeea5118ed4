"""The meaning of `score` and `normalize`, and of counts that must be known at once."""

from __future__ import annotations

from attnspec.diagnostics import did_you_mean
from attnspec.elaborate.claims import Claims
from attnspec.elaborate.collect import Failed
from attnspec.elaborate.names import NORMALIZERS, SCORES, Environment, type_of
from attnspec.grammar import nodes
from attnspec.ir import Score
from attnspec.scalars import Scalar

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
