"""A spec as users hold it: its facts, its pairs as arrays and graphs, and the way to a module."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from attnspec.bind import BindError, Situation, bind_attended
from attnspec.data import to_data
from attnspec.diagnostics import AttnSpecError, Diagnostic, SpecError, did_you_mean
from attnspec.elaborate import Elaborated, elaborate
from attnspec.elaborate.values import ParameterValue
from attnspec.extents import extents_of
from attnspec.given import device_of, index_of, length_of, parameter_of, sampled
from attnspec.grammar.printer import print_file
from attnspec.ir import Input, Program, inputs_of, leaves
from attnspec.patterns import BY_NAME
from attnspec.reading import read_source, source_of
from attnspec.relations import Relation, RelationError
from attnspec.source import Source
from attnspec.tokens import Data
from attnspec.works import unbuilt

if TYPE_CHECKING:
    import networkx
    import scipy.sparse
    import torch

    from attnspec.analysis.report import Report
    from attnspec.checking import Verdict
    from attnspec.planning import Plan
    from attnspec.runtime import CompiledAttention

LONGEST_MASK = 32_768
"""The longest sequence that `Spec.mask` writes out densely: one gibibyte of booleans."""

MOST_EDGES = 2**31 - 1
"""The most edges that `Spec.adjacency` writes out: about ten gigabytes."""

MOST_NODES = 4096
"""The longest sequence that `Spec.graph` builds: networkx spends some 200 bytes on an edge."""

Sample = Mapping[str, "npt.ArrayLike"]


def load(
    path: str | os.PathLike[str], *, name: str | None = None, **parameters: ParameterValue
) -> Spec:
    """The spec in a file; `name` chooses one of several attentions, keywords set its parameters.

    Raises SpecError for anything wrong with the file or the spec.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"a path is needed, got {type(path).__name__}")
    file = Path(path)
    return Spec(read_source(file, str(path) or "''"), name=name, parameters=parameters)


def parse(text: str, *, name: str | None = None, **parameters: ParameterValue) -> Spec:
    """The spec in a text; as `load`, but imports need a file."""
    if not isinstance(text, str):
        raise TypeError(f"the text of a spec is needed, got {type(text).__name__}")
    return Spec(source_of(text), name=name, parameters=parameters)


class Spec:
    """One attention with its parameters set; equal programs are equal specs."""

    def __init__(
        self,
        source: Source,
        *,
        name: str | None = None,
        parameters: Mapping[str, ParameterValue] | None = None,
    ) -> None:
        if name is not None and not isinstance(name, str):
            raise TypeError(f"`name` chooses an attention by its name, got {type(name).__name__}")
        checked = {key: parameter_of(key, value) for key, value in (parameters or {}).items()}
        self._elaborated: Elaborated = elaborate(source, name=name, overrides=checked)

    @property
    def program(self) -> Program:
        """The meaning in normal form."""
        return self._elaborated.program

    @property
    def name(self) -> str:
        """The attention's name."""
        return self.program.name

    @property
    def layers(self) -> int:
        """How many layers the spec distinguishes; 1 where it declares none."""
        return 1 if self.program.layers is None else self.program.layers

    @property
    def heads(self) -> int | None:
        """How many heads the spec declares; None where one pattern serves every head."""
        return self.program.heads

    @property
    def parameters(self) -> dict[str, ParameterValue]:
        """The parameters: numbers, and the text of those that depend on n."""
        return dict(self._elaborated.parameters)

    @property
    def inputs(self) -> dict[str, Input]:
        """The run-time inputs that the spec declares, by name."""
        return {entry.name: entry for entry in self.program.inputs}

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of the normal form, as 64 hexadecimal digits."""
        return hashlib.sha256(repr(to_data(self.program)).encode()).hexdigest()

    @cached_property
    def _meaning(self) -> Program:
        """The program without the words in which it makes its claims."""
        claims = tuple(replace(claim, text="") for claim in self.program.claims)
        return replace(self.program, claims=claims)

    @cached_property
    def source(self) -> str:
        """Canonical text of this attention alone, with imports written out and parameters set."""
        return print_file(self._elaborated.file)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Spec) and self._meaning == other._meaning

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __repr__(self) -> str:
        settings = "".join(f", {key}={value!r}" for key, value in self.parameters.items())
        return f"<Spec {self.name}{settings}>"

    # --- the pairs -----------------------------------------------------------------------------

    def relation(
        self, n: int, layer: int = 0, head: int = 0, inputs: Sample | None = None
    ) -> Relation:
        """The relation of one head of one layer at n positions, `causal` included."""
        n = length_of(n)
        layer, head = self._slot(layer, head)
        attend = self.program.attend(layer, head)
        if attend.graph is None and attend.mechanism is not None:
            raise SpecError(
                Diagnostic(
                    "A707",
                    f"`{attend.mechanism.name}` is a formula, not a graph: it has no pairs",
                    attend.mechanism.span,
                )
            )
        if attend.graph is None:
            raise SpecError(Diagnostic("A408", "nothing is attended", attend.span))
        for leaf in leaves(attend.graph):
            if getattr(BY_NAME[leaf.pattern], "data_dependent", False):
                raise SpecError(
                    Diagnostic(
                        "A706",
                        f"the pairs of `{leaf.pattern}` are decided by the data: not built yet",
                        leaf.span,
                    )
                )
        program = self.program
        at = Situation(
            n=n,
            patterns=BY_NAME,
            layer=layer,
            head=head,
            layers=self.layers,
            heads=program.heads,
            causal=program.causal,
            grid=self.grid(n),
            extra_tokens=program.extra_tokens,
            inputs=self._sample(n, inputs, inputs_of(attend.graph)),
        )
        try:
            return bind_attended(attend.graph, at)
        except BindError as error:
            raise SpecError(Diagnostic("A320", error.message, error.span or attend.span)) from None

    def mask(
        self, n: int, layer: int = 0, head: int = 0, inputs: Sample | None = None
    ) -> npt.NDArray[np.bool_]:
        """bool [n, n]: True where the query of the row reads the key of the column.

        Raises AttnSpecError above n = `LONGEST_MASK`.
        """
        n = length_of(n)
        if n > LONGEST_MASK:
            raise AttnSpecError(
                f"a dense mask is built up to n = {LONGEST_MASK:,}, got {n:,}: use `adjacency`"
            )
        layer, head = self._slot(layer, head)
        mask = np.zeros((n, n), dtype=bool)
        if n:
            relation = self.relation(n, layer, head, inputs)
            with self._located(layer, head):
                for first, last in relation.chunks(n):
                    q, k = relation.rows(first, last, n)
                    mask[q, k] = True
        return mask

    def adjacency(
        self, n: int, layer: int = 0, head: int = 0, inputs: Sample | None = None
    ) -> scipy.sparse.csr_array:
        """scipy.sparse.csr_array [n, n] of bool with sorted indices; never dense on the way.

        Raises AttnSpecError above `MOST_EDGES` edges.
        """
        from scipy.sparse import csr_array

        n = length_of(n)
        layer, head = self._slot(layer, head)
        if n == 0:
            return csr_array((0, 0), dtype=bool)
        relation = self.relation(n, layer, head, inputs)
        pointers = np.zeros(n + 1, np.int64)
        with self._located(layer, head):
            np.cumsum(relation.degrees(n), out=pointers[1:])
        edges = int(pointers[-1])
        if edges > MOST_EDGES:
            raise AttnSpecError(
                f"an adjacency is built up to {MOST_EDGES:,} edges, this one has {edges:,}"
            )
        keys = np.empty(edges, np.int32)
        with self._located(layer, head):
            for first, last in relation.chunks(n):
                keys[pointers[first] : pointers[last]] = relation.row_keys(first, last, n)
        return csr_array(
            (np.ones(edges, bool), keys, pointers.astype(np.int32)), shape=(n, n), copy=False
        )

    def graph(
        self, n: int, layer: int = 0, head: int = 0, inputs: Sample | None = None
    ) -> networkx.DiGraph[int]:
        """networkx.DiGraph on the nodes 0 .. n - 1; an edge q -> k says that q reads k.

        Raises AttnSpecError above n = `MOST_NODES`.
        """
        import networkx

        n = length_of(n)
        if n > MOST_NODES:
            raise AttnSpecError(
                f"a networkx graph is built up to n = {MOST_NODES:,}, got {n:,}: use `adjacency`"
            )
        layer, head = self._slot(layer, head)
        graph: networkx.DiGraph[int] = networkx.DiGraph()
        graph.add_nodes_from(range(n))
        if n:
            relation = self.relation(n, layer, head, inputs)
            with self._located(layer, head):
                for first, last in relation.chunks(n):
                    q, k = relation.rows(first, last, n)
                    graph.add_edges_from(zip(q.tolist(), k.tolist(), strict=True))
        return graph

    # --- checks --------------------------------------------------------------------------------

    def check(self) -> list[Diagnostic]:
        """What the lints and claims have to say; empty means nothing."""
        from attnspec.checking import check

        return [*self._elaborated.warnings, *check(self)]

    @cached_property
    def verdicts(self) -> tuple[Verdict, ...]:
        """What is known of each claim: proven for every n, checked at some lengths, or refuted."""
        from attnspec.checking import judge

        return tuple(judge(self))

    # --- analysis ------------------------------------------------------------------------------

    def analyse(self, n: int, inputs: Sample | None = None) -> Report:
        """What this spec reads, reaches and costs at n positions, exactly where that is possible.

        With `inputs`, one sample of the run-time inputs, the figures are those of that sample.
        """
        from attnspec.analysis.report import Report

        return Report(self, n, inputs)

    analyze = analyse

    # --- towards a module ----------------------------------------------------------------------

    def plan(self, n: int, device: str | torch.device = "cpu", backend: str = "auto") -> Plan:
        """The steps chosen at n, their cost, and each refused backend with its reason.

        The device need not be in this machine. Raises BackendError, a ValueError, where `backend`
        names one that refuses.
        """
        from attnspec.planning import plan

        self.require_built()
        return plan(self.program, length_of(n), device=device_of(device), backend=backend)

    def compile(
        self,
        backend: str = "auto",
        device: str | torch.device | None = None,
        head_size: int | None = None,
    ) -> CompiledAttention:
        """A torch.nn.Module that computes this attention at every n, its parameters on the device.
        Parameters that have the size of a head in their shape are made by the first call, or at
        once for heads of `head_size`.
        Raises BackendError, a ValueError, for a backend that refuses the spec at every length, and
        ValueError for a device that is not there.
        """
        from attnspec.compiling import compile_program

        self.require_built()
        return compile_program(self.program, backend, device, head_size)

    def emit(self, standalone: bool = False, backend: str = "auto") -> str:
        """The text of the Python module that `attnspec compile` writes."""
        from attnspec.compiling import emit_spec

        self.require_built()
        return emit_spec(self, standalone=standalone, backend=backend)

    def require_built(self) -> None:
        """Raise SpecError naming everything in this spec that no backend can run yet."""
        found = unbuilt(self.program)
        if found:
            raise SpecError(
                [
                    Diagnostic(
                        "A706",
                        f"`{name}` is understood, but compiling it is not built yet",
                        span,
                        help="`attnspec check` and `attnspec format` work on it",
                    )
                    for name, span in found
                ]
            )

    # --- helpers -------------------------------------------------------------------------------

    @contextmanager
    def _located(self, layer: int, head: int) -> Iterator[None]:
        """Say of a relation that has no answer where it stands in the text."""
        try:
            yield
        except RelationError as error:
            span = self.program.attend(layer, head).span
            raise SpecError(Diagnostic("A320", error.message, span)) from None

    def _slot(self, layer: int, head: int) -> tuple[int, int]:
        layer, head = index_of("layer", layer), index_of("head", head)
        for what, number, count in (
            ("layer", layer, self.program.layers),
            ("head", head, self.program.heads),
        ):
            if number < 0 or (count is not None and number >= count):
                allowed = f"between 0 and {count - 1}" if count is not None else "at least 0"
                raise AttnSpecError(f"`{what}` must be {allowed}, got {number}")
        return layer, head

    def grid(self, n: int) -> tuple[int, ...]:
        """The extents of the grid at n, () for a line; AttnSpecError where n does not fit."""
        return extents_of(self.program, n)

    def _sample(self, n: int, inputs: Sample | None, needed: set[str]) -> dict[str, Data]:
        if inputs is not None and not isinstance(inputs, Mapping):
            raise TypeError(f"inputs must map names to arrays, got {type(inputs).__name__}")
        given = dict(inputs or {})
        for name in given:
            if name not in self.inputs:
                hint = did_you_mean(str(name), self.inputs)
                raise AttnSpecError(
                    f"`{self.name}` declares no input `{name}`, its inputs are"
                    f" {', '.join(self.inputs) or 'none'}" + (f": {hint}" if hint else "")
                )
        return {
            name: Data(sampled(self.inputs[name], given, n, self.name)) for name in sorted(needed)
        }
