"""A graph taken apart: products that have a decided graph each, and the static pairs beside them.

`chosen(sel) & causal | window(8)` is the window, and the pairs of `chosen(sel) & causal` that are
not in it. Known without torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, product

from attnspec.backends.common.labels import ALL, joined
from attnspec.graphs.operators import Complement, Intersection, Union
from attnspec.graphs.relation import DataDependent, Relation, decided_in
from attnspec.graphs.token_sets import reads_data
from attnspec.limits import LIMITS


@dataclass(frozen=True)
class Product:
    """The pairs of a decided graph, its leaf, that all of `others` have; `static` are those of the
    conditions that positions alone decide, None for none."""

    leaf: DataDependent
    others: tuple[Relation, ...]
    static: Relation | None


@dataclass(frozen=True)
class Parts:
    """Disjoint parts of a graph; `rest` is static, None for no pair."""

    products: tuple[Product, ...]
    rest: Relation | None


@lru_cache(maxsize=64)
def parts_of(relation: Relation) -> Parts | None:
    """The parts of a graph, or None where it is not taken apart: a decided graph stands under
    something else than `|` and `&`, or there are too many products."""
    all_factors = _products(relation)
    if all_factors is None:
        return None
    still = [factors for factors in all_factors if not any(map(decided_in, factors))]
    rest = joined(Union, [joined(Intersection, each, ALL) for each in still], None)
    not_before = [] if rest is None else [Complement(rest)]
    products: list[Product] = []
    for factors in all_factors:
        if factors in still:
            continue
        leaf = next(factor for factor in factors if isinstance(factor, DataDependent))
        others = [*(factor for factor in factors if factor is not leaf), *not_before]
        static = joined(Intersection, [x for x in others if not reads_data(x)], None)
        products.append(Product(leaf, tuple(x for x in others if reads_data(x)), static))
        not_before.append(Complement(joined(Intersection, factors, ALL)))
    return Parts(tuple(products), rest)


def _products(relation: Relation) -> list[tuple[Relation, ...]] | None:
    """The relation as a union of products of factors, which are static or decided leaves."""
    if not decided_in(relation) or isinstance(relation, DataDependent):
        return [(relation,)]
    if not isinstance(relation, Union | Intersection):
        return None
    # terms without a decided graph stay together
    still = [term for term in relation.terms if not decided_in(term)]
    together = joined(type(relation), still, None)
    terms = [*([] if together is None else [together]), *filter(decided_in, relation.terms)]
    parts = [part for part in map(_products, terms) if part is not None]
    if len(parts) < len(terms):
        return None
    if isinstance(relation, Union):
        products = list(chain(*parts))
    else:
        products = [tuple(chain(*some)) for some in product(*parts)]
    return products if len(products) <= LIMITS.products else None
