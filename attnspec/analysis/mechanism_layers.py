"""What a layer of mechanisms costs: operations, traffic and memory, by their formulas."""

from __future__ import annotations

from attnspec.analysis.cost import LayerCost
from attnspec.analysis.mechanism_costs import mechanism_backward_flops, mechanism_flops
from attnspec.analysis.mechanism_memory import Shape, held, moved
from attnspec.analysis.unknown import Unknown
from attnspec.declared import longest_of
from attnspec.ir import Mechanism
from attnspec.scalars import ScalarError
from attnspec.stack import Stack


def mechanism_layer_cost(stack: Stack, n: int, size: int, element: int) -> LayerCost:
    """The cost of the layer that costs most, by each figure, of heads that are mechanisms alone.

    Raises Unknown where pairs come with one, or n is more than it was learned for.
    """
    names = [a.mechanism.name for a in stack.program.attends if a.mechanism is not None]
    known = f"`{names[0]}` is a mechanism"
    longest = longest_of(stack.program)
    if longest is not None and n > longest:
        raise Unknown(f"{known}, learned for at most {longest:,} positions")
    if any(a.mechanism is None or a.graph is not None for a in stack.program.attends):
        raise Unknown(f"{known}, and pairs come with it")
    try:
        layers = [_layer(stack, layer, n, size) for layer in range(stack.spec.layers)]
    except ScalarError as error:
        raise Unknown(str(error)) from None
    flops, backward, numbers, beside = (max(each) for each in zip(*layers, strict=True))
    tensors = 4 * (stack.spec.heads or 1) * n * size
    return LayerCost(
        flops=flops,
        useful_flops=None,
        backward_flops=backward,
        bytes=element * numbers,
        peak_memory=element * (tensors + beside),
    )


def _layer(stack: Stack, layer: int, n: int, size: int) -> tuple[int, int, int, int]:
    """Operations forward and backward, numbers moved, and numbers held by heads that are alike."""
    program, heads = stack.program, stack.spec.heads
    known = {"layers": stack.spec.layers, "layer": layer}
    if heads is not None:
        known["heads"] = heads
    flops = backward = numbers = 0
    alike: dict[Mechanism, list[int]] = {}
    for head in range(heads or 1):
        mechanism = program.attend(layer, head).mechanism
        if mechanism is None:
            continue
        values = {**known, "head": head}
        flops += mechanism_flops(mechanism, n, size, values, program.causal)
        backward += mechanism_backward_flops(mechanism, n, size, values, program.causal)
        numbers += moved(mechanism, Shape(n, size, 1, program.causal), values)
        alike.setdefault(mechanism, []).append(head)
    beside = [
        held(mechanism, Shape(n, size, len(some), program.causal), {**known, "head": some[0]})
        for mechanism, some in alike.items()
    ]
    return flops, backward, numbers, max(beside, default=0)
