"""What a backend is asked to run, and what it answers with; known without torch.

A `Work` is one group of heads of one layer at one length. A `Backend` says of it whether it
refuses, what it costs, and builds a `Kernel` that runs it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from attnspec.graphs.relation import DataDependent, Relation, chosen_text, decided_in
from attnspec.ir.mechanisms.declaration import MechanismDeclaration
from attnspec.ir.program import Program
from attnspec.ir.scores import UNCHANGED, Scores
from attnspec.limits import LIMITS
from attnspec.text.diagnostics import AttnSpecError

if TYPE_CHECKING:
    import torch
    from torch import Tensor


MERGED = ("softmax", "softmax1")
"""The normalisers whose results are merged by their log-sum-exps."""


class BackendError(AttnSpecError):
    """A backend that is unknown, that cannot be had, or that refuses what it is asked to run."""


Heads = tuple[int, ...]
"""The numbers of heads that are computed together."""


@dataclass(frozen=True)
class Shape:
    """What plans and costs are for: samples, heads where a spec declares none, a head's size."""

    batch: int = 1
    heads: int | None = None
    head_dim: int = 64

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if value is not None and (type(value) is not int or not 1 <= value <= LIMITS.shape):
                raise AttnSpecError(
                    f"`{entry.name}` must be an integer from 1 to {LIMITS.shape:,}, got {value!r}"
                )

    def heads_of(self, program: Program) -> int:
        """The heads of a program: those that it declares, or as many as are asked for."""
        if program.heads is not None and self.heads not in (None, program.heads):
            raise AttnSpecError(
                f"`{program.name}` declares heads {program.heads}, got heads = {self.heads}"
            )
        return program.heads or self.heads or 1


ONE = Shape()
"""One sample, and one head where a spec declares none."""


@dataclass(frozen=True, eq=False)
class Standing:
    """Where the queries int64 [n_q] and the keys [n_k] of a work stand in a sequence of `length`
    positions of which they are some: what score changes count distances by."""

    queries: np.ndarray
    keys: np.ndarray
    length: int


@dataclass(frozen=True)
class Work:
    """What a group of heads computes; heads with equal works are one group.

    Queries are the last `n_q` of `n_k` positions. `scale` None is 1 / sqrt(d). `reads` names the
    run-time inputs that the relation's stand-ins stand for.

    With a `mechanism` and `hybrid`, the relation holds the pairs whose weights are exact, and the
    mechanism weighs all others, those with k <= q where it is `causal`. Without `hybrid` it is the
    mechanism alone, and the relation has all these pairs. `layer` is 0 where nothing is drawn.
    With `unit_keys` scores are q . k / |k|, 0 for a zero vector. `standing` says how far apart
    positions are where these are not consecutive, None where they are or no score asks for it.
    `copies` are the heads of a sample that share a call: what runs does not depend on how many
    samples there are. `device` is the type of device. Both are for estimates alone.
    """

    relation: Relation
    n_q: int
    n_k: int
    scale: float | None = None
    changes: Scores = UNCHANGED
    normalize: str = "softmax"
    reads: tuple[str, ...] = ()
    mechanism: MechanismDeclaration | None = None
    hybrid: bool = False
    causal: bool = False
    layer: int = 0
    unit_keys: bool = False
    standing: Standing | None = None
    copies: int = field(default=1, compare=False)
    device: str = field(default="cpu", compare=False)

    @cached_property
    def decided(self) -> tuple[DataDependent, ...]:
        """The parts of the relation that the tensors of a call decide."""
        return decided_in(self.relation)

    @property
    def positions(self) -> tuple[np.ndarray, np.ndarray]:
        """Where queries [n_q] and keys [n_k] stand, int64: what distances are counted by."""
        if self.standing is not None:
            return self.standing.queries, self.standing.keys
        return np.arange(self.n_k - self.n_q, self.n_k), np.arange(self.n_k)

    @property
    def length(self) -> int:
        """The positions of the sequence by which distances are counted."""
        return self.n_k if self.standing is None else self.standing.length

    @property
    def decodes(self) -> bool:
        """Whether the last few queries read static or given rows, as a step of decoding does."""
        few = self.n_q <= LIMITS.rows_looked_up and self.n_q < self.n_k
        return few and not (self.decided or self.mechanism or self.changes.inputs)

    @property
    def waits(self) -> bool:
        """Whether a call decides what is weighed: by inputs, choices, or what scores read."""
        return bool(self.reads or self.decided or self.changes.inputs)

    @property
    def plain(self) -> bool:
        """Whether the weights are the softmax of the scaled scores, nothing else."""
        return self.mechanism is None and self.normalize == "softmax" and not self.changes


@dataclass(frozen=True)
class Call:
    """What a kernel is given besides q, k and v.

    `padding` is bool [B, n_k], True for a real key; `tables` maps the names of learned tables to
    [heads of the group, buckets], and what a mechanism learns to [heads of the group or 1, *shape];
    `data` maps the names of run-time inputs to tensors as patterns take them: [B, n_k], a length
    [B, 1, 1], of a data-dependent work [B, 1, n_k] and [B, 1, 1, 1]; and what is decided to
    its choice, `attnspec.backends.decided.choice.Choice`, for the heads of the group. `draws` are
    how often the layer was called in training, and how often new random features were asked for.
    `known` are the output and its log-sum-exps where they were found before, and derivatives alone
    are asked for; a call with derivatives puts into `kept` what these need again. A step with
    `in_place` may write over the state that it goes on from. `seed`, int64 [1], is there where
    counters decide which weights are dropped (`attnspec.backends.common.dropping`), and `line` the
    number of the call's first query head among those of all samples.
    """

    padding: Tensor | None = None
    dropout_p: float = 0.0
    tables: Mapping[str, Tensor] = field(default_factory=dict)
    data: Mapping[Any, Any] = field(default_factory=dict)
    draws: tuple[int, int] = (0, 0)
    known: tuple[Tensor, Tensor] | None = None
    kept: dict[Any, Any] | None = None
    in_place: bool = False
    seed: Tensor | None = None
    line: int = 0

    def of_samples(self, some: slice, heads: int) -> Call:
        """The call of some samples, each of so many heads."""
        return replace(
            self,
            padding=None if self.padding is None else self.padding[some],
            data={name: values[some] for name, values in self.data.items()},
            known=self.known and (self.known[0][some], self.known[1][some]),
            line=self.line + some.start * heads,
        )


class Kernel(Protocol):
    """Runs a work: q [B, H, n_q, d], k [B, H_kv, n_k, d], v [B, H_kv, n_k, d_v] of one floating
    type -> [B, H, n_q, d_v]. H_kv divides H."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor: ...


@runtime_checkable
class Mergeable(Protocol):
    """A kernel whose outputs can be merged with those of other keys."""

    def partial(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor | None]:
        """The output and its log-sum-exps [B, H, n_q], the logarithms of denominators, float32 at
        least, -inf where a query has no key; None for weights without a positive one."""


@runtime_checkable
class Streamable(Protocol):
    """A kernel that goes on from a state, without what came before."""

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, state: object, with_lse: bool = False
    ) -> tuple[tuple[Tensor, Tensor | None], object]:
        """The outputs of more positions, and the state after them; it is None at first. Outputs
        come with log-sum-exps as of `Mergeable`, None for those too that were not asked for."""


class Backend(Protocol):
    """One way to run works. Nothing but `build` may need torch.

    One that runs heads of different graphs in one call has two methods more: `joins(works)` says
    whether it does so for these, of a head each, and `build_joined(groups, device)` builds the
    kernel of groups of heads that share a work each, one after the other.
    """

    @property
    def name(self) -> str: ...

    def refuses(self, work: Work, device: str) -> str | None:
        """Why this backend cannot run the work on a type of device, or None."""

    def cost(self, work: Work) -> float:
        """Estimated seconds for one head of size 64, forward, by the current rates of the work's
        device; of what is done once for all `copies` of the work its share. Infinity where it is
        not for estimates to choose."""

    def steps(self, work: Work) -> tuple[str, ...]:
        """What it would do, a line for each step."""

    def build(self, work: Work, heads: Heads, device: torch.device) -> Kernel:
        """The kernel that runs the work for these heads, its tables on the device."""


Works = Sequence[tuple[Work, Heads]]
"""What groups of heads compute, and which heads they are."""


def mechanism_of(work: Work) -> MechanismDeclaration:
    """The mechanism of a work that has one."""
    if work.mechanism is None:
        raise ValueError("a graph alone has no mechanism")
    return work.mechanism


def key_heads(heads: Heads, ratio: int) -> list[int]:
    """The key heads of some query heads: each once where all are read equally often."""
    read = [head // ratio for head in heads]
    distinct = sorted(set(read))
    times = len(read) // len(distinct)
    even = read == [head for head in distinct for _ in range(times)]
    return distinct if even else read


def graph_of(work: Work) -> Work:
    """The graph of a work, by itself."""
    return replace(work, mechanism=None, hybrid=False, causal=False, layer=0)


def inputs_read(work: Work) -> str:
    """The run-time inputs that the graph of a work reads, in words."""
    names = ", ".join(f"`{name}`" for name in work.reads)
    return f"the {'input' if len(work.reads) == 1 else 'inputs'} {names}"


def differ_in_pairs_alone(works: Sequence[Work]) -> bool:
    """Whether works of static pairs are the same but for these."""
    first = works[0]
    static = not any(work.reads or work.decided for work in works)
    return static and all(replace(work, relation=first.relation) == first for work in works)


def is_on_request(backend: Backend, device: str) -> bool:
    """Whether a backend runs on a type of device where it is asked for by name alone, which it says
    by the attribute `on_request`, their names."""
    return device in getattr(backend, "on_request", ())


def refusal_of(backend: Backend, work: Work, device: str) -> str | None:
    """Why a backend cannot run a work, or None; others are not asked about mechanisms, and about
    data-dependent choices."""
    if work.decided and not getattr(backend, "runs_decided", False):
        return chosen_text(work.decided[0].name)
    if work.standing is not None and not getattr(backend, "takes_standing", False):
        return "`score` depends on positions that are not consecutive here"
    takes, read = getattr(backend, "takes_scores", "none"), work.changes.inputs
    if takes != "all" and (read or (work.changes and takes == "none")):
        return (
            f"`score` reads `{read[0]}`, an input of a call" if read else "`score` changes scores"
        )
    if work.mechanism is not None and not getattr(backend, "runs_mechanisms", False):
        return f"it runs graphs, and `{work.mechanism.name}` is a mechanism"
    return backend.refuses(work, device)
