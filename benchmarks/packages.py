"""Against packages that do the same work, their projections replaced by stubs.

The stubs return the given q, k and v, so that a package is charged for its attention alone.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import redirect_stdout
from importlib import import_module
from io import StringIO
from typing import Any

import torch

from attnspec.bench.timing import alternate
from attnspec.lower.lower import shares_keys
from attnspec.runtime.module import CompiledAttention
from attnspec.text.diagnostics import SpecError
from benchmarks.cases import HEADS, SIZE, WORKS, Settings, Work
from benchmarks.flex import SAME
from benchmarks.measuring import Json, missing, planned, tensors

Attend = Callable[[], torch.Tensor]
"""One call on tensors that are already where the package wants them; [B, H, n, d]."""

Make = Callable[[CompiledAttention, torch.Tensor, torch.Tensor, torch.Tensor], Attend]
"""From our module and q, k, v to a call of the package."""


class Given(torch.nn.Module):
    """Stands in place of a projection: whatever comes in, the given tensor comes out."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self.tensor = tensor

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.tensor


class Copied(torch.nn.Module):
    """A projection that changes nothing, into memory of its own as any projection writes."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return states.clone()


def local_attention(
    ours: CompiledAttention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> Attend:
    """local-attention with a window of exactly 256 keys on each side."""
    module: Any = (
        import_module("local_attention")
        .LocalAttention(window_size=256, exact_windowsize=True, use_rotary_pos_emb=False)
        .eval()
    )
    return lambda: module(q, k, v)


def longformer(
    ours: CompiledAttention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> Attend:
    """The Longformer attention of transformers; its 64 first tokens are global."""
    models: Any = import_module("transformers.models.longformer.modeling_longformer")
    config: Any = import_module("transformers").LongformerConfig(
        hidden_size=HEADS * SIZE,
        num_attention_heads=HEADS,
        num_hidden_layers=1,
        attention_window=[512],
    )
    module = models.LongformerSelfAttention(config, layer_id=0).eval()
    # what it reads from its states is the queries, so the queries are its states
    states, keys, values = (_joined(x) for x in (q, k, v))
    module.query, module.query_global = Copied(), Copied()
    module.key = module.key_global = Given(keys.transpose(0, 1))
    module.value = module.value_global = Given(values.transpose(0, 1))
    chosen = torch.zeros(states.shape[:2])
    chosen[:, :64] = 10_000.0
    nobody = torch.zeros(states.shape[:2], dtype=torch.bool)

    def attend() -> torch.Tensor:
        out = module(
            states,
            attention_mask=chosen,
            is_index_masked=nobody,
            is_index_global_attn=chosen > 0,
            is_global_attn=True,
        )[0]
        return _split(out)

    return attend


def bigbird(ours: CompiledAttention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Attend:
    """The BigBird attention of transformers, with random blocks of its own."""
    models: Any = import_module("transformers.models.big_bird.modeling_big_bird")
    n = q.shape[2]
    config: Any = import_module("transformers").BigBirdConfig(
        hidden_size=HEADS * SIZE,
        num_attention_heads=HEADS,
        num_hidden_layers=1,
        max_position_embeddings=n,
        block_size=64,
        num_random_blocks=3,
    )
    module = models.BigBirdBlockSparseAttention(config, seed=0).eval()
    states, keys, values = (_joined(x) for x in (q, k, v))
    module.query, module.key, module.value = Given(states), Given(keys), Given(values)
    blocks, band, rows, columns = models.BigBirdModel.create_masks_for_block_sparse_attn(
        torch.ones(states.shape[:2]), 64
    )

    def attend() -> torch.Tensor:
        return _split(module(states, band, rows, columns, blocks, blocks)[0])

    return attend


def performer(causal: bool) -> Make:
    """The fast attention of performer-pytorch, with directions of its own: one draw for all
    heads, and 1e-4 added to every feature."""

    def make(ours: CompiledAttention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Attend:
        package: Any = import_module("performer_pytorch")
        with redirect_stdout(StringIO()):
            # it prints that it has no kernel for other devices at hand
            module = package.FastAttention(SIZE, nb_features=256, causal=causal).eval()
        return lambda: module(q, k, v)

    return make


def nystrom(ours: CompiledAttention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Attend:
    """nystrom-attention with our convolution; its inverse starts from one norm of all heads."""
    module: Any = (
        import_module("nystrom_attention")
        .NystromAttention(HEADS * SIZE, SIZE, HEADS, num_landmarks=64, residual_conv_kernel=33)
        .eval()
    )
    kernel = ours.get_parameter("nystrom_kernel")[0]
    module.res_conv.weight.copy_(kernel.view(-1, 1, 33, 1).expand(HEADS, -1, -1, -1))
    states = torch.cat([_joined(x) for x in (q, k, v)], -1)
    module.to_qkv, module.to_out = Given(states), torch.nn.Identity()
    return lambda: _split(module(states))


def linformer(ours: CompiledAttention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Attend:
    """The self-attention of linformer with our projections, which it shares among heads."""
    keys, values = (ours.get_parameter(f"linformer_{name}")[0, 0] for name in ("keys", "values"))
    module: Any = (
        import_module("linformer")
        .LinformerSelfAttention(HEADS * SIZE, keys.shape[1], k=len(keys), heads=HEADS)
        .eval()
    )
    module.proj_k.copy_(keys.T)
    module.proj_v.copy_(values.T)
    states = _joined(q)
    module.to_q, module.to_k, module.to_v = (Given(_joined(x)) for x in (q, k, v))
    module.to_out = torch.nn.Identity()
    return lambda: _split(module(states))


def reformer(ours: CompiledAttention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Attend:
    """The attention of reformer-pytorch, whose keys are the queries, with hashes of its own."""
    module: Any = import_module("reformer_pytorch").LSHAttention(bucket_size=64, n_hashes=4).eval()
    rows, values = q.flatten(0, 1), v.flatten(0, 1)
    return lambda: module(rows, values)[0].view(q.shape)


RIVALS: dict[str, tuple[Make, bool]] = {
    "window(256)": (local_attention, True),
    "Longformer 256 + 64": (longformer, True),
    "BigBird 64, 3": (bigbird, False),
    "LSH, 4 rounds, chunk 64": (reformer, False),
    "FAVOR+ 256": (performer(causal=False), False),
    "causal FAVOR+ 256": (performer(causal=True), False),
    "Nyström 64": (nystrom, False),
    "Linformer 256": (linformer, True),
}
"""How a package is called, and whether its results are the same, by the work's name."""


def measure(settings: Settings) -> dict[str, Json]:
    """A row for each work: both times and their ratio, forward, or why there are none."""
    rows: list[Json] = []
    for work in WORKS:
        if work.name in settings.packages:
            try:
                rows.append(_row(work, settings.packages_n, settings.rounds))
            except ImportError:
                rows.append(missing(work.name, f"{work.package} is not installed"))
            except SpecError as error:
                rows.append(missing(work.name, error.diagnostics[0].message))
    return {"n": settings.packages_n, "rows": rows}


def _row(work: Work, n: int, rounds: int) -> dict[str, Json]:
    spec = work.case.spec(n)
    ours = spec.compile()
    if work.name not in RIVALS:
        return missing(work.name, f"no way to call {work.package} is written down yet")
    make, same = RIVALS[work.name]
    q, k, v = tensors(n)
    if any(shares_keys(attend.graph) for attend in spec.program.attends):
        k = q
    with torch.no_grad():
        theirs = make(ours, q, k, v)
        difference = _apart(ours(q, k, v), theirs()) if same else None
        if difference is not None and not difference <= SAME:
            raise ValueError(f"{work.name}: the results must be the same, got {difference:g} apart")
        timed = alternate({"ours": lambda: ours(q, k, v), "package": theirs}, rounds)
    return {
        "name": work.name,
        "package": work.package,
        "target": work.target,
        "ours": timed["ours"].data(),
        "theirs": timed["package"].data(),
        "ratio": timed["package"].median / timed["ours"].median,
        "difference": difference,
        **planned(spec, n),
    }


def _apart(found: torch.Tensor, other: torch.Tensor) -> float:
    """How far results are apart, in units of the largest if that is above 1."""
    return float((found - other).abs().max() / other.abs().max().clamp_min(1.0))


def _joined(x: torch.Tensor) -> torch.Tensor:
    """[B, H, n, d] as [B, n, H d], as projections write it."""
    return x.transpose(1, 2).flatten(2).contiguous()


def _split(x: torch.Tensor) -> torch.Tensor:
    """[B, n, H d] as [B, H, n, d]."""
    return x.view(*x.shape[:2], HEADS, SIZE).transpose(1, 2)
