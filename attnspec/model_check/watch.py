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
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.overrides import TorchFunctionMode, _pop_mode_temporarily

from attnspec.model_check.plain import Weights, WrittenOut
from attnspec.model_check.probe import Call, in_double
from attnspec.runtime.module import CompiledAttention

_NAMED = re.compile(r"att(e?n|ention)", re.IGNORECASE)
_CROSS = re.compile(r"cross|encoder_att|encdec|multihead_attn", re.IGNORECASE)
_OTHER = ("key_value_states", "encoder_hidden_states", "cross_attention_states", "memory")
"""Arguments by which an attention is given another sequence to read."""

FLEX = "torch.nn.attention.flex_attention"


@dataclass
class Frame:
    """A module that is running: its path, what it was called with, which finding was the first of
    its own, and whether it is an attention, with another inside that ran."""

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
        for name in ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads"):
            count = getattr(self.module, name, None)
            if isinstance(count, int):
                return count
        return None


@dataclass
class Whole:
    """An attention module as a whole: `run` makes its call again with another x [B, n, D] and
    gives [B, n_q, …]; None where it cannot, and `reason` says why."""

    x: torch.Tensor | None = None
    run: Callable[[torch.Tensor], torch.Tensor] | None = None
    reason: str = ""
    kind: str = "the module as a whole"


Seen = Call | Weights | Whole


def is_attention(module: nn.Module) -> bool:
    """Whether a module is an attention by its name and has weights, or is one of ours."""
    named = _NAMED.search(type(module).__name__) is not None
    return isinstance(module, CompiledAttention) or (
        named and next(module.parameters(), None) is not None
    )


@dataclass
class Watch:
    """Looks at a model while it runs within `watching`, and hands on what it sees.

    `see(frame, seen)` is called for each call, and `forget(count)` takes back all but the first
    so many, where they were parts of a module that is looked at as a whole. `chosen` are the paths
    of modules that are attentions, whatever their names.
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
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(_Mode(self))
            yield

    def uncalled(self) -> Iterator[tuple[str, nn.Module]]:
        """The innermost attentions of the model that did not run, nor what they are a part of."""
        for path, module in self.model.named_modules():
            below = [x for x in module.modules() if x is not module]
            if self._is_attention(path, module) and not any(is_attention(x) for x in below):
                parts = path.split(".")
                if not any(
                    ".".join(parts[:end]) in self.called for end in range(1, len(parts) + 1)
                ):
                    yield path, module

    def found(self, seen: Seen) -> None:
        """A call that was made in the innermost module that runs, an attention if there is one."""
        owners = [frame for frame in self.stack if frame.attention] or self.stack
        self.seen += 1
        with self.aside():
            self.see(owners[-1], seen)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """While something is made again, as it would be without us."""
        self.busy = True
        with ExitStack() as stack:
            if torch.overrides._len_torch_function_stack():  # type: ignore[attr-defined]
                stack.enter_context(_pop_mode_temporarily())
            stack.enter_context(torch.compiler.set_stance("default"))
            try:
                yield
            finally:
                self.busy = False

    # --- modules ---------------------------------------------------------------------------------

    def _is_attention(self, path: str, module: nn.Module) -> bool:
        return path in self.chosen or (not self.chosen and is_attention(module))

    def _enter(self, path: str) -> Callable[..., None]:
        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not self.busy:
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
        calls = self.seen - frame.first
        if frame.attention and not frame.inner and calls != 1:
            self.forget(frame.first)
            self.seen = frame.first + 1
            with self.aside():
                self.see(frame, whole(frame, output))

    # --- functions -------------------------------------------------------------------------------

    def _replaced(self) -> Iterator[tuple[object, str, Callable[..., Any]]]:
        """What is put in the place of functions meanwhile: of which object, by which name."""
        for name in ("forward", "masked"):
            own: Any = vars(CompiledAttention)[name]
            yield CompiledAttention, name, self._around(own, "attnspec", 1)
        modeling: Any = sys.modules.get("transformers.modeling_utils")
        if modeling is not None:
            interface = modeling.AttentionInterface
            yield interface, "get_interface", self._looked_up(interface.get_interface)
        # torch's own functions of several steps show each of them
        for name in (
            "has_torch_function",
            "has_torch_function_unary",
            "has_torch_function_variadic",
        ):
            yield nn.functional, name, lambda *_: False
        flex: Any = getattr(sys.modules.get(FLEX), "flex_attention", None)
        if flex is not None:
            around = {}
            for place in self._places():
                for name, value in list(vars(place).items()):
                    if value is flex or getattr(value, "_torchdynamo_orig_callable", None) is flex:
                        kind = "flex_attention" if value is flex else "flex_attention, compiled"
                        around.setdefault(id(value), self._around(value, kind, 0))
                        yield place, name, around[id(value)]

    def _places(self) -> Iterator[Any]:
        """Where the code of the model may have its name of a function."""
        names = {type(module).__module__ for module in self.model.modules()} | {FLEX}
        own = (
            name for name in names if name == FLEX or not name.startswith(("torch.", "attnspec"))
        )
        yield from filter(None, map(sys.modules.get, own))
        yield from self.model.modules()

    def _looked_up(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def get_interface(interface: Any, name: Any, default: Any) -> Any:
            function = original(interface, name, default)
            kind = f"{name or 'eager'} of transformers"
            return self._around(function, kind, 1, lambda out: out[0].transpose(1, 2))

        return get_interface

    def _around(
        self,
        function: Callable[..., Any],
        kind: str,
        skipped: int,
        outcome: Callable[[Any], torch.Tensor] = lambda out: out[0] if type(out) is tuple else out,
    ) -> Callable[..., Any]:
        """A function that is seen when it is called with queries, keys and values, its first
        arguments but for those that are skipped."""

        @wraps(function)
        def around(*args: Any, **kwargs: Any) -> Any:
            tensors = args[skipped : skipped + 3]
            names = [("q", "query"), ("k", "key"), ("v", "value")][len(tensors) :]
            for pair in names:
                tensors += tuple(kwargs[name] for name in pair if name in kwargs)
            if self.busy or len(tensors) < 3:
                return function(*args, **kwargs)
            left = {n: x for n, x in kwargs.items() if not any(n in pair for pair in names)}
            rest = args[skipped + 3 :]
            self._call(function, kind, args[:skipped], tensors, rest, left, outcome)
            with self.aside():
                return function(*args, **kwargs)

        return around

    def _call(
        self,
        function: Callable[..., Any],
        kind: str,
        before: tuple[Any, ...],
        tensors: tuple[Any, ...],
        rest: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        outcome: Callable[[Any], torch.Tensor],
    ) -> None:
        q, k, v = (x.detach() for x in tensors)
        if hasattr(tensors[1], "attnspec_cached"):
            self.found(Whole(reason="SpecCache goes on from what it has kept, at each call"))
            return
        # [B, n, d] is one head, or heads in line with samples
        shape = _four(q, self.stack)
        if shape is None:
            # an attention is then looked at as a whole
            if not any(frame.attention for frame in self.stack):
                self.found(Whole(reason=f"queries of {q.ndim} dimensions", kind=kind))
            return

        def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cast: Any = None) -> Any:
            given = (x.reshape(-1, *x.shape[2:]) if tensors[0].ndim == 3 else x for x in (q, k, v))
            others = (rest, kwargs) if cast is None else (cast(rest), cast(dict(kwargs)))
            out = outcome(function(*before, *given, *others[0], **others[1]))
            return out.reshape(*shape, *out.shape[-2:])

        q, k, v = (
            x.reshape(*(shape if x.ndim == 3 else x.shape[:2]), *x.shape[-2:]) for x in (q, k, v)
        )
        self.found(
            Call(
                kind,
                q,
                k,
                v,
                run,
                double=lambda q, k, v: run(q, k, v, in_double),
                sink=any(x in kwargs and kwargs[x] is not None for x in ("s_aux", "sinks")),
            )
        )

    def function(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Look at a function of torch that is called; whether it is an attention."""
        names = "scaled_dot_product_attention", "flex_attention"
        kind = getattr(function, "__name__", "")
        if kind not in names:
            return False

        def outcome(out: Any) -> torch.Tensor:
            return out[0] if isinstance(out, tuple) else out  # type: ignore[no-any-return]

        given = dict(kwargs)
        tensors = args[:3] + tuple(given.pop(n) for n in ("query", "key", "value")[len(args) :])
        self._call(function, kind, (), tensors, args[3:], given, outcome)
        return True


def whole(frame: Frame, output: Any) -> Whole:
    """A module as a whole, that was called with hidden states [B, n, D] and has given an output."""
    given = {**dict(enumerate(frame.args)), **frame.kwargs}
    states = [(n, x) for n, x in given.items() if isinstance(x, torch.Tensor) and x.ndim == 3]
    first = output[0] if isinstance(output, tuple | list) and output else output
    if not states or not isinstance(first, torch.Tensor) or first.ndim != 3:
        return Whole(reason="it takes and gives no hidden states [B, n, D]")
    if any(callable(getattr(x, "get_seq_length", None)) for x in given.values()):
        return Whole(reason="it keeps a cache, which another call would change")
    x = states[0][1].detach()
    same = [name for name, value in states if value is states[0][1]]
    if first.shape[:2] != x.shape[:2]:
        return Whole(reason=f"it makes {list(first.shape)} of {list(x.shape)}")

    def run(x: torch.Tensor) -> torch.Tensor:
        moved = {**given, **dict.fromkeys(same, x)}
        args = [moved.pop(at) for at in range(len(frame.args))]
        found = frame.module(*args, **moved)
        return found[0] if isinstance(found, tuple | list) else found  # type: ignore[no-any-return]

    return Whole(x, run)


def _four(q: torch.Tensor, stack: list[Frame]) -> tuple[int, int] | None:
    """Samples and heads of queries with three or four dimensions."""
    if q.ndim == 4:
        return int(q.shape[0]), int(q.shape[1])
    heads = next((frame.heads for frame in reversed(stack) if frame.heads), 1)
    heads = heads if q.shape[0] % heads == 0 else 1
    return (q.shape[0] // heads, heads) if q.ndim == 3 else None


class _Mode(TorchFunctionMode):
    """Shows a watch each function of torch that a model calls."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch, self.written = watch, WrittenOut()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, watch = kwargs or {}, self.watch
        if watch.busy:
            return func(*args, **kwargs)
        if watch.function(func, args, kwargs):
            with watch.aside():
                return func(*args, **kwargs)
        heads = next((frame.heads for frame in reversed(watch.stack) if frame.heads), None)
        out, weights = self.written.called(func, args, kwargs, heads)
        if weights is not None:
            watch.found(weights)
        return out
