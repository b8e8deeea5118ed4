"""`GRAPH + MECHANISM` where the graph has most of what the kernel would weigh: nothing cancels.

In float32 a module may err twice as much as the definition in float32, both against float64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest
import torch
from attention_checks import assert_agree, spec_of, with_gradients
from sweeps import checkered

from attnspec.backends.factored.definitions import divided, exact_pairs, exact_weights, undivided
from attnspec.lower.lower import Binder
from attnspec.runtime.streaming import StreamState

Run = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def drawn(batch: int, n: int, size: int, deviation: float) -> list[torch.Tensor]:
    """q, k and v of two heads whose scores have a standard deviation."""
    source = torch.Generator().manual_seed(n)
    q, k, v = (torch.randn(batch, 2, n, size, generator=source) for _ in range(3))
    return [q * deviation, k, v]


def definition(
    body: str,
    given: Sequence[torch.Tensor],
    real: torch.Tensor | None = None,
    tables: Mapping[str, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Every weight written out, in the type of what is given; learned tables [1, heads, …]."""
    q, k, v = given
    batch, heads, n_q, n = *q.shape[:3], k.shape[2]
    if real is None:
        real = torch.ones(batch, n, dtype=torch.bool)
    outs = torch.zeros(batch, heads, n_q, v.shape[3], dtype=q.dtype)
    for work, members in Binder(spec_of(body).program, {}).works(0, heads, n_q, n):
        for head in members:
            at = head * k.shape[1] // heads
            mine = {name: table[0, head] for name, table in (tables or {}).items()}
            for sample in range(batch):
                rows, keys = q[sample, head], k[sample, at]
                if work.mechanism is None:
                    weights = exact_weights(work, head, rows, keys, mine)
                    weights = weights.masked_fill(~exact_pairs(work, n_q, n), 0.0)
                else:
                    weights = undivided(work, head, rows, keys, mine)
                weights = weights.masked_fill(~real[sample], 0.0)
                total = weights.sum(-1, keepdim=True)
                # a query without a key gets 0
                total = torch.where(total == 0, 1.0, total)
                plain = work.mechanism is None
                weights = weights / total if plain else divided(work, weights, total)
                outs[sample, head] = weights @ v[sample, at]
    return outs


def assert_accurate(
    body: str, run: Run, given: list[torch.Tensor], real: torch.Tensor | None = None
) -> None:
    results = []
    for kind in (torch.float64, torch.float32):
        leaves = [x.detach().to(kind).requires_grad_() for x in given]
        results.append(with_gradients(definition(body, leaves, real), leaves))
    leaves = [x.detach().requires_grad_() for x in given]
    assert_agree(with_gradients(run(*leaves), leaves), *results)


MECHANISMS = (
    "linear()",
    "linear(feature = exp)",
    "taylor()",
    "taylor(order = 2)",
    "favor(features = 16)",
)


@pytest.mark.parametrize(("mechanism", "size", "n"), checkered(MECHANISMS, [4, 16], [1, 20, 40]))
def test_all_keys_of_a_query_may_be_in_the_graph(mechanism: str, size: int, n: int) -> None:
    body = f"attend window(radius = 16) + {mechanism}"
    module = spec_of(body).compile(head_size=size)
    assert_accurate(body, module, drawn(40 if n == 1 else 2, n, size, 4.0))


@pytest.mark.parametrize(
    "graph",
    ["strided(stride = 2)", "(window(radius = 30) | columns(first(2)))", "block(size = 32)"],
)
@pytest.mark.parametrize("causal", ["", "causal"])
def test_few_keys_may_be_left(graph: str, causal: str) -> None:
    body = f"heads 2 {causal} attend {graph} + linear() score bias(buckets = 4)"
    module = spec_of(body).compile(head_size=8)
    ((name, table),) = module.named_parameters()
    with torch.no_grad():
        table.normal_(generator=torch.Generator().manual_seed(1))
    given = drawn(2, 70, 8, 4.0)
    real = torch.ones(2, 70, dtype=torch.bool)
    real[0, :9] = real[1, 40:] = False
    found = []
    for kind in (torch.float64, torch.float32):
        leaves = [table.detach().to(kind)] + [x.to(kind) for x in given]
        leaves = [x.requires_grad_() for x in leaves]
        out = definition(body, leaves[1:], real, {name: leaves[0]})
        found.append(with_gradients(out, leaves))
    leaves = [x.requires_grad_() for x in given]
    mine = with_gradients(module(*leaves, key_padding_mask=real), [table, *leaves])
    for part in (slice(0, 4), slice(1, 5)):
        assert_agree(mine[part], found[0][part], found[1][part])


@pytest.mark.parametrize(
    "graph", ["window(radius = 16)", "window(radius = 70)", "global(first(9))"]
)
@pytest.mark.parametrize("mechanism", ["linear()", "favor(features = 16)", "taylor(order = 2)"])
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_what_is_transformed_is_as_accurate(graph: str, mechanism: str) -> None:
    for causal, n in (("", 1), ("causal", 1), ("", 70), ("causal", 150)):
        body = f"{causal} attend {graph} + {mechanism}"
        module = spec_of(body).compile(head_size=8)

        def run(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, each: Run = module
        ) -> torch.Tensor:
            return torch.func.vmap(lambda *x: each(*(y[None] for y in x))[0])(q, k, v)

        assert_accurate(body, run, drawn(3, n, 8, 4.0))


@pytest.mark.parametrize("graph", ["same(x)", "(same(x) | window(radius = 40))"])
def test_graphs_that_read_inputs_are_as_accurate(graph: str) -> None:
    module = spec_of(f"input x: ids attend {graph} + linear()").compile()
    given, inputs = drawn(3, 40, 8, 4.0), {"x": torch.zeros(3, 40, dtype=torch.int64)}
    for wrapped in (False, True):

        def run(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, wrapped: bool = wrapped
        ) -> torch.Tensor:
            def found(x: torch.Tensor) -> torch.Tensor:
                out: torch.Tensor = module(x, k, v, inputs=inputs)
                return out

            return torch.func.vjp(found, q)[0] if wrapped else found(q)

        assert_accurate("attend full", run, given)


@pytest.mark.parametrize(
    ("body", "mechanism", "sizes"),
    checkered(
        ["window(before = 16, after = 0)", "window(radius = 9) | columns(first(4))"],
        ["linear()", "taylor()", "favor(features = 16)"],
        [[1] * 60, [200, 1, 1, 398], [600]],
    ),
)
def test_steps_are_as_accurate(body: str, mechanism: str, sizes: list[int]) -> None:
    body = f"causal attend ({body}) + {mechanism}"
    module = spec_of(body).compile()

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        state: StreamState | None = None
        outs, low = [], 0
        for size in sizes:
            at = slice(low, low + size)
            out, state = module.step(q[:, :, at], k[:, :, at], v[:, :, at], state)
            outs.append(out)
            low += size
        return torch.cat(outs, 2)

    assert_accurate(body, run, drawn(1, sum(sizes), 8, 4.0))


@pytest.mark.parametrize(
    ("graph", "mechanism", "n"),
    checkered(
        [
            "causal",
            "window(before = 64, after = 0)",
            "(window(before = 9, after = 0) | columns(first(2)))",
        ],
        ["linear()", "taylor()", "favor(features = 8)"],
        [1, 59, 65, 100, 200],
    ),
)
def test_padding_may_leave_queries_without_a_key(graph: str, mechanism: str, n: int) -> None:
    body = f"causal attend {graph} + {mechanism}"
    module = spec_of(body).compile(head_size=8)
    real = torch.ones(3, n, dtype=torch.bool)
    real[0, :1] = real[1, : n // 2] = real[2, n // 2 :] = False

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = module(q, k, v, key_padding_mask=real)
        return out

    given = drawn(3, n, 8, 1.0)
    assert_accurate(body, run, given, real)
    with torch.no_grad():
        assert not run(*given)[0, :, 0].any()
