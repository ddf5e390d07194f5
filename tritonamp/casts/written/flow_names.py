"""Names of the functions and methods through which ``flows`` follows probabilities."""

import ast
from collections.abc import Hashable
from typing import Any

import torch
from torch.nn import functional

# functions that are not finite at 0, or at 1
LOGS = frozenset({"entr", "log", "log10", "log2", "logit", "reciprocal", "rsqrt"})
DIVISIONS = frozenset({"div", "divide", "true_divide"})
SUMS = frozenset({"cumprod", "cumsum", "mean", "prod", "sum"})
BINARY: dict[str, type[ast.operator]] = {
    "add": ast.Add, "sub": ast.Sub, "subtract": ast.Sub, "rsub": ast.Sub, "mul": ast.Mult,
    "multiply": ast.Mult, "pow": ast.Pow,
}  # fmt: skip
KEEPS = frozenset(
    """
    abs amax amin cat chunk clamp clamp_max clamp_min clip clone concat contiguous cpu cuda detach
    diagonal double expand expand_as flatten flip float gather hstack index_select masked_fill
    masked_select max maximum min minimum movedim nan_to_num narrow neg permute ravel repeat reshape
    reshape_as select sort split squeeze stack swapaxes swapdims t take take_along_dim topk
    transpose unbind unflatten unsqueeze view view_as vstack
    """.split()
)
"""Functions and methods whose results are some of the values of their first argument."""
VIEWS = frozenset({"H", "T", "data", "mH", "mT", "values"})  # attributes, also of results of topk
WIDE = torch.float32, torch.float64
_READ = LOGS | DIVISIONS | SUMS | BINARY.keys() | KEEPS
_OTHERS = frozenset({"kl_div", "log1p", "where", "xlog1py", "xlogy"})
_OF_TORCH = {
    function: name
    for owner in (functional, torch.special, torch)
    for name in _READ | _OTHERS
    if callable(function := getattr(owner, name, None))
}


def name_of(function: Any) -> str:
    """Return the name of a function of torch that is on a list above, else ""."""
    is_known = callable(function) and isinstance(function, Hashable)
    return _OF_TORCH.get(function, "") if is_known else ""
