"""How a step of a model spends its time: kernels by what they compute, and the gaps between them."""

import re
from collections.abc import Iterable

KINDS = {
    "experts": r"experts_",
    "collectives": r"nccl|psum|all_?(reduce|gather|to_?all)",
    "attention": r"^_?(decode|plan|indexer|select|attend|combine|merge)_?|sdpa|fmha|flash|topk_",
    "products": r"gemm|gemv|nvjet|cutlass|cublas|split_?k|dot|linear_",
}
"""What a kernel computes, by a pattern that its name contains.  The first that fits is its kind.

Products are those of dense weights, by XLA, cuBLAS or `scaled_linear`.  Small sums over devices are parts of XLA's
fusions.  Kernels that fit none are "others": XLA's fusions, among which are its products of a weight and a single
token, and copies of entries.
"""


def kind(kernel: str) -> str:
    """The kind of the kernel of that name."""
    found = (name for name, pattern in KINDS.items() if re.search(pattern, kernel, re.IGNORECASE))
    return next(found, "others")


def by_kind(kernels: Iterable[tuple[str, float]]) -> dict[str, float]:
    """The seconds of each kind of kernel, of (name, seconds) of each kernel; without kinds that take none."""
    found = dict.fromkeys([*KINDS, "others"], 0.0)
    for name, took in kernels:
        found[kind(name)] += took
    return {name: took for name, took in found.items() if took}


def shares(kernels: Iterable[tuple[str, float]], seconds: float) -> dict[str, float]:
    """The seconds of each kind of kernel, and of "gaps", in a step that takes `seconds`.

    `kernels` are those of `KernelTimes`.  Their times come from a profile, and `seconds` from a run without one.
    """
    found = by_kind(kernels)
    gaps = seconds - sum(found.values())
    return {**found, "gaps": gaps} if gaps > 0 else found


def described(found: dict[str, float], seconds: float) -> str:
    """One line: milliseconds and percentage of each share."""
    parts = (f"{name} {1e3 * took:.3f} ms ({took / seconds:.0%})" for name, took in found.items())
    return ", ".join(parts)
