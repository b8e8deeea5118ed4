"""What a compiled attention may be called with, and what it says of everything else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from inspect import Parameter, signature
from typing import TypeAlias

import torch
from torch import Tensor

from attnspec.backends.common.torch_modes import is_recorded
from attnspec.graphs.predicates.inputs import require_exact
from attnspec.ir.api_checks import index_of, length_of
from attnspec.ir.program import OF_QUERIES, POSITIONS, Input, Program
from attnspec.ir.scalars import Scalar
from attnspec.lower.lower import pair_inputs
from attnspec.lower.work import Call
from attnspec.text.diagnostics import did_you_mean

Inputs: TypeAlias = "Mapping[str, Tensor] | None"
"""Run-time inputs by name, as callers hand them in."""

Parts: TypeAlias = "tuple[Tensor, Tensor, Tensor]"
"""q [B, H, n_q, d], k [B, H_kv, n_k, d] and v [B, H_kv, n_k, d_v]."""

LATER = "for other numbers of heads declare a parameter: `attention name(h = 4) { heads h … }`"

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
PER_HEAD = ("choices", "scores", "buckets", "pairs")
"""Kinds of inputs with an axis of heads."""

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)

KINDS: dict[str, tuple[tuple[torch.dtype, ...], str, str]] = {
    "tokens": ((torch.bool,), "type bool", "[B, n_k]"),
    "ids": (INTEGERS, "an integer type", "[B, n_k]"),
    "numbers": ((*INTEGERS, *FLOATS), "an integer or floating type", "[B, n_k]"),
    "length": (INTEGERS, "an integer type", "[B]"),
    "choices": (INTEGERS[1:], "a signed integer type", "[B, H or H_kv or 1, n_q, any number]"),
    "scores": (FLOATS, "a floating type", "[B, H or H_kv or 1, query blocks, key blocks]"),
    "buckets": (INTEGERS[1:], "a signed integer type", "[B, H or 1, at least 1 round, n_k]"),
    "pairs": (FLOATS, "a floating type", "[B, H or 1, n_q, n_k]"),
}
"""The types of an input of each kind, in words, and its axes."""

_MASKS = (
    "the spec says which keys are read; for padding pass `key_padding_mask`; for a mask that is the"
    " same in all calls `attnspec.explain_mask` or `attnspec.from_mask_mod` writes a spec; for a"
    " mask that changes use `attnspec.MultiheadAttention`"
)
_WEIGHTS = "`attnspec.MultiheadAttention` returns weights; `pairs(q, k)` shows the pairs"
_CAUSAL = "the spec says this, with the statement `causal` or without it; leave the keyword out"
_SCALE = "write the factor on q · k in the spec, as in `scale 1 / 8`"
_OF_CALLS = "key_padding_mask inputs return_lse query_start keys".split()
_INSTEAD = {
    **{x: f"call a compiled `module(q, k, v, {x}=…)`" for x in _OF_CALLS},
    "layer": "make `SelfAttention(…, layer=…)`, or call a compiled `module(q, k, v, layer=…)`",
    "dropout_p": "make `SelfAttention(…, dropout=…)` or call a compiled `module(…, dropout_p=…)`",
    **dict.fromkeys("attention_mask attn_mask block_mask mask mask_mod".split(), _MASKS),
    "enable_gqa": "k and v may always have fewer heads than q; leave `enable_gqa` out",
    "head": "a call computes all heads, which are the axis H of q, k and v",
    "head_mask": "write what each head does in `head` blocks of the spec",
    "causal": _CAUSAL,
    "is_causal": _CAUSAL,
    **dict.fromkeys("need_weights output_attentions return_weights".split(), _WEIGHTS),
    "padding_mask": "pass `key_padding_mask`, bool, True for a real key",
    "position_ids": "keys have the positions 0 to n_k - 1, and queries the last n_q of these",
    "scale": _SCALE,
    "softmax_scale": _SCALE,
    "score_mod": "write the change of scores in the spec, as in `score alibi()` or `score bias()`",
}
"""What callers know from other attentions, and where it is here."""


def refuse_unknown(
    program: Program, unknown: Iterable[str], function: Callable[..., object]
) -> None:
    """Raises TypeError for keywords that a function does not take, with what to do instead."""
    parameters = signature(function).parameters.values()
    names = [each.name for each in parameters if each.default is not Parameter.empty]
    for name in unknown:
        why = _INSTEAD.get(name) or did_you_mean(name, names) or "it takes " + ", ".join(names)
        if name in [entry.name for entry in program.inputs]:
            why = f"`{name}` is an input of the spec; pass `inputs={{{name!r}: tensor}}`"
        raise TypeError(f"`{function.__name__}` takes no `{name}`: {why}")


def check_layer(program: Program, layer: int) -> int:
    """The layer as an integer that the program has."""
    most = "" if program.layers is None else f", 0 to {program.layers - 1},"
    layer = index_of(f"layer{most}", layer)
    if not 0 <= layer < (program.layers or layer + 1):
        allowed = "at least 0" if program.layers is None else f"between 0 and {program.layers - 1}"
        raise ValueError(f"layer must be {allowed}, got {layer}")
    return layer


def check_tensors(program: Program, q: Tensor, k: Tensor, v: Tensor, *, given: str = "") -> None:
    """Raises TypeError or ValueError unless q, k and v fit each other and the program; `given` are
    the shapes that a caller has, if these are others."""
    check_dense(q, k, v)
    if not q.dim() == k.dim() == v.dim() == 4:
        raise ValueError(f"q, k and v must have the axes [B, H, n, d], got {shapes_of(q, k, v)}")
    if q.dtype not in FLOATS or not q.dtype == k.dtype == v.dtype:
        raise TypeError(
            "q, k and v must have one floating type of 16 to 64 bits,"
            f" got q {q.dtype}, k {k.dtype}, v {v.dtype}"
        )
    if not q.device == k.device == v.device:
        raise ValueError(
            "q, k and v must be on one device,"
            f" got q on {q.device}, k on {k.device}, v on {v.device}"
        )
    (batch, heads, n_q, size), (_, key_heads, n_k, _), declared = q.shape, k.shape, program.heads
    longer, kept = not program.cross and n_q > n_k, declared is None or heads == declared
    shared = heads and key_heads and heads % key_heads == 0
    apart = key_heads != v.shape[1] or n_k != v.shape[2]
    for wrong, why in (
        (not kept, f"`{program.name}` declares {declared} heads, so q must have {declared} heads"),
        (not batch == k.shape[0] == v.shape[0], "q, k and v must have one batch size"),
        (apart, "k and v must have the same number of heads and the same length"),
        (size != k.shape[3], "q and k must have one head size"),
        (not shared, f"the heads of {'k' if v is k else 'k and v'} must divide those of q"),
        (size == 0 or v.shape[3] == 0, "heads must have a size of at least 1"),
        (longer, "n_q must be at most n_k, since queries are the last n_q of n_k positions"),
    ):
        if wrong:
            more = "" if kept else f"; {LATER}"
            # with the heads behind the positions, as other libraries have them
            turned = n_q == declared if declared is not None else heads > n_q
            if turned and n_k and n_q % n_k == 0 and not given:
                more = f" (are these [B, n, H, d]? then transpose the axes 1 and 2){more}"
            if longer and kept:
                more += "; for keys of another sequence write `cross` in the spec"
            raise ValueError(f"{why}, got {given or shapes_of(q, k, v)}{more}")


def check_dense(*parts: Tensor) -> None:
    """Raises TypeError unless q, k and v are dense tensors."""
    for name, x in zip("qkv", parts, strict=True):
        check_strided(name, x)


def shapes_of(*parts: Tensor) -> str:
    """The shapes of q, k and v, in words; of q and k where the keys are the values, too."""
    named = zip("qk" if parts[1] is parts[2] else "qkv", parts, strict=False)
    return ", ".join(f"{name} {list(x.shape)}" for name, x in named)


def check_strided(name: str, tensor: object) -> None:
    """Raises TypeError unless it is a dense tensor."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if tensor.layout != torch.strided or tensor.is_nested:
        kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        raise TypeError(f"{name} must be a dense tensor, got one of the layout {kind}")


def check_query_start(program: Program, query_start: int, reads_m: bool) -> int:
    """The number of a call's first query as an integer; ValueError where that says nothing.
    `reads_m` says whether the pairs depend on the number of all queries."""
    start = length_of(query_start, "query_start")
    if start and not program.cross:
        raise ValueError(
            f"query_start can be given only for a spec with `cross`, got {start}: the queries of"
            f" `{program.name}` are always the last n_q positions; leave query_start out"
        )
    if start and reads_m:
        raise ValueError(
            f"`{program.name}` depends on m, the number of all queries, and a call that starts at"
            f" query {start} does not know m: pass all queries in one call"
        )
    return start


def check_dropout(dropout_p: float, name: str = "dropout_p") -> float:
    """The probability as a float between 0 and 1."""
    # tuples where calls are traced: the tracer of torch 2.9 knows no unions
    if isinstance(dropout_p, bool) or not isinstance(dropout_p, (int, float)):
        raise TypeError(f"{name} must be a number, got {type(dropout_p).__name__}")
    if not 0.0 <= dropout_p <= 1.0:
        raise ValueError(f"{name} must be between 0 and 1, got {dropout_p}")
    return float(dropout_p)


def check_inputs(
    program: Program, inputs: Inputs, q: Tensor, k: Tensor, padding: Tensor | None
) -> dict[str, Tensor]:
    """The inputs of q [B, H, n_q, d] and k [B, H_kv, n_k, d] as patterns take them: [B, n_k],
    numbers as int64 or float64, one of a token at padding [B, n_k]; a length [B, 1, 1]; what is
    about heads as it is given."""
    tensors = check_names(program, inputs)
    (batch, heads, n_q, _), (_, key_heads, n_k, _) = q.shape, k.shape
    checked = {}
    for entry in program.inputs:
        _, kind, axes = KINDS[entry.kind]
        if entry.name not in tensors:
            raise ValueError(
                f"`{program.name}` needs its input `{entry.name}`: pass inputs={{{entry.name!r}:"
                f" tensor}} ({kind}, shape {axes})"
            )
        name, tensor = f"the input `{entry.name}`", tensors[entry.name]
        shape: tuple[int, ...] = (batch,) if entry.kind == "length" else (batch, n_k)
        if entry.kind in PER_HEAD:
            # how many blocks, columns or rounds there must be is for what reads it to say
            check_strided(name, tensor)
            shape = tuple(tensor.shape)
            sizes = {"B": batch, "H": heads, "H_kv": key_heads, "n_q": n_q, "n_k": n_k, "1": 1}
            some = [
                [sizes[x] for x in axis.split(" or ") if x in sizes]
                for axis in axes[1:-1].split(", ")
            ]
            # of numbers of pairs a step has those of all keys
            rows = zip(some[: 3 if entry.kind == "pairs" else 4], shape, strict=False)
            if len(shape) != 4 or any(fits and size not in fits for fits, size in rows):
                said = ", ".join(f"{x} = {sizes[x]}" for x in sizes if x > "1" and x in axes)
                raise ValueError(
                    f"{name} must have the shape {axes} with {said}, got {list(shape)}"
                )
        check_tensor(name, tensor, entry.kind, shape, q.device)
        if entry.kind == "length":
            # no position lies before one below 0
            tensor = tensor.long().clamp(min=0).view(-1, 1, 1)
        elif entry.kind == "numbers":
            tensor = tensor.double() if tensor.is_floating_point() else tensor.long()
            tensor = tensor if padding is None else without_padding(tensor, padding)
        checked[entry.name] = tensor
    return checked


def check_names(program: Program, inputs: Inputs) -> Mapping[str, Tensor]:
    """The inputs by name, empty for None; raises unless the program declares each."""
    tensors, declared = {} if inputs is None else inputs, [x.name for x in program.inputs]
    if not isinstance(tensors, Mapping):
        raise TypeError(
            f"inputs must be a mapping of names to tensors, got {type(tensors).__name__}"
        )
    for name in tensors:
        if name not in declared:
            names = ", ".join(declared) or "none"
            raise ValueError(f"`{program.name}` has no input {name!r}; its inputs: {names}")
    return tensors


def without_padding(numbers: Tensor, padding: Tensor) -> Tensor:
    """Numbers [B, n_k] with one of a real token at padding, 1 where no token is real: what stands
    there is no number of a token, and no predicate may fail on it."""
    if not numbers.numel():
        return numbers
    first = numbers.flatten().gather(0, padding.flatten().to(torch.uint8).argmax().view(1))
    return torch.where(padding, numbers, torch.where(padding.any(), first, 1).to(numbers.dtype))


def along_keys(
    program: Program, parts: Parts, call: Call, change: Callable[[Tensor, int], Tensor]
) -> tuple[Parts, Call]:
    """A call with `change(tensor, axis)` in the place of all that has an axis of keys."""

    def changed(entry: Input, x: Tensor, axis: int) -> Tensor:
        return x if entry.kind in OF_QUERIES else change(x, axis)

    q, k, v = parts
    tables = {**call.tables, **{x: change(call.tables[x], 4) for x in pair_inputs(program)}}
    data = along_positions(program, call.data, changed)
    padding = None if call.padding is None else change(call.padding, 1)
    call = replace(call, padding=padding, tables=tables, data=data)
    return (q, change(k, 2), change(v, 2)), call


def of_first_keys(program: Program, parts: Parts, call: Call, count: int) -> tuple[Parts, Call]:
    """A call of the first so many keys; ValueError for more than there are, or too few."""
    n_q, n_k = (x.shape[2] for x in parts[:2])
    least = 0 if program.cross else n_q
    if not least <= count <= n_k:
        raise ValueError(
            f"keys, the number of keys in use after the call, must be {least} to {n_k}, got {count}"
        )
    return along_keys(program, parts, call, lambda x, axis: x.narrow(axis, 0, count))


def along_positions(
    program: Program, inputs: Mapping[str, Tensor], change: Callable[[Input, Tensor, int], Tensor]
) -> dict[str, Tensor]:
    """The inputs with `change(input, tensor, axis)` in the place of those that have an axis of
    positions; what cannot be one stays, and is refused by who reads it."""
    changed = dict(inputs)
    for entry in program.inputs:
        axis, x = POSITIONS.get(entry.kind), inputs.get(entry.name)
        if axis is not None and isinstance(x, Tensor) and x.ndim > axis:
            changed[entry.name] = change(entry, x, axis)
    return changed


def check_promises(
    program: Program, data: Mapping[str, Tensor], before: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """How many tokens of each sample, int64 [B], inputs mark that promise a bound, with those
    before; ValueError where one marks more."""
    marked = dict(before)
    for entry in program.inputs:
        if entry.at_most is None:
            continue
        name, at_most = entry.name, entry.at_most
        marked[name] = marks = data[name].sum(-1) + marked.get(name, 0)
        if len(marks) and not marks.is_meta:
            require_numbers(f"a call checks the values of `{name}`", marks)
            if (most := int(marks.amax())) > at_most:
                raise ValueError(
                    f"the input `{name}` may mark at most {at_most} tokens per sequence, got {most}"
                )
    return marked


def check_finite(
    program: Program, q: Tensor, k: Tensor, v: Tensor, data: Mapping[str, Tensor]
) -> None:
    """Raises ValueError, with the first place, where a tensor holds NaN or an infinity; a score
    that is given may be -inf, which is never chosen."""
    scores = {x.name: data[x.name] for x in program.inputs if x.kind in ("scores", "pairs")}
    for name, x in {"q": q, "k": k, "v": v, **scores}.items():
        if x.is_meta:
            continue
        scored, block = name in scores, "" if name in pair_inputs(program) else " block"
        wrong = ~x.isfinite() & ~(scored & x.isneginf())
        for place in wrong.nonzero()[:1].tolist():
            last = (f"query{block}", f"key{block}") if scored else ("position", "number")
            axes = zip(("sample", "head", *last), place, strict=False)
            at = ", ".join(f"{axis} {index}" for axis, index in axes)
            raise ValueError(
                f"{f'the input `{name}`' if scored else name} must be finite, got"
                f" {float(x.detach()[tuple(place)])} at {at}; {int(wrong.sum()):,} of its"
                f" {x.numel():,} numbers are not finite"
            )


def taken_apart(
    program: Program, data: Mapping[str, Tensor], n_k: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The inputs of a call without those that have a number of each pair, and these as tables,
    [1, H or 1, B, n_q, n_k]: they have gradients."""
    rest, tables = dict(data), {}
    for name in pair_inputs(program):
        x = rest.pop(name)
        if x.shape[3] != n_k:
            raise ValueError(
                f"the input `{name}` must have a number for each of the {n_k} keys, got"
                f" {list(x.shape)}"
            )
        tables[name] = x.transpose(0, 1)[None]
    return rest, tables


def require_unchanged(outs: Sequence[Tensor | None], call: Call) -> None:
    """Derivatives of outputs raise RuntimeError where padding or inputs have been written over
    since, as those of torch's own operations do: they are taken of what is there now."""
    read = [x for x in (*call.data.values(), call.padding) if x is not None]
    versions = [(x, x._version) for x in read if not x.is_inference()]

    def check(grads: object) -> None:
        if any(x._version != version for x, version in versions):
            raise RuntimeError(
                "`key_padding_mask` or an input was changed in place before the backward pass,"
                " which needs the earlier values: pass a `.clone()`"
            )

    for out in outs:
        if versions and out is not None and out.grad_fn is not None:
            out.grad_fn.register_prehook(check)


def check_exact(
    predicates: Mapping[Scalar, Sequence[str]],
    data: Mapping[str, Tensor],
    n: int,
    m: int | None = None,
) -> None:
    """Raises ValueError where whole numbers that predicates compute of inputs may not be exact, for
    n keys and m queries, n where it is None."""
    for predicate, names in predicates.items():
        whole = {x: data[x] for x in names if data[x].numel() and not data[x].is_floating_point()}
        if any(x.is_meta for x in whole.values()):
            continue
        for name, x in whole.items():
            require_numbers(f"a call checks the values of `{name}`", x)
        require_exact(predicate, n, {x: (int(y.min()), int(y.max())) for x, y in whole.items()}, m)


def require_numbers(what: str, *tensors: Tensor) -> None:
    """Raises ValueError where a trace has no numbers of tensors, which `what` names or reads."""
    if any(map(is_recorded, tensors)):
        raise ValueError(
            f"{what}, and an export within `composed()` has no values: export the module outside"
            " of `composed()`, as one operator"
        )


def check_tensor(
    name: str, tensor: Tensor, kind: str, shape: tuple[int, ...], device: torch.device | None
) -> None:
    """Raises unless a tensor is dense, of a type of `KINDS`, a shape, and on a device, if any."""
    check_strided(name, tensor)
    types, words, _ = KINDS[kind]
    if tensor.dtype not in types:
        raise TypeError(f"{name} must be of {words}, got {tensor.dtype}")
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} must have the shape {list(shape)}, got {list(tensor.shape)}")
    if device is not None and tensor.device != device:
        raise ValueError(f"{name} must be on {device}, the device of q, got {tensor.device}")
