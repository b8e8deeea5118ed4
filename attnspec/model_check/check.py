"""A model is run on the arguments that are given, and each of its attention layers compared."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from attnspec.model_check.compare import compared
from attnspec.model_check.report import LayerCheck, ModelVerification
from attnspec.model_check.setting import Setting, copied, setting_of
from attnspec.model_check.wanted import NoPlace, Wanted
from attnspec.model_check.watch import Frame, Seen, Watch
from attnspec.text.diagnostics import AttnSpecError

if TYPE_CHECKING:
    from attnspec.spec import Spec

Progress = Callable[[int, str], None]
"""Told how many layers were looked at, and which is next."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, with what had been looked at by then."""

    def __init__(self, partial: ModelVerification) -> None:
        super().__init__(str(partial))
        self.partial = partial


class OutOfTime(Exception):
    """The time that was given is over."""


@dataclass(frozen=True)
class Question:
    """What is asked of a model: see `verify_model` for the fields."""

    spec: Spec
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    inputs: Mapping[str, object] | None = None
    layers: tuple[int | str, ...] | None = None
    exact: bool | None = None
    positions: str = "absolute"
    seconds: float = float("inf")
    progress: Progress = lambda count, doing: None

    @property
    def numbers(self) -> set[int]:
        return {x for x in self.layers or () if isinstance(x, int)}

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(x for x in self.layers or () if isinstance(x, str))


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

    The model is run on `args` and `kwargs`, in evaluation and without gradients; `call` has those
    of its arguments that are named like one of ours. `inputs` are the run-time inputs of the spec,
    [B, n]; documents are taken from `position_ids` where they are not given. A spec of one layer
    holds for every attention layer, else its layers are theirs in the order of calls. `layers` are
    the numbers of those to look at, or dotted names of modules to be taken as attention layers.
    With `positions="real"` the spec counts from the first real token of each sample.

    Every weight is looked at, in n / e calls of each attention for values of e elements; where that
    are more than 16, all rows at once in a call or two, which miss a row that differs by one pair
    with a probability of at most 1e-6. `exact` chooses one of both. Nothing of the model, its
    arguments or caches is changed. Raises AttnSpecError where spec and arguments do not fit, and
    what the model itself raises.
    """
    chosen = (layers,) if isinstance(layers, int | str) else layers
    question = Question(
        spec=spec,
        args=args,
        kwargs={**kwargs, **(call or {})},
        inputs=inputs,
        layers=None if chosen is None else tuple(chosen),
        exact=exact,
        positions=positions,
    )
    return check_model(model, question)


def check_model(model: nn.Module, question: Question) -> ModelVerification:
    """As `verify_model`, with a time limit and progress; raises Interrupted on Ctrl-C."""
    given: object = model
    if not isinstance(given, nn.Module):
        raise TypeError(f"a model, a torch.nn.Module, is needed, got {type(given).__name__}")
    model = getattr(model, "_orig_mod", model)
    require_paths(model, question.paths)
    setting = setting_of(model, question.args, question.kwargs)
    wanted = Wanted(question.spec, setting, question.inputs, question.positions)
    run = Run(model, question, setting, wanted)
    found = run.verified()
    if found.differing and found.interrupted is None:
        for change, other, restore in _other_settings(model, question, setting):
            try:
                again = check_model_once(model, other)
            except Exception:
                # a setting that does not run explains nothing
                continue
            finally:
                restore()
            if again.ok:
                found = found.with_change(change)
    return found


def check_model_once(model: nn.Module, question: Question) -> ModelVerification:
    """One run in one setting."""
    setting = setting_of(model, question.args, question.kwargs)
    wanted = Wanted(question.spec, setting, question.inputs, question.positions)
    return Run(model, question, setting, wanted).verified()


def require_paths(model: nn.Module, paths: Sequence[str]) -> None:
    """Raise for a dotted name that is no module of the model."""
    known = dict(model.named_modules())
    for path in paths:
        if path not in known:
            raise AttnSpecError(f"`layers` must be numbers or modules of the model, got {path!r}")


@dataclass
class Run:
    """One run of a model, and what was seen of each layer."""

    model: nn.Module
    question: Question
    setting: Setting
    wanted: Wanted
    checks: list[LayerCheck] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    start: float = field(default_factory=time.monotonic)

    def verified(self) -> ModelVerification:
        """What was found; raises Interrupted."""
        watch = Watch(self.model, self.see, self.forget, self.question.paths)
        try:
            with quiet(self.model):
                plain = self._called()
                with watch.watching():
                    watched = self._called()
            self._compare_outputs(plain, watched)
            self._uncalled(watch)
        except KeyboardInterrupt:
            raise Interrupted(self.report(f"after {len(self.checks)} layers")) from None
        except OutOfTime:
            return self.report(f"the time is over, after {len(self.checks)} layers")
        return self.report()

    def report(self, interrupted: str | None = None) -> ModelVerification:
        """What is known so far."""
        if not self.checks and interrupted is None:
            self.faults.append("no attention layer was found: name modules, `layers=[…]`")
        found = {check.layer for check in self.checks if check.layer is not None}
        declared = self.question.spec.program.layers
        if declared is not None and declared > 1 and len(found) < declared and not interrupted:
            self.faults.append(f"the spec has {declared} layers, {len(found)} ran")
        return ModelVerification(
            spec=self.question.spec.name,
            model=type(self.model).__name__,
            setting=self.setting.words,
            layers=tuple(self.checks),
            faults=tuple(self.faults),
            notes=tuple(self.wanted.notes),
            interrupted=interrupted,
        )

    def see(self, frame: Frame, seen: Seen) -> None:
        """Look at one attention layer."""
        if time.monotonic() - self.start > self.question.seconds:
            raise OutOfTime
        number = sum(check.layer is not None for check in self.checks)
        self.question.progress(number, frame.path)
        check = LayerCheck(number, frame.path, seen.kind)
        self.checks.append(self._looked_at(frame, seen, check))

    def forget(self, count: int) -> None:
        """Take back what was seen of a module's parts."""
        del self.checks[count:]

    def _looked_at(self, frame: Frame, seen: Seen, check: LayerCheck) -> LayerCheck:
        unnumbered = LayerCheck(None, check.path, check.kind, excused=True)
        if frame.crosses and not self.wanted.program.cross:
            return _left(unnumbered, "it reads another sequence, and the spec is of one")
        if self.wanted.program.cross and not frame.crosses:
            return _left(unnumbered, "it reads one sequence, and the spec says `cross`")
        declared, number = self.question.spec.program.layers, check.layer or 0
        if self.question.numbers and number not in self.question.numbers:
            return LayerCheck(number, check.path, check.kind, reason="not asked for", excused=True)
        if declared is not None and declared > 1 and number >= declared:
            return _left(check, f"the spec has {declared} layers")
        if self.wanted.mixes:
            return _left(check, "the spec is a formula without pairs")
        try:
            return compared(seen, self.wanted, check, self.setting.batch, self.question.exact)
        except NoPlace as fault:
            return _left(check, str(fault))

    def _called(self) -> Any:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            return self.model(*copied(self.question.args), **copied(dict(self.question.kwargs)))

    def _compare_outputs(self, plain: Any, watched: Any) -> None:
        """The model was looked at as it runs only if its outputs are what they are without us: a
        fused kernel or compiled code may compute something else."""
        for before, after in zip(_tensors(plain), _tensors(watched), strict=False):
            if before.shape != after.shape or not before.is_floating_point():
                continue
            apart = (before.double() - after.double()).abs()
            real = self.setting.real
            if real is not None and apart.ndim > 1 and apart.shape[:2] == real.shape:
                apart = apart[real.to(apart.device)]
            size = before.double().abs().nan_to_num().max() if before.numel() else 0.0
            if bool((apart > torch.finfo(before.dtype).eps ** (2 / 3) * (1 + size)).any()):
                self.faults.append(
                    "what runs otherwise (a fused kernel, compiled code) gives other outputs than"
                    f" what was looked at, by {float(apart.nan_to_num().max()):.2g}"
                )
                return

    def _uncalled(self, watch: Watch) -> None:
        for path, module in watch.uncalled():
            kind = type(module).__name__
            self.checks.append(LayerCheck(None, path, kind, reason="it was never called"))


def _left(check: LayerCheck, reason: str) -> LayerCheck:
    return LayerCheck(check.layer, check.path, check.kind, reason=reason, excused=check.excused)


@contextmanager
def quiet(model: nn.Module) -> Iterator[None]:
    """The model in evaluation, where nothing is dropped; each part is as before afterwards."""
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of an output, in order, caches left out."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _tensors(each)


def _other_settings(
    model: Any, question: Question, setting: Setting
) -> Iterator[tuple[str, Question, Callable[[], None]]]:
    """What may be the reason: the same question in a setting that differs in one thing, and what
    puts the model back."""
    from dataclasses import replace

    named = dict(setting.arguments)
    if setting.real is not None and bool(setting.real.all()) and "attention_mask" in named:
        rest = {name: x for name, x in named.items() if name != "attention_mask"}
        yield "without `attention_mask`", replace(question, args=(), kwargs=rest), lambda: None
    if setting.past is None and named.get("use_cache") is not False and hasattr(model, "generate"):
        rest = {**named, "use_cache": False}
        yield "with `use_cache=False`", replace(question, args=(), kwargs=rest), lambda: None
    switch = getattr(model, "set_attn_implementation", None)
    now = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if switch is not None and now is not None:
        for name in {"eager", "sdpa"} - {now}:
            try:
                switch(name)
            except Exception:
                continue
            yield f"with attn_implementation = {name!r}", question, partial(switch, now)
