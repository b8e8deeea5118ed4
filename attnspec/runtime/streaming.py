"""Decoding with a causal attention: what is kept of the positions before, and what runs then."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from attnspec.backends.common.key_cache import GraphStream, KeyCache
from attnspec.backends.planner import choose
from attnspec.graphs.forms.stability import must_be_stable, unsteady_layer
from attnspec.graphs.forms.written import written
from attnspec.graphs.look_back import LookBack, lag_of_data, look_back
from attnspec.graphs.operators import Intersection, Union
from attnspec.graphs.relation import Relation
from attnspec.ir.program import OF_QUERIES, POSITIONS, Compound, Program, Term
from attnspec.lower.work import Heads, Kernel, Streamable, Work, Works
from attnspec.runtime.engine import Engine, Prepared
from attnspec.text.diagnostics import ranges

Tensors: TypeAlias = "tuple[tuple[tuple[int, int, int], ...], torch.dtype, torch.device]"
"""Samples, heads and sizes of q, k and v, their type and device: the same in all steps."""


@dataclass(frozen=True, eq=False, repr=False)
class StreamState:
    """What a causal attention keeps of the first `position` positions: for each group of heads its
    part; `marked`, int64 [B], counts the tokens that inputs marked which promise a bound."""

    position: int
    parts: tuple[object, ...]
    works: Works
    tensors: Tensors
    marked: Mapping[str, Tensor] = field(default_factory=dict)

    @staticmethod
    def first(
        state: StreamState | None, works: Works, q: Tensor, k: Tensor, v: Tensor
    ) -> StreamState:
        """The state to go on from; raises unless it fits the works and the tensors."""
        if q.shape[2] != k.shape[2]:
            raise ValueError(
                "a step takes the queries, keys and values of the same positions,"
                f" got q {list(q.shape)}, k {list(k.shape)}"
            )
        tensors = tuple((x.shape[0], x.shape[1], x.shape[3]) for x in (q, k, v)), q.dtype, q.device
        if state is None:
            return StreamState(0, (None,) * len(works), works, tensors)
        if not isinstance(cast(object, state), StreamState):
            kind = type(state).__name__
            raise TypeError(f"state must be what a step returned, or None, got {kind}")
        if state.tensors != tensors:
            pairs = zip(_words(tensors), _words(state.tensors), strict=True)
            differ = zip(*(pair for pair in pairs if pair[0] != pair[1]), strict=True)
            got, made = map(", ".join, differ)
            raise ValueError(f"this step got {got}, and the state was made with {made}")
        if state.works != works:
            raise ValueError(
                "the state is of another layer or module: pass the state that the last step of"
                " this layer returned"
            )
        return state

    def __repr__(self) -> str:
        return f"StreamState(position={self.position}, of {', '.join(_words(self.tensors))})"

    def after(self, positions: int, parts: Iterable[object]) -> StreamState:
        """The state so many positions later."""
        return replace(self, position=self.position + positions, parts=tuple(parts))

    def selected(self, samples: Tensor) -> StreamState:
        """The state of some samples, int64 [B'], in any order, as a search with beams has them."""

        def chosen(x: Tensor) -> Tensor:
            # of each sample one row or more, one after the other; or what serves all
            if len(x) == 1 < self.samples:
                return x
            rows = torch.unflatten(x, 0, (self.samples, -1))
            return rows.index_select(0, samples.to(x.device)).flatten(0, 1)

        shapes = tuple((len(samples), *shape[1:]) for shape in self.tensors[0])
        return replace(self._mapped(chosen), tensors=(shapes, *self.tensors[1:]))

    def owned(self) -> StreamState:
        """The state with memory of its own, so that none of what it does not hold is kept."""
        return self._mapped(lambda x: x if x.untyped_storage().nbytes() == x.nbytes else x.clone())

    def _mapped(self, of: Callable[[Tensor], Tensor]) -> StreamState:
        parts, marked = tree_map_only(Tensor, of, (self.parts, self.marked))
        return replace(self, parts=parts, marked=marked)

    @property
    def samples(self) -> int:
        return self.tensors[0][0][0]

    def kept(self) -> list[Tensor]:
        """The tensors that it holds."""
        return [x for x in tree_leaves((self.parts, self.marked)) if isinstance(x, Tensor)]


def _words(tensors: Tensors) -> list[str]:
    """What tensors share with those of all other steps of a sequence, in words."""
    sizes, dtype, device = tensors
    shapes = [
        f"{name} [{batch}, {heads}, t, {size}]"
        for name, (batch, heads, size) in zip("qkv", sizes, strict=True)
    ]
    return [*shapes, str(dtype).removeprefix("torch."), f"device {device}"]


def streamed(
    engine: Engine, layer: int, heads: int, keys: int, device: torch.device, keep_all: bool
) -> tuple[Works, Prepared]:
    """What groups of heads compute at every length and what goes on with them, nothing where each
    step is a call with all keys; ValueError where no step can be taken."""
    program, name = engine.program, engine.program.name
    if program.cross:
        raise ValueError(
            f"`step` is for one growing sequence, and `{name}` has `cross`: call the module with"
            " the next queries and their `query_start`"
        )
    if not program.causal:
        raise ValueError(
            f"decoding step by step needs the statement `causal`, and `{name}` does not have it:"
            " write it before `attend`"
        )
    if program.grid:
        raise ValueError(
            f"`step` needs a sequence that grows, and the grid of `{name}` has a fixed size:"
            " call the module with the whole sequence"
        )
    if (fault := unsteady_layer(program, layer, heads)) is not None:
        raise ValueError(must_be_stable(name, fault))
    works = engine.binder.works(layer, heads, 1, 1)
    lengths = {entry.name for entry in program.inputs if entry.kind == "length"}
    for work, _ in works:
        for length in lengths.intersection(work.reads):
            raise ValueError(
                f"`step` cannot use the input `{length}`, a length that may change as the sequence"
                " grows: call the module with the last queries, all keys and the length"
            )
        if work.decided and work.mechanism is not None:
            raise ValueError(
                f"`step` cannot run `{work.decided[0].name}` added to a mechanism: remove the"
                " mechanism, or call the module with the last queries and all keys"
            )
    if any(work.decided or work.changes.inputs for work, _ in works):
        return works, Prepared()
    kernels = [(_kernel(engine, layer, *each, device, keep_all), *each) for each in works]
    return works, engine.together(kernels, heads, keys, device)


_EVERY = 1 << 60
"""So far back that no key is left out."""


def _kernel(
    engine: Engine, layer: int, work: Work, heads: Heads, device: torch.device, keep_all: bool
) -> Kernel:
    program, kernel = engine.program, cast(Any, None)
    if work.mechanism is not None:
        kernel = choose(work, device.type, engine.backend).build(work, heads, device)
        if not work.hybrid:
            if not isinstance(kernel, Streamable):
                name = work.mechanism.name
                raise ValueError(
                    f"`step` cannot run `{name}`, which needs all positions at once: call the"
                    " module with the whole sequence"
                )
            return kernel
    promised = frozenset(entry.name for entry in program.inputs if entry.at_most is not None)
    bound, lag = look_back(work.relation, promised), lag_of_data(work.relation)
    if keep_all and (bound is None or (bound.marked and lag)):
        bound = LookBack(0, _EVERY)
    if bound is not None and bound.marked and lag:
        beside = "`tokens(at_most = N)` beside a `shift` of a graph that reads an input"
        raise ValueError(f"`step` cannot use {beside}: remove the `shift`, or pass `keep_all=True`")
    if bound is None:
        term = cast(Term, program.attend(layer, heads[0]).graph)
        graph = work.relation.terms[0] if isinstance(work.relation, Intersection) else None
        words = [] if program.layers is None else [f"layer {layer}"]
        words += [] if program.heads is None else [f"head {ranges(heads)}"]
        place = f" in {', '.join(words)}" if words else ""
        raise ValueError(
            "`step` keeps a fixed number of keys, and"
            f" `{written(_unbounded(term, graph, promised))}`{place} may read keys at any earlier"
            " position: pass `keep_all=True`, or use windows, blocks, first positions, or"
            f" `columns(x)` with `input x: tokens(at_most = N)`{', and no `shift`' * (lag > 0)}"
        )
    # an input that is read at earlier positions is kept with their keys
    reach = replace(bound, before=bound.before + lag)
    if kernel is None:
        return cast(Kernel, GraphStream(work, reach, heads, device))
    return cast(Kernel, kernel.streamed(reach))


def _unbounded(term: Term, relation: Relation | None, promised: frozenset[str]) -> Term:
    """The part of a union that has no bound on how far back it reads; all of another graph."""
    if isinstance(term, Compound) and term.op == "|" and isinstance(relation, Union):
        for part, bound in zip(term.terms, relation.terms, strict=True):
            if look_back(bound, promised) is None:
                return _unbounded(part, bound, promised)
    return term


def followed(before: KeyCache | None, new: KeyCache, program: Program) -> KeyCache:
    """What is kept with the next positions; inputs that are not about keys are those of these."""
    if before is None:
        return new
    kinds = {x.name: x.kind for x in program.inputs}
    of_keys = {x: y for x, y in new.data.items() if kinds[x] in {*POSITIONS} - {*OF_QUERIES}}
    every = before.joined(replace(new, data=of_keys))
    return replace(every, data={**new.data, **every.data})
