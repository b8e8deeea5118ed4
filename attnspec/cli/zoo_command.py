"""`attnspec zoo`: the specs that ship with the package."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources

import click

from attnspec.cli import console, options
from attnspec.cli.files import write_result
from attnspec.interchange.zoo import SUFFIX, zoo_texts
from attnspec.text.diagnostics import hinted

PRELUDE = "prelude"


@click.command("zoo", short_help="List, print or write the specs that ship with attnspec.")
@click.argument("name", required=False)
@click.option("-o", "output", metavar="FILE", help="Write the spec to a file.")
@click.option("--prelude", is_flag=True, help="Print the patterns that the language defines.")
@options.force_option
@options.json_option
def command(
    name: str | None, output: str | None, prelude: bool, force: bool, as_json: bool
) -> None:
    """List the specs that ship with attnspec, or print or write the one called NAME.

    Example: attnspec zoo bigbird -o bigbird.attn
    """
    if prelude and name is not None:
        raise click.UsageError("--prelude stands without the NAME of a spec")
    file = resources.files("attnspec.graphs.patterns").joinpath(PRELUDE + SUFFIX)
    texts = {PRELUDE: file.read_text(encoding="utf-8")} if prelude else zoo_texts()
    name = PRELUDE if prelude else name
    if name is None:
        if output is not None:
            raise click.UsageError("-o needs the NAME of a spec; `attnspec zoo` lists them")
        console.answer(as_json, {"specs": [*map(entry, texts, texts.values())]}, listing(texts))
        return
    wanted = name.removesuffix(SUFFIX)
    if wanted not in texts:
        message = f"the zoo has no spec {name!r}"
        hint = hinted(message, wanted, texts)
        raise click.UsageError(hint if hint != message else f"{message}; `attnspec zoo` lists all")
    if output is not None:
        write_result(output, texts[wanted], force=force)
        console.say(f"wrote {output}")
    if as_json or output is None:
        text = texts[wanted]
        console.answer(as_json, {**entry(wanted, text), "text": text}, text.removesuffix("\n"))


def about(text: str) -> str:
    """The first line of a spec, without its `#`."""
    return text.partition("\n")[0].lstrip("# ").rstrip(".")


def entry(name: str, text: str) -> dict[str, object]:
    return {"name": name, "about": about(text)}


def listing(texts: Mapping[str, str]) -> str:
    """A line for each spec: its name and what it is."""
    width = max(len(name) for name in texts)
    return "\n".join(f"{name:<{width}}  {about(text)}" for name, text in texts.items())
