"""The attention of a model while it runs: which calls of queries, keys and values are made where.

Outermost calls are seen: of transformers' attention functions, whatever implementation a config
names; of the attention of this package; of `scaled_dot_product_attention` and `flex_attention`; and
a softmax whose result is multiplied with values. A module that is an attention by its name and
makes no such call, or several, is looked at as a whole.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.overrides import TorchFunctionMode, _pop_mode_temporarily

from attnspec.model_check.plain import Weights, WrittenOut
from attnspec.model_check.probe import Call
from attnspec.runtime.module import CompiledAttention

_NAMED = re.compile(r"attn|attention", re.IGNORECASE)
_CROSS = re.compile(r"cross|encoder_att|encdec|multihead_attn", re.IGNORECASE)
_OTHER = ("key_value_states", "encoder_hidden_states", "cross_attention_states")
"""Arguments by which an attention is given another sequence to read."""

_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads", "h")
"""Attributes in which modules keep how many query heads they have."""

_FLEX = "torch.nn.attention.flex_attention"
_FUNCTIONS = ("scaled_dot_product_attention", "flex_attention")


@dataclass
class Frame:
    """A module that is running: its path, what it was called with, how many calls were seen before,
    whether it is an attention, and whether another inside it ran."""

    path: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    first: int
    attention: bool
    inner: bool = False

    @property
    def crosses(self) -> bool:
        """Whether it reads another sequence, by its name or by what it was given."""
        given = any(isinstance(self.kwargs.get(name), torch.Tensor) for name in _OTHER)
        return given or _CROSS.search(self.path) is not None

    @property
    def heads(self) -> int | None:
        """How many query heads it says that it has."""
        counts = (getattr(self.module, name, None) for name in _HEADS)
        return next((count for count in counts if isinstance(count, int)), None)


@dataclass
class Whole:
    """An attention module as a whole: `run` makes its call again with another x [B, n, D] and
    gives [B, n, …]; None where it cannot, and `reason` says why."""

    x: torch.Tensor | None = None
    run: Callable[[torch.Tensor], torch.Tensor] | None = None
    reason: str = ""
    kind: str = "the module as a whole"


Seen = Call | Weights | Whole


@dataclass
class Watch:
    """Looks at a model while it runs within `watching`, and hands on what it sees.

    `see(frame, seen)` is called for each call, and `forget(count)` takes back all but the first
    so many, where they were parts of a module that is looked at as a whole. `chosen` are the paths
    of modules that are the attentions, whatever their names.
    """

    model: nn.Module
    see: Callable[[Frame, Seen], None]
    forget: Callable[[int], None]
    chosen: tuple[str, ...] = ()
    seen: int = 0
    stack: list[Frame] = field(default_factory=list)
    called: set[str] = field(default_factory=set)
    busy: bool = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """The time in which the model is looked at."""
        with ExitStack() as stack:
            for path, module in self.model.named_modules():
                before = module.register_forward_pre_hook(self._enter(path), with_kwargs=True)
                after = module.register_forward_hook(self._leave, with_kwargs=True)
                stack.callback(before.remove)
                stack.callback(after.remove)
            for target, name, function in self._replaced():
                stack.enter_context(patch.object(target, name, function))
            # what is compiled would be traced with us in it; the plain run compares it
            stack.enter_context(_stance("force_eager"))
            stack.enter_context(_Mode(self))
            yield

    def uncalled(self) -> Iterator[tuple[str, nn.Module]]:
        """The innermost attentions of the model that did not run, nor what they are a part of."""
        attentions = {p: m for p, m in self.model.named_modules() if self._is_attention(p, m)}
        for path, module in attentions.items():
            inner = any(other.startswith(f"{path}.") for other in attentions)
            if not inner and not any(f"{path}.".startswith(f"{x}.") for x in self.called):
                yield path, module

    def found(self, seen: Seen) -> None:
        """A call that was made in the innermost attention that runs, else the innermost module."""
        owners = [frame for frame in self.stack if frame.attention]
        if not owners and self.chosen:
            return
        owners = owners or self.stack
        self.seen += 1
        with self.aside():
            self.see(owners[-1], seen)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """While something is run as it would be without us."""
        with ExitStack() as stack:
            if torch._C._len_torch_function_stack():
                stack.enter_context(_pop_mode_temporarily())
            stack.enter_context(_stance("default"))
            self.busy = True
            try:
                yield
            finally:
                self.busy = False

    @property
    def heads(self) -> int | None:
        """How many query heads the innermost module has that says so."""
        return next((frame.heads for frame in reversed(self.stack) if frame.heads), None)

    # --- modules ---------------------------------------------------------------------------------

    def _is_attention(self, path: str, module: nn.Module) -> bool:
        """Whether a module is chosen, or one of ours, or an attention by its name with weights."""
        if self.chosen:
            return path in self.chosen
        named = _NAMED.search(type(module).__name__) is not None
        return isinstance(module, CompiledAttention) or (
            named and next(module.parameters(), None) is not None
        )

    def _enter(self, path: str) -> Callable[..., None]:
        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self.busy:
                return
            attention = self._is_attention(path, module)
            if attention:
                self.called.add(path)
                for frame in self.stack:
                    frame.inner = True
            self.stack.append(Frame(path, module, args, kwargs, self.seen, attention))

        return enter

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self.busy:
            return
        frame = self.stack.pop()
        if frame.attention and not frame.inner and self.seen - frame.first != 1:
            self.forget(frame.first)
            self.seen = frame.first + 1
            with self.aside():
                self.see(frame, _whole(frame, output))

    # --- functions -------------------------------------------------------------------------------

    def _replaced(self) -> Iterator[tuple[object, str, Callable[..., Any]]]:
        """What is put in the place of functions meanwhile: of which object, by which name."""
        for name in ("forward", "masked"):
            yield CompiledAttention, name, self.around(vars(CompiledAttention)[name], "attnspec", 1)
        modeling: Any = sys.modules.get("transformers.modeling_utils")
        if modeling is not None:
            interface = modeling.AttentionInterface
            yield interface, "get_interface", self._looked_up(interface.get_interface)
        # torch's own functions of several steps show each of them
        for name in ("", "_unary", "_variadic"):
            yield nn.functional, f"has_torch_function{name}", lambda *_: False
        flex: Any = getattr(sys.modules.get(_FLEX), "flex_attention", None)
        if flex is None:
            return
        modules = {type(module).__module__ for module in self.model.modules()}
        names = [_FLEX, *(x for x in modules if not x.startswith(("torch.", "attnspec.")))]
        places = [*filter(None, map(sys.modules.get, names)), *self.model.modules()]
        for place in places:
            for name, value in list(vars(place).items()):
                if flex in (value, getattr(value, "_torchdynamo_orig_callable", None)):
                    kind = "flex_attention" if value is flex else "flex_attention, compiled"
                    yield place, name, self.around(value, kind)

    def _looked_up(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def get_interface(interface: Any, name: Any, default: Any) -> Any:
            function = original(interface, name, default)
            return self.around(function, f"{name or 'eager'} of transformers", 1, turned=True)

        return get_interface

    def around(
        self, function: Callable[..., Any], kind: str, skipped: int = 0, turned: bool = False
    ) -> Callable[..., Any]:
        """A function that is seen when it is called with queries, keys and values, its first
        arguments but for those skipped; `turned` says that it gives [B, n_q, H, e]."""

        @wraps(function)
        def seen(*args: Any, **kwargs: Any) -> Any:
            rest, tensors = dict(kwargs), list(args[skipped : skipped + 3])
            for names in (("q", "query"), ("k", "key"), ("v", "value"))[len(tensors) :]:
                tensors += [rest.pop(name) for name in names if name in rest]
            if self.busy or len(tensors) < 3:
                return function(*args, **kwargs)
            before, after = args[:skipped], args[skipped + 3 :]

            def run(q: Any, k: Any, v: Any, cast: Callable[[Any], Any] = lambda x: x) -> Any:
                found = function(*before, q, k, v, *cast(after), **cast(rest))
                out = found[0] if isinstance(found, tuple) else found
                return out.transpose(1, 2) if turned else out

            self._call(kind, tensors, run, rest)
            with self.aside():
                return function(*args, **kwargs)

        return seen

    def _call(self, kind: str, tensors: list[Any], run: Any, rest: Mapping[str, Any]) -> None:
        q, k, v = (x.detach() for x in tensors)
        sink = any(rest.get(name) is not None for name in ("s_aux", "sinks"))
        if hasattr(tensors[1], "attnspec_cached"):
            self.found(Whole(reason="`SpecCache` goes on from what it has kept, at each call"))
        elif q.ndim == 4:
            self.found(Call(kind, q, k, v, run, sink))
        elif q.ndim == 3:
            heads = self.heads if self.heads and len(q) % self.heads == 0 else 1

            def flat(*given: torch.Tensor, **cast: Any) -> Any:
                out = run(*(x.flatten(0, 1) for x in given), **cast)
                return out.unflatten(0, (-1, heads))

            q, k, v = (torch.unflatten(x, 0, (-1, heads)) for x in (q, k, v))
            self.found(Call(kind, q, k, v, flat, sink))
        elif not any(frame.attention for frame in self.stack):
            # an attention is then looked at as a whole
            self.found(Whole(reason=f"queries of {q.ndim} dimensions", kind=kind))


class _Mode(TorchFunctionMode):
    """Shows a watch each function of torch that a model calls."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch, self.written = watch, WrittenOut()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, watch = kwargs or {}, self.watch
        name = getattr(func, "__name__", "")
        if watch.busy:
            return func(*args, **kwargs)
        if name in _FUNCTIONS:
            return watch.around(lambda *given, **rest: func(*given, **rest), name)(*args, **kwargs)
        out, weights = self.written.called(func, args, kwargs, watch.heads)
        if weights is not None:
            watch.found(weights)
        return out


def _stance(name: str) -> AbstractContextManager[object]:
    """Whether compiled code runs compiled, as far as torch can be told."""
    set_stance = getattr(torch.compiler, "set_stance", None)
    return nullcontext() if set_stance is None else set_stance(name)


def _whole(frame: Frame, output: Any) -> Whole:
    """A module as a whole, that was called with hidden states [B, n, D] and has given an output."""
    given: dict[Any, Any] = {**dict(enumerate(frame.args)), **frame.kwargs}
    states = [x for x in given.values() if isinstance(x, torch.Tensor) and x.ndim == 3]
    first = output[0] if isinstance(output, tuple | list) and output else output
    if not states or not isinstance(first, torch.Tensor) or first.shape[:2] != states[0].shape[:2]:
        return Whole(reason="it does not take hidden states [B, n, D] and give [B, n, …]")
    if any(callable(getattr(x, "get_seq_length", None)) for x in given.values()):
        return Whole(reason="it keeps a cache, which another call would change")

    def run(x: torch.Tensor) -> torch.Tensor:
        moved = {name: x if each is states[0] else each for name, each in given.items()}
        args = [moved.pop(at) for at in range(len(frame.args))]
        found: Any = frame.module(*args, **moved)
        out: torch.Tensor = found[0] if isinstance(found, tuple | list) else found
        return out

    return Whole(states[0].detach(), run)
