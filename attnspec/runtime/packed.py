"""Documents one behind the other, without padding: each is a sequence by itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor

from attnspec.backends.common.torch_modes import is_watched
from attnspec.backends.planner import AUTO
from attnspec.graphs.forms.properties import moves_along
from attnspec.graphs.forms.stability import unsteady_layer
from attnspec.ir.linear import asks_positions
from attnspec.ir.normal_form import normal_term
from attnspec.ir.program import Attend, Compound, InputRef, Leaf, Program, Term
from attnspec.ir.scores import goes_by_distance
from attnspec.runtime.call_checks import (
    INTEGERS,
    PER_HEAD,
    Inputs,
    Parts,
    check_dense,
    check_layer,
    check_names,
    check_tensor,
    check_tensors,
    shapes_of,
)
from attnspec.runtime.module import CompiledAttention
from attnspec.text.diagnostics import count_of


def packed(
    module: CompiledAttention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    *,
    layer: int = 0,
    dropout_p: float = 0.0,
    inputs: Inputs = None,
) -> Tensor:
    """Attention of packed documents, each a sequence by itself: what a loop over them returns.

    q [T, H, d], k [T, H_kv, d] and v [T, H_kv, d_v] are the tokens of all documents, document i
    those from cu_seqlens[i] up to cu_seqlens[i + 1]; the output is [T, H, d_v]. Or q, k and v are
    jagged nested tensors [B, H, j, d] of the same documents, and so is the output. `inputs` are
    [T] for tokens and ids, [B] for a length.

    With `cu_seqlens_k` of keys, documents may have fewer queries, their last; inputs are of keys.

    Where pairs depend on q - k and on labels alone, at every length, one call computes all
    documents. Any other spec counts from the first position, or from the last, or mixes whole
    sequences: documents of equal lengths are one call each, and a mechanism that redraws its
    features counts every such call. The host reads `cu_seqlens`, and waits for a GPU that has it.

    Raises TypeError or ValueError, with the shapes, for tensors that do not fit.
    """
    if not isinstance(cast(object, module), CompiledAttention):
        raise TypeError(f"module must be what spec.compile() returns, got {type(module).__name__}")
    if torch.compiler.is_dynamo_compiling():
        # documents are counted before anything runs, which a traced program cannot
        outside: Any = torch.compiler.disable(packed)  # type: ignore[no-untyped-call]
        rest: Any = {"layer": layer, "dropout_p": dropout_p, "inputs": inputs}
        return cast(Tensor, outside(module, q, k, v, cu_seqlens, cu_seqlens_k, **rest))
    program = module.program
    if program.cross:
        raise ValueError(
            f"`{program.name}` has `cross`, and packed documents are one sequence each: call"
            " the module for each document"
        )
    rest = {"layer": check_layer(program, layer), "dropout_p": dropout_p}
    nested = any(getattr(x, "is_nested", False) for x in (q, k, v))
    if nested:
        if cu_seqlens is not None or cu_seqlens_k is not None:
            raise ValueError("nested tensors know where documents end: leave cu_seqlens out")
        (q, k, v), cu_seqlens, cu_seqlens_k = _of_nested(q, k, v)
    out = _of_documents(module, (q, k, v), cu_seqlens, cu_seqlens_k, inputs, rest)
    return (
        torch.nested.nested_tensor_from_jagged(out, cu_seqlens).transpose(1, 2) if nested else out
    )


def _of_documents(
    module: CompiledAttention,
    parts: Parts,
    cu_seqlens: Tensor | None,
    cu_seqlens_k: Tensor | None,
    inputs: Inputs,
    rest: Mapping[str, Any],
) -> Tensor:
    """The output [T, H, d_v] for q, k and v of all documents."""
    (q, k, _), program = parts, module.program
    ends = _checked_ends(*parts, cu_seqlens, cu_seqlens_k)
    # of all documents, for the shapes that the caller has
    rows = [x.transpose(0, 1)[None] for x in parts]
    check_tensors(program, *rows, given=shapes_of(*parts))
    inputs = check_names(program, inputs)
    for entry in program.inputs:
        if entry.kind in PER_HEAD:
            raise ValueError(
                f"the input `{entry.name}` cannot be used with packed documents, because the shape"
                f" of `{entry.kind}` depends on the length of a document: call the module once for"
                " each document"
            )
        if entry.name in inputs:
            each = "document" if entry.kind == "length" else "key"
            count = len(ends[0]) - 1 if each == "document" else len(k)
            name = f"the input `{entry.name}`, with a number for each {each},"
            check_tensor(name, inputs[entry.name], entry.kind, (count,), q.device)
    together = torch.equal(*ends) and module.backend == AUTO and len(ends[0]) > 2 and len(q)
    if not together or not _is_part(program, rest["layer"], q.shape[1]):
        return _by_length(module, parts, ends, inputs, rest)
    within, name = module.with_input("ids", _within)
    places = torch.arange(len(q), device=q.device)
    labels = torch.searchsorted(ends[0].to(q.device), places, right=True)
    whole = {key: x[None] for key, x in {**inputs, name: labels}.items()}
    out: Tensor = within.forward(*rows, inputs=whole, **rest)
    return out[0].transpose(0, 1)


def _by_length(
    module: CompiledAttention,
    parts: Parts,
    ends: tuple[Tensor, Tensor],
    inputs: Mapping[str, Tensor],
    rest: Mapping[str, Any],
) -> Tensor:
    """The documents of each length, of queries and of keys, in a call of their own."""
    device, lengths = parts[0].device, torch.stack([x.diff() for x in ends], 1)
    of_documents = {x.name for x in module.program.inputs if x.kind == "length"}
    outs, order = [], []
    # of documents without queries there is nothing to compute, unless there are no others
    some: Any = lengths[lengths[:, 0] > 0] if lengths[:, 0].any() else lengths.new_zeros(1, 2)
    for size in some.unique(dim=0):
        documents = (lengths == size).all(1).nonzero()[:, 0]
        rows, columns = (
            (starts[documents, None] + torch.arange(count)).to(device)
            for starts, count in zip(ends, size.tolist(), strict=True)
        )
        each = documents.to(device)
        mine = {x: y[each if x in of_documents else columns] for x, y in inputs.items()}
        at = zip(parts, (rows, columns, columns), strict=True)
        out = module(*(x[index].transpose(1, 2) for x, index in at), inputs=mine, **rest)
        outs.append(out.transpose(1, 2).flatten(0, 1))
        order.append(rows.flatten())
    return torch.cat(outs)[torch.argsort(torch.cat(order))]


@lru_cache(maxsize=256)
def _is_part(program: Program, layer: int, heads: int) -> bool:
    """Whether the pairs and scores of a document are those of the whole between its positions."""
    if program.grid is not None or unsteady_layer(program, layer, heads) is not None:
        return False
    alone = (None if attend.mechanism else attend.graph for attend in program.attends)
    scores = (value for attend in program.attends for value in attend.numbers)
    moves = all(goes_by_distance(x) or not asks_positions(x) for x in scores)
    return moves and all(graph is not None and moves_along(graph) for graph in alone)


def _within(attend: Attend, name: str) -> Attend:
    """The same between positions of one label."""
    same = Leaf("same", (("ids", InputRef(name, "ids")),))
    return replace(attend, graph=normal_term(Compound("&", (cast(Term, attend.graph), same))))


def _of_nested(*given: Any) -> tuple[Parts, Tensor, Tensor]:
    """The tokens [T, H, d] of jagged tensors, the offsets of queries, and of keys."""
    for name, x in zip("qkv", given, strict=True):
        if not x.is_nested or x.layout != torch.jagged or x.dim() != 4 or x._ragged_idx != 2:
            raise TypeError(
                f"{name} must be a nested tensor [B, H, j, d] of the layout torch.jagged; build q,"
                " k and v as torch.nested.nested_tensor_from_jagged(values, offsets).transpose(1,"
                " 2), k and v from the same tensor of offsets"
            )
        if x.lengths() is not None:
            raise ValueError(f"{name} has gaps between documents: pass {name}.contiguous()")
    if given[1].shape[2] != given[2].shape[2]:
        raise ValueError(
            "k and v have different tensors of offsets: give both the same one in"
            " torch.nested.nested_tensor_from_jagged(values, offsets)"
        )
    rows, columns, _ = (x.offsets() for x in given)
    q, k, v = (x.values().transpose(0, 1) for x in given)
    return (q, k, v), rows, columns


def _checked_ends(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Any, cu_seqlens_k: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Where the queries and the keys of documents end; raises unless q, k and v are [T, H, d] of
    such documents. What is left the module checks."""
    check_dense(q, k, v)
    alike = cu_seqlens_k is None
    if not q.dim() == k.dim() == v.dim() == 3 or {len(v), len(q if alike else k)} != {len(k)}:
        fewer = alike and q.dim() == 3
        got = shapes_of(q, k, v) + "; for fewer queries than keys pass cu_seqlens_k, too" * fewer
        raise ValueError(f"q, k and v must be [T, H, d] of the same T tokens, got {got}")
    if is_watched(q):
        raise ValueError(
            "a traced program cannot count documents: call `attnspec.packed` outside of the"
            " traced program"
        )
    rows = _ends(cu_seqlens, len(q), "cu_seqlens")
    columns = rows if alike else _ends(cu_seqlens_k, len(k), "cu_seqlens_k")
    if len(rows) != len(columns):
        raise ValueError(
            "cu_seqlens and cu_seqlens_k must have the same number of documents, got"
            f" {len(rows) - 1} and {len(columns) - 1}"
        )
    for document in (rows.diff() > columns.diff()).nonzero()[:1, 0].tolist():
        n_q, n_k = (int(x.diff()[document]) for x in (rows, columns))
        raise ValueError(
            "a document must have at least as many keys as queries, since its queries are"
            f" its last positions: document {document} has {count_of(n_q, 'query', 'queries')} and"
            f" {count_of(n_k, 'key')}"
        )
    return rows, columns


def _ends(offsets: Any, tokens: int, name: str) -> Tensor:
    """Where documents begin and end, for the host; raises unless that is from 0 up to the number of
    tokens."""
    is_tensor, held = isinstance(offsets, Tensor), "it holds 0 and the end of each document"
    if not is_tensor or offsets.dtype not in INTEGERS or offsets.dim() != 1 or not len(offsets):
        what = f"{offsets.dtype} {list(offsets.shape)}" if is_tensor else type(offsets).__name__
        raise TypeError(f"{name} must be a tensor of integers [documents + 1], got {what}; {held}")
    ends: list[int] = offsets.tolist()
    for wrong, what in (
        (ends[0] != 0, f"start with 0, got {ends[0]}"),
        (ends != sorted(ends), f"not decrease, got {ends}"),
        (ends[-1] != tokens, f"end with {tokens}, the number of tokens, got {ends[-1]}"),
    ):
        if wrong:
            raise ValueError(f"{name} must {what}; {held}")
    return torch.tensor(ends)
