"""`attnspec compile`: a spec becomes a Python module."""

from __future__ import annotations

import keyword
import math
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import click

from attnspec.backends.planner import AUTO, Plan
from attnspec.cli import console, options
from attnspec.cli.failures import fitting, status_of
from attnspec.cli.files import require_folder, write_result
from attnspec.cli.specs import length_of, shown_path, spec_at
from attnspec.compile.emit import class_name, is_as_emitted
from attnspec.lower.mechanism_sizes import longest_of
from attnspec.lower.work import BackendError
from attnspec.spec import Spec
from attnspec.text.diagnostics import AttnSpecError, SpecError, ranges, time_text

SUFFIX = "_attn.py"

TYPICAL_LENGTH = 4096
"""Where the messages say what is chosen; a module chooses anew at every length."""

ALONE = (
    "chosen: the code in the file, at every length",
    "because: a file of --standalone needs only torch, and has no planner to choose a backend",
)
"""What the messages say instead of a file that stands alone."""


@click.command("compile")
@options.spec_argument
@click.option(
    "-o",
    "output",
    metavar="FILE",
    help="The file to write, or - to print; default SPEC_attn.py in the current folder.",
)
@options.name_option
@options.set_option
@options.backend_option
@click.option("--standalone", is_flag=True, help="Write a short file that needs only torch.")
@options.force_option
@options.json_option
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

    The file has one class, a torch.nn.Module that works at every length. It imports attnspec. With
    --standalone it needs only torch, and on the CPU computes and masks all pairs. No file is
    written if a claim of the spec is false, or if writing fails.

    Example: attnspec compile bigbird --set block=32 -o bigbird32_attn.py
    """
    if output not in (None, "", "-"):
        # before the work, not after it
        require_folder(output)
    loaded = spec_at(spec, name, parameters)
    diagnostics = loaded.check()
    if status_of(diagnostics):
        raise SpecError(diagnostics)
    if output == "":
        raise click.UsageError("a file's name is required after -o, or - to print")
    # standard input has no name, so the attention lends its own
    own = loaded.name if spec == "-" else Path(spec).stem
    target = f"{own}{SUFFIX}" if output is None else output
    with fitting():
        text = loaded.emit(standalone=standalone, backend=backend)
        lines = [written(loaded, target), *(ALONE if standalone else reasons(loaded, backend))]
    if target != "-":
        write(target, spec, text, force)
    if as_json:
        console.result_json(
            {
                "ok": True,
                "file": None if target == "-" else shown_path(target),
                "name": loaded.name,
                "fingerprint": loaded.fingerprint,
                "diagnostics": [d.to_dict() for d in diagnostics],
            }
        )
        return
    if target == "-":
        console.result(text.removesuffix("\n"))
    if diagnostics:
        console.diagnose(diagnostics)
    console.say("\n".join(lines))


def write(target: str, spec: str, text: str, force: bool) -> None:
    """Write the module, but never over the spec, nor over a file that is not an emitted module, or
    that was edited since."""
    if spec != "-" and os.path.exists(target) and os.path.samefile(target, spec):
        raise click.UsageError(f"the output is the spec itself: {shown_path(target)}")
    # an emitted module as it was written
    is_ours = lambda data: is_as_emitted(data.decode("utf-8", "replace"))  # noqa: E731
    write_result(target, text, force=force, is_ours=is_ours)
    shown, stem = shown_path(target), Path(target).name.removesuffix(".py")
    if not target.endswith(".py") or not stem.isidentifier() or keyword.iskeyword(stem):
        plain = re.sub(r"\W", "_", stem, flags=re.ASCII).removesuffix("_attn")
        plain = f"_{plain}" if plain[:1].isdigit() else plain
        console.say(f"warning: {shown} cannot be imported by its name, {plain}{SUFFIX} could be")
    elif stem in sys.stdlib_module_names or stem in ("torch", "numpy", "attnspec"):
        way = f"{stem}{SUFFIX} would not"
        console.say(f"warning: {shown} hides the module `{stem}` from what stands beside it, {way}")


def written(loaded: Spec, target: str) -> str:
    """The line that says what was written."""
    fixed = loaded.program.fixed_length
    done = "printed" if target == "-" else f"wrote {shown_path(target)}"
    longest = longest_of(loaded.program)
    lengths = "every length" if longest is None else f"n up to {longest:,}"
    lengths = lengths if fixed is None else f"n = {fixed:,}"
    return f"{done}: class {class_name(loaded.name)}, for {lengths}"


def reasons(loaded: Spec, backend: str) -> list[str]:
    """Two lines: what runs the module, and why."""
    n = length_of(loaded.program, None, TYPICAL_LENGTH)
    try:
        plan = loaded.plan(n, backend=backend)
    except BackendError:
        raise
    except AttnSpecError as error:
        return [
            "chosen: when it is called, at each length",
            f"because: n = {n:,}, which this message is about, does not fit: "
            + str(error).partition("\n")[0],
        ]
    reason = "" if backend == AUTO else ", as --backend asks"
    return [
        f"chosen: {chosen(plan)}{reason}, at n = {n:,} on the CPU",
        f"because: {costs(plan)} (estimates: forward, all heads, size 64)",
    ]


def chosen(plan: Plan) -> str:
    """`tiles for every head`, or the layers and heads of each backend."""
    places: dict[str, list[str]] = {}
    for step in plan.steps:
        heads = "every head" if step.heads is None else f"head {ranges(list(step.heads))}"
        places.setdefault(step.chosen.name, []).append(f"layer {ranges(list(step.layers))} {heads}")
    if len(places) == 1:
        return f"{next(iter(places))} for every head"
    return "; ".join(f"{name} for {', '.join(where)}" for name, where in places.items())


def costs(plan: Plan) -> str:
    """The estimated time of all heads and layers, as chosen where that is several backends, then by
    each backend alone, cheapest first; `attnspec plan` says why others refuse."""
    seconds: dict[str, float] = {}
    refusing = set()
    together = 0.0
    for step in plan.steps:
        times = len(step.layers)
        for candidate in step.candidates:
            name = candidate.backend.name
            if candidate.refusal is not None:
                refusing.add(name)
                continue
            seconds[name] = seconds.get(name, 0.0) + times * candidate.seconds
            if candidate is step.candidates[0]:
                together += times * candidate.seconds
    sentences = []
    if len({step.chosen.name for step in plan.steps}) > 1 and math.isfinite(together):
        sentences.append(f"together {time_text(together)}")
    able = [name for name, s in seconds.items() if name not in refusing and math.isfinite(s)]
    ranked = sorted((seconds[name], name) for name in able)
    sentences += [f"{name} {time_text(s)}" for s, name in ranked] or ["no backend runs all heads"]
    return ", ".join(sentences)
