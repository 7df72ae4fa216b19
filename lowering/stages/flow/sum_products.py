"""Keep IREE from taking sums of products for contractions that it cannot write."""

from __future__ import annotations

from typing import Any

from lowering.stages.ir.structured import RESHAPES, inputs_of, is_elementwise, loops_of, maps_of
from lowering.stages.ir.symbols import maker_of, ops_of, origin_of, walk
from lowering.stages.ir.templates import compilation_info, put

# `math.fma` with -0.0 is the product, which IREE takes for none.
_PRODUCT = """
func.func private @product(%a: {kind}, %b: {kind}) -> {kind} {{
  %nothing = arith.constant -0.0 : {kind}
  %ab = math.fma %a, %b, %nothing : {kind}
  return %ab : {kind}
}}
"""


def hide_products(function: Any) -> None:
    """Write products that are then added up along several loops so that IREE packs no factor.

    It fuses the two, takes them for a product of matrices, lays out its factors, and dies (SIGSEGV)
    or refuses what it has made of them ("failed to legalize operation 'linalg.generic'").

    Before: %p = linalg.generic {arith.mulf} ins(%x, %w); %y = sum over j, k of %p[i, j, k]
    After:  %p = linalg.generic {math.fma with -0.0} ins(%x, %w); %y = sum over j, k of %p[i, j, k]
    """
    for op in ops_of(function):
        if op.name != "linalg.generic" or _reductions(op) < 2:
            continue
        if maker_of(_yielded(op)) == "arith.addf":
            for value in inputs_of(op):
                value = origin_of(value, RESHAPES)
                is_op = maker_of(value) == "linalg.generic" and is_elementwise(value.owner)
                if is_op and maker_of(product := _yielded(value.owner)) == "arith.mulf":
                    _hide(product.owner)


def sum_products(module: Any) -> None:
    """Write products that are added up along several loops so that IREE's vectorizer knows none.

    Where one factor is the same for all rows, as in a weighted loss, it makes a contraction of
    that, and refuses it afterwards ("invalid accumulator/result vector shape").

    Before: %y = sum over i, j of %x[i, j] * %w[j]                    {arith.mulf; arith.addf}
    After:  the same                                          {math.fma with -0.0; arith.addf}

    Args:
        module: one in flow, its dispatches formed.
    """
    from iree.compiler import ir

    for op in [op for op in walk(module) if op.name == "linalg.generic"]:
        product = _product_in(op)
        if product is None:
            continue
        if product.name == "arith.muli":
            zeros = [0] * len(op.attributes["iterator_types"])
            # Number by number, which for whole numbers is the only way there is.
            plain = compilation_info({"distribution": zeros}, "Default")
            op.attributes["compilation_info"] = ir.Attribute.parse(plain)
            continue
        _hide(product)


def _hide(product: Any) -> None:
    from iree.compiler import ir

    with ir.InsertionPoint(product), product.location:
        text = _PRODUCT.format(kind=product.results[0].type)
        (result,) = put(text, list(product.operands))
    product.results[0].replace_all_uses_with(result)
    product.erase()


def _reductions(op: Any) -> int:
    return sum("reduction" in str(kind) for kind in op.attributes["iterator_types"])


def _yielded(op: Any) -> Any:
    *_, end = ops_of(op)
    return end.operands[0]


def _product_in(op: Any) -> Any:
    """Return the product in an op that adds up products along several loops; or None.

    Not of what is like a product of matrices, each of which has a loop of the result to itself.
    """
    maps = maps_of(op)
    if len(op.results) != 1 or not all(m.is_projected_permutation for m in maps):
        return None
    *inputs, kept = (set(loops_of(m)) for m in maps)
    own = [[(one & kept) - other for other in inputs] for one in inputs]
    is_of_matrices = any(own[i][j] and own[j][i] for i in range(len(own)) for j in range(i))
    if is_of_matrices or maps[0].n_dims - len(kept) < 2:
        return None
    total = _yielded(op).owner
    if getattr(total, "name", "") not in ("arith.addf", "arith.addi"):
        return None
    makers = [operand.owner for operand in total.operands]
    products = [m for m in makers if getattr(m, "name", "") in ("arith.mulf", "arith.muli")]
    return products[0] if products else None
