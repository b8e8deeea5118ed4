"""`attnspec compile`: a spec becomes a Python module."""

from __future__ import annotations

import keyword
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import click

from attnspec.bind import BindError
from attnspec.cli import console
from attnspec.cli.failures import status_of
from attnspec.cli.files import write_result
from attnspec.cli.options import (
    backend_option,
    force_option,
    json_option,
    name_option,
    set_option,
    spec_argument,
)
from attnspec.cli.plan_command import fitting
from attnspec.cli.specs import length_of, shown_path, spec_at
from attnspec.diagnostics import SpecError
from attnspec.elaborate.coverage import ranges
from attnspec.planning import Plan
from attnspec.relations import RelationError
from attnspec.spec import Spec

SUFFIX = "_attn.py"

TYPICAL_LENGTH = 4096
"""Where the messages say what is chosen; a module chooses anew at every length."""


@click.command("compile")
@spec_argument
@click.option(
    "-o",
    "output",
    metavar="FILE",
    help="Where to write; - prints. Otherwise SPEC's name with _attn.py, in this folder.",
)
@name_option
@set_option
@backend_option
@click.option("--standalone", is_flag=True, help="A module that needs torch and numpy alone.")
@force_option
@json_option
def command(
    spec: str,
    output: str | None,
    name: str | None,
    parameters: Mapping[str, str],
    backend: str,
    standalone: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Write the Python module that computes a spec's attention.

    The module holds one class, a torch.nn.Module that works at every length. It is written whole
    or not at all, and not while a claim of the spec is false.

    Example: attnspec compile bigbird.attn --set block=32 -o bigbird32_attn.py
    """
    loaded = spec_at(spec, name, parameters)
    found = loaded.check()
    if status_of(found):
        raise SpecError(found)
    with fitting():
        text = loaded.emit(standalone=standalone, backend=backend)
    target = output if output is not None else default_output(spec, loaded)
    if target != "-":
        write(target, spec, text, force)
    if as_json:
        console.result_json(
            {
                "ok": True,
                "file": None if target == "-" else shown_path(target),
                "name": loaded.name,
                "fingerprint": loaded.fingerprint,
                "diagnostics": [d.to_dict() for d in found],
            }
        )
        return
    if target == "-":
        console.result(text.removesuffix("\n"))
    if found:
        console.diagnose(found)
    for line in summary(loaded, target, backend):
        console.say(line)


def default_output(spec: str, loaded: Spec) -> str:
    """`STEM_attn.py` in this folder; standard input has no name, so the attention lends its own."""
    return (loaded.name if spec == "-" else Path(spec).stem) + SUFFIX


def write(target: str, spec: str, text: str, force: bool) -> None:
    """Write the module, but never over the spec, nor over a file that is not an emitted module."""
    if spec != "-" and os.path.exists(target) and os.path.samefile(target, spec):
        raise click.UsageError(f"the output is the spec itself: {shown_path(target)}")
    write_result(target, text, force=force or is_ours(target))
    stem = Path(target).name.removesuffix(".py")
    if not target.endswith(".py") or not stem.isidentifier() or keyword.iskeyword(stem):
        console.say(f"warning: {shown_path(target)} cannot be imported by its name")
    elif stem in sys.stdlib_module_names or stem in ("torch", "numpy", "attnspec"):
        console.say(f"warning: {shown_path(target)} hides the module `{stem}` in its folder")


def is_ours(target: str) -> bool:
    """Whether a file is an emitted module, which the next one may replace."""
    try:
        with open(target, encoding="utf-8") as file:
            return MARK in file.read(1 << 20)
    except (OSError, UnicodeDecodeError):
        return False


def summary(loaded: Spec, target: str, backend: str) -> Iterator[str]:
    """Three lines: what was written, what runs it, and why."""
    yield f"{'printed' if target == '-' else f'wrote {shown_path(target)}'}: {loaded!r}"
    try:
        plan = loaded.plan(length_of(loaded, None, TYPICAL_LENGTH), backend=backend)
    except (BindError, RelationError) as error:
        yield f"the backends are chosen when it is called: {error}"
        yield "`attnspec plan` says what is chosen at a length"
        return
    yield f"at n = {plan.n:,} on the CPU: {chosen(plan)}"
    yield f"{'estimated' if backend == 'auto' else 'as asked; estimated'}, forward: {costs(plan)}"


def chosen(plan: Plan) -> str:
    """`tiles for every head`, or the heads and layers of each backend."""
    backends = list(dict.fromkeys(step.chosen.name for step in plan.steps))
    if len(backends) == 1:
        return f"{backends[0]} for every head"
    layers = {layer for step in plan.steps for layer in step.layers}
    parts = []
    for step in plan.steps:
        heads = "every head" if step.heads is None else f"head {ranges(list(step.heads))}"
        where = heads if len(layers) == 1 else f"layer {ranges(list(step.layers))} {heads}"
        parts.append(f"{step.chosen.name} for {where}")
    return ", ".join(parts)


def costs(plan: Plan) -> str:
    """The estimated time of each backend for all heads and layers, cheapest first."""
    seconds: dict[str, float] = {}
    refusals: dict[str, str] = {}
    for step in plan.steps:
        times = len(step.layers) * len(step.heads or (0,))
        for candidate in step.candidates:
            if candidate.seconds is None:
                refusals.setdefault(candidate.backend.name, candidate.refusal or "")
            else:
                total = seconds.get(candidate.backend.name, 0.0)
                seconds[candidate.backend.name] = total + times * candidate.seconds
    ranked = sorted((s, name) for name, s in seconds.items() if name not in refusals)
    parts = [f"{name} {1000 * s:.3g} ms" for s, name in ranked]
    parts += [f"{name} refuses ({reason})" for name, reason in refusals.items()]
    return ", ".join(parts)
