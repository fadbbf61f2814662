"""Kernels for jax-triton 0.3, which passes an operand that is updated in place twice: also as a result."""

import inspect
import re
from functools import cache
from typing import Any

import triton
from triton.runtime.jit import KernelParam

NAME = "_updated"


@cache
def with_result_parameter(kernel: Any) -> Any:
    """`kernel` with an additional, unused parameter between its pointers and its constants."""
    twin = triton.JITFunction(kernel.fn)
    index, first = next((i, parameter.name) for i, parameter in enumerate(twin.params) if parameter.is_constexpr)
    source, found = re.subn(rf"\b{first}\s*:", f"{NAME}, {first}:", twin.src, count=1)
    assert found, f"{kernel} has no parameter {first} with an annotation"
    twin._unsafe_update_src(source)
    # jax-triton and Triton's compiler read the parameters from these two lists.
    parameter = inspect.Parameter(NAME, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    twin.params.insert(index, KernelParam(index, parameter, False, False))
    twin.arg_names.insert(index, NAME)
    return twin
