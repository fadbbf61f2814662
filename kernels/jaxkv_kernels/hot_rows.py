"""Rows on the device that hold tokens of a cache in host memory: the map of rows, and memory that kernels access."""

import ctypes
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


@dataclass(frozen=True)
class HotMap:
    """The parts of the map of a request with tokens at `positions` positions and `rows` rows on the device.

    - `place` [positions]: the row in which a token was stored last, from 0 to rows - 1.
    - `held` [rows]: the position whose token a row holds, or -1.  The token at position p is in row r = place[p] if
      held[r] is p; otherwise it is in no row.
    - `order` [rows]: the rows, the least recently used first.
    """

    positions: int
    rows: int

    @property
    def width(self) -> int:
        """Elements of the map."""
        return self.positions + 2 * self.rows

    def empty(self) -> jax.Array:
        """The map [width] of rows that hold no tokens."""
        place = jnp.zeros(self.positions, jnp.int32)
        order = jnp.arange(self.rows, dtype=jnp.int32)
        return jnp.concatenate([place, jnp.full(self.rows, -1, jnp.int32), order])

    def split(self, maps: jax.Array) -> list[jax.Array]:
        """`place`, `held` and `order` of maps [..., width]."""
        return jnp.split(maps, (self.positions, self.positions + self.rows), axis=-1)

    def forget(self, maps: jax.Array, which: jax.Array) -> jax.Array:
        """The maps [L, B, width], where the rows of the requests that bool [B] selects hold no tokens."""
        _, held, _ = self.split(maps)
        # Only this part: in a program that donates them, the maps are updated in place.
        return lax.dynamic_update_slice_in_dim(maps, jnp.where(which[:, None], -1, held), self.positions, axis=-1)


GLOBAL, PREFERRED_LOCATION, ACCESSED_BY, CPU = 1, 3, 5, -1
"""Constants of CUDA's driver: CU_MEM_ATTACH_GLOBAL, two of CUmem_advise, and CU_DEVICE_CPU."""


class HostMemory:
    """Zeroed host memory that kernels of `device` can access.

    XLA may copy an operand in host memory to the device, or move operations on it to the host.  Kernels therefore
    receive an address, and XLA does not know what they access: whoever creates the memory must keep it alive, and must
    order accesses by other data.

    On GPUs, it is managed memory that stays on the host and is mapped for the device.  Pinned memory is mapped in pages
    of 4 KiB, and a GPU that reads entries here and there spends most of its time looking up their addresses: an H200
    reads scattered entries of 656 bytes in 2.75 GB at 23 GB/s, and at 45 GB/s in managed memory, whose pages are large.

    Raises:
      MemoryError: CUDA's driver cannot provide the memory.
    """

    def __init__(self, nbytes: int, device: jax.Device):
        if device.platform == "gpu":
            self.address, free = _managed(nbytes, device)
            memory = (ctypes.c_uint8 * nbytes).from_address(self.address)
            freed: Any = weakref.finalize(memory, free)  # when the last view of the bytes is deleted
            freed.atexit = False
            self.bytes = np.ctypeslib.as_array(memory)
            self.bytes[...] = 0  # pages exist, on the host, once they are written
        else:
            self.bytes = np.zeros(nbytes, np.uint8)
            self.address = self.bytes.ctypes.data
        _LIVING[self.address] = self

    @property
    def words(self) -> np.ndarray:
        """The address as kernels receive it: int32 [2], the low half first."""
        return np.asarray([self.address], np.int64).view(np.int32)


def _managed(nbytes: int, device: jax.Device) -> tuple[int, Callable[[], Any]]:
    """The address of new managed memory, whose pages stay on the host and are mapped for `device`; what frees it."""
    driver, context, ordinal = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_int()
    address, size = ctypes.c_uint64(), ctypes.c_size_t(nbytes)

    def call(function: str, *arguments: Any) -> None:
        if code := getattr(driver, function)(*arguments):
            raise MemoryError(f"{nbytes / 1e9:.2f} GB of host memory for {device}: {function} of CUDA returned {code}")

    def call_in_context(function: str, *arguments: Any) -> None:
        call("cuCtxPushCurrent_v2", context)
        try:
            call(function, *arguments)
        finally:
            call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    call("cuDeviceGet", ctypes.byref(ordinal), device.local_hardware_id)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), ordinal)
    call_in_context("cuMemAllocManaged", ctypes.byref(address), size, GLOBAL)
    call_in_context("cuMemAdvise", address, size, PREFERRED_LOCATION, CPU)
    call_in_context("cuMemAdvise", address, size, ACCESSED_BY, ordinal)
    return address.value, partial(call_in_context, "cuMemFree_v2", address)


_LIVING: weakref.WeakValueDictionary[int, HostMemory] = weakref.WeakValueDictionary()


def memory_at(words) -> HostMemory:
    """The memory with an address, as `words`; RuntimeError if it no longer exists."""
    address = int(np.asarray(words, np.int32).view(np.int64)[0])
    memory = _LIVING.get(address)
    if memory is None:
        raise RuntimeError(f"no host memory at address {address:#x}: keep its `HostEntries` as long as it is in use")
    return memory
