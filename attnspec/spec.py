"""A spec as users hold it: its facts, its pairs as arrays and graphs, and the way to a module."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Never, overload

import numpy as np
import numpy.typing as npt

from attnspec.elaborate import Elaborated, elaborate
from attnspec.graphs.bind import extents_of
from attnspec.graphs.relation import Relation
from attnspec.graphs.stack import Sample, Stack
from attnspec.ir.api_checks import joined_parameters, length_of, parameter_of
from attnspec.ir.crossing import crossed
from attnspec.ir.program import Input, ParameterValue, Program
from attnspec.ir.serial import fingerprint
from attnspec.limits import LIMITS
from attnspec.lower.lower import device_of, require_built
from attnspec.lower.work import Shape
from attnspec.text.decoding import read_source, source_of
from attnspec.text.diagnostics import AttnSpecError, Diagnostic
from attnspec.text.source import Source

if TYPE_CHECKING:
    import networkx
    import scipy.sparse
    import torch
    from matplotlib.axes import Axes

    from attnspec.analysis.report.report import Report
    from attnspec.backends.planner import Plan
    from attnspec.check.verdicts import Verdict
    from attnspec.compile.exports.block_rows import BlockRows
    from attnspec.compile.exports.flex_masks import FlexMask
    from attnspec.compile.mask_comparison import MaskComparison
    from attnspec.distributed.planning import DistributedPlan, Rates
    from attnspec.runtime.module import CompiledAttention
    from attnspec.show.differences import Difference
    from attnspec.show.picture import Picture


def load(
    path: str | os.PathLike[str],
    /,
    *,
    name: str | None = None,
    parameters: Mapping[str, ParameterValue] | None = None,
    **more: ParameterValue,
) -> Spec:
    """The spec in a file; `name` chooses one of several attentions.

    Keywords set its parameters, and `parameters` those of any name, `name` and `parameters` too.
    Raises SpecError for anything wrong with the file or the spec.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"a path is needed, got {type(path).__name__}")
    source = read_source(Path(path), str(path) or "''")
    return Spec(source, name=name, parameters=joined_parameters(parameters, more))


def parse(
    text: str,
    /,
    *,
    name: str | None = None,
    parameters: Mapping[str, ParameterValue] | None = None,
    **more: ParameterValue,
) -> Spec:
    """The spec in a text; as `load`, but imports need a file."""
    if not isinstance(text, str):
        raise TypeError(f"the text of a spec is needed, got {type(text).__name__}")
    return Spec(source_of(text), name=name, parameters=joined_parameters(parameters, more))


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
        self.elaborated: Elaborated = elaborate(source, name=name, overrides=checked)

    @property
    def program(self) -> Program:
        """The meaning in normal form."""
        return self.elaborated.program

    @property
    def name(self) -> str:
        """The attention's name."""
        return self.program.name

    @property
    def layers(self) -> int:
        """How many layers the spec distinguishes; 1 where it declares none."""
        return self.program.layer_count

    @property
    def heads(self) -> int | None:
        """How many heads the spec declares; None where one pattern serves every head."""
        return self.program.heads

    @property
    def parameters(self) -> dict[str, ParameterValue]:
        """The parameters: numbers, and the text of those that depend on n."""
        return dict(self.elaborated.parameters)

    @property
    def inputs(self) -> dict[str, Input]:
        """The run-time inputs that the spec declares, by name."""
        return {entry.name: entry for entry in self.program.inputs}

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of the normal form, as 64 hexadecimal digits."""
        return fingerprint(self.program)

    @cached_property
    def _meaning(self) -> Program:
        """The program without the words in which it makes its claims."""
        claims = tuple(replace(claim, text="") for claim in self.program.claims)
        return replace(self.program, claims=claims)

    @cached_property
    def source(self) -> str:
        """Canonical text of this attention alone, with imports written out and parameters set."""
        return self.elaborated.source

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Spec) and self._meaning == other._meaning

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __repr__(self) -> str:
        settings = "".join(f", {key}={value!r}" for key, value in self.parameters.items())
        return f"<Spec {self.name}{settings}>"

    def __str__(self) -> str:
        return self.source

    def _repr_html_(self) -> str:
        from attnspec.show.notebook import html_of

        return html_of(self.elaborated)

    def _repr_svg_(self) -> str | None:
        from attnspec.show.notebook import drawing_of

        return drawing_of(self.elaborated)[0]

    def show(
        self,
        n: int | None = None,
        layer: int | None = None,
        head: int | None = None,
        inputs: Sample | None = None,
        m: int | None = None,
    ) -> Picture:
        """Which query reads which key at n positions, or at a short length that the spec has: of
        one layer, one head, or all that differ. `print` gives text, a notebook a drawing,
        `.save("a.html")` a page to point at.

        `inputs` is one sample of the run-time inputs, m the queries of a spec with `cross`. Raises
        AttnSpecError for a length, layer or head that the spec does not have, SpecError where no
        head has pairs.
        """
        from attnspec.show.notebook import picture_of

        return picture_of(self.elaborated, n, layer, head, inputs, m)

    def plot(
        self,
        n: int | None = None,
        ax: Axes | None = None,
        layer: int = 0,
        head: int = 0,
        inputs: Sample | None = None,
    ) -> Axes:
        """The pairs of one head at n positions on matplotlib's axes, by default new ones, which are
        returned; raises as `show`, and AttnSpecError without the extra `attnspec[plot]`."""
        from attnspec.show.png import plotted

        return plotted(self.show(n, layer, head, inputs).figure, ax)

    # --- the pairs -----------------------------------------------------------------------------

    def relation(
        self, n: int, layer: int = 0, head: int = 0, inputs: Sample | None = None
    ) -> Relation:
        """The relation of one head of one layer at n positions, `causal` included."""
        return self.stack(inputs, n).relation(n, layer, head)

    def mask(
        self,
        n: int,
        layer: int = 0,
        head: int = 0,
        inputs: Sample | None = None,
        m: int | None = None,
    ) -> npt.NDArray[np.bool_]:
        """bool [n, n]: True where the query of the row reads the key of the column; of a spec with
        `cross` [m, n], where m is n if it is not given.

        Raises AttnSpecError above a length of `LIMITS.mask`, and for m of another spec.
        """
        stack, length = self._crossed(n, m, inputs)
        return stack.mask(length, layer, head)[stack.queries(length), : length_of(n)]

    def adjacency(
        self,
        n: int,
        layer: int = 0,
        head: int = 0,
        inputs: Sample | None = None,
        m: int | None = None,
    ) -> scipy.sparse.csr_array:
        """scipy.sparse.csr_array [n, n] of bool with sorted indices; never dense on the way; of a
        spec with `cross` [m, n] as `mask`.

        Raises AttnSpecError above `LIMITS.edges` edges, above n = `LIMITS.positions_listed`, and
        for m of another spec.
        """
        stack, length = self._crossed(n, m, inputs)
        adjacency = stack.adjacency(length, layer, head)
        return adjacency[stack.queries(length), : length_of(n)] if self.program.cross else adjacency

    def _crossed(self, n: int, m: int | None, inputs: Sample | None) -> tuple[Stack, int]:
        """All layers and heads for m queries, and the length that holds these and n keys."""
        program, length = crossed(self.program, n, m)
        return (Stack(program, inputs) if program.cross else self.stack(inputs, n)), length

    def graph(
        self, n: int, layer: int = 0, head: int = 0, inputs: Sample | None = None
    ) -> networkx.DiGraph[int]:
        """networkx.DiGraph on the nodes 0 .. n - 1; an edge q -> k says that q reads k.

        Raises AttnSpecError above n = `LIMITS.matrix`, and for a spec with `cross`.
        """
        import networkx

        if self.program.cross:
            raise AttnSpecError(
                f"`{self.name}` joins two sequences, whose positions are not nodes of one graph:"
                " use `adjacency`"
            )
        n = length_of(n)
        if n > LIMITS.matrix:
            raise AttnSpecError(
                f"a networkx graph is built up to n = {LIMITS.matrix:,}, got {n:,}: use `adjacency`"
            )
        graph: networkx.DiGraph[int] = networkx.DiGraph()
        graph.add_nodes_from(range(n))
        for q, k in self.stack(inputs, n).pairs(n, layer, head):
            graph.add_edges_from(zip(q.tolist(), k.tolist(), strict=True))
        return graph

    def grid(self, n: int) -> tuple[int, ...]:
        """The extents of the grid at n, () for a line; AttnSpecError where n does not fit."""
        return extents_of(self.program, n)

    def stack(self, inputs: Sample | None = None, n: int | None = None) -> Stack:
        """All layers and heads of this spec; with `inputs`, those of that sample, of which the
        choices that these make are known at n positions."""
        return Stack(self.program, inputs, None if n is None else self._decided(n, inputs, None))

    # --- checks --------------------------------------------------------------------------------

    def check(self) -> list[Diagnostic]:
        """What the lints and claims have to say; empty means nothing."""
        from attnspec.check.hints import check

        return [*self.elaborated.warnings, *check(self.elaborated, self.verdicts)]

    @cached_property
    def verdicts(self) -> tuple[Verdict, ...]:
        """What is known of each claim: proven for every n, checked at some lengths, or refuted."""
        from attnspec.check.verdicts import judge

        return tuple(judge(self.program))

    @overload
    def compare(  # type: ignore[overload-overlap]
        self,
        other: Spec,
        n: int | None = None,
        *,
        inputs: Sample | None = None,
        m: int | None = None,
    ) -> Difference: ...

    @overload
    def compare(
        self,
        other: object,
        n: int | None = None,
        layer: int = 0,
        head: int | None = None,
        inputs: Sample | None = None,
        m: int | None = None,
    ) -> MaskComparison: ...

    def compare(
        self,
        other: object,
        n: int | None = None,
        layer: int = 0,
        head: int | None = None,
        inputs: Sample | None = None,
        m: int | None = None,
    ) -> Difference | MaskComparison:
        """The pairs that only this spec has, or only the other: a spec, a mask, a mask function.

        A mask is bool, True = attends, [n, n] for every head or [H, n, n]; a mask function is
        f(b, h, q, k) of torch, or anything with a `mask_mod`. These are held against one layer, or
        one head of it; of two specs all layers and heads are compared, as `attnspec.diff` does.
        A spec with `cross` has m queries, n if neither m nor a mask [m, n] says how many.
        `str` of the answer has counts, examples and a row; `equal` and `counterexample` the rest.
        """
        if isinstance(other, Spec):
            from attnspec.check.compare import compare
            from attnspec.show.differences import Difference

            if n is None:
                raise ValueError("two specs are compared at a length: `compare(spec, n)`")
            difference = compare(self.elaborated, other.elaborated, n, inputs, m)
            return Difference(
                difference.a, difference.b, difference.n, difference.compared, difference.notes
            )
        from attnspec.compile.mask_comparison import compare_mask

        return compare_mask(self.program, inputs, other, n, layer, head, m)

    # --- analysis ------------------------------------------------------------------------------

    def analyse(
        self,
        n: int,
        inputs: Sample | None = None,
        tensors: tuple[npt.ArrayLike, npt.ArrayLike] | None = None,
        batch: int = 1,
        heads: int | None = None,
        head_dim: int = 64,
        m: int | None = None,
    ) -> Report:
        """What this spec reads, reaches and costs at n positions, exactly where that is possible.

        With `inputs`, one sample of the run-time inputs, the figures are those of that sample; with
        `tensors`, q [H, n, d] and k [H_kv, n, d] of one sample, those of the pairs that are decided
        for it, in every layer by the same tensors. Inputs that decide by themselves need none.
        Costs are those of the plan for so many samples, and for so many heads where the spec
        declares none, one if they are not given, of size `head_dim`. Of a spec with `cross` n are
        the keys, and m, n if it is not given, the queries; such a one takes no `tensors`.
        """
        from attnspec.analysis.report.report import Report

        shape = Shape(batch, heads, head_dim)
        if self.program.cross:
            if tensors is not None:
                raise AttnSpecError(
                    f"`{self.name}` joins two sequences, of which no tensors are analysed:"
                    " `module.pairs(q, k)` of the compiled module has their pairs"
                )
            return Report(self.elaborated, n, inputs, m=m, shape=shape)
        # raises where m is given
        crossed(self.program, n, m)
        report = self._decided(n, inputs, tensors)
        if report is None:
            return Report(self.elaborated, n, inputs, shape=shape)
        from attnspec.compile.decided import told_apart

        of_each = told_apart(self.elaborated, max(head for _, head in report) + 1)
        return Report(of_each, n, inputs, report, shape=shape)

    def _decided(
        self, n: int, inputs: Sample | None, tensors: tuple[npt.ArrayLike, npt.ArrayLike] | None
    ) -> Mapping[tuple[int, int], Relation] | None:
        """The pairs that tensors, or inputs alone, decide at n positions; None where none do."""
        if tensors is None and not (inputs and self.stack(inputs).unknown):
            return None
        from attnspec.compile.decided import decided_pairs

        return decided_pairs(self.program, n, inputs, tensors)

    analyze = analyse

    # --- towards a module ----------------------------------------------------------------------

    def plan(
        self,
        n: int,
        device: str | torch.device = "cpu",
        batch: int = 1,
        heads: int | None = None,
        head_dim: int = 64,
        backend: str = "auto",
        m: int | None = None,
        training: bool = False,
    ) -> Plan:
        """The steps chosen at n, their cost, and each refused backend with its reason.

        The cost is for so many samples, and for so many heads where the spec declares none, one if
        they are not given, of size `head_dim`, and of a spec with `cross` for m queries, n if it is
        not given; with `training` that of the backward, too, by the operations that a report
        counts: the steps are the same. The device need not be in this machine. Raises
        BackendError, a ValueError, where `backend` names one that refuses.
        """
        from attnspec.analysis.cost.cost import passes_of
        from attnspec.backends.planner import plan

        require_built(self.program)
        shape = Shape(batch, heads, head_dim)
        program, length = crossed(self.program, n, m)
        passes = partial(passes_of, size=head_dim) if training else None
        return plan(program, length, device_of(device), backend, shape, passes)

    def distribute(
        self,
        n: int,
        devices: int,
        batch: int = 1,
        heads: int | None = None,
        head_dim: int = 64,
        key_heads: int | None = None,
        inputs: Sample | None = None,
        rates: Rates | None = None,
    ) -> DistributedPlan:
        """The plan of n positions over several devices, without any: which of them holds which
        positions, and what travels, of numbers of two bytes.

        Heads are those of the spec, or as many as are given, and `key_heads` as many or fewer.
        With `inputs`, one sample of the run-time inputs, graphs are those of that sample; `rates`
        are what estimates of time assume.
        """
        from attnspec.distributed.exchange import Tensors
        from attnspec.distributed.planning import plan

        require_built(self.program)
        count = Shape(batch, heads, head_dim).heads_of(self.program)
        keys = count if key_heads is None else key_heads
        tensors = Tensors(batch, count, keys, head_dim, head_dim)
        return plan(self.program, length_of(n), devices, tensors, inputs=inputs, rates=rates)

    def compile(
        self,
        backend: str = "auto",
        device: str | torch.device | None = None,
        head_size: int | None = None,
        check_finite: bool = False,
        **unknown: Never,
    ) -> CompiledAttention:
        """A torch.nn.Module that computes this attention at every n, its parameters on the device.
        Parameters that have the size of a head in their shape are made by the first call, or at
        once for heads of `head_size`. With `check_finite` calls raise ValueError where q, k or v
        hold NaN or an infinity.
        Raises BackendError, a ValueError, for a backend that refuses the spec at every length, and
        ValueError for a device that is not there.
        """
        from attnspec.compile.compiler import compile_program
        from attnspec.runtime.call_checks import refuse_unknown

        if unknown:
            refuse_unknown(self.program, unknown, Spec.compile)
        require_built(self.program)
        module = compile_program(self.program, backend, device, head_size)
        module.check_finite = check_finite
        return module

    # --- for other libraries -------------------------------------------------------------------

    def to_flex(
        self,
        n: int | None = None,
        layer: int = 0,
        inputs: Mapping[str, object] | None = None,
        heads: int | None = None,
        device: str | torch.device = "cpu",
        m: int | None = None,
    ) -> FlexMask:
        """The pairs of one layer for torch's FlexAttention: `.mask_mod`, and `.block_mask(n)`; of m
        queries and n keys as `mask`. What the spec does to scores is `.score_mod` and `.scale(d)`.

        `inputs` are those of a call, `heads` tells so many apart where the spec declares none.
        Without `n` the mask function is that of every length, or raises ValueError where pairs
        depend on n or m. Raises AttnSpecError for data-dependent graphs and for mechanisms.
        """
        from attnspec.compile.exports.flex_masks import flex_mask

        return flex_mask(self.program, n, layer, heads, inputs, device_of(device), m)

    def to_bsr(
        self,
        n: int,
        block: int,
        layer: int = 0,
        head: int = 0,
        inputs: Sample | None = None,
        m: int | None = None,
    ) -> BlockRows:
        """The pairs of one head as a block-sparse matrix, as FlashInfer takes them: `indptr`,
        `indices` and the `mask` of each block of `block` x `block`; of m queries and n keys as
        `mask`.

        Raises AttnSpecError for too many blocks.
        """
        from attnspec.compile.exports.block_rows import block_rows

        size = length_of(block, "`block`", 1)
        stack, length = self._crossed(n, m, inputs)
        return block_rows(stack.relation(length, layer, head), length_of(n), size, m)

    def emit(self, standalone: bool = False, backend: str = "auto") -> str:
        """The text of the Python module that `attnspec compile` writes."""
        from attnspec.compile.compiler import emit_spec

        require_built(self.program)
        return emit_spec(self.elaborated, standalone=standalone, backend=backend)


def diff(
    a: Spec, b: Spec, n: int, inputs: Sample | None = None, m: int | None = None
) -> Difference:
    """The pairs that only one of two specs has at n positions, for each layer and head.

    A spec that declares no layers, or heads, is compared with every one of the other. `inputs` is
    one sample of the run-time inputs, for both. Of specs with `cross` n are the keys and m, n if it
    is not given, the queries. Raises TypeError for what is not a spec, SpecError
    where a size has no value at n, and AttnSpecError for a length that one of them does not have
    or for an input that neither declares.
    """
    for spec in (a, b):
        if not isinstance(spec, Spec):
            raise TypeError(
                f"specs are compared, got {type(spec).__name__}; a mask or a mask function is"
                " compared by `spec.compare(mask, n)`"
            )
    return a.compare(b, n, inputs=inputs, m=m)
