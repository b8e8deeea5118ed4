"""The pairs that the tensors and inputs of one sample decide, for what is said of graphs."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from attnspec.compile.compiler import compile_program
from attnspec.elaborate import Elaborated
from attnspec.graphs.forms.stability import bound_choice
from attnspec.graphs.patterns import BY_NAME
from attnspec.graphs.relation import Relation
from attnspec.graphs.stack import Sample, decides
from attnspec.graphs.written_pairs import WrittenPairs
from attnspec.ir.api_checks import length_of
from attnspec.ir.program import Program, leaves
from attnspec.text.diagnostics import AttnSpecError

Tensors = tuple[npt.ArrayLike, npt.ArrayLike]


def decided_pairs(
    program: Program, n: int, inputs: Sample | None, tensors: Tensors | None
) -> Mapping[tuple[int, int], Relation] | None:
    """The pairs of every layer and head whose graph tensors decide; None where there is none, or
    where there are no tensors and inputs do not decide alone. Raises ValueError for tensors that do
    not fit."""
    n = length_of(n)
    graphs = [attend.graph for attend in program.attends if attend.mechanism is None]
    decided = [graph for graph in graphs if graph is not None and decides(graph)]
    given = {name: torch.as_tensor(np.asarray(x))[None] for name, x in (inputs or {}).items()}
    if not decided or not n or any(x.shape[1:2] == (0,) for x in given.values()):
        return None
    if tensors is None:
        chosen = [leaf for graph in decided for leaf in leaves(graph)]
        bound = [
            bound_choice(program, leaf, n)
            for leaf in chosen
            if BY_NAME[leaf.pattern].data_dependent
        ]
        if not all(one is not None and one.given_choice for one in bound):
            return None
        # no query and key decides anything
        heads = max([x.shape[1] for x in given.values() if x.ndim == 4], default=1)
        q = k = torch.zeros(1, program.heads or heads, n, 1)
    else:
        q, k = (_of_one(name, x, n) for name, x in zip("qk", tensors, strict=True))
    with warnings.catch_warnings():
        # the report says what looks ahead
        warnings.simplefilter("ignore")
        module = compile_program(program).eval()
    found: dict[tuple[int, int], Relation] = {}
    with torch.no_grad():
        for layer in range(program.layer_count):
            row = [program.attend(layer, head) for head in range(q.shape[1])]
            graphs = [None if one.mechanism is not None else one.graph for one in row]
            if not any(graph is not None and decides(graph) for graph in graphs):
                continue
            masks = module.pairs(q, k, layer=layer, inputs=given or None)[0].numpy()
            for head, graph in enumerate(graphs):
                if graph is not None and decides(graph):
                    found[layer, head] = WrittenPairs(masks[head])
    return found


def _of_one(name: str, given: npt.ArrayLike, n: int) -> torch.Tensor:
    """Queries or keys of one sample, [1, H, n, d]."""
    found = torch.as_tensor(given).detach().cpu()
    if found.dim() != 3 or found.shape[1] != n or not found.is_floating_point():
        raise AttnSpecError(
            f"`tensors` are q and k of one sample, real [H, {n}, d], got {name} with the shape"
            f" {list(found.shape)} of {found.dtype}"
        )
    return found[None]


def told_apart(spec: Elaborated, heads: int) -> Elaborated:
    """A spec that has so many heads, for each of which something else was decided."""
    program = spec.program
    if program.heads is not None:
        return spec
    slots = tuple(row * heads for row in program.slots)
    return replace(spec, program=replace(program, heads=heads, slots=slots))
