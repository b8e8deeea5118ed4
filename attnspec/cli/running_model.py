"""`attnspec verify --model`: a running model is compared with a spec."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from attnspec.cli import console
from attnspec.cli.failures import INTERRUPTED, LIMIT, WRONG_SPEC, fitting
from attnspec.cli.specs import read_inputs

if TYPE_CHECKING:
    from torch import nn

    from attnspec.spec import Spec


def verify_running(
    ctx: click.Context,
    factory: str,
    spec: Spec,
    n: int,
    texts: Mapping[str, str],
    seconds: float,
    as_json: bool,
) -> None:
    """Print the report on the model that a factory makes, and exit with its status."""
    import torch

    from attnspec.model_check import Run

    model, args, kwargs = _made(factory, n)
    arrays = read_inputs(spec, texts, (), n)
    inputs = {name: torch.as_tensor(value)[None] for name, value in arrays.items()}
    status = LIMIT
    with fitting(), console.progress_bar() as show:

        def progress(count: int, path: str) -> None:
            show(count / (count + 8), f"layer {count}: {path}")

        run = Run(model, spec, args, kwargs, inputs=inputs, seconds=seconds, progress=progress)
        try:
            run.verified()
        except KeyboardInterrupt:
            status = INTERRUPTED
    report = run.report
    console.answer(as_json, report.to_dict(), str(report))
    if report.interrupted is not None:
        console.say(f"interrupted: {report.interrupted}")
        ctx.exit(status)
    ctx.exit(0 if report.ok else WRONG_SPEC)


def _made(factory: str, n: int) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """The model that PACKAGE.MODULE:FACTORY makes, and what it is called with."""
    import torch
    from torch import nn

    name, _, attribute = factory.partition(":")
    if not (name and attribute):
        raise click.UsageError(f"--model: PACKAGE.MODULE:FACTORY is required, got {factory!r}")
    # as `python -m` finds modules
    folder = os.getcwd()
    sys.path.insert(0, folder)
    try:
        made: Any = getattr(importlib.import_module(name), attribute)()
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        raise click.UsageError(f"--model: {factory} makes no model: {what}") from error
    finally:
        # what is called may have changed both
        if folder in sys.path:
            sys.path.remove(folder)
    if isinstance(made, tuple) and len(made) == 3 and isinstance(made[0], nn.Module):
        model, args, kwargs = made
        return model, tuple(args), dict(kwargs)
    if not isinstance(made, nn.Module):
        kind = type(made).__name__
        raise click.UsageError(
            f"--model: {factory}() must return a model or (model, args, kwargs), got {kind}"
        )
    size = getattr(getattr(made, "config", None), "vocab_size", None)
    if not isinstance(size, int):
        raise click.UsageError(
            f"--model: {type(made).__name__} has no `vocab_size` in its config, so what it takes is"
            f" not known: let {factory}() return (model, args, kwargs)"
        )
    ids = torch.randint(0, size, (1, n), generator=torch.Generator().manual_seed(0))
    return made, (), {"input_ids": ids}
