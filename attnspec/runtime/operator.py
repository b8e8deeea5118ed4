"""`torch.ops.attnspec.attention`: a compiled attention as one operator of torch.

What traces a program sees a call of it: one graph serves every length, and an exported program runs
wherever this package is imported. Its log-sum-exps are for `return_lse` and for derivatives, and
else mean nothing. `runtime.engine` is imported when it runs, this module as soon as torch is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch._guards import active_fake_mode
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from attnspec.awaited import when_imported

if TYPE_CHECKING:
    from attnspec.lower.work import Call
    from attnspec.runtime.engine import Engine, Prepared


_LIBRARY: Any = torch.library.Library("attnspec", "DEF")  # type: ignore[no-untyped-call]

_GIVEN = (
    "Tensor q, Tensor k, Tensor v, str program, Tensor[] learned, Tensor[] inputs,"
    " Tensor? key_padding_mask=None, SymInt layer=0, float dropout_p=0.0, Tensor? seed=None,"
    " SymInt calls=0, SymInt asked=0, bool return_lse=False, SymInt query_start=0,"
    " Tensor? keys=None"
)
_TAGS = (torch.Tag.pt2_compliant_tag,)
_LIBRARY.define(f"attention({_GIVEN}) -> (Tensor, Tensor)", tags=_TAGS)
_LIBRARY.define(
    "attention_backward(Tensor? grad, Tensor? grad_lse, Tensor out, Tensor lse, bool[] asks,"
    f" {_GIVEN}) -> Tensor[]",
    tags=_TAGS,
)
_attention = torch.ops.attnspec.attention.default
_attention_backward = torch.ops.attnspec.attention_backward.default

ABOVE = 5
"""Arguments of the backward operator before those that both have."""


class Given(NamedTuple):
    """What the operator is called with: q, k and v, the text of a plan, what a module of it has
    learned and the run-time inputs, in the order of the program, a length as [B, 1, 1]; the seed of
    dropout; as `Draws`, how often the layer was called and draws anew were asked for; the number of
    the first query between two sequences; how many of the keys count, an integer []."""

    q: Any
    k: Any
    v: Any
    program: str
    learned: Sequence[Any]
    inputs: Sequence[Any]
    key_padding_mask: Any = None
    layer: int = 0
    dropout_p: float = 0.0
    seed: Any = None
    calls: int = 0
    asked: int = 0
    return_lse: bool = False
    query_start: int = 0
    keys: Any = None

    @property
    def engine(self) -> Engine:
        from attnspec.runtime.engine import engine_of

        return engine_of(self.program)

    def call(
        self, known: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Prepared, tuple[Tensor, Tensor, Tensor], Call]:
        """What the engine runs, and what of: the keys that count. Padding is there where it says
        something, since models hand over masks of ones; what is transformed shows no numbers."""
        from attnspec.backends.common.torch_modes import is_transformed
        from attnspec.lower.work import Call
        from attnspec.runtime.call_checks import of_first_keys

        engine, draws = self.engine, (self.calls, self.asked)
        tables = dict(zip(engine.learned, self.learned, strict=True))
        names = (each.name for each in engine.program.inputs if each.kind != "pairs")
        data = dict(zip(names, self.inputs, strict=True))
        call = Call(self.key_padding_mask, self.dropout_p, tables, data, draws, known)
        parts = self[:3]
        if self.keys is not None:
            parts, call = of_first_keys(engine.program, parts, call, int(self.keys))
        prepared = engine.prepare(self.layer, *parts[:2], self.query_start)
        if call.padding is not None and not is_transformed() and bool(call.padding.all()):
            call = replace(call, padding=None)
        return prepared, parts, call

    def gradients(
        self,
        above: Sequence[Tensor | None],
        asks: Sequence[bool],
        known: tuple[Tensor, Tensor] | None = None,
    ) -> list[Tensor | None]:
        """Those of q, k, v and what is learned that are asked for, from those of the outputs. Where
        these are `known` they are not computed again; else gradients can be differentiated."""
        from attnspec.backends.common.torch_modes import composed, derivatives, followed

        again, every = known is None, (*self[:3], *self.learned)
        with self.modes():
            prepared, parts, call = self.call(known)
            leaves = [*parts, *call.tables.values()]
            if not again:
                leaves = [x.detach().requires_grad_(a) for x, a in zip(leaves, asks, strict=True)]

            def run(q: Tensor, k: Tensor, v: Tensor, *learned: Tensor) -> Any:
                whole = replace(call, tables=dict(zip(call.tables, learned, strict=True)))
                return self.engine.run(prepared, (q, k, v), whole, above[1] is not None)

            with composed() if again else followed():
                grads = derivatives(run, leaves, asks, above, again)
        pairs = zip(every, grads, strict=True)
        return [y if y is None else _of_all_keys(y, x) for x, y in pairs]

    @contextmanager
    def modes(self) -> Iterator[None]:
        """No autocast, and random numbers from the seed."""
        with torch.autocast(self.q.device.type, enabled=False):
            if self.seed is None:
                yield
                return
            device, numbers, places = self.q.device, cast(Any, torch.default_generator), list[Any]()
            if device.type != "cpu":
                numbers, places = torch.get_device_module(device), [device]
            with torch.random.fork_rng(places, device_type=device.type):
                numbers.manual_seed(int(self.seed))
                yield


# --- what it computes -----------------------------------------------------------------------------


@torch.library.impl(_LIBRARY, "attention", "CompositeExplicitAutograd")
def _run(*given: Any) -> tuple[Tensor, Tensor]:
    at = Given(*given)
    with at.modes():
        out, lse = at.engine.run(*at.call(), at.return_lse, reusable=True)
    return _own(out, at[:3]), cast(Tensor, lse).contiguous()


@torch.library.impl(_LIBRARY, "attention_backward", "CompositeExplicitAutograd")
def _derivatives(*given: Any) -> list[Tensor]:
    (*above, out, lse, asks), at = given[:ABOVE], Given(*given[ABOVE:])
    every = zip((*at[:3], *at.learned), at.gradients(above, asks, (out, lse)), asks, strict=True)
    seen = [x for x in above if x is not None]
    return [
        x.new_empty(0) if not ask else torch.zeros_like(x) if y is None else _own(y, seen)
        for x, y, ask in every
    ]


def _of_all_keys(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient of a tensor from that of its part of the keys that count."""
    sizes = zip(x.shape[::-1], grad.shape[::-1], strict=True)
    more = [each for size, part in sizes for each in (0, size - part)]
    return torch.nn.functional.pad(grad, more) if any(more) else grad


def _own(x: Tensor, given: Sequence[Tensor]) -> Tensor:
    """A tensor in one piece that shares no memory with what was given."""
    x = x.contiguous()
    places = {each.untyped_storage().data_ptr() for each in given}
    return x.clone() if x.untyped_storage().data_ptr() in places else x


# --- what is known of it without computing --------------------------------------------------------


def _shapes(*given: Any) -> tuple[Tensor, Tensor]:
    at = Given(*given)
    wide = torch.promote_types(at.q.dtype, torch.float32)
    shape = at.q.shape[:3]
    return at.q.new_empty(*shape, at.v.shape[3]), at.q.new_empty(shape, dtype=wide)


def _shapes_backward(*given: Any) -> list[Tensor]:
    at, asks = Given(*given[ABOVE:]), given[ABOVE - 1]
    every = (*at[:3], *at.learned)
    return [x.new_empty(x.shape if ask else (0,)) for x, ask in zip(every, asks, strict=True)]


torch.library.register_fake("attnspec::attention", _shapes, lib=_LIBRARY)
torch.library.register_fake("attnspec::attention_backward", _shapes_backward, lib=_LIBRARY)


def _operations(backward: bool, *given: Any, **_: object) -> int:
    """The operations of a call whose tensors are their shapes, as the analysis counts them; heads
    that have values of another size count as the larger."""
    from attnspec.analysis.cost.cost import operations_of

    at = Given(*given[ABOVE if backward else 0 :])
    batch, heads, n_q, size = at.q
    works = at.engine.binder.works(at.layer, heads, n_q, at.k[2], at.query_start)
    wide = max(size, at.v[3])
    counts = (
        operations_of(replace(work, copies=len(mine)), wide, at.engine.backend, batch)
        for work, mine in works
    )
    return sum(each[backward] for each in counts)


def _register_formulas() -> None:
    """Tells torch's counter of operations what ours are."""
    from torch.utils.flop_counter import register_flop_formula

    register_flop_formula(torch.ops.attnspec.attention)(partial(_operations, False))
    register_flop_formula(torch.ops.attnspec.attention_backward)(partial(_operations, True))


# the counter imports Triton where that is installed, which costs more than the rest of this module
when_imported("torch.utils.flop_counter", _register_formulas)


# --- rules ----------------------------------------------------------------------------------------


_PLAINLY = (
    "or export it under `attnspec.runtime.composed()`, as plain operations, if its pairs do not"
    " depend on values"
)


class _Followed(_SingleLevelFunction):
    """The derivatives of the operator; of those that a traced program takes there are none. Torch's
    own registration would have none under torch.func, and would lose tangents of forward mode
    without a word: what has no rule here is refused."""

    @staticmethod
    def forward(ctx: Any, operator: Any, keys: Any, given: tuple[Any, ...], *_: Tensor) -> Any:
        # a function turns gradients off, and the levels of torch.func below it derive too
        with torch.set_grad_enabled(torch._C._functorch.maybe_current_level() is not None):
            result = tuple(_below(operator, keys, given))
        ctx.once = operator is _attention
        if ctx.once:
            flat, ctx.tree = tree_flatten(list(given))
            ctx.others = [None if isinstance(x, Tensor) else x for x in flat]
            ctx.save_for_backward(*result, *(x if isinstance(x, Tensor) else None for x in flat))
            ctx.set_materialize_grads(False)
            if not Given(*given).return_lse:
                ctx.mark_non_differentiable(result[1])
        return result

    @staticmethod
    def backward(ctx: Any, *above: Any) -> tuple[Any, ...]:
        if not ctx.once:
            raise RuntimeError(
                "second derivatives of an attention are not computed in a traced program, nor"
                " under `vmap` where queries and keys decide the pairs: call the module itself,"
                f" without `vmap`, {_PLAINLY}"
            )
        from attnspec.backends.common.torch_modes import is_batched

        out, lse, *tensors = ctx.saved_tensors
        flat = [y if x is None else x for x, y in zip(tensors, ctx.others, strict=True)]
        at = Given(*tree_unflatten(flat, ctx.tree))
        asks = [*ctx.needs_input_grad[3 : 6 + len(at.learned)]]
        grads: Sequence[Tensor | None] = [None] * len(asks)
        if any(x is not None for x in above):
            # no plain operations tell what the data of each sample that is mapped over decide
            each = is_batched(at.q, at.k) and at.engine.decided_leaves
            if torch.is_grad_enabled() and active_fake_mode() is None and not each:
                # derivatives of derivatives: those of plain operations
                grads = at.gradients(above, asks)
            else:
                every = _attention_backward(*above, out, lse, asks, *at)
                grads = [x if ask else None for x, ask in zip(every, asks, strict=True)]
        return *[None] * 3, *grads, *[None] * (len(ctx.needs_input_grad) - 3 - len(asks))

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(
            "forward-mode differentiation (jvp) of an attention is not computed in a traced"
            f" program: call the module itself, {_PLAINLY}"
        )


def _below(operator: Any, keys: Any, given: tuple[Any, ...]) -> Any:
    """What an operator does where autograd has passed it by."""
    with torch._C._AutoDispatchBelowAutograd():
        return operator.redispatch(keys & torch._C._after_autograd_keyset, *given)


def _follows(operator: Any) -> Callable[..., Any]:
    def rule(keys: Any, *given: Any) -> Any:
        tensors = [x for x in tree_leaves(given) if isinstance(x, Tensor)]
        asks = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
        if not asks and forward_ad._current_level < 0:
            return _below(operator, keys, given)
        with enable_single_level_autograd_function():
            follow: Any = _Followed
            return follow.apply(operator, keys, given, *tensors)

    return rule


for _operator in (_attention, _attention_backward):
    _LIBRARY.impl(_operator, _follows(_operator), "Autograd", with_keyset=True)


def _narrowed(*given: Any) -> Any:
    from attnspec.runtime.module import in_type_of_autocast

    return in_type_of_autocast(lambda _, *parts: _attention(*parts))(None, *given)


for _kind in ("CPU", "CUDA"):
    torch.library.impl(_LIBRARY, "attention", f"Autocast{_kind}")(_narrowed)


def _batched(operator: Callable[..., Any], above: int) -> Callable[..., Any]:
    """The rule for vmap: what is mapped over joins the batch. Where learned tables are mapped over
    or ask for gradients, pairs have numbers, or weights are dropped, each is called by itself."""

    def rule(info: Any, in_dims: Sequence[Any], *given: Any) -> tuple[Any, Any]:
        size, at, dims = info.batch_size, Given(*given[above:]), Given(*in_dims[above:])

        def changed(of: Callable[[Tensor, int | None], Tensor]) -> list[Any]:
            """The arguments with each tensor, and its axis that is mapped over, changed."""

            def one(x: Any, dim: int | None) -> Any:
                return of(x, dim) if isinstance(x, Tensor) else x

            every: list[Any] = tree_map(one, [*given], [*in_dims])
            return every

        def folded_in(x: Tensor, dim: int | None) -> Tensor:
            """[size, B, …] in some order as [size B, …]."""
            return (x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)).flatten(0, 1)

        asked = above and any(given[above - 1][3:])
        alone = asked or at.engine.pairs or at.seed is not None or at.keys is not None
        if alone or any(dim is not None for dim in dims.learned):

            def picked(x: Tensor, dim: int | None, at: int) -> Tensor:
                return x if dim is None else x.select(dim, at)

            outs = [operator(*changed(partial(picked, at=i))) for i in range(size)]
            return [torch.stack(x) for x in zip(*outs, strict=True)], [0] * len(outs[0])
        folded = changed(folded_in)
        folded[above + 4] = at.learned
        batch = len(folded[above]) // size
        # a gradient that nobody asked for has one axis
        outs = [x.unflatten(0, (size, batch)) if x.dim() > 1 else x for x in operator(*folded)]
        return outs, [0 if x.dim() > 1 else None for x in outs]

    return rule


for _operator, _above in ((_attention, 0), (_attention_backward, ABOVE)):
    torch.library.register_vmap(_operator, _batched(_operator, _above), lib=_LIBRARY)
