"""Memory of other libraries as JAX arrays, by DLPack, with its bounds, strides and address checked.

`jax.numpy.from_dlpack` alone does not suffice: it accepts transposed tensors, converts 64-bit numbers, and copies
memory that is not aligned, without an error or a warning.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

PLATFORMS = {1: "cpu", 2: "cuda", 10: "rocm"}
"""DLDeviceType of the devices whose memory can be shared, and what JAX calls their platform."""
ALIGNMENTS = {"cpu": 64}
"""Bytes: JAX copies memory on CPUs that does not begin at a multiple of this."""
ALIGNMENT = 128
"""Bytes: programs for other devices assume that arrays begin at a multiple of this."""
_KINDS = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex"}
"""DLDataTypeCode, as the dtypes begin that have the same number of bits."""


class _Tensor(ctypes.Structure):
    """DLTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Versioned(ctypes.Structure):
    """DLManagedTensorVersioned.  The older DLManagedTensor begins with its tensor."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


_STRUCTURES: dict[bytes, Any] = {b"dltensor": _Tensor, b"dltensor_versioned": _Versioned}
"""What a capsule of that name points to."""

_api = ctypes.pythonapi
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_IsValid", _api))
_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_GetPointer", _api))


@dataclass(frozen=True)
class Exported:
    """What a tensor exports."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In elements."""
    address: int
    """Of the first element."""
    platform: str
    device: int

    @staticmethod
    def by(name: str, tensor: Any) -> "Exported":
        """The facts of `tensor`, an argument of that name; ValueError unless a device of JAX has its memory."""
        if not hasattr(tensor, "__dlpack__") or not hasattr(tensor, "__dlpack_device__"):
            found = type(tensor).__name__
            raise ValueError(f"`{name}` is a {found}: expected a tensor with `__dlpack__` and `__dlpack_device__`")
        kind, device = map(int, tensor.__dlpack_device__())
        if kind not in PLATFORMS:
            expected = ", ".join(f"{number} ({platform})" for number, platform in PLATFORMS.items())
            raise ValueError(f"`{name}` is on a device of DLPack's type {kind}: expected one of {expected}")
        platform = PLATFORMS[kind]
        try:
            jax.local_devices(backend=platform)
        except RuntimeError:
            raise ValueError(
                f"`{name}` is on {platform}:{device}: expected memory of a device that JAX has, "
                f"{', '.join(map(str, jax.local_devices()))}"
            ) from None
        try:
            capsule = _capsule(tensor)
        except (BufferError, TypeError) as error:
            described = f"{type(tensor).__name__} of {getattr(tensor, 'dtype', 'an unknown dtype')}"
            raise ValueError(f"`{name}` is a {described}, which it cannot export by DLPack: {error}") from error
        for kind_of_capsule, structure in _STRUCTURES.items():
            if _is_valid(capsule, kind_of_capsule):
                content = structure.from_address(_pointer(capsule, kind_of_capsule))
                break
        else:
            raise ValueError(
                f"`{name}` exports {capsule!r}: expected a capsule of {' or '.join(map(repr, _STRUCTURES))}"
            )
        found = content.tensor if isinstance(content, _Versioned) else content
        shape = tuple(found.shape[: found.ndim])
        strides = tuple(found.strides[: found.ndim]) if found.strides else _contiguous(shape)
        kind_of_number = _KINDS.get(found.code, f"type {found.code} of ")
        dtype = f"{kind_of_number}{found.bits}" + f" x {found.lanes}" * (found.lanes != 1)
        address = (found.data or 0) + found.byte_offset
        return Exported(dtype, shape, strides, address, platform, device)

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements follow one another, the last axis innermost; axes of length 1 have any stride."""
        steps = zip(self.shape, self.strides, _contiguous(self.shape), strict=True)
        return 0 in self.shape or all(count == 1 or stride == own for count, stride, own in steps)


def _capsule(tensor: Any):
    try:
        return tensor.__dlpack__(max_version=(1, 0))  # without, NumPy does not export read-only memory
    except TypeError:
        return tensor.__dlpack__()  # of a library that is older than that argument


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))


def to_array(name: str, tensor: Any, size: int, dtype: jnp.dtype, *, copy: bool) -> jax.Array:
    """The first `size` elements of a contiguous tensor as an array [size] of `dtype`.

    It shares memory with the tensor unless `copy` is true.  ValueError if it cannot, or the tensor is not of that
    dtype, is smaller, or is not contiguous; messages call it `name`.
    """
    facts = Exported.by(name, tensor)
    if facts.dtype != str(dtype):
        raise ValueError(
            f"`{name}` has dtype {facts.dtype}: expected {dtype}, that of the layout's buffer; a layout may have any "
            "`dtype` whose itemsize divides the entry's bytes"
        )
    if not facts.is_contiguous:
        raise ValueError(
            f"`{name}` has shape {facts.shape} and strides {facts.strides}, in elements: expected a contiguous tensor, "
            f"with strides {_contiguous(facts.shape)}; describe the strides by `CacheLayout.from_strides` instead"
        )
    if (elements := prod(facts.shape)) < size:
        raise ValueError(
            f"`{name}` has shape {facts.shape}, {elements} elements: expected the layout's {size} at least"
        )
    if not copy:
        least = ALIGNMENTS.get(facts.platform, ALIGNMENT)
        if rest := facts.address % least:
            raise ValueError(
                f"`{name}` begins {rest} bytes after a multiple of {least}: expected memory that begins at one, which "
                f"JAX shares on {facts.platform}; pass `copy=True` to copy it"
            )
    if facts.shape == (size,):
        part = tensor
    elif isinstance(tensor, jax.Array) and not copy:
        raise ValueError(
            f"`{name}` is a JAX array of shape {facts.shape}: expected ({size},), because JAX reshapes and slices by "
            "copying; pass `copy=True` to copy it"
        )
    elif not hasattr(tensor, "reshape"):
        raise ValueError(f"`{name}` has shape {facts.shape}: expected ({size},), as it has no `reshape`")
    else:
        part = tensor.reshape(-1)[:size]
        if not isinstance(tensor, jax.Array) and Exported.by(name, part).address != facts.address:
            raise ValueError(f"`{name}.reshape(-1)` is a copy of it: expected a view; pass a tensor of shape ({size},)")
    try:
        array = jnp.from_dlpack(part)
    except BufferError as error:  # before 0.12, JAX requests a version of DLPack that has no read-only memory
        raise ValueError(
            f"JAX {jax.__version__} cannot share `{name}`: {error}; expected memory that may be written, or a newer JAX"
        ) from error
    # JAX's own `copy=True` shares memory on CPUs, and its `copy=False` does not find every copy.
    if copy:
        return jax.block_until_ready(jnp.array(array, copy=True))
    if array.unsafe_buffer_pointer() != facts.address:
        raise ValueError(f"JAX {jax.__version__} copies `{name}` instead of sharing it: pass `copy=True` to allow that")
    return array
