"""Reach that is proven for every n: sound by brute force, and the truths that it must see."""

from __future__ import annotations

from itertools import product

import pytest
from random_specs import spec_text

from attnspec.analysis.reach import reach
from attnspec.check import form_proofs
from attnspec.graphs.forms.conditions import TooMany
from attnspec.spec import Spec, parse


def spec_of(body: str) -> Spec:
    return parse(f"attention a {{ {body} }}")


def status(body: str, claim: str) -> str:
    (verdict,) = spec_of(f"{body} require {claim}").verdicts
    return verdict.status


STRIDE = "causal heads 2 attend window(before = isqrt(n), after = 0) head 1 {{ attend {} }}"
CELLS = "causal layers 2 layer {} {{ attend block(size = 8) }} layer {} {{ attend {} | self }}"
SUMMARY = "summary(stride = 8, cells = 1)"


@pytest.mark.parametrize(
    ("body", "claim"),
    [
        ("attend full", "reach(layers = 1)"),
        ("causal attend full", "diameter <= 1"),
        ("layers 3 attend self layer 2 { attend full }", "depth <= 3"),
        ("attend global(first(1)) | self", "depth <= 2"),
        ("attend global(last(3) | first(2)) | random(keys = 2)", "diameter < 3"),
        ("attend global(every(8))", "path_length <= 2"),
        ("input x: tokens attend global(x) | global(first(1))", "reach(layers = 2)"),
        (
            "layers 2 layer 0 { attend rows(first(1)) } layer 1 { attend columns(first(1)) }",
            "depth <= 2",
        ),
        ("attend strided(stride = isqrt(n))", "reach(layers = 2)"),
        ("causal attend strided(stride = 128)", "depth <= 2"),
        (STRIDE.format("residue(step = isqrt(n))"), "reach(layers = 2)"),
        ("causal attend fixed(stride = isqrt(n), cells = 3)", "reach(layers = 2)"),
        (CELLS.format(0, 1, SUMMARY), "reach(layers = 2)"),
        ("attend window(radius = 3)", "depth <= n"),
        ("causal attend window(before = 1, after = 0)", "reach(layers = n - 1)"),
        ("heads 2 attend linear() head 1 { attend full }", "depth <= 1"),
    ],
)
def test_what_follows_is_proven(body: str, claim: str) -> None:
    assert status(body, claim) == "proven"


@pytest.mark.parametrize(
    ("body", "claim", "found"),
    [
        # true at some lengths, or true but not by these rules
        ("attend window(radius = 3)", "depth <= 400", "checked"),
        ("attend expander(degree = 8)", "depth <= 99", "checked"),
        ("attend strided(stride = isqrt(n))", "reach(layers = 1)", "refuted"),
        # a later token is no way round
        ("causal attend global(first(1)) | self", "depth <= 2", "refuted"),
        # a set without a member joins nothing
        ("attend global(first(0)) | self", "depth <= 2", "refuted"),
        ("attend global(positions(5)) | self", "depth <= 2", "refuted"),
        ("input x: tokens attend global(x) | self", "depth <= 2", "unchecked"),
        # the last block has no summary
        ("attend fixed(stride = 8, cells = 1)", "reach(layers = 2)", "refuted"),
        (CELLS.format(1, 0, SUMMARY), "reach(layers = 2)", "refuted"),
        (STRIDE.format("residue(step = isqrt(n) + 2)"), "reach(layers = 2)", "refuted"),
        # a size that is none of a pattern may be below 1 where sequences are short
        (
            "causal layers 2 layer 0 { attend block(size = 4) }"
            " layer 1 { attend where(k % 4 >= 4 - n // 64) }",
            "reach(layers = 2)",
            "checked",
        ),
        (
            "causal layers 2 layer 0 { attend block(size = 4) }"
            " layer 1 { attend where(k % 4 >= 4 - n // 256) }",
            "reach(layers = 2)",
            "refuted",
        ),
        (
            "attend where((q - k) % (2 * (n // 2) - 5) == 0)"
            " | where(abs(q - k) < 2 * (n // 2) - 5)",
            "diameter <= 2",
            "refuted",
        ),
        (
            "layers 2 layer 1 { attend rows(first(1)) } layer 0 { attend columns(first(1)) }",
            "depth <= 2",
            "refuted",
        ),
        ("attend window(before = 0, after = 1)", "depth <= n", "refuted"),
        ("attend full", "depth >= 1", "refuted"),
        ("attend full", "diameter == 1 at n = 7", "checked"),
    ],
)
def test_what_does_not_follow_is_checked(body: str, claim: str, found: str) -> None:
    assert status(body, claim) == found


LAYERS = "{} layers 2 layer 0 {{ attend {} | self }} layer 1 {{ attend {} | self }}"


@pytest.mark.parametrize("step", [2, 3, 8])
@pytest.mark.parametrize("turned", [False, True])
def test_a_window_fills_the_gaps_of_a_residue_and_not_one_position_less(
    step: int, turned: bool
) -> None:
    for missing, found in ((0, "proven"), (1, "refuted")):
        parts = f"residue(step = {step})", f"window(before = {step - 1 - missing}, after = 0)"
        body = LAYERS.format("causal", *(parts[::-1] if turned else parts))
        assert status(body, "reach(layers = 2)") == found
        assert status(body, "depth <= 2") == found
    # without `causal` there is a way round on the other side, of which no rule speaks
    parts = f"residue(step = {step})", f"window(radius = {step - 1})"
    body = LAYERS.format("", *(parts[::-1] if turned else parts))
    assert status(body, "depth <= 2") == "proven"


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize(
    ("body", "needed"),
    [
        ("attend full", 1),
        ("causal attend strided(stride = 128)", 2),
        ("layers 3 attend self layer 2 { attend full }", 3),
    ],
)
def test_what_is_proven_is_what_holds_at_the_bound(body: str, needed: int, layers: int) -> None:
    for claim, holds in (
        (f"reach(layers = {layers})", layers >= needed),
        (f"depth <= {layers}", layers >= needed),
        (f"depth < {layers}", layers > needed),
    ):
        assert status(body, claim) == ("proven" if holds else "refuted")


def test_a_line_is_followed_to_its_end() -> None:
    for causal in ("", "causal"):
        body = f"{causal} attend window(radius = 1)"
        for claim, found in (
            ("depth <= n - 1", "proven"),
            ("depth < n", "proven"),
            ("depth <= n", "proven"),
            ("reach(layers = n - 1)", "proven"),
            ("depth < n - 1", "refuted"),
            ("depth <= n - 2", "refuted"),
        ):
            assert status(body, claim) == found, claim


@pytest.mark.parametrize(
    "part",
    [*range(1), *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 6))],
)
def test_bounds_are_sound(part: int) -> None:
    """Bounds of random specs against the depth and the diameter found by following all pairs."""
    numbers = lines = 0
    for seed in range(60 * part, 60 * part + 60):
        spec = parse(spec_text(seed))
        stack = spec.stack()
        layers = form_proofs.layer_forms(stack)
        if layers is None:
            continue
        bound = form_proofs.bound_of(layers, spec.program)
        for n in (1, 9, 64):
            found = reach.depth(stack, n).value
            if isinstance(bound, int):
                numbers += 1
                assert found is not None, (seed, n, bound)
                assert found <= bound, (seed, n, bound)
            elif bound == form_proofs.LINE:
                lines += 1
                assert found is not None, (seed, n)
                assert found <= n - 1, (seed, n)
    assert numbers > 10
    assert lines > 10


PARTS = (
    "self",
    "full",
    "window(radius = 1)",
    "residue(step = 2)",
    "global(first(1)) | self",
    "columns(first(1))",
    "rows(first(1))",
    "block(size = 3)",
    "summary(stride = 3, cells = 1) | self",
)


@pytest.mark.parametrize("causal", ["", "causal "])
def test_bounds_of_two_layers_are_sound(causal: str) -> None:
    """The last layer stands above itself, and no other is met again."""
    joins = []
    for first, second in product(PARTS, repeat=2):
        spec = spec_of(f"{causal}layers 2 attend {first} layer 1 {{ attend {second} }}")
        layers = form_proofs.layer_forms(spec.stack())
        assert layers is not None
        bound = form_proofs.bound_of(layers, spec.program)
        depths = {n: reach.depth(spec.stack(), n).value for n in (2, 7, 11)}
        if isinstance(bound, int):
            joins.append((first, second))
            assert all(d is not None and d <= bound for d in depths.values()), (first, second)
            # at some length it takes as many
            assert bound in depths.values(), (first, second)
        elif bound == form_proofs.LINE:
            assert all(d is not None and d <= max(n - 1, 0) for n, d in depths.items())
    alone = {first for first, second in joins if first == second}
    assert {*product(PARTS, alone)} <= {*joins}


def test_a_proof_names_no_length() -> None:
    (verdict,) = spec_of("attend full require depth <= 1").verdicts
    assert (verdict.status, verdict.lengths, verdict.failed_at) == ("proven", (), None)
    (checked,) = spec_of("attend window(radius = 3) require depth <= 400").verdicts
    assert checked.lengths == (1, 2, 64, 257, 1024)
    (failed,) = spec_of("attend window(radius = 3) require depth <= 40").verdicts
    assert (failed.status, failed.failed_at) == ("refuted", 257)


# --- graphs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("claim", "found"),
    [
        ("self subset causal", "proven"),
        (
            "strided(stride = 9 * n) == window(radius = 9 * n - 1) | residue(step = 9 * n)",
            "proven",
        ),
        ("global(marked) subset full", "proven"),
        ("random(keys = 3) & causal subset random(keys = 3)", "proven"),
        ("shift(full, by = 0) == full", "checked"),
        ("full subset window(radius = 4000)", "checked"),
        ("global(marked) == full", "unchecked"),
        ("window(radius = 9) subset window(radius = 8)", "refuted"),
    ],
)
def test_claims_about_graphs(claim: str, found: str) -> None:
    assert status("input marked: tokens attend self", claim) == found


def test_a_counterexample_has_its_row() -> None:
    spec = spec_of(
        "attend self require window(before = 3, after = 0) == block(size = 4) & causal at n = 12"
    )
    (verdict,) = spec.verdicts
    assert verdict.diagnostics[0].message.endswith(
        "does not hold at n = 12: (4, 1) is only in the first graph:"
        " query 4 reads 1..4 in the first, 4 in the second"
    )


def test_graphs_are_compared_at_long_lengths() -> None:
    claim = "window(radius = 255) subset window(radius = n // 256) at n = {}"
    assert status("attend self", claim.format(65_536)) == "checked"
    assert status("attend self", claim.format(65_024)) == "refuted"


@pytest.mark.parametrize("claim", ["reach(layers = 2)", "depth <= 2", "diameter <= 2"])
def test_of_too_many_graphs_nothing_follows(monkeypatch: pytest.MonkeyPatch, claim: str) -> None:
    body = "layers 2 attend window(radius = 1) layer 1 { attend full }"
    wrong = "layers 2 attend window(radius = 1) layer 1 { attend window(radius = 2) }"
    specs = [spec_of(f"{each} require {claim}") for each in (body, wrong)]
    found = [
        [form_proofs.proven(one, spec.stack()) for one in spec.program.claims] for spec in specs
    ]
    assert found == [[True], [False]]

    def too_many(*given: object) -> None:
        raise TooMany

    for what in ("joined", "merged"):
        with monkeypatch.context() as patch:
            patch.setattr(form_proofs, what, too_many)
            for spec in specs:
                assert not any(
                    form_proofs.proven(one, spec.stack()) for one in spec.program.claims
                ), what
