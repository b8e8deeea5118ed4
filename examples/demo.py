"""Holds a compiled spec against its definition: `python -m attnspec.examples.demo SPEC MODULE`.

MODULE is the file that `attnspec compile SPEC` wrote. Its outputs and gradients are compared, in
float64 and at odd lengths, with the compiler's dense backend and with a softmax written here over
`spec.mask(n)`. The spec is one of graphs alone: no run-time inputs, and the default score.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

import attnspec

LENGTHS = (1, 129, 515)
TOLERANCE = 1e-12
"""Largest difference allowed, for values of order one: some thousand roundings of float64."""

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], torch.Tensor]


def load_emitted(path: Path, name: str) -> torch.nn.Module:
    """The module of an emitted file: the class is the attention's name in CamelCase."""
    module_spec = importlib.util.spec_from_file_location(path.stem, path)
    if module_spec is None or module_spec.loader is None:
        raise ValueError(f"{path} must be a Python file")
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    emitted = getattr(module, "".join(part.capitalize() for part in name.split("_")))()
    if not isinstance(emitted, torch.nn.Module):
        raise TypeError(f"{path} must define a torch.nn.Module named after {name}")
    return emitted


def heads_of(spec: attnspec.Spec) -> int:
    """The heads to try: as many as the spec declares, or two."""
    return spec.heads or 2


def masked_softmax(spec: attnspec.Spec) -> Attention:
    """Attention by its textbook formula: every score, and -inf where the mask is false."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int) -> torch.Tensor:
        n = q.shape[-2]
        masks = [torch.from_numpy(spec.mask(n, layer, head)) for head in range(heads_of(spec))]
        mask = torch.stack(masks)
        scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
        weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
        # a query without keys reads nothing
        out: torch.Tensor = weights.masked_fill(~mask, 0.0) @ v
        return out

    return attend


def through(module: torch.nn.Module) -> Attention:
    return lambda q, k, v, layer: module(q, k, v, layer=layer)


def run(attention: Attention, n: int, heads: int, layer: int) -> list[torch.Tensor]:
    """The output and the gradients of q, k and v, for inputs that depend on n alone."""
    generator = torch.Generator().manual_seed(n)

    def draw() -> torch.Tensor:
        return torch.randn(2, heads, n, 16, dtype=torch.float64, generator=generator)

    q, k, v = (draw().requires_grad_() for _ in range(3))
    weight = draw()
    out = attention(q, k, v, layer)
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), (q, k, v))]


def largest_difference(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> float:
    """The largest absolute difference; NaN where either side has one."""
    return max(
        (float((x - y).abs().max()) for x, y in zip(a, b, strict=True)),
        key=lambda difference: (math.isnan(difference), difference),
    )


def verify(spec: attnspec.Spec, emitted: torch.nn.Module) -> bool:
    """Prints the largest differences of each layer and length; whether all are small enough."""
    references = {
        "dense backend": through(spec.compile(backend="dense")),
        "masked softmax": masked_softmax(spec),
    }
    good = True
    for layer in range(spec.layers):
        for n in LENGTHS:
            got = run(through(emitted), n, heads_of(spec), layer)
            for name, reference in references.items():
                wanted = run(reference, n, heads_of(spec), layer)
                values = largest_difference(got[:1], wanted[:1])
                gradients = largest_difference(got[1:], wanted[1:])
                good = good and values <= TOLERANCE and gradients <= TOLERANCE
                print(
                    f"layer {layer}  n = {n:<4}  against {name:<14}  "
                    f"values {values:.1e}  gradients {gradients:.1e}"
                )
    return good


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    spec = attnspec.load(arguments[0])
    if not verify(spec, load_emitted(Path(arguments[1]), spec.name)):
        print(f"not verified: {arguments[1]} differs from its definition", file=sys.stderr)
        return 1
    print(f"verified: {arguments[1]} computes what {arguments[0]} says, values and gradients")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
