"""One name for one operation, however it was called: ``a @ b``, ``torch.matmul(a, b)`` and ``a.matmul(b)``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# What only looks at a tensor's shape. It makes no tensor, and what it says does not depend on the content.
LOOKS = frozenset(
    {
        "dim",
        "ndim",
        "ndimension",
        "shape",
        "size",
        "numel",
        "nelement",
        "stride",
        "storage_offset",
        "dtype",
        "device",
        "layout",
        "is_contiguous",
        "is_floating_point",
        "is_complex",
        "is_cuda",
        "is_cpu",
        "is_meta",
        "is_sparse",
        "is_nested",
        "is_quantized",
        "is_inference",
        "is_leaf",
        "is_same_size",
        "requires_grad",
        "element_size",
        "get_device",
        "nbytes",
        "itemsize",
        "names",
        "_version",
        "__len__",
        "__hash__",
        "__repr__",
        "__format__",
    }
)

# They write a tensor's numbers as text.
SHOWS = frozenset({"__repr__", "__format__"})

# They make a tensor of another's shape, and read nothing else of it.
LIKE = frozenset({"ones_like", "zeros_like", "empty_like", "full_like", "rand_like", "randn_like"}) | {
    *("new_ones", "new_zeros", "new_empty", "new_full", "new_tensor"),
}

_SAME = {
    "__add__": "add",
    "__radd__": "add",
    "__iadd__": "add",
    "__sub__": "sub",
    "__isub__": "sub",
    "__rsub__": "rsub",
    "subtract": "sub",
    "__mul__": "mul",
    "__rmul__": "mul",
    "__imul__": "mul",
    "multiply": "mul",
    "__truediv__": "div",
    "__itruediv__": "div",
    "__div__": "div",
    "__rtruediv__": "rdiv",
    "__rdiv__": "rdiv",
    "divide": "div",
    "true_divide": "div",
    "__matmul__": "matmul",
    "__rmatmul__": "rmatmul",
    "__imatmul__": "matmul",
    "__neg__": "neg",
    "negative": "neg",
    "__pow__": "pow",
    "__ipow__": "pow",
    "__rpow__": "rpow",
    "__eq__": "eq",
    "__ne__": "ne",
    "__lt__": "lt",
    "less": "lt",
    "__le__": "le",
    "less_equal": "le",
    "__gt__": "gt",
    "greater": "gt",
    "__ge__": "ge",
    "greater_equal": "ge",
    "__invert__": "logical_not",
    "bitwise_not": "logical_not",
    "__and__": "logical_and",
    "bitwise_and": "logical_and",
    "__or__": "logical_or",
    "bitwise_or": "logical_or",
    "__getitem__": "getitem",
    "__setitem__": "setitem",
    "swapaxes": "transpose",
    "swapdims": "transpose",
    "concat": "cat",
    "concatenate": "cat",
    "absolute": "abs",
    "square": "square",
    "moveaxis": "movedim",
    "special_erf": "erf",
    "special_expit": "sigmoid",
    "special_softmax": "softmax",
    "special_log_softmax": "log_softmax",
}


def canonical(function: Callable[..., Any]) -> str:
    """Return the operation's name; one in place has the name of the one that is not."""
    name = getattr(function, "__name__", type(function).__name__)
    if name == "__get__":  # a property: Tensor.shape.__get__
        return getattr(getattr(function, "__self__", None), "__name__", name)
    return canonical_name(name)


def canonical_name(name: str) -> str:
    """Return the operation that a function or method of this name does."""
    name = _SAME.get(name, name)
    if name.endswith("_") and not name.startswith("_"):
        name = name[:-1]
    return _SAME.get(name, name)
