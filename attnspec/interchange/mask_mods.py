"""`attnspec.from_mask_mod`: a mask function of FlexAttention or transformers as a spec."""

from __future__ import annotations

import inspect
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any

import numpy as np
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask

from attnspec.graphs.patterns import BY_NAME
from attnspec.interchange.named import named
from attnspec.interchange.traced import Captured, UntracedError, constants, graph, trace
from attnspec.ir.program import InputRef, Term, leaves, symbols_of
from attnspec.ir.scalars import FUNCTIONS
from attnspec.spec import Spec, parse
from attnspec.text.diagnostics import AttnSpecError, SpecError, first_line

LENGTHS = (1, 2, 5, 17, 64)
"""Lengths at which every pair of a spec is held against its function."""

LONGEST = 768
"""The longest of such lengths where sizes, or captured tensors, ask for more."""

HEADS = 4
"""Heads that are examined where a function reads its head and no table says how many there are."""

_TAKEN = frozenset({*"qknbh", "head", "heads", "layer", "layers", *FUNCTIONS, *BY_NAME})
"""Names that an input cannot have."""


def from_mask_mod(
    mask_mod: Callable[..., Any], *, name: str | None = None, heads: int | None = None
) -> Spec:
    """The spec of a mask function f(b, h, q, k) of torch; True = attends.

    The function is called once with tensors that record what is done to them: arithmetic,
    comparisons, `& | ~`, torch.where, tables read at [h]. A captured tensor that is read at the
    query or the key becomes an input: of kind `tokens` where it is boolean, `ids` where entries are
    equal or not, `numbers` where they are real or compared in another way. A pattern of the
    language stands where it is proven to be the same for every n. Every pair is then held against
    the function at several lengths.

    `heads` says how many heads the spec has; without it, that of a table that is read, or none.
    Raises AttnSpecError with the reason for what no spec says.
    """
    if not callable(mask_mod):
        raise TypeError(
            f"a function of (b, h, q, k) is needed, got {type(mask_mod).__name__}"
            + (": for a tensor call `attnspec.explain_mask`" if hasattr(mask_mod, "shape") else "")
        )
    called, captured = reading_captured(mask_mod, name, "mask")
    taken = _arguments(mask_mod)
    if taken == 5:
        raise AttnSpecError(
            f"`{called}` takes five arguments, as a score_mod does, and a mask_mod takes four,"
            " (b, h, q, k): for a score_mod call `attnspec.from_score_mod`"
        )
    if taken in (1, 2, 3):
        raise AttnSpecError(
            f"`{called}` takes {('one argument', 'two arguments', 'three arguments')[taken - 1]},"
            " and a mask function takes four, (b, h, q, k): the sample, the head, and the positions"
            " of the query and the key; add those that are missing"
        )
    with errors_of(called):
        term = graph(trace(mask_mod, captured))
        require_positions(term)
    with written_as(called, term, captured.heads if heads is None else heads) as spec:
        _hold(spec, mask_mod, captured, constants(term))
    return spec


def reading_captured(
    function: Callable[..., Any], name: str | None, plain: str
) -> tuple[str, Captured]:
    """What a function is called in a spec, `plain` where it has no name, and what it captures."""
    given = _captured(function)
    known = Captured(lambda tensor: _input_name(given.get(id(tensor), "")))
    return name or _name_of(function, plain), known


@contextmanager
def errors_of(called: str) -> Iterator[None]:
    """Has errors of tracing a function say its name."""
    try:
        yield
    except UntracedError as error:
        raise AttnSpecError(f"`{called}` cannot be written as a spec: {error}") from None
    except AttnSpecError:
        raise
    except Exception as error:
        raise AttnSpecError(f"`{called}` cannot be traced: {first_line(error)}") from error


@contextmanager
def written_as(
    called: str, term: Term, heads: int | None, more: Mapping[str, str] | None = None, *rest: str
) -> Iterator[Spec]:
    """The spec of a graph, with `more` inputs by their kinds, and further statements; its
    errors have no places, since nobody wrote its text."""
    pattern, causal = named(term)
    refs = [
        ref
        for leaf in leaves(term)
        for _, value in leaf.arguments
        for ref in (value if isinstance(value, tuple) else (value,))
        if isinstance(ref, InputRef)
    ]
    # ids are numbers too, where one tensor is both
    read = {ref.name: ref.kind for ref in sorted(refs, key=lambda ref: ref.kind != "numbers")}
    lines = [f"attention {called} {{"]
    lines += [f"    heads {heads}"] if heads is not None else []
    lines += [f"    input {name}: {kind}" for name, kind in {**(more or {}), **read}.items()]
    lines += ["    causal"] if causal else []
    lines += [f"    attend {pattern}", *(f"    {each}" for each in rest), "}", ""]
    try:
        yield parse("\n".join(lines))
    except SpecError as error:
        reasons = "; ".join(each.message for each in error.diagnostics)
        text = "\n".join(lines).strip()
        raise AttnSpecError(
            f"`{called}` cannot be written as a spec, since this text has an error:"
            f"\n{text}\n{reasons}"
        ) from None


def require_positions(term: Term) -> None:
    """Raise where a predicate asks which sample of the batch it is in."""
    if "b" in symbols_of(term):
        raise UntracedError("its pairs depend on the sample's index; read a tensor at [b] instead")


# --- names ---------------------------------------------------------------------------------------


def _arguments(function: Callable[..., Any]) -> int | None:
    """How many arguments a function must be given in order; None where it does not say."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    ordered = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(each.kind in ordered and each.default is each.empty for each in parameters)


def _name_of(function: Callable[..., Any], plain: str) -> str:
    """A name of the language for a function; a plain one where it has none that could be."""
    text = getattr(function, "__name__", plain).strip("_").lower()
    words = text.isascii() and text.isidentifier() and len(text) <= 64
    return text if words and text not in _TAKEN else plain


def _input_name(text: str) -> str:
    """A name as an input may have it, or nothing."""
    text = text.strip("_").lower()
    if text.isascii() and text.isidentifier() and text not in _TAKEN and len(text) <= 60:
        return text
    return ""


def _captured(function: Any) -> dict[int, str]:
    """The names of the tensors that a function has in its closure, its defaults or an object whose
    method it is, or that of functions and objects in it; in a list that of the list."""
    names, waiting, seen = {}, deque([(function, "")]), set()
    while waiting:
        value, name = waiting.popleft()
        if id(value) in seen or isinstance(value, str | bytes | int | float):
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            names[id(value)] = name
        for key, part in _parts_of(value).items():
            path = key if isinstance(key, str) else f"{name}_{key}" if key else name
            waiting.append((part, path))
    return names


def _parts_of(value: Any) -> Mapping[Any, Any]:
    """What a function, an object or a list has by names or numbers; of classes tensors alone, of
    modules and tensors nothing."""
    if isinstance(value, partial):
        return {**value.keywords, "": value.func}
    if inspect.ismethod(value):
        return {"": value.__func__, " ": value.__self__}
    if inspect.isfunction(value):
        closed = inspect.getclosurevars(value)
        defaults = inspect.signature(value).parameters.values()
        named = {x.name: x.default for x in defaults if x.default is not x.empty}
        return {**closed.globals, **named, **closed.nonlocals}
    if isinstance(value, dict):
        return value
    if isinstance(value, list | tuple):
        return dict(zip(getattr(value, "_fields", count()), value, strict=False))
    if inspect.ismodule(value) or isinstance(value, Tensor):
        return {}
    kinds = reversed((value if inspect.isclass(value) else type(value)).__mro__)
    slots = {
        name: getattr(value, name, None)
        for kind in kinds
        for name, slot in vars(kind).items()
        if isinstance(slot, Tensor) or inspect.ismemberdescriptor(slot)
    }
    return slots if inspect.isclass(value) else {**slots, **getattr(value, "__dict__", {})}


# --- the pairs held against the function ----------------------------------------------------------


def _hold(spec: Spec, mask_mod: Callable[..., Any], captured: Captured, sizes: set[int]) -> None:
    """Raise AttnSpecError where the function and the spec differ in a pair."""
    reads_head = any("head" in symbols_of(term) for term in spec.program.graphs)
    heads = spec.heads or (HEADS if reads_head else 1)
    for n, samples in _trials(spec, captured, sizes):
        try:
            with warnings.catch_warnings():
                # of operations that torch maps one by one
                warnings.filterwarnings("ignore", "There is a performance drop")
                masks = mask_of(mask_mod, len(samples), heads, n)
        except Exception as error:
            raise AttnSpecError(
                f"`{spec.name}` has no mask at n = {n:,}: {first_line(error)}"
            ) from error
        for sample, inputs in enumerate(samples):
            for head in range(heads):
                meant = masks[sample, head].numpy()
                differ = np.argwhere(spec.mask(n, head=head, inputs=inputs) != meant)
                if len(differ):
                    q, k = differ[0].tolist()
                    raise AttnSpecError(
                        f"the spec found for `{spec.name}` is not its mask: at n = {n:,} in head"
                        f" {head} the function says {bool(meant[q, k])} for query {q} and key {k},"
                        " and the spec the opposite; the function may depend on something besides"
                        " its arguments"
                    )


def mask_of(mask_mod: Callable[..., Any], batch: int, heads: int, n: int) -> Tensor:
    """The pairs of a function, bool [batch, heads, n, n]."""
    # torch counts the arguments of a plain function right, and of a method one too many
    plain = lambda b, h, q, k: mask_mod(b, h, q, k)  # noqa: E731
    return create_mask(plain, batch, heads, n, n, device="cpu")


def _trials(
    spec: Spec, captured: Captured, sizes: set[int]
) -> Iterator[tuple[int, list[dict[str, np.ndarray]]]]:
    """Lengths, with the samples of the inputs."""
    at_positions, lengths = captured.tensors, captured.lengths
    rows = [len(x) for x in at_positions.values() if x.dim() == 2]
    batch = max([*rows, *map(len, lengths.values())], default=1)
    if at_positions:
        tried = {min(LONGEST, *(tensor.shape[-1] for tensor in at_positions.values()))}
    else:
        sizes = sizes.union(*(x.tolist() for x in lengths.values()))
        tried = {*LENGTHS, min(LONGEST, 2 * max(sizes, default=0) + 3)}
    for n in sorted(tried):
        every = lengths | {x: y[..., :n].expand(batch, -1) for x, y in at_positions.items()}
        read = {name: every[name] for name in spec.inputs}
        yield n, [{name: x[sample].numpy() for name, x in read.items()} for sample in range(batch)]
