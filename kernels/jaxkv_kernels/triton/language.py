"""Triton and its language, or a stand-in where Triton is not installed.

A kernel's file also has the reasons against calls, which `jaxkv.explain` reports on every machine.  With the stand-in,
these files can be imported everywhere; their kernels only run with Triton.
"""

from typing import TYPE_CHECKING, Any


class _Absent:
    """Every attribute is the stand-in itself, and every call returns its first argument, as decorators must."""

    def __getattr__(self, name: str) -> "_Absent":
        return self

    def __call__(self, value: Any = None, *args: Any, **kwargs: Any) -> Any:
        return value


if TYPE_CHECKING:
    import triton as triton
    import triton.language as tl
else:
    try:
        import triton
        import triton.language as tl
    except ImportError:
        triton = tl = _Absent()
