"""`attnspec diff`: where two specs differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import click

from attnspec.cli import console, options
from attnspec.cli.failures import fitting
from attnspec.cli.specs import STDIN, read_inputs, shown_path, source_at
from attnspec.elaborate import attention_names, parameter_names
from attnspec.show.differences import page
from attnspec.spec import Spec, diff
from attnspec.text.diagnostics import hinted
from attnspec.text.source import Source

if TYPE_CHECKING:
    import numpy as np

DEFAULT_LENGTH = 512


@click.command("diff")
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@options.length_option(DEFAULT_LENGTH)
@options.queries_option
@options.input_option
@click.option(
    "--name",
    "names",
    metavar="NAME",
    multiple=True,
    help="Choose an attention by its name; given twice, one in A and one in B.",
)
@options.set_option
@click.option(
    "--exit-code", is_flag=True, help="Exit with 1 unless the specs are known to be equal."
)
@options.json_option
@click.pass_context
def command(
    ctx: click.Context,
    a: str,
    b: str,
    length: int | None,
    queries: int | None,
    inputs: Mapping[str, str],
    names: Sequence[str],
    parameters: Mapping[str, str],
    exit_code: bool,
    as_json: bool,
) -> None:
    """Show which pairs only A has, and which only B.

    Layers and heads are compared one by one. Graphs that are written alike, in a normal form, are
    equal for every n; others are compared at N. --set and --input apply to each spec that has the
    parameter or input. The exit status is 0 whether or not the specs differ, unless --exit-code is
    given.

    Example: attnspec diff old.attn new.attn -n 512
    """
    if a == b == "-":
        raise click.UsageError("standard input can be one of the two specs, not both")
    first, second = specs(a, b, names, parameters)
    fixed = (first.program.fixed_length, second.program.fixed_length, DEFAULT_LENGTH)
    n = next(n for n in (length, *fixed) if n is not None)
    with fitting():
        difference = diff(first, second, n, _inputs((first, second), inputs, n), queries)
    labels = [STDIN if spec == "-" else shown_path(spec) for spec in (a, b)]
    console.answer(as_json, difference.to_dict(), console.styled(page(difference, labels)))
    ctx.exit(1 if exit_code and difference.equal is not True else 0)


def specs(a: str, b: str, names: Sequence[str], parameters: Mapping[str, str]) -> tuple[Spec, Spec]:
    """Both specs, each with those of the settings that it has a parameter for."""
    if len(names) > 2:
        raise click.UsageError(f"--name is given once, or once for each spec, got {len(names)}")
    sources = source_at(a), source_at(b)
    chosen = _names(sources, names)
    allowed = [parameter_names(*pair) for pair in zip(sources, chosen, strict=True)]
    for name in parameters:
        every = dict.fromkeys(allowed[0] + allowed[1])
        if name not in every:
            they = ", ".join(f"`{one}`" for one in every) or "none"
            message = f"neither spec has a parameter `{name}` (they have {they})"
            raise click.UsageError(hinted(message, name, every))
    first, second = (
        Spec(source, name=name, parameters={x: y for x, y in parameters.items() if x in has})
        for source, name, has in zip(sources, chosen, allowed, strict=True)
    )
    return first, second


def _names(sources: tuple[Source, Source], names: Sequence[str]) -> list[str | None]:
    """Which attention of each file; one name serves the files that have it."""
    if len(names) == 2:
        return list(names)
    if not names:
        return [None, None]
    found = [names[0] if names[0] in attention_names(source) else None for source in sources]
    # a name that no file has gets the message that says so
    return found if any(found) else [names[0], names[0]]


def _inputs(
    both: tuple[Spec, Spec], texts: Mapping[str, str], n: int
) -> dict[str, np.ndarray] | None:
    """One sample of the inputs given, as the specs that declare them read it."""
    if not texts:
        return None
    arrays: dict[str, np.ndarray] = {}
    for spec, other in (both, both[::-1]):
        # an input that neither declares is refused by the first
        own = {x: text for x, text in texts.items() if x in spec.inputs or x not in other.inputs}
        arrays |= read_inputs(spec, own, (), n)
    return arrays
