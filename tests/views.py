"""What the package says of a spec beside what the oracle says: one table, a few lines a view.

Only names that users import, the registries and the oracle stand here, so that what is inside the
package may be another without a change of this file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from inspect import signature
from typing import Any, TypeAlias

import numpy as np
import torch
from oracle import decided, dense, truth
from oracle.meaning import masks
from oracle.program import attention_of
from oracle.tree import Attention
from population import inputs_of, spec_of
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils._pytree import tree_leaves

from attnspec import Report, Spec, diff, parse
from attnspec.backends import BACKENDS
from attnspec.limits import LIMITS, Limits


@dataclass(frozen=True)
class Case:
    """A spec at n, with one sample of its inputs."""

    spec: Spec
    n: int
    tree: Attention | None = None
    """What the text was written from, where that is known."""

    @cached_property
    def attention(self) -> Attention:
        return self.tree or attention_of(self.spec.program)

    @cached_property
    def inputs(self) -> dict[str, Any]:
        return inputs_of(self.spec, self.n)

    @cached_property
    def masks(self) -> np.ndarray:
        """bool [layers, heads, n, n] by the oracle."""
        return masks(self.attention, self.n, self.inputs, self.sample)

    @cached_property
    def sample(self) -> decided.Sample | None:
        """What decides, of a spec whose pairs tensors decide."""
        if not is_decided(self.spec):
            return None
        q, k = (numbers((self.spec.heads or 1, self.n, 6), seed).numpy() for seed in (3, 4))
        k = q if shares_keys(self.spec) else k
        learned = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        causal = self.spec.program.causal
        return decided.Sample(q, k, [True] * self.n, causal, 6**-0.5, 1, learned)

    @cached_property
    def module(self) -> Any:
        return self.spec.compile(head_size=6).double()

    @cached_property
    def report(self) -> Report:
        tensors = None if self.sample is None else (self.sample.q, self.sample.k)
        return self.spec.analyse(self.n, self.inputs or None, tensors=tensors)

    @cached_property
    def with_claims(self) -> tuple[Spec, int]:
        """The spec with claims at its end, and how many."""
        (before, _, after), claims = self.spec.source.rpartition("}"), _claims(self)
        return parse(f"{before} {' '.join(claims)} }}{after}"), len(claims)

    def decided(self) -> np.ndarray:
        """The pairs that a module says."""
        assert self.sample is not None
        q, k = (torch.from_numpy(x)[None] for x in (self.sample.q, self.sample.k))
        inputs = {name: torch.from_numpy(np.stack([x])) for name, x in self.inputs.items()}
        ask, layers = self.module.pairs, range(self.spec.layers)
        return np.stack([ask(q, k, layer=at, inputs=inputs)[0].numpy() for at in layers])

    def each(self, ask: Callable[..., Any]) -> np.ndarray:
        """What a method of the spec says of every layer and head."""
        layers, heads = self.spec.layers, self.spec.heads or 1
        given = self.inputs or None
        return np.stack(
            [[ask(self.n, layer, head, given) for head in range(heads)] for layer in range(layers)]
        )

    @property
    def query(self) -> int:
        """A position that the views of paths start from."""
        return self.n // 2


def is_decided(spec: Spec) -> bool:
    """Whether queries and keys, or what an input says in their place, decide pairs."""
    return not decided.NAMES.isdisjoint(patterns(spec))


def patterns(spec: Spec) -> set[str]:
    """The names of the patterns of its graphs."""
    graphs = [attend.graph for attend in spec.program.attends if attend.graph is not None]
    return {name for graph in graphs for name in _leaves(graph)}


def _leaves(graph: Any) -> list[str]:
    below = [name for each in getattr(graph, "terms", ()) for name in _leaves(each)]
    return [graph.pattern] if hasattr(graph, "pattern") else below


def shares_keys(spec: Spec) -> bool:
    """Whether keys are queries."""
    words = ("lsh(" in spec.source) and "share_qk = false" not in spec.source
    return words and is_decided(spec)


View: TypeAlias = "tuple[Callable[[Case], Any], Callable[[Case], Any]]"
"""What the package says, and what the oracle says."""

SILENT = object()
"""No answer."""


def _figure(name: str, meant: Callable[[Case], Any] | None = None) -> View:
    def said(case: Case) -> Any:
        quality = case.report.quality[name]
        if quality != "exact":
            # under other limits figures may be bounds, estimates or unknown
            return f"{name} is a {quality}" if LIMITS == Limits() else SILENT
        return getattr(case.report, name)

    return said, meant or (lambda case: truth.figure(name, case.attention, case.masks))


def _flag(name: str) -> View:
    return _figure(name, lambda case: truth.flag(name, case.masks, case.attention, case.inputs))


def _claims(case: Case) -> list[str]:
    """Claims of which about a half hold; of a figure's four comparisons two in turn."""
    found = ["causal", "symmetric", "rows_nonempty", *["stable"] * (case.n <= 40)]
    found += [f"reach(layers = {layers})" for layers in (0, 1, 2, 3)]
    for name in ("edges", "degree", "depth", "diameter"):
        value = truth.figure(name, case.attention, case.masks)
        two = (("<=", "!="), ("<", "=="))[(case.n + len(name)) % 2]
        compared = two if value is not None else ("<=",)
        found += [f"{name} {how} {100_000 if value is None else value}" for how in compared]
    by_place = ["degree <= 3 + layer"]
    if case.spec.heads is not None:
        by_place += ["window(radius = head) subset window(radius = 1 + layer)", "edges < n * head"]
    return [f"require {each} at n = {case.n}" for each in (*found, *by_place)]


def _verdicts(case: Case) -> Any:
    if case.spec.inputs or case.spec.program.grid or case.sample is not None:
        # those are about all inputs; of the text of a grid the parameters are set from outside
        return SILENT
    spec, count = case.with_claims
    verdicts = spec.verdicts[-count:]
    said = {"refuted": False, "checked": True, "proven": True}
    # of heads that are not declared some claims are not checked
    return {each.claim.text: said[each.status] for each in verdicts if each.status in said}


def _held(case: Case) -> dict[str, bool]:
    spec, count = case.with_claims
    texts = [each.text for each in spec.program.claims[-count:]]
    claims = zip(texts, attention_of(spec.program).claims[-count:], strict=True)
    return {x: truth.holds(case.attention, y, case.n, held=case.masks) for x, y in claims}


def _live(case: Case) -> np.ndarray | None:
    """How many keys each head holds before each step of generation, [layers, heads, n]."""
    if np.triu(case.masks, 1).any():
        return None
    later = case.masks[..., ::-1, :].cumsum(-2)[..., ::-1, :] > 0
    return np.asarray((later & np.tri(case.n, dtype=bool)).sum(-1))


def _cache(case: Case, whole: bool) -> int | None:
    live = _live(case)
    if live is None:
        return None
    # keys and values of size 64 in 4 bytes
    return int(live.sum((0, 1)).max() * 2 * 64 * 4) if whole else int(live.max())


def _spectral_gap(case: Case) -> float:
    """1 less the second eigenvalue by size of the walk on the pairs, whichever way they go."""
    union = case.masks.any((0, 1))
    either = union | union.T
    scale = np.sqrt(np.maximum(either.sum(1), 1))
    values = np.sort(np.abs(np.linalg.eigvalsh(either / scale[:, None] / scale)))
    return float(1 - values[-2]) if case.n > 1 else 1.0


def _path(case: Case) -> list[bool]:
    """Whether the query has a path to some keys in no more pairs than layers are needed."""
    found, far = [], hops(case)[case.query]
    for key in {0, case.n // 3, case.query, case.n - 1}:
        steps = case.report.path(case.query, key)
        here, last, right = case.query, math.inf, steps is not None
        for layer, head, position in steps or ():
            # further layers are as the last one
            pairs = case.masks[min(layer, len(case.masks) - 1), head]
            right &= position == here or bool(pairs[here, position])
            right &= layer <= last
            here, last = position, layer
        found.append(right and here == key and len(steps or ()) <= far[key])
    return found


NEAR = "attend window(radius = 3) | columns(first(2))"


def near(n: int) -> np.ndarray:
    at = np.arange(n)
    return np.asarray((abs(at[:, None] - at) <= 3) | (at < 2))


def _compared(case: Case) -> Any:
    """How many pairs the spec alone has, and how many `NEAR` alone."""
    program = case.spec.program
    chosen = any(entry.kind == "choices" for entry in program.inputs)
    if case.n == 0 or program.grid or chosen or any(x.mechanism for x in program.attends):
        return SILENT
    found = diff(case.spec, spec_of(NEAR), case.n, case.inputs or None)
    return [found.only_in_a.count, found.only_in_b.count]


def _flex(case: Case) -> Any:
    """The pairs of the functions that FlexAttention is handed, whose lists are those of torch."""
    spec, heads = case.spec, case.spec.heads or 1
    chosen = any(entry.kind == "choices" for entry in spec.program.inputs)
    if case.n == 0 or chosen or any(x.mechanism for x in spec.program.attends):
        return SILENT
    found = []
    at = torch.arange(case.n)
    head = torch.arange(heads)[:, None, None]
    for layer in range(spec.layers):
        flex = spec.to_flex(case.n, layer, case.inputs or None)
        try:
            # all pairs at once: torch asks for each of its own, which takes thirty times as long
            pairs = flex.mask_mod(torch.tensor(0), head, at[:, None], at)
        except ValueError as error:
            if "numbers fit in 64 bits" not in str(error):
                raise
            return SILENT
        found.append(pairs.expand(heads, case.n, case.n))
        # of a single block there is little to list
        if layer == 0 and case.n > 128:
            ours = flex.block_mask()
            torchs = create_block_mask(flex.mask_mod, 1, heads, case.n, case.n, "cpu")
            for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks"):
                assert torch.equal(getattr(ours, name), getattr(torchs, name)), name
            assert torch.equal(ours.to_dense(), torchs.to_dense())
    return torch.stack(found).numpy()


def _block_rows(case: Case) -> Any:
    """The pairs of the blocks that FlashInfer is handed, which say whether they are whole."""
    n, size = case.n, (16, 7, 1)[case.n % 3]
    if n == 0:
        return SILENT

    def dense(_: int, *at: Any) -> np.ndarray:
        found = case.spec.to_bsr(n, size, *at)
        rows = np.repeat(np.arange(len(found.indptr) - 1), np.diff(found.indptr))
        most = [np.minimum(size, n - each * size) for each in (rows, found.indices)]
        assert found.mask.any((1, 2)).all()
        assert (found.full == (found.mask.sum((1, 2)) == most[0] * most[1])).all()
        bits = np.unpackbits(found.packed_mask, bitorder="little")
        assert (bits[: found.mask.size] == found.mask.ravel()).all()
        return np.asarray(found.dense())

    return case.each(dense)


CHOOSING = re.compile(r"score = s\b|(lsh|cluster)\([hl]\b")
"""Choices that inputs make."""

PAIRS: dict[str, View] = {
    "mask": (lambda c: c.each(c.spec.mask), lambda c: c.masks),
    "adjacency": (lambda c: c.each(lambda *at: c.spec.adjacency(*at).toarray()), lambda c: c.masks),
    "graph": (
        lambda c: set(c.spec.graph(c.n, 0, 0, c.inputs or None).edges),
        lambda c: {(int(q), int(k)) for q, k in np.argwhere(c.masks[0, 0])},
    ),
    "compare": (
        _compared,
        lambda c: [int((c.masks & ~near(c.n)).sum()), int((near(c.n) & ~c.masks).sum())],
    ),
    "flex": (_flex, lambda c: c.masks),
    "block rows": (_block_rows, lambda c: c.masks),
    "source": (lambda c: parse(c.spec.source) == c.spec, lambda c: True),
}
"""What is asked of every graph."""

DECIDED: dict[str, View] = {
    "pairs": (lambda c: c.decided(), lambda c: c.masks),
    # where inputs choose, no tensors are asked for
    "mask": (
        lambda c: c.each(c.spec.mask) if CHOOSING.search(c.spec.source) else SILENT,
        lambda c: c.masks,
    ),
    "source": PAIRS["source"],
}
"""What is asked of every graph that tensors decide, beside the figures of its pairs."""

FIGURES: dict[str, View] = {
    **{
        name: _figure(name)
        for name in "edges density degree min_degree depth diameter path_length".split()
    },
    **{name: _flag(name) for name in ("causal", "rows_nonempty", "symmetric")},
    "mean_degree": _figure("mean_degree", lambda c: float(c.masks.sum(-1).mean())),
    "readers": _figure("readers", lambda c: c.masks.sum(-2).max()),
    "min_readers": _figure("min_readers", lambda c: c.masks.sum(-2).min()),
    "empty_rows": _figure("empty_rows", lambda c: (~c.masks.any(-1)).sum()),
    "unread_keys": _figure("unread_keys", lambda c: (~c.masks.any(-2)).sum()),
    "spectral_gap": _figure("spectral_gap", _spectral_gap),
    "useful_flops": _figure("useful_flops", lambda c: 4 * 64 * c.masks.sum((1, 2, 3)).max()),
    "kv_cache": (lambda c: c.report.kv_cache, lambda c: _cache(c, whole=False)),
    "kv_cache_bytes": (lambda c: c.report.kv_cache_bytes, lambda c: _cache(c, whole=True)),
    "verdicts": (_verdicts, _held),
    "hops": (lambda c: c.report.hops(c.query), lambda c: hops(c)[c.query]),
    "told": (lambda c: c.report.told(c.query), lambda c: hops(c)[:, c.query]),
    "path": (
        _path,
        lambda c: [hops(c)[c.query, key] >= 0 for key in {0, c.n // 3, c.query, c.n - 1}],
    ),
    "eccentricity": (lambda c: c.report.eccentricity(c.query), lambda c: eccentricity(c)),
    "edges per head": (
        lambda c: [at.edges for at in c.report.per_head.values()],
        lambda c: c.masks.sum((-1, -2)).ravel().tolist(),
    ),
}
"""What is asked of every graph without a mechanism at n >= 1."""


def hops(case: Case) -> np.ndarray:
    """int [n, n]: layers until a query has read a key that it may read, -1 for never."""
    found = np.full((case.n, case.n), -1)
    for layers, read in enumerate(truth.stacks(case.masks)):
        found[read & (found < 0)] = layers
    return np.where(truth.allowed(case.attention, case.n), found, -1)


def eccentricity(case: Case) -> int | None:
    allowed = truth.allowed(case.attention, case.n)[case.query]
    walks = truth.distances(case.masks)[case.query][allowed]
    return None if (walks < 0).any() else int(walks.max())


def agree(said: Any, meant: Any) -> bool:
    if isinstance(meant, np.ndarray):
        return np.shape(said) == meant.shape and bool((np.asarray(said) == meant).all())
    if isinstance(meant, dict):
        return bool(said.items() <= meant.items())
    if isinstance(meant, float) and isinstance(said, float):
        return math.isclose(said, meant, rel_tol=1e-9, abs_tol=1e-9)
    return bool(said == meant)


def differing(case: Case, views: Mapping[str, View]) -> list[str]:
    """The views in which the package says something else than the oracle."""
    found = []
    for name, (package, oracle) in views.items():
        said = package(case)
        if said is not SILENT and not agree(said, oracle(case)):
            found.append(f"{name}: {said} instead of {oracle(case)}"[:600])
    return found


# --- kernels -------------------------------------------------------------------------------------

KERNELS = (
    "auto",
    *(each.name for each in BACKENDS if "cpu" not in getattr(each, "on_request", ())),
)
"""The backends that run on the CPU."""

SLOW_KERNELS = {
    "triton": (
        *("full", "blocks", "empty rows", "by layer", "documents", "few marked tokens", "length"),
        *("times", "choices", "both", "bias", "softmax1", "several inputs", "five residues"),
        *("linear", "efficient", "favor of relus", "random", "documents and linear"),
        *("shifted back", "scattered tokens", "rows(first(0))"),
    )
}
"""Those that are asked for by name, here by an interpreter, and the specs that they run by
default: each kind of kernel, few tiles."""

SHAPES = (
    "plain",
    "last queries",
    "one query",
    "grouped",
    "left",
    "right",
    "holes",
    "wide",
    "strided",
    "several",
)
"""What calls are like: how many queries, key heads, padding, sizes, strides."""


@dataclass(frozen=True)
class Call:
    """The tensors of a call in one type."""

    case: Case
    shape: str
    dtype: torch.dtype
    layer: int = 0
    sharp: bool = False
    """Scores of a standard deviation of 4."""

    @cached_property
    def inputs(self) -> list[dict[str, Any]]:
        return [inputs_of(self.case.spec, self.case.n, seed) for seed in range(2)]

    @cached_property
    def padding(self) -> np.ndarray | None:
        n, at = self.case.n, np.arange(self.case.n)
        rows = {
            "left": (at >= n // 3, at >= n // 2),
            "right": (at < n - n // 3, at < 0),
            "holes": (at % 3 != 1, at % 5 < 3),
            # beside fewer queries and key heads
            "several": (at >= n // 2, at != n - 2),
        }
        return np.stack(rows[self.shape]) if self.shape in rows else None

    @cached_property
    def tensors(self) -> list[Tensor]:
        n, heads = self.case.n, self.case.spec.heads or 2
        n_q = {"last queries": -(-n // 3), "several": -(-n // 2), "one query": min(n, 1)}.get(
            self.shape, n
        )
        key_heads = heads // min(x for x in (2, 3, 5, 7, heads) if heads % x == 0 and x > 0)
        grouped = self.shape in ("grouped", "several") and not shares_keys(self.case.spec)
        key_heads = key_heads if grouped else heads
        out = {"wide": 13}.get(self.shape, 5)
        if {x.mechanism.name for x in self.case.spec.program.attends if x.mechanism} & {
            "gmlp",
            "mixer",
        }:
            # values are one half of what it takes; standalone files have one size of a head
            out = 6
        generator = torch.Generator().manual_seed(n)
        made: list[Tensor] = []
        for count, length, width in ((heads, n_q, 6), (key_heads, n, 6), (key_heads, n, out)):
            x = torch.randn(2, length, count, 2 * width, generator=generator).to(self.dtype)
            x = x.transpose(1, 2)[..., ::2] * (4 if self.sharp and not made else 1)
            made.append((x if self.shape == "strided" else x.contiguous()).requires_grad_())
        if shares_keys(self.case.spec):
            made[0] = made[1].detach()[:, :, n - n_q :].requires_grad_()
        return made

    @property
    def keywords(self) -> dict[str, Any]:
        found: dict[str, Any] = {"layer": self.layer}
        if self.padding is not None:
            found["key_padding_mask"] = torch.from_numpy(self.padding)
        if self.inputs[0]:
            found["inputs"] = {
                name: torch.from_numpy(np.stack([sample[name] for sample in self.inputs]))
                for name in self.inputs[0]
            }
            for name, x in found["inputs"].items():
                # choices and scores are those of the queries
                if self.case.spec.inputs[name].kind in ("choices", "scores", "pairs"):
                    found["inputs"][name] = x[:, :, x.shape[2] - self.tensors[0].shape[2] :]
        return found

    @cached_property
    def tables(self) -> dict[str, Tensor]:
        """Numbers for each table that the spec learns, by its name."""
        module = self.made(self.case.spec.compile())
        kind = torch.float32 if self.dtype == torch.float64 else self.dtype
        return {x: numbers(y.shape, 1).to(kind).double() for x, y in module.named_parameters()}

    @cached_property
    def kept(self) -> dict[str, Tensor]:
        """What a module has beside what it learns."""
        return dict(self.made(self.case.spec.compile()).named_buffers())

    def made(self, module: Any) -> Any:
        """A module whose tables have the size of the call's heads."""
        # what is kept moves in training
        module.eval()
        if any(map(torch.nn.parameter.is_lazy, [*module.parameters(), *module.buffers()])):
            with torch.no_grad():
                module(*self.tensors, **self.keywords)
        return module

    def learning(self, module: Any) -> Any:
        """A module with the numbers of the call."""
        with torch.no_grad():
            tables = self.tables.values()
            for x, table in zip(self.made(module).parameters(), tables, strict=True):
                x.copy_(table)
        return module

    def meant(self, dtype: torch.dtype, sums: bool) -> list[Tensor]:
        """The output, the log-sum-exps and the gradients by the oracle in a type, of the `sums`
        too where they are asked for."""
        key = f"{dtype} {sums}"
        if key not in self.__dict__:
            leaves = [x.detach().to(dtype).requires_grad_() for x in self.tensors]
            tables = [x.to(dtype).requires_grad_() for x in self.tables.values()]
            by_size = {x.shape[-1]: x for x in tables if x.dim()}
            learned = {**self.kept, **dict(zip(self.tables, tables, strict=True))}
            q, k, v = leaves
            given = self.layer, self.padding, self.inputs, by_size, learned
            asked = dense.Call(q, k, v, *given)
            out, lse = dense.attend_with_lse(self.case.attention, asked)
            results = [out.detach(), lse.detach() if sums else torch.zeros(0)]
            grads = gradients(out, lse if sums else None, [*leaves, *tables])
            self.__dict__[key] = [*results, *grads]
        return self.__dict__[key]  # type: ignore[no-any-return]

    def said(self, module: Any) -> list[Tensor]:
        """The same of a module, in the type of the call; no log-sum-exps where it has none."""
        leaves, keywords = [x.detach().requires_grad_() for x in self.tensors], self.keywords
        passed = [x for x in tree_leaves([leaves, keywords]) if isinstance(x, Tensor)]
        versions = [x._version for x in passed]
        try:
            out, lse = module(*leaves, **keywords, return_lse=True)
        except (TypeError, ValueError) as error:
            # weights without a positive denominator; files that stand alone
            if "log-sum-exps" not in str(error) and "return_lse" not in str(error):
                raise
            out, lse = module(*leaves, **keywords), None
        grads = gradients(out, lse, [*leaves, *module.parameters()])
        with torch.no_grad():
            # another operation computes the same
            plain = module(*leaves, **keywords)
        assert versions == [x._version for x in passed], "what was passed is written over"
        close = 1e-2 if self.dtype.itemsize < 4 else 1e-4 if self.dtype.itemsize < 8 else 1e-9
        torch.testing.assert_close(plain, out.detach(), rtol=close, atol=close, equal_nan=True)
        return [out.detach(), torch.zeros(0) if lse is None else lse.detach(), *grads]


def numbers(shape: Any, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def gradients(
    out: Tensor,
    lse: Tensor | None,
    leaves: list[Tensor],
    weights: Tensor | None = None,
) -> list[Tensor]:
    """Of fixed random weights of the outputs and of the sines of the log-sum-exps."""
    weights = numbers(out.shape, 2) if weights is None else weights
    # the same numbers in every type
    total = (out * weights.bfloat16().to(out.dtype)).sum()
    if lse is not None:
        total = total + torch.where(torch.isfinite(lse), lse, 0.0).sin().sum().to(out.dtype)
    if not total.requires_grad:
        return [torch.zeros_like(x) for x in leaves]
    return list(torch.autograd.grad(total, leaves, materialize_grads=True))


NAMES = ("output", "log-sum-exp", "gradient of q", "of k", "of v", "of a table")


def errors(said: list[Tensor], meant: list[Tensor], rough: list[Tensor]) -> list[str]:
    """What of a call errs by more than the definition does in the same type, `rough`."""
    # a gradient may vanish by cancellation of terms as large as any
    largest = float(
        torch.cat([x[x.isfinite()].flatten().abs() for x in meant] + [torch.ones(1)]).max()
    )
    found = []
    for index, (got, want, base) in enumerate(zip(said, meant, rough, strict=True)):
        name = NAMES[min(index, 5)]
        if got.shape != want.shape:
            found.append(f"{name} is {list(got.shape)} instead of {list(want.shape)}")
            continue
        known = want.to(got.dtype).isfinite()
        if not torch.equal(known, got.isfinite()):
            found.append(f"{name} is finite elsewhere")
        elif known.any():
            error, off = (float((x.double() - want)[known].abs().max()) for x in (got, base))
            # in 16 bits the definition may have no number where there is one
            off = off if math.isfinite(off) else 0.0
            allowed = 64 * torch.finfo(said[0].dtype).eps * largest + 8 * off
            if not error <= allowed:
                found.append(f"{name} errs by {error:.3g}, allowed {allowed:.3g}")
    return found


def errors_of(call: Call, module: Any) -> list[str]:
    """In what a module differs from the oracle."""
    said = call.said(call.learning(module).to(torch.promote_types(call.dtype, torch.float32)))
    return beside_oracle(call, said, sums=said[1].dim() > 1)


def beside_oracle(call: Call, said: list[Tensor], sums: bool) -> list[str]:
    """In what the first numbers of a call differ from the oracle's."""
    meant, rough = (call.meant(x, sums)[: len(said)] for x in (torch.float64, call.dtype))
    found = errors(said, meant, rough)
    if found and call.dtype.itemsize > 2:
        # what cancels is known to as many digits less as in a shorter type, or a few less than that
        short, by = {8: (torch.float32, 2**-26), 4: (torch.bfloat16, 2**-13)}[call.dtype.itemsize]
        narrow = call.meant(short, sums)[: len(said)]
        rough = [want + (x - want) * by for x, want in zip(narrow, meant, strict=True)]
        found = errors(said, meant, rough)
    return found


def worst(said: Tensor, meant: Tensor) -> float:
    """The greatest error of a row, as a part of the row, or of a tenth of a mean one."""
    size = meant.norm(dim=-1)
    # below its least normal number a type has fewer digits
    normal = math.sqrt(meant.shape[-1]) * torch.finfo(said.dtype).tiny
    least = max(0.1 * float(size.mean()), normal)
    return float(((said.double() - meant).norm(dim=-1) / size.clamp(min=least)).max())


def row_errors(call: Call, said: list[Tensor]) -> list[str]:
    """What has a row that errs by more roundings than four (outputs), twenty or the definition's
    own number in 16 bits (gradients, whose terms cancel), one (tables, summed in float32)."""
    sums = said[1].dim() > 1
    meant, found = call.meant(torch.float64, sums), []
    for index, (got, want) in enumerate(zip(said, meant, strict=True)):
        eps, allowed = torch.finfo(call.dtype).eps, (4.0, 0.0, 20.0, 20.0, 20.0, 1.0)[min(index, 5)]
        times = worst(got, want) / eps if index != 1 else 0.0
        if 1 < index < 5 and times > allowed:
            allowed = worst(call.meant(call.dtype, sums)[index], want) / eps
        if not times <= allowed:
            found.append(f"{NAMES[min(index, 5)]} errs by {times:.3g} roundings")
    return found


def taken(kernel: str, ask: Callable[[], Any]) -> Any:
    """What a backend makes of a call, None where it does not take it."""
    try:
        return ask()
    except ValueError as error:
        if kernel == "auto" or type(error).__name__ != "BackendError":
            raise
        return None


def check(call: Call, kernel: str) -> list[str] | None:
    """In what a backend differs from the oracle; None where it does not take the spec."""
    spec = call.case.spec
    found: list[str] | None = taken(kernel, lambda: errors_of(call, spec.compile(backend=kernel)))
    return found


def times_weighed(case: Case, kernel: str, layer: int) -> Any:
    """How often a kernel weighs each pair, [heads, n, n]: of queries that are all zero every key
    of a row weighs the same, and values that are a unit matrix show which."""

    def weights(module: Any, at: Case) -> Any:
        zeros = torch.zeros(1, at.spec.heads or 1, at.n, 4, dtype=torch.float64)
        values = torch.eye(at.n, dtype=torch.float64).expand(*zeros.shape[:3], at.n)
        keywords: dict[str, Any] = {"layer": layer}
        if at.inputs:
            keywords["inputs"] = {x: torch.from_numpy(np.stack([y])) for x, y in at.inputs.items()}
        return module(zeros, zeros, values, **keywords)[0].numpy()

    def ask() -> Any:
        module = case.spec.compile(backend=kernel)
        if case.spec.program.grid is None:
            # what is made for a longer sequence serves shorter ones
            weights(module, Case(case.spec, case.n + 5))
        return weights(module, case) * np.maximum(case.masks[layer].sum(-1), 1)[..., None]

    return taken(kernel, ask)


def step_errors(call: Call) -> list[str]:
    """In what the outputs differ that come in steps of several positions, and of one."""
    module = call.learning(call.case.spec.compile()).double()
    outs: list[Tensor] = []
    state, first = None, 0
    while first < call.case.n:
        at = slice(first, first + (1, 2, 1, 1, 1, 1, 4)[len(outs) % 7])
        given: dict[str, Any] = {"layer": call.layer}
        if call.padding is not None:
            given["key_padding_mask"] = call.keywords["key_padding_mask"][:, at]
        if "inputs" in call.keywords:
            kinds = {name: entry.kind for name, entry in call.case.spec.inputs.items()}
            size = {name: entry.size for name, entry in call.case.spec.inputs.items()}
            given["inputs"] = {
                # a length is one number, and choices have an axis of heads before their queries
                name: x[..., at]
                if kinds[name] == "buckets"
                else x[:, :, at, : at.stop]
                if kinds[name] == "pairs"
                else x[:, :, at, : -(-at.stop // size[name])]
                if kinds[name] == "scores"
                else x[:, at]
                if x.dim() == 2
                else x[:, :, at]
                if x.dim() == 4
                else x
                for name, x in call.keywords["inputs"].items()
            }
        q, k, v = (x.detach()[:, :, at] for x in call.tensors)
        # later states are written over those before them
        given |= {"keep_all": True, "in_place": len(outs) > 1}
        out, state = module.step(q, k, v, state, **given)
        outs.append(out.detach())
        first = at.stop
    return beside_oracle(call, [torch.cat(outs, 2)], sums=False)


def written(spec: Spec, standalone: bool) -> torch.nn.Module:
    """The module of the text that is written for a spec."""
    room: dict[str, Any] = {"__name__": "written"}
    try:
        text = spec.emit(standalone=standalone)
    except ValueError:
        if not standalone:
            raise
        # what no short file says
        text = spec.emit()
    exec(compile(text, "written", "exec"), room)
    (made,) = [
        x
        for x in room.values()
        if isinstance(x, type) and issubclass(x, torch.nn.Module) and x.__module__ == "written"
    ]
    return made(6) if "head_size" in signature(made).parameters else made()
