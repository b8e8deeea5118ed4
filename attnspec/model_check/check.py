"""A model is run on its arguments, and each of its attention layers is compared with a spec."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from attnspec.ir.program import Program
from attnspec.model_check.call import NARROWEST, READ, Call
from attnspec.model_check.report import LayerCheck, ModelVerification
from attnspec.model_check.wanted import NotComparable, Pairs, Wanted, copied
from attnspec.model_check.watch import Frame, Watch
from attnspec.text.diagnostics import AttnSpecError, count_of, hinted

if TYPE_CHECKING:
    from attnspec.spec import Spec

# how many leaks, and how many missing pairs, of a layer are listed
_LISTED = 1000
# up to this many calls every weight is measured, unless `exact` says otherwise
_FEW = 16
# changes of a setting: of arguments, and of the implementation that a config names
_CHANGES: tuple[dict[str, Any], ...] = (
    {"attention_mask": None},
    {"use_cache": False},
    {"attention_mask": None, "use_cache": False},
    {"attn_implementation": "eager"},
    {"attn_implementation": "sdpa"},
)


def verify_model(
    model: nn.Module,
    spec: Spec,
    *args: Any,
    inputs: Mapping[str, object] | None = None,
    layers: Sequence[int | str] | int | str | None = None,
    exact: bool | None = None,
    positions: str = "absolute",
    call: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> ModelVerification:
    """Compare a running model with a spec: which key influences which query in which layer.

        print(verify_model(model, spec, input_ids, attention_mask=mask))

    The model runs on `args`, `kwargs` and `call`, for names that this function uses itself, and
    stays as it was. `inputs` are run-time inputs of the spec, [B, n]; documents are taken from
    `position_ids`. A spec of one layer holds for every attention layer; else its layers are those
    of the model in call order. `layers`: numbers of layers to check, or dotted names of modules to
    be taken as attention layers. `positions="real"` counts from each sample's first real token.

    Every weight is measured, in n / e calls for values of e elements. Where these are more than 16,
    or `exact` is False, one call compares all rows: it misses a pair with a probability of at most
    1e-6. Raises AttnSpecError where spec and arguments do not fit, what the model raises, and
    KeyboardInterrupt with the report by then.
    """
    chosen = (layers,) if isinstance(layers, int | str) else layers or ()
    kwargs |= call or {}
    return Run(model, spec, args, kwargs, inputs, chosen, exact, positions).verified()


@dataclass
class Run:
    """One run of a model with the arguments of `verify_model`, and the `report` on it. `progress`
    gets the number of layers that ran and the path of the next; `seconds` limits the time."""

    model: nn.Module
    spec: Spec
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    inputs: Mapping[str, object] | None = None
    layers: Sequence[int | str] = ()
    exact: bool | None = None
    positions: str = "absolute"
    seconds: float = float("inf")
    progress: Callable[[int, str], None] = lambda count, doing: None

    def __post_init__(self) -> None:
        model: Any = getattr(self.model, "_orig_mod", self.model)
        if not isinstance(model, nn.Module):
            raise TypeError(f"a model, a torch.nn.Module, is needed, got {type(model).__name__}")
        if not isinstance(getattr(self.spec, "program", None), Program):
            got = type(self.spec).__name__
            raise TypeError(f"a spec is needed, `attnspec.parse(text)` or `load(path)`, got {got}")
        self.model, names = model, dict(model.named_modules())
        for path in self.layers:
            if isinstance(path, str) and path not in names:
                raise AttnSpecError(hinted(f"`layers`: no module is named {path!r}", path, names))
        self.implementation = getattr(getattr(model, "config", None), "_attn_implementation", None)
        bound = zip(inspect.signature(model.forward).parameters, self.args, strict=False)
        self.arguments: dict[str, Any] = {**dict(bound), **self.kwargs}
        self.wanted = Wanted(self.spec, self.arguments, self.inputs or {}, self.positions)
        words = [f"attn_implementation = {self.implementation!r}"] * bool(self.implementation)
        words += self.wanted.words
        self.report = ModelVerification(self.spec.name, type(model).__name__, words)
        self.start, self.ran = time.monotonic(), 0

    def verified(self) -> ModelVerification:
        """The report, with settings that are equal where this one is not."""
        report = self.report
        try:
            self._look()
            if any(layer.reason is None and not layer.ok for layer in report.layers):
                report.equal_with = list(self._equal_settings())
        except KeyboardInterrupt:
            report.interrupted = f"Ctrl-C, after {count_of(len(report.layers), 'layer')}"
            raise KeyboardInterrupt(str(report)) from None
        except TimeoutError:
            report.interrupted = f"the time limit, after {count_of(len(report.layers), 'layer')}"
        return report

    def _look(self) -> None:
        """Run the model and check its layers."""
        watch = Watch(self.model, self._see, tuple(x for x in self.layers if isinstance(x, str)))
        trained = [module for module in self.model.modules() if module.training]
        self.model.eval()
        try:
            plain = self._outputs()
            with watch.watching():
                watched = self._outputs()
        finally:
            for module in trained:
                module.training = True
        self._compare_outputs(plain, watched)
        for path, kind in watch.uncalled():
            self.report.layers.append(LayerCheck(None, path, kind, reason="it was never called"))
        if not self.report.layers:
            self.report.faults.append("no attention layer ran: name its module in `layers`")
        elif self.ran < self.spec.layers > 1:
            self.report.faults.append(f"the spec has {self.spec.layers} layers, {self.ran} ran")

    def _see(self, frame: Frame, call: Call) -> None:
        """Check one attention layer."""
        if time.monotonic() - self.start > self.seconds:
            raise TimeoutError
        number, other = self.ran, frame.crosses != self.wanted.program.cross
        self.progress(number, frame.path)
        check = LayerCheck(None if other else number, frame.path, call.kind)
        self.ran += not other
        numbers = [x for x in self.layers if isinstance(x, int)]
        if other:
            words = ("another", "has one") if frame.crosses else ("one", "says `cross`")
            check.reason = f"it reads {words[0]} sequence, and the spec {words[1]}"
            check.excused = True
        elif numbers and number not in numbers:
            check.reason, check.excused = "not asked for", True
        elif number >= self.spec.layers > 1:
            check.reason = f"the spec has {self.spec.layers} layers"
        else:
            try:
                self._compare(call, check)
            except NotComparable as reason:
                check.reason = str(reason)
        self.report.layers.append(check)

    def _compare(self, call: Call, check: LayerCheck) -> None:
        """Compare a layer; raises NotComparable, and AttnSpecError where heads differ."""
        heads, declared = call.shape[1], self.wanted.program.heads
        pairs = self.wanted.pairs(call, check.path, check.layer or 0)
        if declared not in (None, heads) and not call.together:
            words = f"`{self.spec.name}` has {declared} heads, and the model has {heads} in"
            raise AttnSpecError(f"{words} {check.path or 'itself'}")
        check.heads = None if call.together else heads
        check.pairs = int((pairs.allowed & pairs.compared).expand(call.shape).sum())
        check.faults = call.grouped_wrongly()
        n_k, width = (0, 0) if call.sizes else call.v.shape[2:]
        few = n_k <= _FEW * width if self.exact is None else self.exact
        by_rows = not few and width >= NARROWEST and not self.wanted.decided
        if not by_rows or bool((call.rows_differ(pairs.allowed) & pairs.compared).any()):
            _compare_weights(call, pairs, check)
        check.passes = call.passes

    def _outputs(self) -> list[Tensor]:
        """Run the model: the floating point tensors that it returns, on the CPU."""
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            kwargs = {name: copied(x) for name, x in self.kwargs.items()}
            leaves = tree_leaves(self.model(*map(copied, self.args), **kwargs))
        tensors = (x for x in leaves if isinstance(x, Tensor))
        return [x.cpu() for x in tensors if x.is_floating_point()]

    def _compare_outputs(self, plain: list[Tensor], watched: list[Tensor]) -> None:
        """Add a fault where a fused kernel or compiled code returns other outputs."""
        real = self.wanted.own
        for before, after in zip(plain, watched, strict=True):
            gap = (before - after).abs()
            if real is not None and gap.shape[:2] == real.shape:
                gap = gap[real]
            size = torch.cat([before.float().flatten().abs().nan_to_num(), torch.ones(1)]).max()
            if bool((gap > 2 * torch.finfo(after.dtype).eps ** (2 / 3) * size).any()):
                words = "a fused kernel or compiled code gives other outputs than the checked calls"
                self.report.faults = [f"{words}, by {float(gap.nan_to_num().max()):.2g}"]

    def _equal_settings(self) -> Iterator[str]:
        """The changes with which the model is equal."""
        model: Any = self.model
        before = {"attn_implementation": self.implementation, **self.arguments}
        for change in _CHANGES:
            if any(before.get(name) in (value,) for name, value in change.items()):
                continue
            kwargs = {**self.arguments, **change}
            try:
                if name := kwargs.pop("attn_implementation", None):
                    model.set_attn_implementation(name)
                other = replace(self, args=(), kwargs=kwargs)
                other.start = self.start
                other._look()
                if other.report.ok:
                    yield " and ".join(f"{name} = {value!r}" for name, value in change.items())
            except TimeoutError:
                return
            except Exception:
                pass  # a setting that is refused explains nothing
            finally:
                if self.implementation:
                    model.set_attn_implementation(self.implementation)


def _compare_weights(call: Call, pairs: Pairs, check: LayerCheck) -> None:
    """Compare a layer weight by weight."""
    sizes, allowed = call.weights().cpu(), pairs.allowed
    reads = sizes > READ
    if bool((allowed & ~reads).any()) and not call.together:
        # weights that a score makes tiny are read all the same
        reads |= call.weights(double=True).cpu() > 0
    leaks, missing = reads & ~allowed & pairs.compared, allowed & ~reads & pairs.compared
    check.leak_count, check.missing_count = int(leaks.sum()), int(missing.sum())
    check.leaks, check.missing = (
        [
            (b, check.layer or 0, None if call.together else h, pairs.first + q, int(pairs.keys[k]))
            for b, h, q, k in differing.nonzero()[:_LISTED].tolist()
        ]
        for differing in (leaks, missing)
    )
    if check.leaks:
        check.weight = float(sizes[leaks][0])
    counts = {what: int((leaks & where).sum()) for what, where in pairs.never.items()}
    check.causes = [(f"{what} is read", count) for what, count in counts.items() if count]
