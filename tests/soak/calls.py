"""Modules held against the definition: outputs, gradients, steps, the emitted text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from oracle import dense
from oracle.dense import Call
from oracle.scalars import Invalid
from oracle.tree import Attention

from attnspec.backends.factored.features.directions import one_head
from attnspec.runtime import CompiledAttention
from attnspec.runtime.streaming import StreamState
from attnspec.spec import Spec
from soak.checks import emitted_class
from soak.trial import Trial, has_mechanism, sample_of

FORMULAS = ("auto", "factored")
GRAPHS = ("auto", "auto", "dense", "tiles", "bands", "rows", "scattered")
"""Backends for specs with mechanisms and without; `auto` twice, for it is what is used."""

EXACT, ROUGH = 1e-9, 256.0 * 2.0**-24
"""The error allowed in float64 and in float32, relative to the scale of the result."""

WORSE = 8.0
"""So many times the error of the definition in the same type is allowed besides."""

FACTORS = (1.0, 3.0, 5.0, 7.0)
"""Of the values: everything is linear in them, so that each is another sample of how the definition
rounds."""


def directions(
    seed: int, layer: int, head: int, features: int, size: int, orthogonal: bool
) -> np.ndarray:
    """The random rows of a mechanism, as the package draws them."""
    return one_head(seed, layer, head, 0, features, size, orthogonal)


@dataclass(frozen=True)
class Case:
    """The tensors of one call, and how they lie in memory."""

    layer: int
    leaves: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    layout: str
    repeat: int
    padding: np.ndarray | None
    inputs: list[dict[str, Any]]
    weight: torch.Tensor

    def tensors(self, dtype: torch.dtype) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """q, k and v as they are given, and what their gradients are asked of."""
        leaves = [leaf.to(dtype).clone().requires_grad_() for leaf in self.leaves]
        return [self._laid(leaf) for leaf in leaves], leaves

    def _laid(self, leaf: torch.Tensor) -> torch.Tensor:
        match self.layout:
            case "transposed":
                return leaf.transpose(1, 2)
            case "strided":
                return leaf[..., ::2]
            case "expanded":
                return leaf.expand(self.repeat, -1, -1, -1)
            case "reversed":
                return leaf.permute(3, 2, 1, 0)
            case _:
                return leaf

    def given(self, spec: Attention) -> dict[str, Any]:
        """The keyword arguments of a module."""
        found: dict[str, Any] = {"layer": self.layer}
        if self.padding is not None:
            found["key_padding_mask"] = torch.from_numpy(self.padding)
        if spec.inputs:
            found["inputs"] = {
                entry.name: torch.from_numpy(np.stack([s[entry.name] for s in self.inputs]))
                for entry in spec.inputs
            }
        return found


def case_of(trial: Trial, n: int, *, whole: bool = False) -> Case:
    """A random call at n keys; `whole` with as many queries."""
    spec, draw = trial.spec, trial.numbers
    batch = int(draw.choice((1, 1, 2, 3)))
    heads = spec.heads or int(draw.choice((1, 2, 4)))
    groups = [g for g in range(1, heads + 1) if heads % g == 0]
    key_heads = heads if draw.random() < 0.6 else int(draw.choice(groups))
    rows = n if whole else _queries(n, draw)
    # unit rows of one channel weigh 0 or 2, and what divides the 0 is the guard against it alone
    least = 2 if "taylor" in spec.words() else 1
    size, out = int(draw.integers(least, 7)), int(draw.integers(1, 6))
    layout = str(draw.choice(("plain", "plain", "transposed", "strided", "expanded", "reversed")))
    sharp = float(draw.choice((0.3, 1.0, 1.0, 4.0)))
    generator = torch.Generator().manual_seed(int(draw.integers(2**31)))
    leaves = []
    for count, length, width, factor in (
        (heads, rows, size, sharp),
        (key_heads, n, size, 1.0),
        (key_heads, n, out, 1.0),
    ):
        shape = {
            "transposed": (batch, length, count, width),
            "strided": (batch, count, length, 2 * width),
            "expanded": (1, count, length, width),
            "reversed": (width, length, count, batch),
        }.get(layout, (batch, count, length, width))
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64) * factor
        # exact in both types, so that both compute the same function
        leaves.append(drawn.float().double())
    weight = torch.randn(batch, heads, rows, out, generator=generator, dtype=torch.float64)
    return Case(
        int(draw.integers(spec.layers)) if spec.layers else int(draw.choice((0, 0, 2))),
        (leaves[0], leaves[1], leaves[2]),
        layout,
        batch,
        _padding(batch, n, draw),
        [sample_of(spec, n, draw) for _ in range(batch)],
        weight.float().double(),
    )


def _queries(n: int, draw: np.random.Generator) -> int:
    """How many of the last positions ask: all, some, or a few, as in generation."""
    kind = draw.random()
    if kind < 0.5:
        return n
    return int(draw.integers(0, n + 1)) if kind < 0.7 else min(n, int(draw.integers(1, 17)))


def _padding(batch: int, n: int, draw: np.random.Generator) -> np.ndarray | None:
    """True for real keys; on the left, on the right, or anywhere."""
    kind = draw.choice(("none", "none", "left", "right", "any"))
    if kind == "none":
        return None
    if kind == "any":
        return np.asarray(draw.random((batch, n)) < 0.7)
    real = draw.integers(0 if draw.random() < 0.2 else min(1, n), n + 1, batch)[:, None]
    places = np.arange(n)[None]
    return np.asarray(places < real if kind == "right" else places >= n - real)


def learned(module: CompiledAttention, seed: int) -> dict[int, torch.Tensor]:
    """Gives learned tables values, the same to all of one shape; those values by their size."""
    found = {}
    for called, parameter in module.named_parameters():
        if called.startswith("bias_"):
            generator = torch.Generator().manual_seed(seed + parameter.shape[-1])
            values = torch.randn(parameter.shape, generator=generator)
            with torch.no_grad():
                parameter.copy_(values)
            found[parameter.shape[-1]] = values.double()
    return found


def _run(
    trial: Trial, case: Case, dtype: torch.dtype, module: CompiledAttention
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    module = module.to(dtype)
    given, leaves = case.tensors(dtype)
    tables = [p for name, p in module.named_parameters() if name.startswith("bias_")]
    out = module(*given, **case.given(trial.spec))
    found = torch.autograd.grad(
        (out * case.weight.to(dtype)).sum(), [*leaves, *tables], allow_unused=True
    )
    grads = [_filled(g, x) for g, x in zip(found, [*leaves, *tables], strict=True)]
    by_size: dict[int, torch.Tensor] = {}
    for grad, table in zip(grads[3:], tables, strict=True):
        size = table.shape[-1]
        by_size[size] = by_size[size] + grad if size in by_size else grad
    return out.detach(), [*grads[:3], *(by_size[size] for size in sorted(by_size))]


def _dense(
    trial: Trial, case: Case, dtype: torch.dtype, values: dict[int, torch.Tensor]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The same by the definition."""
    given, leaves = case.tensors(dtype)
    tables = {size: table.to(dtype).requires_grad_() for size, table in values.items()}
    call = Call(given[0], given[1], given[2], case.layer, case.padding, case.inputs, tables)
    out = dense.attend(trial.spec, call, directions)
    asked = [*leaves, *(tables[size] for size in sorted(tables))]
    if not out.requires_grad:
        return out, [torch.zeros_like(x) for x in asked]
    found = torch.autograd.grad((out * case.weight.to(dtype)).sum(), asked, allow_unused=True)
    return out.detach(), [_filled(g, x) for g, x in zip(found, asked, strict=True)]


def _filled(grad: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(like) if grad is None else grad


def call(trial: Trial, spec: Spec, module: CompiledAttention, n: int, values: Any) -> None:
    """One call at n keys: outputs and gradients, in float64 and float32."""
    case = case_of(trial, n)
    where = _described(case, module)
    try:
        want, want_grads = _dense(trial, case, torch.float64, values)
    except Invalid as error:
        try:
            _run(trial, case, torch.float64, module)
        except ValueError as refusal:
            trial.refused("call", refusal)
            return
        except Exception as crash:
            trial.crashed("call", crash, n)
            return
        if case.weight.shape[2]:
            # of no queries nothing need be asked
            trial.found("call", f"took what has no meaning: {error}; {where}", n)
        return
    for dtype in (torch.float64, torch.float32):
        if dtype is torch.float32 and "taylor" in trial.spec.words():
            # 1 + cos is a difference of features: what it loses depends on how they are summed
            trial.refusals["call: taylor in float32 is not compared"] += 1
            continue
        try:
            got, grads = _run(trial, case, dtype, module)
        except ValueError as error:
            if module.backend != "auto" and type(error).__name__ == "BackendError":
                trial.refused("call", error)
            else:
                trial.crashed("call", error, n)
            return
        except Exception as error:
            trial.crashed("call", error, n)
            return
        roughly = _Roughly(trial, case, dtype, values)
        names = ("output", "gradient of q", "gradient of k", "gradient of v", "gradient of a table")
        for at, (mine, right) in enumerate(zip((got, *grads), (want, *want_grads), strict=True)):
            about = names[min(at, 4)], where, n
            _compare(trial, about, mine, right, partial(roughly.of, at))


class _Roughly:
    """What the definition comes to in a type, found when it is asked for."""

    def __init__(
        self, trial: Trial, case: Case, dtype: torch.dtype, values: dict[int, torch.Tensor]
    ) -> None:
        self._trial, self._case, self._dtype, self._values = trial, case, dtype, values
        self._found: list[list[torch.Tensor]] = []

    def of(self, at: int) -> Iterator[torch.Tensor]:
        """The result of a number, rounded in one way after the other, in float64."""
        for index, factor in enumerate(FACTORS):
            if index == len(self._found):
                self._found.append(self._with(factor))
            yield self._found[index][at]

    def _with(self, factor: float) -> list[torch.Tensor]:
        q, k, v = self._case.leaves
        case = replace(self._case, leaves=(q, k, v * factor))
        out, grads = _dense(self._trial, case, self._dtype, self._values)
        # the gradient of the values is what multiplies them
        return [x.double() / (1.0 if at == 3 else factor) for at, x in enumerate((out, *grads))]


def _compare(
    trial: Trial,
    about: tuple[str, str, int],
    got: torch.Tensor,
    want: torch.Tensor,
    roughly: Callable[[], Iterator[torch.Tensor]] = lambda: iter(()),
) -> None:
    what, where, n = about
    single = got.dtype == torch.float32
    kind = f"{what} in {'float32' if single else 'float64'}"
    trial.checks[kind] += 1
    if got.shape != want.shape:
        trial.found(kind, f"shape {list(got.shape)} instead of {list(want.shape)}; {where}", n)
        return
    if not want.numel():
        return
    scale = max(1.0, float(want.abs().max()))
    least = (ROUGH if single else EXACT) * scale
    allowed, error = least, float((got.double() - want).abs().max())
    for rough in roughly():
        if error <= allowed or not math.isfinite(allowed):
            break
        off = WORSE * float((rough - want).abs().max())
        allowed = max(allowed, least + off) if math.isfinite(off) else off
    if not math.isfinite(allowed):
        trial.refusals[f"{kind}: not finite by the definition"] += 1
        return
    if not error <= allowed:
        message = f"error {error:.3g}, allowed {allowed:.3g}, scale {scale:.3g}; {where}"
        trial.found(kind, message, n)


def _described(case: Case, module: CompiledAttention) -> str:
    given, _ = case.tensors(torch.float64)
    shapes = ", ".join(f"{x} {list(t.shape)}" for x, t in zip("qkv", given, strict=True))
    padding = "" if case.padding is None else f", padding {case.padding.astype(int).tolist()}"
    return f"{module.backend}, {shapes}, {case.layout}, layer {case.layer}{padding}"[:700]


def modules(trial: Trial, spec: Spec, chosen: list[int]) -> None:
    """Calls of a module at some lengths, steps, and the emitted class."""
    backend = str(trial.numbers.choice(FORMULAS if has_mechanism(trial.spec) else GRAPHS))
    seed = int(trial.numbers.integers(2**31))
    try:
        module = spec.compile(backend=backend)
    except ValueError as error:
        if type(error).__name__ == "BackendError" and backend != "auto":
            trial.refused("compile", error)
        else:
            trial.crashed("compile", error)
        return
    except Exception as error:
        trial.crashed("compile", error)
        return
    values = learned(module, seed)
    for n in chosen:
        call(trial, spec, module, n, values)
    if trial.findings:
        return
    n = chosen[-1]
    if trial.spec.causal and backend == "auto" and n:
        steps(trial, module.to(torch.float64), n, values)
    if trial.numbers.random() < 0.15 and backend == "auto":
        made = emitted_class(trial, spec, whole=trial.numbers.random() < 0.04)
        if made is not None:
            same_bits(trial, module.to(torch.float32), made, seed, n)


def same_bits(trial: Trial, module: CompiledAttention, made: Any, seed: int, n: int) -> None:
    """The emitted class against the module, bit for bit."""
    case = case_of(trial, n)
    other = made()
    learned(other, seed)
    try:
        mine, grads = _run(trial, case, torch.float32, module)
    except ValueError:
        return
    out, others = _run(trial, case, torch.float32, other)
    pairs = zip((mine, *grads), (out, *others), strict=True)
    same = all(bool(((a == b) | (a.isnan() & b.isnan())).all()) for a, b in pairs)
    trial.same("emitted bits", same, "the emitted class computes something else", n)


def steps(trial: Trial, module: CompiledAttention, n: int, values: dict[int, torch.Tensor]) -> None:
    """Streaming against the rows of the whole sequence."""
    case = case_of(trial, n, whole=True)
    try:
        want, _ = _dense(trial, case, torch.float64, values)
    except Invalid:
        return
    (q, k, v), _ = case.tensors(torch.float64)
    given = case.given(trial.spec)
    outs: list[torch.Tensor] = []
    state: StreamState | None = None
    low = 0
    while low < n:
        high = min(n, low + int(trial.numbers.choice((1, 1, 2, 3, 7, 20))))
        part: dict[str, Any] = {"layer": given["layer"]}
        if "key_padding_mask" in given:
            part["key_padding_mask"] = given["key_padding_mask"][:, low:high]
        if "inputs" in given:
            part["inputs"] = {
                name: x if x.dim() == 1 else x[:, low:high] for name, x in given["inputs"].items()
            }
        try:
            with torch.no_grad():
                at = slice(low, high)
                out, state = module.step(q[:, :, at], k[:, :, at], v[:, :, at], state, **part)
        except ValueError as error:
            trial.refused("step", error)
            return
        except Exception as error:
            trial.crashed("step", error, n)
            return
        outs.append(out)
        low = high
    where = _described(case, module)
    got = torch.cat(outs, 2)
    _compare(trial, ("steps", where, n), got, want)
