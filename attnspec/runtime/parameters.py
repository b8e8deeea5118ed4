"""What a compiled attention learns: which parameters it has, how they start, when they are made."""

from __future__ import annotations

import math
from itertools import product
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter, is_lazy

from attnspec.graphs.counter_rng import CENTROIDS, Stream, normals
from attnspec.ir.mechanisms.declaration import Part
from attnspec.lower.lower import bias_tables, buckets_of
from attnspec.runtime.engine import Engine


class Learner(nn.Module):
    """A module with what a program learns, a row for each layer and head that it declares.

    Where the shape of a parameter has the size of a head and that is not known, the parameter waits
    for it, as those of torch's lazy modules do.
    """

    def __init__(self, engine: Engine, head_size: int | None) -> None:
        super().__init__()
        self.program, self._parts = engine.program, engine.parts
        # tables of `score bias` start at zero, so that no position is preferred
        biases = {
            name: Part(name, (buckets_of(x),)) for (_, x), name in bias_tables(self.program).items()
        }
        self._learned = biases | {name: part for (_, part), name in self._parts.items()}
        for name, part in self._learned.items():
            size = head_size if {"d", "d_v"} & set(part.shape) else 0
            table = None if size is None else torch.empty(self._shape(part, size, size))
            if part.kept:
                self.register_buffer(name, UninitializedBuffer() if table is None else table)
            else:
                learned = UninitializedParameter() if table is None else nn.Parameter(table)
                self.register_parameter(name, cast(nn.Parameter, learned))
        self._waits = bool(self._waiting())
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Starts what is learned anew, as papers say, drawn with the generator."""
        for name, x in self._tensors():
            if name in self._learned and not is_lazy(x):
                _start(x, self._learned[name], generator)

    def make_parameters(
        self, head_size: int, value_size: int, device: torch.device | None = None
    ) -> None:
        """Makes and starts the parameters that wait for the size of a head, and of its values."""
        waiting = self._waiting()
        if waiting and torch.compiler.is_compiling():
            raise ValueError(
                f"{', '.join(f'`{name}`' for name in waiting)} must have a size before the module"
                f" is traced: build it with head_size={head_size}, or call it once"
            )
        for name in waiting:
            part, parameter = self._learned[name], cast(Any, self.learned(name))
            parameter.materialize(self._shape(part, head_size, value_size), device=device)
            _start(parameter, part, None)
        self._waits = False

    def check_sizes(self, q: Tensor, v: Tensor | None) -> None:
        """Raises ValueError for heads of another size than what is learned was made for."""
        sides = {"d": ("q", q), "d_v": ("v", v)}
        for (owner, part), name in self._parts.items():
            for entry, size in zip(part.shape, self.learned(name).shape[2:], strict=False):
                called, tensor = sides.get(str(entry), ("", None))
                if tensor is not None and tensor.shape[3] != size:
                    raise ValueError(
                        f"`{owner}` has learned `{name}` for heads of {size} numbers: {called} must"
                        f" be [B, H, n, {size}], got {list(tensor.shape)}; build a module with"
                        f" head_size={tensor.shape[3]} for these"
                    )

    def learned(self, name: str) -> Tensor:
        """A parameter, or a buffer, by its name."""
        return cast(Tensor, getattr(self, name))

    def _shape(self, part: Part, head_size: int, value_size: int) -> tuple[int, ...]:
        """[layers or 1, heads or 1, *shape] for heads of a size."""
        layers = 1 if part.layers else self.program.layers or 1
        heads = 1 if part.heads else self.program.heads or 1
        sizes: dict[Any, Any] = {"d": head_size, "d_v": value_size}
        return layers, heads, *(sizes.get(entry, entry) for entry in part.shape)

    def _waiting(self) -> list[str]:
        """The names of what has no shape yet."""
        return [name for name, x in self._tensors() if is_lazy(x)]

    def _tensors(self) -> list[tuple[str, Any]]:
        return [*self._parameters.items(), *self._buffers.items()]

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *rest: Any) -> None:
        LazyModuleMixin._lazy_load_hook(self, state_dict, prefix, *rest)  # type: ignore[arg-type]
        self._waits = bool(self._waiting())
        super()._load_from_state_dict(state_dict, prefix, *rest)

    # what waits for its shape has no numbers to detach
    _save_to_state_dict = LazyModuleMixin._save_to_state_dict


def _start(parameter: Tensor, part: Part, generator: torch.Generator | None) -> None:
    """Fills a parameter as its part says."""
    with torch.no_grad():
        if part.start in ("normal", "scaled"):
            width = parameter.shape[-1] if part.start == "scaled" else 1
            parameter.normal_(0.0, part.by / math.sqrt(max(1, width)), generator=generator)
        elif part.start == "uniform":
            parameter.uniform_(-part.by, part.by, generator=generator)
        elif part.start == "drawn":
            # Gaussian rows [layers, heads, count, d] by the seed, layer and head
            layers, heads, count, size = parameter.shape
            for at in product(range(layers), range(heads)):
                rows = normals(Stream(int(part.by), CENTROIDS, *at), np.arange(count), size)
                parameter[at] = torch.from_numpy(rows)
        else:
            parameter.fill_({"constant": part.by, "ones": 1.0}.get(part.start, 0.0))


class Draws(nn.Module):
    """Counts the training calls of each layer; its extra state is what a `state_dict` keeps of it.

    Traced calls are not counted: a program has no numbers of its own.
    """

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.calls = [0] * layers
        self.last = [0] * layers
        self.asked = 0

    def of(self, layer: int) -> tuple[int, int]:
        """How often a layer was called, and how often anew was asked for."""
        calls = self.last if again() else self.calls
        return calls[layer % len(calls)], self.asked

    def count(self, layer: int) -> None:
        """One more call of a layer in training."""
        if not again():
            row = layer % len(self.calls)
            self.last[row] = self.calls[row]
            self.calls[row] += 1

    def get_extra_state(self) -> Tensor:
        return torch.tensor([self.asked, *self.calls])

    def set_extra_state(self, state: Tensor) -> None:
        self.asked, *self.calls = state.tolist()
        self.last = list(self.calls)


def again() -> bool:
    """Whether a call is computed again for a backward, when it must be what it was. What is traced
    is not, and cannot ask."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
