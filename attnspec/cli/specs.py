"""From the SPEC of a command line to a `Spec`."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click
import numpy as np

from attnspec.ir.program import inputs_of
from attnspec.limits import LIMITS
from attnspec.text.decoding import read_source, source_of, source_of_bytes
from attnspec.text.diagnostics import Diagnostic, SpecError, did_you_mean, hinted
from attnspec.text.source import Source

if TYPE_CHECKING:
    from attnspec.ir.program import Input, Program
    from attnspec.spec import Spec

STDIN = "<stdin>"


def source_at(spec: str) -> Source:
    """The text of a file, or of standard input for `-`; where there is no such file, that of the
    spec in the zoo of this name."""
    if spec.endswith(".py") and os.path.isfile(spec):
        name = shown_path(spec)
        message = f"a spec is required, {name} is a Python module"
        hint = f"`attnspec verify {name}` takes a compiled module"
        raise SpecError(Diagnostic("A182", message, None, help=hint))
    if spec == "-":
        return _standard_input()
    # a file goes first, and only a bare name is looked up
    if re.fullmatch(r"\w+(\.attn)?", spec) and not os.path.lexists(spec):
        return _of_zoo(spec)
    return read_source(Path(spec), shown_path(spec))


def _of_zoo(name: str) -> Source:
    from attnspec.interchange.zoo import zoo_texts

    texts = zoo_texts()
    if name in texts:
        return source_of(texts[name], name)
    message = f"there is no file {name}"
    if name.endswith(".attn"):
        bare = name.removesuffix(".attn")
        advice = f"`{bare}`, without the ending, is the spec of the zoo" if bare in texts else None
    else:
        message = f"{name} is neither a file nor a spec of the zoo"
        # what stands in the folder is meant rather than what only looks alike
        beside = f"did you mean `{name}.attn`?" if os.path.isfile(f"{name}.attn") else None
        advice = beside or did_you_mean(name, texts) or "`attnspec zoo` lists its names"
    raise SpecError(Diagnostic("A180", message, None, help=advice))


def shown_path(path: str) -> str:
    """A path as messages show it: bytes that are not text in backslashes, no line ends."""
    text = os.fsencode(path).decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def spec_at(spec: str, name: str | None, parameters: Mapping[str, str]) -> Spec:
    """The attention that a command is about."""
    from attnspec.spec import Spec

    return Spec(source_at(spec), name=name, parameters=dict(parameters))


def length_of(program: Program, asked: int | None, default: int) -> int:
    """The length asked for, or the size of the spec's grid, or the default, no longer than what
    the spec's mechanisms learn."""
    from attnspec.lower.mechanism_sizes import longest_of

    if asked is not None:
        return asked
    if program.fixed_length is not None:
        return program.fixed_length
    return min(default, longest_of(program) or default)


def _standard_input() -> Source:
    # sys.stdin is None where the shell closed it
    try:
        data = b"" if sys.stdin is None else sys.stdin.buffer.read(LIMITS.text_size + 1)
    except OSError as error:
        reason = os.strerror(error.errno).lower() if error.errno else str(error)
        message = f"standard input cannot be read: {reason}"
        raise SpecError(Diagnostic("A183", message, None)) from None
    return source_of_bytes(data, STDIN)


def needed_inputs(spec: Spec, layers: Iterable[int], head: int | None = None) -> set[str]:
    """The run-time inputs that the graphs of some layers, or of one head of each, read; those for
    each head, which no command line holds, left out."""
    heads = range(spec.heads or 1) if head is None else [head]
    attends = [spec.program.attend(layer, one) for layer in layers for one in heads]
    named = {name for a in attends if a.graph is not None for name in inputs_of(a.graph)}
    return {name for name in named if spec.inputs[name].kind in _KINDS}


_WHOLE, _TIMES = "(?P<value>[0-9]{1,10})", r"(?:\*(?P<times>[0-9]{1,10}))?"
_REAL = r"(?P<value>[+-]?(?:nan|inf|[0-9]{1,18}(?:\.[0-9]*)?(?:[eE][+-]?[0-9]{1,3})?))"

_KINDS = {
    "tokens": ("{}=0,5,9", _WHOLE + r"(?:\.\.(?P<last>[0-9]{1,10}))?", "positions are"),
    "ids": ("{}=0*{first},1*{rest}", _WHOLE + _TIMES, "ids separated by commas are"),
    "length": ("{}=12", _WHOLE, "one number is"),
    "numbers": ("{}=0.5*{first},2.25*{rest}", _REAL + _TIMES, "numbers separated by commas are"),
}
"""The kinds of run-time inputs that `--input` takes: an example, an item, and what is required."""


def example_of(entry: Input, n: int) -> str:
    """An option that gives an input at n positions; nothing for a kind that only Python gives."""
    text = _KINDS.get(entry.kind, ("",))[0]
    return text and "--input " + text.format(entry.name, first=n - n // 2, rest=n // 2)


def read_inputs(
    spec: Spec, texts: Mapping[str, str], needed: Collection[str], n: int
) -> dict[str, np.ndarray]:
    """Arrays for `Spec.relation`; raises click.UsageError for what is missing or does not fit."""
    for name in texts:
        if name not in spec.inputs:
            known = ", ".join(f"`{known}`" for known in spec.inputs) or "none"
            message = f"`{spec.name}` declares no input `{name}` (it declares {known})"
            raise click.UsageError(hinted(message, name, spec.inputs))
    missing = [spec.inputs[name] for name in sorted(needed) if name not in texts]
    if missing:
        options = " ".join(filter(None, (example_of(each, n) for each in missing)))
        names = ", ".join(f"`{entry.name}` ({entry.kind})" for entry in missing)
        raise click.UsageError(
            f"`{spec.name}` reads run-time inputs that are not given: {names}"
            + (f"\nhelp: for example {options}" if options else "")
        )
    return {name: _values(spec.inputs[name], text, n) for name, text in texts.items()}


def _values(entry: Input, text: str, n: int) -> np.ndarray:
    if entry.kind not in _KINDS:
        message = f"an input of kind {entry.kind} is passed in Python: `spec.analyse(n, inputs)`"
        _refuse(entry, message, n)
    _, pattern, wanted = _KINDS[entry.kind]
    matches = [re.fullmatch(pattern, part.strip()) for part in text.split(",")]
    items = [item for item in matches if item is not None]
    if len(items) < len(matches) or (entry.kind == "length" and len(items) > 1):
        _refuse(entry, f"{wanted} required, got {text!r}", n)
    match entry.kind:
        case "length":
            length = int(text)
            if length > n:
                _refuse(entry, f"a length of at most n = {n} is required, got {length}", n)
            return np.array(length)
        case "tokens":
            marked = np.zeros(n, bool)
            for item in items:
                first, last = int(item["value"]), int(item["last"] or item["value"])
                if last < first or last >= n:
                    _refuse(entry, f"positions from 0 to {n - 1} are required, got {item[0]}", n)
                marked[first : last + 1] = True
            return marked
        case kind:
            counts = [int(item["times"] or 1) for item in items]
            if sum(counts) != n:
                each = "one for each position"
                _refuse(entry, f"{n} {kind} are required, {each}, got {sum(counts)}", n)
            # int64 where all are whole
            whole = all(re.fullmatch(r"[+-]?[0-9]+", item["value"]) for item in items)
            return np.repeat([(int if whole else float)(item["value"]) for item in items], counts)


def _refuse(entry: Input, message: str, n: int) -> NoReturn:
    example = example_of(entry, n)
    advice = f"\nhelp: for example {example}" if example else ""
    raise click.UsageError(f"--input {entry.name} ({entry.kind}): {message}{advice}")
