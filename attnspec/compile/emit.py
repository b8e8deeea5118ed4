"""The text of the Python module that a spec compiles to.

The same program gives the same bytes: no path, date, machine or order of a set enters the text.
The spec stands in the docstring, inert; the plan stands below it as plain data.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import keyword
from collections.abc import Sequence
from pprint import pformat
from textwrap import wrap
from typing import TYPE_CHECKING

from attnspec.ir.program import Program
from attnspec.ir.serial import fingerprint, plan_data
from attnspec.text.diagnostics import InternalError
from attnspec.version import __version__

if TYPE_CHECKING:
    from attnspec.elaborate import Elaborated

WIDTH = 100
"""The longest line."""

OWN = ("CompiledAttention", "FORMAT", "PLAN")
"""Names that the module itself uses, besides torch."""

ALONE = frozenset(("functools", "math", "torch"))
"""What a standalone module imports."""

MARK = ", compiled by attnspec "
"""Stands in the first line of every emitted module, between the name and the version."""

SPEC = "It was compiled from this spec:"
"""Stands above the spec in the docstring of every emitted module."""

SEAL = "# sha256 of the lines above: "
"""Begins the last line of every emitted module, by which edits are noticed."""

_DEPENDENT = """\
try:
    from attnspec.runtime import FORMAT, CompiledAttention
except ImportError as error:
    raise ImportError(
        "this module runs on the package attnspec, which cannot be imported here: install it, or"
        " compile the spec with --standalone"
    ) from error
"""

_CHECK = """\
if PLAN["format"] != FORMAT:
    raise ImportError(
        f"this module was compiled for format {PLAN['format']}, and the attnspec that is installed"
        f" reads format {FORMAT}: compile the spec again, or install attnspec VERSION"
    )
"""


def emit(
    spec: Elaborated, facts: Sequence[str], backend: str = "auto", body: str | None = None
) -> str:
    """The module of a spec; `facts` are lines about it for the docstring. A module that stands
    alone has its `body`, and no plan; the others import attnspec."""
    parts = [body or ""]
    if body is None:
        check = _CHECK.replace("VERSION", __version__)
        plan = constant("PLAN", plan_data(spec.program, backend))
        parts = [_DEPENDENT, f"{plan}\n", check, "\n" + _class(spec.program)]
    module = "\n".join([_docstring(spec, facts), *parts])
    check_module(module, body is not None)
    return sealed(module)


def sealed(module: str) -> str:
    """A module with the line that tells whether it was edited since."""
    return f"{module}\n{SEAL}{hashlib.sha256(module.encode()).hexdigest()}\n"


def is_as_emitted(text: str) -> bool:
    """Whether a file is an emitted module that nobody has edited."""
    module, seal, _ = text.rpartition(f"\n{SEAL}")
    return bool(seal) and MARK in module.partition("\n")[0] and sealed(module) == text


def class_name(name: str) -> str:
    """An attention's name in CamelCase; one that would hide a name of Python, or may be that of a
    constant, gets a suffix."""
    camel = "".join(part[:1].upper() + part[1:] for part in name.split("_"))
    if not camel[:1].isalpha():
        return f"Attention{camel}"
    constant = camel.isupper() and len(camel) > 1
    hidden = keyword.iskeyword(camel) or hasattr(builtins, camel) or camel in (*OWN, "torch")
    return f"{camel}Attention" if hidden or constant else camel


def constant(name: str, value: object) -> str:
    """A constant, on several lines where it is too long for one."""
    shown = pformat(value, 1, WIDTH - len(name) - 3, compact=True, sort_dicts=False)
    return f"{name} = {shown}".replace("'", '"')


def _docstring(spec: Elaborated, facts: Sequence[str]) -> str:
    name, source = spec.program.name, spec.source.rstrip("\n").split("\n")
    lines = [f"{name}{MARK}{__version__}.", ""]
    lines += [f"    attention = {class_name(name)}()", "    out = attention(q, k, v)", ""]
    lines += [SPEC, "", *(f"    {line}".rstrip() for line in source), ""]
    lines += [*facts, ""] if facts else []
    lines += [f"Fingerprint of the spec (sha256): {fingerprint(spec.program)}", ""]
    inert = "\n".join(lines).replace("\\", "\\\\")
    # three quotation marks in a row would end the docstring
    return '"""' + inert.replace('"""', '\\"\\"\\"') + '"""\n'


def _class(program: Program) -> str:
    inputs = "The spec declares no `inputs`."
    if program.inputs:
        # what loads torch is not needed for a name
        from attnspec.runtime.call_checks import KINDS

        shown = ", ".join(f"{x.name} ({' '.join(KINDS[x.kind][1:])})" for x in program.inputs)
        inputs = f"`inputs` holds {shown}."
    queries = "Queries are the last n_q of the n_k positions"
    if program.cross:
        queries = "Queries are another sequence than the keys, from its `query_start` on"
    heads = "H" if program.heads is None else program.heads
    call = (
        f"A call takes q [B, {heads}, n_q, d], k [B, H_kv, n_k, d] and v [B, H_kv, n_k, d_v], where"
        f" H_kv divides {heads}, and returns [B, {heads}, n_q, d_v]. {queries}. `layer` is the"
        " number of one, `key_padding_mask` bool [B, n_k], True for a real key, `dropout_p` a"
        " fraction of the weights. With `return_lse` the log-sum-exps"
        f" [B, {heads}, n_q] come as well. {inputs}"
    )
    shown = "\n    ".join(wrap(call, WIDTH - 4))
    return f'''\
class {class_name(program.name)}(CompiledAttention):
    """The attention `{program.name}`.

    {shown}
    """

    def __init__(self, head_size: int | None = None) -> None:
        super().__init__(PLAN, head_size)
'''


def check_module(text: str, standalone: bool) -> None:
    """Raises InternalError unless the text parses and imports nothing but what it may."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise InternalError(f"the emitted module does not parse: {error}") from error
    allowed = ALONE if standalone else {"attnspec"}
    for node in ast.walk(tree):
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        modules += [node.module or "."] if isinstance(node, ast.ImportFrom) else []
        for module in modules:
            if module.partition(".")[0] not in allowed:
                raise InternalError(f"the emitted module imports {module}")
