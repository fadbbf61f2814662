"""Kernels for jax-triton 0.3, which passes operands that are updated in place twice: also as results."""

import inspect
import re
from functools import cache
from typing import Any

import triton
from triton.runtime.jit import KernelParam


@cache
def with_result_parameters(kernel: Any, count: int) -> Any:
    """`kernel` with `count` additional, unused parameters between its pointers and its constants."""
    twin = triton.JITFunction(kernel.fn)
    index, first = next((i, parameter.name) for i, parameter in enumerate(twin.params) if parameter.is_constexpr)
    names = [f"_updated{i}" for i in range(count)]
    source, found = re.subn(rf"\b{first}\s*:", f"{', '.join(names)}, {first}:", twin.src, count=1)
    assert found, f"{kernel} has no parameter {first} with an annotation"
    twin._unsafe_update_src(source)
    # jax-triton and Triton's compiler read the parameters from these two lists.
    parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    twin.params[index:index] = [KernelParam(index + i, one, False, False) for i, one in enumerate(parameters)]
    twin.arg_names[index:index] = names
    return twin
