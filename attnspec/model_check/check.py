"""A model is run on the arguments that are given, and each of its attention layers compared."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from attnspec.model_check.compare import compared
from attnspec.model_check.report import LayerCheck, ModelVerification
from attnspec.model_check.setting import copied, setting_of
from attnspec.model_check.wanted import NoPlace, Wanted
from attnspec.model_check.watch import Frame, Seen, Watch
from attnspec.text.diagnostics import AttnSpecError

if TYPE_CHECKING:
    from attnspec.spec import Spec


class Interrupted(KeyboardInterrupt):
    """Ctrl-C; `partial` is what had been looked at by then."""

    def __init__(self, partial: ModelVerification) -> None:
        super().__init__(str(partial))
        self.partial = partial


class OutOfTime(Exception):
    """The time that was given is over."""


@dataclass(frozen=True)
class Question:
    """What is asked of a model, as `verify_model` has it; `seconds` is a limit of time, and
    `progress` is told how many layers were looked at, and which is next."""

    spec: Spec
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    inputs: Mapping[str, object] | None = None
    layers: Sequence[int | str] | None = None
    exact: bool | None = None
    positions: str = "absolute"
    seconds: float = float("inf")
    progress: Callable[[int, str], None] = lambda count, doing: None


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
    is more than 16, all rows at once in a call or two, which miss a row that differs by one pair
    with a probability of at most 1e-6. `exact` chooses one of both. Nothing of the model, its
    arguments or caches is changed. Raises AttnSpecError where spec and arguments do not fit, and
    what the model itself raises.
    """
    chosen = (layers,) if isinstance(layers, int | str) else layers
    given = {**kwargs, **(call or {})}
    return check_model(model, Question(spec, args, given, inputs, chosen, exact, positions))


def check_model(model: nn.Module, question: Question) -> ModelVerification:
    """As `verify_model`, with a time limit and progress; raises Interrupted on Ctrl-C."""
    given: object = model
    if not isinstance(given, nn.Module):
        raise TypeError(f"a model, a torch.nn.Module, is needed, got {type(given).__name__}")
    model = getattr(model, "_orig_mod", model)
    known = dict(model.named_modules())
    for path in question.layers or ():
        if isinstance(path, str) and path not in known:
            raise AttnSpecError(f"`layers` must be numbers or modules of the model, got {path!r}")
    found = Run(model, question).verified()
    if found.differing and found.interrupted is None:
        try:
            found = replace(found, equal_with=tuple(_equal_settings(model, question)))
        except Interrupted:
            words = "every layer was looked at, other settings were not"
            raise Interrupted(replace(found, interrupted=words)) from None
    return found


class Run:
    """One run of a model, and what was seen of each layer."""

    def __init__(self, model: nn.Module, question: Question) -> None:
        self.model, self.question = model, question
        self.setting = setting_of(model, question.args, question.kwargs)
        self.wanted = Wanted(question.spec, self.setting, question.inputs, question.positions)
        self.numbers = {x for x in question.layers or () if isinstance(x, int)}
        self.checks: list[LayerCheck] = []
        self.faults: list[str] = []
        self.start = time.monotonic()

    def verified(self) -> ModelVerification:
        """What was found; raises Interrupted."""
        paths = tuple(x for x in self.question.layers or () if isinstance(x, str))
        watch = Watch(self.model, self.see, self.forget, paths)
        try:
            with quiet(self.model):
                plain = self._called()
                with watch.watching():
                    watched = self._called()
            self._compare_outputs(plain, watched)
            for path, module in watch.uncalled():
                kind = type(module).__name__
                self.checks.append(LayerCheck(None, path, kind, reason="it was never called"))
        except KeyboardInterrupt:
            raise Interrupted(self._report(f"after {len(self.checks)} layers")) from None
        except OutOfTime:
            return self._report(f"the time is over, after {len(self.checks)} layers")
        return self._report()

    def see(self, frame: Frame, seen: Seen) -> None:
        """Look at one attention layer."""
        if time.monotonic() - self.start > self.question.seconds:
            raise OutOfTime
        number = sum(check.layer is not None for check in self.checks)
        self.question.progress(number, frame.path)
        self.checks.append(self._looked_at(frame, seen, number))

    def forget(self, count: int) -> None:
        """Take back what was seen of a module's parts."""
        del self.checks[count:]

    def _looked_at(self, frame: Frame, seen: Seen, number: int) -> LayerCheck:
        check, layers = LayerCheck(number, frame.path, seen.kind), self.question.spec.layers
        if frame.crosses != self.wanted.program.cross:
            one, other = ("another", "is of one") if frame.crosses else ("one", "says `cross`")
            reason = f"it reads {one} sequence, and the spec {other}"
            return replace(check, layer=None, reason=reason, excused=True)
        if self.numbers and number not in self.numbers:
            return replace(check, reason="not asked for", excused=True)
        if number >= layers > 1:
            return replace(check, reason=f"the spec has {layers} layers")
        if self.wanted.mixes:
            return replace(check, reason="the spec is a formula without pairs")
        try:
            return compared(seen, self.wanted, check, self.question.exact)
        except NoPlace as fault:
            return replace(check, reason=str(fault))

    def _called(self) -> Any:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            return self.model(*copied(self.question.args), **copied(dict(self.question.kwargs)))

    def _compare_outputs(self, plain: Any, watched: Any) -> None:
        """The model was looked at as it runs only if its outputs are what they are without us: a
        fused kernel or compiled code may compute something else."""
        real = self.setting.own
        for before, after in zip(_tensors(plain), _tensors(watched), strict=True):
            apart = (before.double() - after.double()).abs()
            if real is not None and apart.shape[:2] == real.shape:
                apart, before = apart[real], before[real]
            size = 1 + before.double().abs().nan_to_num().amax() if before.numel() else 1.0
            if bool((apart > torch.finfo(after.dtype).eps ** (2 / 3) * size).any()):
                self.faults.append(
                    "what runs otherwise (a fused kernel, compiled code) gives other outputs than"
                    f" what was looked at, by {float(apart.nan_to_num().max()):.2g}"
                )
                return

    def _report(self, interrupted: str | None = None) -> ModelVerification:
        """What is known so far."""
        layers = self.question.spec.layers
        ran = sum(check.layer is not None for check in self.checks)
        if interrupted is None and not ran:
            self.faults.append("no attention layer was found: name modules, `layers=[…]`")
        elif interrupted is None and ran < layers:
            self.faults.append(f"the spec has {layers} layers, {ran} ran")
        return ModelVerification(
            spec=self.question.spec.name,
            model=type(self.model).__name__,
            setting=self.setting.words,
            layers=tuple(self.checks),
            faults=tuple(self.faults),
            notes=tuple(self.wanted.notes),
            interrupted=interrupted,
        )


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
    """The floating point tensors of an output on the CPU, in order, caches left out."""
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            yield value.cpu()
    elif isinstance(value, Mapping | tuple | list):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(each)


def _equal_settings(model: Any, question: Question) -> Iterator[str]:
    """The settings, other than that of the question in one or two things, in which the model reads
    the pairs of the spec."""
    setting = setting_of(model, question.args, question.kwargs)
    now = getattr(getattr(model, "config", None), "_attn_implementation", None)
    changes: list[tuple[str, set[str], dict[str, object]]] = []
    if setting.own is not None and bool(setting.own.all()):
        changes.append(("without `attention_mask`", {"attention_mask"}, {}))
    if setting.past is None and hasattr(model, "generate"):
        changes.append(("with `use_cache=False`", set(), {"use_cache": False}))
    if len(changes) == 2:
        words = " and ".join(words for words, _, _ in changes)
        changes.append((words, {"attention_mask"}, {"use_cache": False}))
    for words, left_out, added in changes:
        named = {n: x for n, x in setting.arguments.items() if n not in left_out}
        if _is_equal(model, replace(question, args=(), kwargs={**named, **added})):
            yield words
    for name in ("eager", "sdpa"):
        if hasattr(model, "set_attn_implementation") and name != now is not None:
            try:
                model.set_attn_implementation(name)
                if _is_equal(model, question):
                    yield f"with attn_implementation = {name!r}"
            except Exception:
                # an implementation that is refused explains nothing
                continue
            finally:
                model.set_attn_implementation(now)


def _is_equal(model: nn.Module, question: Question) -> bool:
    try:
        return Run(model, question).verified().ok
    except Exception:
        # a setting that does not run explains nothing
        return False
