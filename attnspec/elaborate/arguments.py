"""Matching the arguments of a call with what a pattern or mechanism declares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from typing import NoReturn

from attnspec.bind import check_value
from attnspec.diagnostics import did_you_mean
from attnspec.elaborate.collect import Failed
from attnspec.elaborate.elaborator import Elaborator
from attnspec.elaborate.names import Environment
from attnspec.grammar import nodes
from attnspec.ir import ArgumentValue
from attnspec.relations import Parameter, RelationError
from attnspec.source import Span


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
