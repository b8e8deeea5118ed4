"""A model is run on the arguments that are given, and each of its attention layers compared."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from attnspec.model_check.call import Call
from attnspec.model_check.compare import compared
from attnspec.model_check.report import LayerCheck, ModelVerification
from attnspec.model_check.wanted import NotComparable, Wanted, copied
from attnspec.model_check.watch import Frame, Watch
from attnspec.text.diagnostics import AttnSpecError

if TYPE_CHECKING:
    from attnspec.spec import Spec

_MASK, _CACHE = ("attention_mask",), {"use_cache": False}
_CHANGES: tuple[tuple[str, tuple[str, ...], Mapping[str, object], str | None], ...] = (
    ("without `attention_mask`", _MASK, {}, None),
    ("with `use_cache=False`", (), _CACHE, None),
    ("without `attention_mask` and with `use_cache=False`", _MASK, _CACHE, None),
    ("with attn_implementation = 'eager'", (), {}, "eager"),
    ("with attn_implementation = 'sdpa'", (), {}, "sdpa"),
)
"""Other settings: in words, the arguments left out, those added, and the implementation."""


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

    The model is run on `args` and `kwargs`, in evaluation and without gradients, and stays as it
    was, with its caches; `call` has arguments named like ours. `inputs` are the run-time inputs of
    the spec, [B, n]; documents are taken from `position_ids`. A spec of one layer holds for every
    attention layer, else its layers are theirs in the order of calls. `layers` are the numbers of
    those to look at, or dotted names of modules to be taken as attention layers. With
    `positions="real"` the spec counts from the first real token of each sample.

    Every weight is looked at, in n / e calls of each attention for values of e elements; where that
    is more than 16, or not `exact`, all rows at once, and weights where a row differs: this misses
    one pair with a probability of at most 1e-6. Raises AttnSpecError where spec and arguments do
    not fit, and what the model itself raises.
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
    checks: list[LayerCheck] = field(init=False)
    faults: list[str] = field(init=False)

    def __post_init__(self) -> None:
        given: object = self.model
        if not isinstance(given, nn.Module):
            raise TypeError(f"a model, a torch.nn.Module, is needed, got {type(given).__name__}")
        self.model = getattr(self.model, "_orig_mod", self.model)
        names = dict(self.model.named_modules())
        for path in self.layers:
            if isinstance(path, str) and path not in names:
                raise AttnSpecError(f"`layers` must be numbers or modules, got {path!r}")
        arguments = self.args, self.kwargs, self.inputs
        self.wanted = Wanted(self.spec, self.model, *arguments, self.positions)
        self.checks, self.faults, self.start = [], [], time.monotonic()

    def verified(self) -> ModelVerification:
        """What was found, and where pairs differ, the settings in which they do not; raises
        Interrupted."""
        found = self._looked_at()
        if not found.differing or found.interrupted:
            return found
        try:
            return replace(found, equal_with=tuple(self._equal_settings()))
        except KeyboardInterrupt:
            words = "other settings were not looked at"
            raise Interrupted(replace(found, interrupted=words)) from None

    def _looked_at(self) -> ModelVerification:
        """What was found with this setting; raises Interrupted."""
        watch = Watch(self.model, self._see, tuple(x for x in self.layers if isinstance(x, str)))
        trained = [module for module in self.model.modules() if module.training]
        self.model.eval()
        try:
            plain = self._called()
            with watch.watching():
                watched = self._called()
        except KeyboardInterrupt:
            raise Interrupted(self._report(f"after {len(self.checks)} layers")) from None
        except TimeoutError:
            return self._report(f"the time is over, after {len(self.checks)} layers")
        finally:
            for module in trained:
                module.training = True
        self._compare_outputs(plain, watched)
        for path, module in watch.uncalled():
            kind = type(module).__name__
            self.checks.append(LayerCheck(None, path, kind, reason="it was never called"))
        layers, ran = self.spec.layers, sum(check.layer is not None for check in self.checks)
        if not ran:
            self.faults.append("no attention layer was found: name modules, `layers=[…]`")
        elif ran < layers:
            self.faults.append(f"the spec has {layers} layers, {ran} ran")
        return self._report()

    def _see(self, frame: Frame, call: Call) -> None:
        """Look at one attention layer."""
        if time.monotonic() - self.start > self.seconds:
            raise TimeoutError
        number = sum(check.layer is not None for check in self.checks)
        self.progress(number, frame.path)
        layers, other = self.spec.layers, frame.crosses != self.wanted.program.cross
        words = ("another", "is of one") if frame.crosses else ("one", "says `cross`")
        numbers = [x for x in self.layers if isinstance(x, int)]
        reasons = {
            f"it reads {words[0]} sequence, and the spec {words[1]}": other,
            "not asked for": numbers and number not in numbers,
            f"the spec has {layers} layers": number >= layers > 1,
        }
        reason = next((words for words, holds in reasons.items() if holds), None)
        excused = reason in list(reasons)[:2]
        at = None if other else number
        check = LayerCheck(at, frame.path, call.kind, reason=reason, excused=excused)
        try:
            done = check if reason else compared(call, self.wanted, check, self.exact)
        except NotComparable as fault:
            done = replace(check, reason=str(fault))
        self.checks.append(done)

    def _called(self) -> Any:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            kwargs = {name: copied(x) for name, x in self.kwargs.items()}
            return self.model(*map(copied, self.args), **kwargs)

    def _compare_outputs(self, plain: Any, watched: Any) -> None:
        """The model was looked at as it runs only if its outputs are what they are without us: a
        fused kernel or compiled code may compute something else."""
        real = self.wanted.own
        for before, after in zip(_tensors(plain), _tensors(watched), strict=True):
            gap = (before - after).abs()
            if real is not None and gap.shape[:2] == real.shape:
                gap = gap[real]
            size = torch.cat([before.float().flatten().abs().nan_to_num(), torch.ones(1)]).max()
            if bool((gap > 2 * torch.finfo(after.dtype).eps ** (2 / 3) * size).any()):
                self.faults.append(
                    "what runs otherwise (a fused kernel, compiled code) gives other outputs than"
                    f" what was looked at, by {float(gap.nan_to_num().max()):.2g}"
                )
                return

    def _report(self, interrupted: str | None = None) -> ModelVerification:
        return ModelVerification(
            spec=self.spec.name,
            model=type(self.model).__name__,
            setting=tuple(self.wanted.words),
            layers=tuple(self.checks),
            faults=tuple(self.faults),
            notes=tuple(self.wanted.notes),
            interrupted=interrupted,
        )

    def _equal_settings(self) -> Iterator[str]:
        """The settings, other than this in one or two things, in which the model reads the pairs of
        the spec."""
        arguments = self.wanted.arguments
        for words, left_out, added, name in _CHANGES:
            kept = {n: x for n, x in arguments.items() if n not in left_out}
            now = getattr(getattr(self.model, "config", None), "_attn_implementation", None)
            if len(kept) + len(left_out) != len(arguments) or (name and now in (None, name)):
                continue
            switch: Any = getattr(self.model, "set_attn_implementation", lambda name: None)
            try:
                switch(name or now)
                if replace(self, args=(), kwargs={**kept, **added})._looked_at().ok:
                    yield words
            except Exception:
                # a setting that is refused explains nothing
                continue
            finally:
                switch(now)


def _tensors(output: Any) -> list[torch.Tensor]:
    """The floating point tensors of an output, on the CPU."""
    tensors = (x for x in tree_leaves(output) if isinstance(x, torch.Tensor))
    return [x.cpu() for x in tensors if x.is_floating_point()]
