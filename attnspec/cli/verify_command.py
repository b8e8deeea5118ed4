"""`attnspec verify`: compare a compiled attention with the definition of its spec."""

from __future__ import annotations

import hashlib
import importlib.util
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from textwrap import dedent
from types import ModuleType
from typing import TYPE_CHECKING

import click

from attnspec.backends.planner import AUTO, OWN
from attnspec.backends.plugins import installed_names
from attnspec.cli import console, options
from attnspec.cli.failures import WRONG_SPEC, fitting
from attnspec.cli.running_model import verify_running
from attnspec.cli.specs import length_of, shown_path, spec_at
from attnspec.compile.emit import MARK, SPEC, class_name
from attnspec.graphs.stack import Stack, blamed
from attnspec.ir.program import Program
from attnspec.ir.serial import from_data
from attnspec.lower.lower import require_built
from attnspec.spec import parse
from attnspec.text.diagnostics import AttnSpecError

if TYPE_CHECKING:
    import torch

DEFAULT_LENGTH = 512

EVERY = "all"
"""Stands in place of a backend's name for each of them."""

_LOADED = "emitted_module"


@click.command("verify")
@click.argument("spec", metavar="SPEC_OR_MODULE")
@options.length_option(DEFAULT_LENGTH)
@options.queries_option
@click.option(
    "--backend",
    metavar="NAME",
    default=AUTO,
    help="Use this backend or fail with its reason; `all` tries each one and says which refuse.",
)
@click.option(
    "--model",
    "factory",
    metavar="PACKAGE.MODULE:FACTORY",
    help="Compare a running model with SPEC. FACTORY() returns the model, or (model, args, kwargs)"
    " with N positions. A model alone, with a config, is called with N random `input_ids`.",
)
@click.option(
    "--seconds",
    metavar="S",
    type=click.FloatRange(min=0.1),
    default=600.0,
    show_default="600",
    help="Check no further layer of the model after S seconds.",
)
@options.input_option
@options.name_option
@options.set_option
@options.json_option
@click.pass_context
def command(
    ctx: click.Context,
    spec: str,
    length: int | None,
    queries: int | None,
    backend: str,
    factory: str | None,
    seconds: float,
    inputs: Mapping[str, str],
    name: str | None,
    parameters: Mapping[str, str],
    as_json: bool,
) -> None:
    """Compare a compiled attention with its definition.

    Checks that every pair of the graph is computed exactly once and no other pair, and that outputs
    and gradients agree with the definition in float64. Beyond 4,096 positions queries are sampled,
    and each line of the report says how many. A MODULE is a file that `attnspec compile` wrote. Its
    code is executed: use only files that you trust.

    With --model, a PyTorch model runs and each of its attention layers is compared with SPEC: which
    key influences which query is measured. Ctrl-C prints what has been checked so far.

    Example: attnspec verify bigbird_attn.py -n 512
    """
    if factory is not None:
        if spec.endswith(".py") or backend != AUTO or queries is not None:
            raise click.UsageError("--model takes a SPEC, and neither --backend nor -m")
        loaded = spec_at(spec, name, parameters)
        n = length_of(loaded.program, length, DEFAULT_LENGTH)
        verify_running(ctx, factory, loaded, n, inputs, seconds, as_json)
    if inputs:
        raise click.UsageError("--input needs --model: otherwise inputs are drawn at random")
    program, module = _read(spec, name, parameters, backend)
    n = length_of(program, length, DEFAULT_LENGTH)
    # it loads torch, which no help text and no error of the spec should wait for
    from attnspec.verification.verify import verify

    if 0 in (n, queries):
        raise click.UsageError(f"there is nothing to verify at {'m' if n else 'n'} = 0")
    names = [*OWN, *installed_names()] if backend == EVERY else [backend]
    with fitting(), blamed(Stack(program), n):
        verification = verify(program, n, names, module=module, m=queries)
    console.answer(as_json, verification.to_dict(), str(verification))
    ctx.exit(0 if verification.ok else WRONG_SPEC)


def _read(
    spec: str, name: str | None, parameters: Mapping[str, str], backend: str
) -> tuple[Program, torch.nn.Module | None]:
    """The program of a spec, or of a module that `attnspec compile` wrote, with this."""
    if not spec.endswith(".py"):
        loaded = spec_at(spec, name, parameters)
        require_built(loaded.program)
        return loaded.program, None
    if name is not None or parameters or backend != AUTO:
        raise click.UsageError("--name, --set and --backend are for a SPEC, not for a module")
    return emitted(spec)


def emitted(path: str) -> tuple[Program, torch.nn.Module]:
    """The program of an emitted module, and the attention itself.

    Raises AttnSpecError for a file that `attnspec compile` did not write, or not like this.
    """
    shown = shown_path(path)
    text = Path(path).read_text(encoding="utf-8", errors="replace")
    if MARK not in text.partition("\n")[0]:
        raise AttnSpecError(f"{shown} is not a module that `attnspec compile` wrote")
    spec = importlib.util.spec_from_file_location(_LOADED, path)
    if spec is None or spec.loader is None:
        raise AttnSpecError(f"{shown} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    # dataclasses look their module up here
    sys.modules[_LOADED] = module
    try:
        spec.loader.exec_module(module)
        if not hasattr(module, "PLAN"):
            return _standing_alone(module, shown)
        plan = module.PLAN["program"]
        program = from_data(plan)
        attention: torch.nn.Module = getattr(module, class_name(program.name))()
    except AttnSpecError:
        raise
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        raise AttnSpecError(f"{shown} cannot be run, was it edited? {what}") from error
    stated = re.search(r"^Fingerprint .*: ([0-9a-f]{64})$", module.__doc__ or "", re.MULTILINE)
    if stated is None or stated[1] != hashlib.sha256(repr(plan).encode()).hexdigest():
        raise AttnSpecError(f"{shown} was edited: its plan has another fingerprint than its spec")
    return program, attention


def _standing_alone(module: ModuleType, shown: str) -> tuple[Program, torch.nn.Module]:
    """The same of a module that stands alone, whose docstring has the spec."""
    from attnspec.verification.alone import Alone

    text = module.__doc__ or ""
    _, _, behind = text.partition(SPEC)
    match = re.match(r"\n*((?: {4}.*\n|\n)*)", behind)
    spec = parse("" if match is None else dedent(match[1]))
    if f": {spec.fingerprint}\n" not in text:
        raise AttnSpecError(f"{shown} was edited: its spec has another fingerprint than it states")
    return spec.program, Alone(spec.program, getattr(module, class_name(spec.name)))
