"""The attention calls of a running model: the outermost ones of transformers' attention functions,
of this package, of `scaled_dot_product_attention` and `flex_attention`, and products of a softmax
with values. A module named an attention that makes no single call for all of its queries is
measured as a whole."""

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
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _pop_mode_temporarily
from torch.utils._pytree import tree_leaves, tree_map_only

from attnspec.model_check.call import Call, four_axes, written_out
from attnspec.model_check.wanted import is_cache
from attnspec.runtime.module import CompiledAttention

_NAMED = re.compile(r"attn|attention", re.IGNORECASE)
_HELD = re.compile(r"(.*\.)?(self_|cross_)?(attn|attention)")
_CROSS = re.compile(r"cross|encoder_att|encdec|multihead_attn", re.IGNORECASE)
# arguments that are another sequence to read
_OTHER = ("key_value_states", "encoder_hidden_states", "cross_attention_states")
# attributes that count query heads
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads", "h")
_FUNCTIONS = ("scaled_dot_product_attention", "flex_attention")


@dataclass
class Frame:
    """A module that runs with its arguments, whether it is an attention, and the calls it made."""

    path: str
    module: nn.Module
    arguments: tuple[tuple[Any, ...], Mapping[str, Any]]
    attention: bool
    calls: list[Call] = field(default_factory=list)

    @property
    def crosses(self) -> bool:
        """Whether it reads another sequence, by its name or by its arguments."""
        other = any(isinstance(self.arguments[1].get(name), Tensor) for name in _OTHER)
        return other or _CROSS.search(self.path) is not None

    @property
    def states(self) -> list[Tensor]:
        """Its arguments of three axes: hidden states are the first."""
        tensors = (x for x in tree_leaves(self.arguments) if isinstance(x, Tensor))
        return [x for x in tensors if x.ndim == 3]

    @property
    def in_one_call(self) -> bool:
        """Whether it makes one call, of all its queries: [B, n, D] or [n, B, D]."""
        calls, sizes = self.calls, [sorted(x.shape[:2]) for x in self.states]
        return len(calls) == 1 and (not sizes or sorted(calls[0].shape[::2]) in sizes)


class Watch(TorchFunctionMode):
    """Within `watching`, `see(frame, call)` gets each call of a module when the module ends.
    `chosen` are the paths of modules to be taken as attentions."""

    def __init__(self, model: nn.Module, see: Callable[..., None], chosen: tuple[str, ...]) -> None:
        super().__init__()
        self.see, self.chosen = see, chosen
        self.paths = {module: path for path, module in model.named_modules()}
        self.stack: list[Frame] = []
        self.called: list[str] = []
        self.busy = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """The context in which calls are seen."""
        with ExitStack() as stack:
            for target, name, function in self._replaced():
                stack.enter_context(patch.object(target, name, function))
            # a compiled model would trace this, too; its outputs are compared instead
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(self)
            yield

    def uncalled(self) -> Iterator[tuple[str, str]]:
        """Paths and classes of the innermost attentions that did not run, nor their parts."""
        attentions = {p: m for m, p in self.paths.items() if self._is_attention(p, m)}
        for path, module in attentions.items():
            inner = any(other.startswith(f"{path}.") for other in attentions)
            if not inner and not any(f"{path}.".startswith(f"{x}.") for x in self.called):
                yield path, type(module).__name__

    def _is_attention(self, path: str, module: nn.Module) -> bool:
        """Whether a module is chosen, or of this package, or has parameters and such a name, its
        own or that of its class."""
        if self.chosen:
            return path in self.chosen
        named = _NAMED.search(type(module).__name__) or _HELD.fullmatch(path)
        runs = any(True for _ in module.parameters()) and not isinstance(module, nn.ModuleList)
        return bool(named and runs) or isinstance(module, CompiledAttention)

    def _module(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """`original`, which calls a module; each call of attention that it made is then seen."""

        def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            path = self.paths.get(module)
            again = self.stack and self.stack[-1].module is module
            if self.busy or again or path is None:
                return original(module, *args, **kwargs)
            frame = Frame(path, module, (args, kwargs), self._is_attention(path, module))
            self.called += [path] * frame.attention
            ran = len(self.called)
            self.stack.append(frame)
            output = original(module, *args, **kwargs)
            self.stack.pop()
            innermost = frame.attention and len(self.called) == ran
            if innermost and not frame.in_one_call:
                frame.calls = [_whole(frame, output)]
            with patch.object(self, "busy", True), _pop_mode_temporarily():
                for call in frame.calls:
                    self.see(frame, call)
            return output

        return called

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See a function of torch that the model calls."""
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if self.busy:
            return func(*args, **kwargs)
        if name in _FUNCTIONS:
            return self._around(func, name)(*args, **kwargs)
        out, call = written_out(func, args, kwargs, self._heads)
        self._made(call)
        return out

    def _made(self, call: Call | None) -> None:
        """Add a call to the innermost attention that runs, else to the innermost module."""
        owner = next((frame for frame in reversed(self.stack) if frame.attention), None)
        if call is not None and self.stack and (owner or not self.chosen):
            (owner or self.stack[-1]).calls.append(call)

    @property
    def _heads(self) -> int | None:
        """How many query heads the innermost module has that says so."""
        counts = (getattr(f.module, name, None) for f in reversed(self.stack) for name in _HEADS)
        return next((count for count in counts if isinstance(count, int) and count), None)

    def _replaced(self) -> Iterator[tuple[object, str, Callable[..., Any]]]:
        """Objects, names of their functions, and what replaces these within `watching`."""
        # modules that are compiled go by one or the other
        for name in ("__call__", "_call_impl"):
            yield nn.Module, name, self._module(getattr(nn.Module, name))
        for name in ("forward", "masked"):
            function = vars(CompiledAttention)[name]
            yield CompiledAttention, name, self._around(function, "attnspec", 1)
        # torch's own functions of several steps show each of them
        for name in ("", "_unary", "_variadic"):
            yield nn.functional, f"has_torch_function{name}", lambda *_: False
        modeling: Any = sys.modules.get("transformers.modeling_utils")
        if modeling is None:
            return
        original = modeling.AttentionInterface.get_interface

        def looked_up(interface: Any, name: Any, default: Any) -> Any:
            function = original(interface, name, default)
            ours = type(function).__module__.startswith("attnspec.")
            kind = f"the registered spec {name}" if ours else f"{name or 'eager'} of transformers"
            return self._around(function, kind, 1, turned=True)

        yield modeling.AttentionInterface, "get_interface", looked_up

    def _around(
        self, function: Callable[..., Any], kind: str, skipped: int = 0, turned: bool = False
    ) -> Callable[..., Any]:
        """A function whose calls are seen: after `skipped` arguments come queries, keys and values.
        `turned`: it returns [B, n_q, H, e]."""

        @wraps(function)
        def seen(*args: Any, **kwargs: Any) -> Any:
            rest, tensors = dict(kwargs), list(args[skipped : skipped + 3])
            for names in (("q", "query"), ("k", "key"), ("v", "value"))[len(tensors) :]:
                tensors += [rest.pop(name) for name in names if name in rest]
            if self.busy or len(tensors) < 3:
                return function(*args, **kwargs)
            before, after, ndim = args[:skipped], args[skipped + 3 :], tensors[0].ndim

            def run(*qkv: Any, cast: Callable[[Any], Any]) -> Any:
                flat = [x.flatten(0, 1) if ndim == 3 else x for x in qkv]
                out = tree_leaves(function(*before, *flat, *cast(after), **cast(rest)))[0]
                return out.transpose(1, 2) if turned else four_axes(out, qkv[0].shape[1])

            q, k, v = (four_axes(x.detach(), self._heads) for x in tensors)
            reason = "its keys are in a `SpecCache`" * hasattr(tensors[1], "attnspec_cached")
            if q.ndim == 4:
                self._made(Call(kind, (*q.shape[:3], k.shape[2]), q, k, v, run, reason=reason))
            with patch.object(self, "busy", True):
                return function(*args, **kwargs)

        return seen


def _whole(frame: Frame, output: Any) -> Call:
    """A module as a whole: which rows of its output move with which positions of its states."""
    states, arguments = next(iter(frame.states), torch.empty(0)), frame.arguments
    cached = any(is_cache(x) for x in tree_leaves(arguments))
    if cached or getattr(tree_leaves(output)[0], "shape", ())[:2] != states.shape[:2]:
        reason = "it makes no single call, and does not map [B, n, D] alone to [B, n, …]"
        return Call("the module as a whole", together=True, reason=reason)
    x = states.detach()

    def moved(noise: Tensor, at: slice) -> Tensor:
        other = x.clone()
        other[:, at] += noise
        args, kwargs = tree_map_only(Tensor, lambda t: other if t is states else t, arguments)
        out: Tensor = tree_leaves(frame.module(*args, **kwargs))[0]
        return out.flatten(2)

    def sizes(double: bool) -> Tensor:
        noise = torch.randn(x[:, :1].shape, generator=torch.Generator().manual_seed(0)).to(x)
        before = moved(noise, slice(0))
        # a smaller move is rounding
        still = 4 * torch.finfo(before.dtype).eps * before.abs().nan_to_num().max()
        after = (moved(noise * x.std(), slice(at, at + 1)) for at in range(x.shape[1]))
        rows = [(out - before).abs().nan_to_num().amax(-1) > still for out in after]
        return torch.stack(rows, -1)[:, None].float()

    shape = (len(x), 1, x.shape[1], x.shape[1])
    return Call("the module as a whole", shape, sizes=sizes, together=True)
