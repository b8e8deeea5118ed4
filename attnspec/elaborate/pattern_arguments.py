"""Matching the arguments of a call with what a pattern or mechanism declares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, replace
from typing import NoReturn

from attnspec.elaborate.collect import Failed
from attnspec.elaborate.elaborator import CALL, Elaborator
from attnspec.elaborate.imports import Module
from attnspec.elaborate.names import TOKEN_SETS, Bound, Environment
from attnspec.grammar import nodes
from attnspec.graphs.bind import check_value
from attnspec.ir.parameters import Parameter, RelationError
from attnspec.ir.program import ArgumentValue, Mechanism, Term, Tokens
from attnspec.ir.scalars import FUNCTIONS, Apply, Scalar
from attnspec.text.diagnostics import did_you_mean
from attnspec.text.source import Span


class Arguments(Elaborator):
    """Elaborates arguments by the `Parameter` of each field."""

    def arguments(
        self, node: nodes.Call, env: Environment, parameters: Mapping[str, Parameter]
    ) -> tuple[dict[str, ArgumentValue], dict[str, Span]]:
        """The values given in a call by argument name, and their places."""
        positional = [name for name, p in parameters.items() if p.positional]
        values: dict[str, ArgumentValue] = {}
        spans: dict[str, Span] = {}
        failed = False
        for index, argument in enumerate(node.arguments):
            try:
                name = argument.name
                if name is None:
                    if index >= len(positional):
                        self._unnamed(node, argument, env, parameters)
                    name = positional[index]
                if name not in parameters or name in spans:
                    known = tuple(parameters)
                    sizeless = node.name == "window" and not spans
                    ways = self._two_ways(argument, env) if sizeless else None
                    self.unknown_argument(node, argument, known, name, name in spans, ways)
                spans[name] = argument.value.span
                values[name] = self.argument(parameters[name], name, argument.value, env)
            except Failed:
                failed = True
        if failed:
            raise Failed
        return values, spans

    def complete(
        self,
        node: nodes.Call,
        declaration: type,
        parameters: Mapping[str, Parameter],
        values: dict[str, ArgumentValue],
    ) -> None:
        """Check that all that is required is there, and fill in the defaults."""
        signatures = getattr(declaration, "signatures", None)
        if signatures is not None:
            given = {name for name in values if any(name in s for s in signatures)}
            matching = [s for s in signatures if given == set(s)]
            if not matching:
                ways = " or ".join(f"`{_written(node.name, s)}`" for s in signatures)
                nearest = next((s for s in signatures if given and given < set(s)), None)
                if nearest:
                    missing = ", ".join(f"`{n}`" for n in nearest if n not in given)
                    self.collector.fail(
                        "A303",
                        f"`{node.name}` needs {missing} as well",
                        node.span,
                        help=f"write {ways}",
                    )
                found = " and ".join(f"`{name}`" for name in values) or "nothing"
                self.collector.fail("A303", f"`{node.name}` takes {ways}, got {found}", node.span)
        for entry in fields(declaration):
            if entry.name not in parameters or entry.name in values:
                continue
            if entry.default is MISSING:
                parameter = parameters[entry.name]
                self.collector.fail(
                    "A303",
                    f"`{node.name}` needs `{entry.name}`",
                    node.span,
                    notes=(f"`{entry.name}`: {parameter.doc}",),
                )
            if entry.default is not None:
                values[entry.name] = entry.default

    def _unnamed(
        self,
        node: nodes.Call,
        argument: nodes.Argument,
        env: Environment,
        parameters: Mapping[str, Parameter],
    ) -> NoReturn:
        names = [name for name, p in parameters.items() if not p.positional]
        if not names:
            self._too_many(node, argument, len(parameters))
        help_text: str | None = f"write `{names[0]} = …`"
        notes: tuple[str, ...] = ()
        if node.name == "window":
            help_text = self._two_ways(argument, env) or help_text
            notes = ("a bare size means one thing in one library and another in the next",)
        self.collector.fail(
            "A301",
            f"the arguments of `{node.name}` need their names",
            argument.span,
            notes=notes,
            help=help_text,
        )

    def _two_ways(self, argument: nodes.Argument, env: Environment) -> str | None:
        """What a size may mean for a window, where it is known."""
        size = self.scalar(argument.value, env, "a window's size")
        if not isinstance(size, int) or isinstance(size, bool) or size <= 0:
            return None
        return (
            f"`window(radius = {size})` keeps {2 * size + 1} keys on both sides,"
            f" `window(before = {size - 1}, after = 0)` keeps the last {size}"
        )

    def _too_many(self, node: nodes.Call, argument: nodes.Argument, most: int) -> NoReturn:
        allowed = "at most one argument" if most == 1 else f"at most {most} arguments"
        self.collector.fail(
            "A302",
            f"`{node.name}` takes {allowed if most else 'no arguments'}",
            argument.span,
        )

    def unknown_argument(
        self,
        node: nodes.Call,
        argument: nodes.Argument,
        names: Sequence[str],
        name: str | None,
        repeated: bool,
        ways: str | None = None,
    ) -> NoReturn:
        """Fail because an argument is unknown, repeated or one too many; `name` is what it stands
        for, written or by its place, `ways` what to write where no name is near."""
        span = argument.name_span or argument.span
        if repeated:
            self.collector.fail("A304", f"`{name}` is given twice", span)
        if argument.name is None:
            self._too_many(node, argument, len(names))
        known = ", ".join(f"`{name}`" for name in names) or "no arguments"
        self.collector.fail(
            "A302",
            f"`{node.name}` has no argument `{argument.name}`",
            span,
            notes=(f"it takes {known}",),
            help="`==` compares"
            if node.name == "where"
            else did_you_mean(argument.name, names) or ways,
        )

    def check_together(
        self,
        node: nodes.Call,
        declaration: type,
        values: Mapping[str, ArgumentValue],
        spans: Mapping[str, Span],
    ) -> None:
        """What a declaration itself asks of its arguments, where all of them are known."""
        if not all(isinstance(value, int | float | str) for value in values.values()):
            return
        try:
            declaration(**values)
        except RelationError as error:
            named = next(
                (s for name, s in spans.items() if f"`{name}`" in error.message), node.span
            )
            self.collector.fail("A306", error.message, named)

    def check_constant(
        self, parameter: Parameter, name: str, value: ArgumentValue, span: Span
    ) -> None:
        """Range checks of an argument that is known already."""
        if isinstance(value, int | float):
            wrong = check_value(parameter, name, value)
            if wrong:
                self.collector.fail("A306", wrong, span, notes=(f"`{name}`: {parameter.doc}",))

    def input_of(
        self, parameter: Parameter, name: str, node: nodes.Expression, env: Environment
    ) -> ArgumentValue:
        """An input of the kind that an argument asks for; `prefix` takes a count as well."""
        bound = self.expression(node, env)
        if bound.kind == "input":
            kind = bound.value.kind  # type: ignore[union-attr]
            if kind != parameter.kind:
                self.collector.fail(
                    "A313",
                    f"an input of kind `{parameter.kind}` is needed, got one of kind `{kind}`",
                    node.span,
                )
            return bound.value  # type: ignore[return-value]
        if parameter.kind == "length" and bound.kind == "scalar":
            value = self.integer(node, env, f"`{name}`")
            if isinstance(value, int) and value < 0:
                self.collector.fail("A306", f"`{name}` must be at least 0, got {value}", node.span)
            return value
        count = " or a count" if parameter.kind == "length" else ""
        self.collector.fail(
            "A313",
            f"an input of kind `{parameter.kind}`{count} is needed",
            node.span,
            help=f"declare one: `input x: {parameter.kind}`",
        )


def parameters_of(declaration: type) -> dict[str, Parameter]:
    """The arguments that a pattern or mechanism takes in the language, by name."""
    return {
        entry.name: entry.metadata["parameter"]
        for entry in fields(declaration)
        if entry.metadata["parameter"].kind != "context"
    }


def _written(name: str, signature: Sequence[str]) -> str:
    return f"{name}({', '.join(f'{argument} = …' for argument in signature)})"


MOST_NESTED = 64


class Calls(Arguments):
    """Elaborates what has brackets behind its name."""

    def __init__(self) -> None:
        super().__init__()
        self._expanding: list[tuple[nodes.Graph, Module]] = []

    def call(self, node: nodes.Call, env: Environment, bare: bool = False) -> Bound:
        """What a call stands for; `bare` where the text has the word alone."""
        name = node.name
        if name in self.module.broken:
            raise Failed
        if name in self.module.graphs:
            return self._named_graph(node, env)
        if name in FUNCTIONS:
            return self._function(node, env)
        if name in TOKEN_SETS:
            return self._token_set(node, env)
        if name == "transpose":
            (term,) = self._positional(node, env, 1)
            return Bound("graph", self.compound("transpose", (term,), node.span), node.span)
        if name == "shift":
            return self._shift(node, env)
        if name in self.patterns:
            return self._pattern(node, env)
        if name in self.mechanisms:
            return self._mechanism(node, env, bare)
        if name in env.names:
            self.collector.fail(
                "A210", f"`{name}` is a value and takes no arguments", node.name_span
            )
        words = [*self.patterns, *self.module.graphs, *self.mechanisms, *FUNCTIONS, *TOKEN_SETS]
        self.collector.fail(
            "A201",
            f"`{name}` is not defined",
            node.name_span,
            help=did_you_mean(name, [*words, "transpose", "shift"]),
        )

    # --- functions, token sets, operators ------------------------------------------------------

    def _function(self, node: nodes.Call, env: Environment) -> Bound:
        least, most = FUNCTIONS[node.name]
        values = self._scalars(node, env)
        if len(values) < least or (most is not None and len(values) > most):
            needed = "one argument" if most == 1 else "at least one argument"
            self.collector.fail(
                "A303", f"`{node.name}` takes {needed}, got {len(values)}", node.span
            )
        value = self.folded(Apply(node.name, tuple(values)), node.span)
        return Bound("scalar", value, node.span)

    def _scalars(self, node: nodes.Call, env: Environment) -> list[Scalar]:
        def one(argument: nodes.Argument) -> Scalar:
            if argument.name is not None:
                self.collector.fail(
                    "A301", f"the arguments of `{node.name}` have no names", argument.span
                )
            value = self.scalar(argument.value, env, f"an argument of `{node.name}`")
            self.typed(value, "number", node.name, argument.value.span)
            return value

        return self.each(node.arguments, one)

    def _token_set(self, node: nodes.Call, env: Environment) -> Bound:
        if node.name == "positions":
            return self._positions(node, env)
        names = TOKEN_SETS[node.name]
        given: dict[str, Scalar] = {}
        for index, argument in enumerate(node.arguments):
            name = argument.name or (names[index] if index < len(names) else "")
            if name not in names or name in given:
                self.unknown_argument(node, argument, names, name, name in given)
            value = self.integer(argument.value, env, f"`{name}`")
            least = 1 if name == "step" else 0
            if isinstance(value, int) and value < least:
                self.collector.fail(
                    "A306", f"`{name}` must be at least {least}, got {value}", argument.value.span
                )
            given[name] = value
        if names[0] not in given:
            self.collector.fail("A303", f"`{node.name}` needs its `{names[0]}`", node.span)
        if node.name == "every":
            given.setdefault("offset", 0)
        return Bound("tokens", Tokens(node.name, tuple(given[name] for name in names)), node.span)

    def _positions(self, node: nodes.Call, env: Environment) -> Bound:
        def ends(argument: nodes.Argument) -> tuple[Scalar, Scalar]:
            if argument.name is not None:
                self.collector.fail("A301", "positions have no names", argument.span)
            value = argument.value
            parts = (value.first, value.last) if isinstance(value, nodes.Range) else (value, value)
            first, last = (self.integer(part, env, "a position") for part in parts)
            for scalar in (first, last):
                if isinstance(scalar, int) and scalar < 0:
                    self.collector.fail(
                        "A306",
                        f"a position must be at least 0, got {scalar}",
                        value.span,
                        help="`last(c)` counts from the end",
                    )
            if isinstance(first, int) and isinstance(last, int) and first > last:
                self.collector.fail("A307", f"the range {first}..{last} is empty", value.span)
            return first, last

        if not node.arguments:
            self.collector.fail("A303", "`positions` needs at least one position", node.span)
        pairs = self.each(node.arguments, ends)
        return Bound(
            "tokens", Tokens("positions", tuple(x for pair in pairs for x in pair)), node.span
        )

    def _positional(self, node: nodes.Call, env: Environment, count: int) -> list[Term]:
        if len(node.arguments) != count or any(a.name for a in node.arguments):
            self.collector.fail(
                "A303", f"`{node.name}` takes {count} graph without a name", node.span
            )
        return self.each([a.value for a in node.arguments], lambda value: self.graph(value, env))

    def _shift(self, node: nodes.Call, env: Environment) -> Bound:
        terms = [a for a in node.arguments if a.name is None]
        by = [a for a in node.arguments if a.name == "by"]
        if len(terms) != 1 or len(by) != 1 or len(node.arguments) != 2:
            self.collector.fail("A303", "`shift` takes a graph and `by = x`", node.span)
        term = self.graph(terms[0].value, env)
        amount = self.integer(by[0].value, env, "`by`")
        return Bound("graph", self.compound("shift", (term,), node.span, amount), node.span)

    # --- patterns and mechanisms ---------------------------------------------------------------

    def _pattern(self, node: nodes.Call, env: Environment) -> Bound:
        pattern = self.patterns[node.name]
        parameters = parameters_of(pattern)
        variadic = next((n for n, p in parameters.items() if p.kind == "extents"), None)
        if variadic is not None:
            return self._extents(node, env, variadic, parameters[variadic])
        values, spans = self.arguments(node, env, parameters)
        self.complete(node, pattern, parameters, values)
        if pattern.data_dependent:
            self.check_together(node, pattern, values, spans)
        if getattr(pattern, "needs_grid", False) and self.grid_rank is None:
            self._needs_grid(node)
        return Bound("graph", self.leaf(node.name, values, spans, node.span), node.span)

    def _extents(
        self, node: nodes.Call, env: Environment, name: str, parameter: Parameter
    ) -> Bound:
        extent = replace(parameter, kind="integer")

        def one(argument: nodes.Argument) -> Scalar:
            if argument.name is not None:
                self.collector.fail(
                    "A301", f"the extents of `{node.name}` have no names", argument.span
                )
            value = self.integer(argument.value, env, "an extent")
            self.check_constant(extent, "extent", value, argument.value.span)
            return value

        extents = tuple(self.each(node.arguments, one))
        if self.grid_rank is None:
            self._needs_grid(node)
        if len(extents) != self.grid_rank:
            self.collector.fail(
                "A303",
                f"`{node.name}` needs one extent for each of the grid's {self.grid_rank} axes,"
                f" got {len(extents)}",
                node.span,
            )
        return Bound("graph", self.leaf(node.name, {name: extents}, {}, node.span), node.span)

    def _needs_grid(self, node: nodes.Call) -> NoReturn:
        if "sequence" in self.broken:
            raise Failed
        self.collector.fail(
            "A208",
            f"`{node.name}` needs positions on a grid",
            node.name_span,
            help="add `sequence grid(H, W)`",
        )

    def _mechanism(self, node: nodes.Call, env: Environment, bare: bool) -> Bound:
        if bare:
            self.collector.fail(
                "A206", f"`{node.name}` is a mechanism: write `{node.name}()`", node.span
            )
        declaration = self.mechanisms[node.name]
        parameters = parameters_of(declaration)
        values, spans = self.arguments(node, env, parameters)
        self.complete(node, declaration, parameters, values)
        self.check_together(node, declaration, values, spans)
        mechanism = Mechanism(node.name, tuple(sorted(values.items())), node.span)
        return Bound("mechanism", mechanism, node.span)

    # --- named graphs --------------------------------------------------------------------------

    def _named_graph(self, node: nodes.Call, env: Environment) -> Bound:
        definition, home = self.module.graphs[node.name]
        self.spend(CALL, node.span)
        if any(d is definition for d, _ in self._expanding):
            chain = [d.name for d, _ in self._expanding]
            chain = [*chain[chain.index(definition.name) :], definition.name]
            self.collector.fail(
                "A211",
                f"`{node.name}` is defined by itself: {' -> '.join(chain)}",
                node.name_span,
                related=(("defined here", definition.name_span),),
            )
        if len(self._expanding) >= MOST_NESTED:
            self.collector.fail(
                "A197", f"named graphs may be nested at most {MOST_NESTED} deep", node.name_span
            )
        self.used_graphs[(id(home), definition.name)] = (definition, home)
        inner = self._given(node, definition, env)
        outside = self.module
        self.module = home
        self._expanding.append((definition, home))
        try:
            for parameter in definition.parameters:
                if parameter.name not in inner.names and parameter.default is not None:
                    inner.names[parameter.name] = self.expression(parameter.default, inner)
            missing = [p.name for p in definition.parameters if p.name not in inner.names]
            if missing:
                self.collector.fail(
                    "A303",
                    f"`{node.name}` needs {', '.join(f'`{name}`' for name in missing)}",
                    node.span,
                    related=(("defined here", definition.name_span),),
                )
            term = self.graph(definition.body, inner)
        finally:
            self._expanding.pop()
            self.module = outside
        return Bound("graph", term, node.span)

    def _given(self, node: nodes.Call, definition: nodes.Graph, env: Environment) -> Environment:
        names = [parameter.name for parameter in definition.parameters]
        inner = Environment(grid_rank=env.grid_rank)
        for index, argument in enumerate(node.arguments):
            name = argument.name or (names[index] if index < len(names) else None)
            if name is None or name not in names or name in inner.names:
                self.unknown_argument(node, argument, names, name, name in inner.names)
            inner.names[name or ""] = self.expression(argument.value, env)
        return inner
