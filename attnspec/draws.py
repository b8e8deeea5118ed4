"""How often random features were drawn anew: by calls in training, and because it was asked."""

from __future__ import annotations

import torch
from torch import nn


class Draws(nn.Module):
    """Counts the training calls of each layer; its extra state is what a `state_dict` keeps of it.

    Traced calls are not counted: a program has no numbers of its own.
    """

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.calls = [0] * layers
        self.last = [0] * layers
        self.asked = 0

    def number(self, layer: int, every: int) -> int:
        """The draw that a layer uses now, one that is drawn every so many calls."""
        row = layer if layer < len(self.calls) else 0
        calls = self.last[row] if _again() else self.calls[row]
        return calls // every + self.asked if every else 0

    def count(self, layer: int) -> None:
        """One more call of a layer in training."""
        if not _again():
            row = layer if layer < len(self.calls) else 0
            self.last[row] = self.calls[row]
            self.calls[row] += 1

    def redraw(self) -> None:
        """A new draw for every layer."""
        self.asked += 1

    def get_extra_state(self) -> torch.Tensor:
        return torch.tensor([self.asked, *self.calls])

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.asked, *self.calls = state.tolist()
        self.last = list(self.calls)


def _again() -> bool:
    """Whether a call is computed again for a backward, when it must be what it was. What is traced
    is not, and cannot ask."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
