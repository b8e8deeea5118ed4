"""A model is run on the arguments that are given, and each of its attention layers compared."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from attnspec.model_check.call import NARROWEST, READ, Call
from attnspec.model_check.report import LayerCheck, ModelVerification
from attnspec.model_check.wanted import NotComparable, Pairs, Wanted, copied
from attnspec.model_check.watch import Frame, Watch
from attnspec.text.diagnostics import AttnSpecError

if TYPE_CHECKING:
    from attnspec.spec import Spec

# so many leaks, and as many missing pairs, of a layer are listed
_LISTED = 1000
# up to so many calls all weights are asked for, unless another way is chosen
_FEW = 16
_MASK, _CACHE = "attention_mask", {"use_cache": False}
_CHANGES: Mapping[str, tuple[str, Mapping[str, object], str]] = {
    "without `attention_mask`": (_MASK, {}, ""),
    "with `use_cache=False`": ("", _CACHE, ""),
    "without `attention_mask` and with `use_cache=False`": (_MASK, _CACHE, ""),
    "with attn_implementation = 'eager'": ("", {}, "eager"),
    "with attn_implementation = 'sdpa'": ("", {}, "sdpa"),
}
"""Other settings: the argument left out, those added, and the implementation."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C; `partial` is what had been looked at by then."""

    def __init__(self, partial: ModelVerification) -> None:
        super().__init__(str(partial))
        self.partial = partial


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
    """Hold a running model against a spec: which key influences which query in which layer.

        print(verify_model(model, spec, input_ids, attention_mask=mask))

    The model is run on `args` and `kwargs`, without gradients, and stays as it was, with its
    caches; `call` has arguments named like ours. `inputs` are the run-time inputs of the spec,
    [B, n]; documents are taken from `position_ids`. A spec of one layer holds for every attention
    layer, else its layers are theirs in the order of calls. `layers` are numbers of those to look
    at, or dotted names of modules to be taken as attention layers. With `positions="real"` the spec
    counts from the first real token of each sample.

    Every weight is looked at, in n / e calls for values of e elements; where that is more than 16,
    or not `exact`, all rows at once, which misses one pair with a probability of at most 1e-6.
    Raises AttnSpecError where spec and arguments do not fit, and what the model raises.
    """
    chosen = (layers,) if isinstance(layers, int | str) else layers or ()
    given = {**kwargs, **(call or {})}
    return Run(model, spec, args, given, inputs, chosen, exact, positions).verified()


@dataclass
class Run:
    """One run of a model, asked as `verify_model` is, and what was seen of each layer; `seconds` is
    a limit of time, and `progress` gets how many layers were looked at, and which is next."""

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
        self.model, names = model, dict(model.named_modules())
        for path in self.layers:
            if isinstance(path, str) and path not in names:
                raise AttnSpecError(f"`layers` must be numbers or modules, got {path!r}")
        arguments = self.args, self.kwargs, self.inputs
        self.wanted = Wanted(self.spec, model, *arguments, self.positions)
        self.checks, self.faults = list[LayerCheck](), list[str]()
        self.start = time.monotonic()

    def verified(self) -> ModelVerification:
        """What was found, and where pairs differ, the settings in which they do not; raises
        Interrupted."""
        try:
            self._look()
            differ = any(x.reason is None and not x.ok for x in self.checks)
            return self._report(equal_with=tuple(self._equal_settings()) if differ else ())
        except KeyboardInterrupt:
            raise Interrupted(self._report(f"after {len(self.checks)} layers")) from None
        except TimeoutError:
            return self._report(f"the time is over, after {len(self.checks)} layers")

    def _look(self) -> None:
        """Run the model and look at its layers."""
        watch = Watch(self.model, self._see, tuple(x for x in self.layers if isinstance(x, str)))
        trained = [module for module in self.model.modules() if module.training]
        self.model.eval()
        try:
            plain = self._called()
            with watch.watching():
                watched = self._called()
        finally:
            for module in trained:
                module.training = True
        self._compare_outputs(plain, watched)
        for path, kind in watch.uncalled():
            self.checks.append(LayerCheck(None, path, kind, reason="it was never called"))
        layers, ran = self.spec.layers, sum(check.layer is not None for check in self.checks)
        if not ran:
            self.faults.append("no attention layer was found: name modules, `layers=[…]`")
        elif ran < layers:
            self.faults.append(f"the spec has {layers} layers, {ran} ran")

    def _see(self, frame: Frame, call: Call) -> None:
        """Look at one attention layer."""
        if time.monotonic() - self.start > self.seconds:
            raise TimeoutError
        number = sum(check.layer is not None for check in self.checks)
        self.progress(number, frame.path)
        check = LayerCheck(number, frame.path, call.kind)
        numbers = [x for x in self.layers if isinstance(x, int)]
        if frame.crosses != self.wanted.program.cross:
            words = ("another", "is of one") if frame.crosses else ("one", "says `cross`")
            reason = f"it reads {words[0]} sequence, and the spec {words[1]}"
            check = replace(check, layer=None, reason=reason, excused=True)
        elif numbers and number not in numbers:
            check = replace(check, reason="not asked for", excused=True)
        elif number >= self.spec.layers > 1:
            check = replace(check, reason=f"the spec has {self.spec.layers} layers")
        else:
            try:
                check = self._compared(call, check)
            except NotComparable as reason:
                check = replace(check, reason=str(reason))
        self.checks.append(check)

    def _compared(self, call: Call, check: LayerCheck) -> LayerCheck:
        """A layer with what was found; raises NotComparable, and AttnSpecError for heads that are
        not those of the spec."""
        wanted, heads, declared = self.wanted, call.shape[1], self.wanted.program.heads
        pairs = wanted.pairs(call, check.path, check.layer or 0)
        if declared not in (None, heads) and not call.together:
            raise AttnSpecError(
                f"`{self.spec.name}` has {declared} heads, the model {heads} in {check.path}"
            )
        check = replace(
            check,
            heads=None if call.together else heads,
            pairs=int((pairs.allowed & pairs.compared).expand(call.shape).sum()),
            faults=call.grouped_wrongly(),
        )
        n_k, width = (0, 0) if call.sizes else call.v.shape[2:]
        few = n_k <= _FEW * width if self.exact is None else self.exact
        by_rows = not few and width >= NARROWEST and not wanted.decided
        if not by_rows or bool((call.rows_differ(pairs.allowed) & pairs.compared).any()):
            check = _by_weights(call, pairs, check)
        return replace(check, passes=call.passes)

    def _called(self) -> Any:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            kwargs = {name: copied(x) for name, x in self.kwargs.items()}
            return self.model(*map(copied, self.args), **kwargs)

    def _compare_outputs(self, plain: Any, watched: Any) -> None:
        """A fault where outputs are others without us: a fused kernel or compiled code may compute
        something else than what was looked at."""
        real = self.wanted.own
        for before, after in zip(_tensors(plain), _tensors(watched), strict=True):
            gap = (before - after).abs()
            if real is not None and gap.shape[:2] == real.shape:
                gap = gap[real]
            size = torch.cat([before.float().flatten().abs().nan_to_num(), torch.ones(1)]).max()
            if bool((gap > 2 * torch.finfo(after.dtype).eps ** (2 / 3) * size).any()):
                self.faults = [
                    "what runs otherwise (a fused kernel, compiled code) gives other outputs than"
                    f" what was looked at, by {float(gap.nan_to_num().max()):.2g}"
                ]

    def _report(
        self, interrupted: str | None = None, equal_with: tuple[str, ...] = ()
    ) -> ModelVerification:
        names, words = (self.spec.name, type(self.model).__name__), tuple(self.wanted.words)
        checks, faults = tuple(self.checks), tuple(self.faults)
        return ModelVerification(*names, words, checks, faults, equal_with, interrupted)

    def _equal_settings(self) -> Iterator[str]:
        """The settings, other than this in one or two things, in which the model reads the pairs of
        the spec."""
        arguments = self.wanted.arguments
        now = getattr(getattr(self.model, "config", None), "_attn_implementation", None)
        switch: Any = getattr(self.model, "set_attn_implementation", lambda name: None)
        for words, (left_out, added, name) in _CHANGES.items():
            kept = {n: x for n, x in arguments.items() if n != left_out}
            if (left_out and left_out not in arguments) or (name and now in (None, name)):
                continue
            try:
                switch(name or now)
                other = replace(self, args=(), kwargs={**kept, **added})
                other._look()
                if other._report().ok:
                    yield words
            except Exception:
                pass  # a setting that is refused explains nothing
            finally:
                switch(now)


def _by_weights(call: Call, pairs: Pairs, check: LayerCheck) -> LayerCheck:
    """Weight by weight."""
    sizes, allowed = call.weights().cpu(), pairs.allowed
    reads = sizes > READ
    if bool((allowed & ~reads).any()) and not call.together:
        # weights that a score makes tiny are read all the same
        reads |= call.weights(double=True).cpu() > 0
    leaks, missing = reads & ~allowed & pairs.compared, allowed & ~reads & pairs.compared
    counts = {what: int((leaks & where).sum()) for what, where in pairs.never.items()}

    def listed(differing: torch.Tensor) -> tuple[tuple[int, int, int | None, int, int], ...]:
        return tuple(
            (b, check.layer or 0, None if call.together else h, pairs.first + q, int(pairs.keys[k]))
            for b, h, q, k in differing.nonzero()[:_LISTED].tolist()
        )

    return replace(
        check,
        leaks=listed(leaks),
        leak_count=int(leaks.sum()),
        weight=float(sizes[leaks][0]) if bool(leaks.any()) else 0.0,
        causes=tuple((f"{what} is read", count) for what, count in counts.items() if count),
        missing=listed(missing),
        missing_count=int(missing.sum()),
    )


def _tensors(output: Any) -> list[torch.Tensor]:
    """The floating point tensors of an output, on the CPU."""
    tensors = (x for x in tree_leaves(output) if isinstance(x, torch.Tensor))
    return [x.cpu() for x in tensors if x.is_floating_point()]
