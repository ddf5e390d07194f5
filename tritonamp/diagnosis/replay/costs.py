"""The cost of modules in a wider precision: bytes, and FLOPs at the rate of FP32."""

from collections.abc import Sequence

from tritonamp.diagnosis.terminal import in_bytes
from tritonamp.watched.products import Products, Share

_NO_CONVOLUTION = "torch has no half convolution with an FP32 result"


def cost_in_words(
    products: Products, results: Sequence[str], modules: Sequence[str], weights: float
) -> str:
    """Return the cost of modules in both tiers in words; "" without modules.

    Args:
        products: products of a forward.
        results: names of modules with FP32 results.
        modules: names of modules in FP32.
        weights: further bytes of weights and gradients of ``modules``.
    """
    costs = []
    if results:
        costs.append(f"FP32 results: {_of_results(products.inside(results))}")
    if modules:
        share = products.inside(modules)
        costs.append(
            f"FP32: {in_bytes(weights)} more of weights, {_part(share.flops, share)} at its rate"
        )
    return "; ".join(costs)


def _of_results(share: Share) -> str:
    """Return the cost of FP32 results in words."""
    costs = [f"no FP32 weights, {in_bytes(2 * share.elements)} more of results in a forward"]
    if share.flops > share.convolved:
        costs.append(f"{_part(share.flops - share.convolved, share)} at the rate of half products")
    if share.convolved:
        slow = f"{_part(share.convolved, share)} at the rate of FP32"
        costs.append(f"{slow}, because {_NO_CONVOLUTION}")
    return ", ".join(costs)


def _part(flops: int, share: Share) -> str:
    """Return FLOPs as a part of a forward's, in words."""
    part = 100 * flops / share.of_all if share.of_all else 0.0
    return f"{part:.{0 if part >= 10 else 1}f} % of the forward's FLOPs"
