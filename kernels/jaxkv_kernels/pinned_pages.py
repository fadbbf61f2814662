"""Pinned memory in huge pages, of which a GPU needs to look up few addresses when it reads entries here and there."""

import ctypes
import mmap
import weakref

import jax
import numpy as np

HUGE = 2**21
"""Bytes of a huge page."""
PORTABLE = 1
"""CU_MEMHOSTREGISTER_PORTABLE: pinned for all devices."""


def pinned_pages(nbytes: int, device: jax.Device) -> np.ndarray:
    """Zeros, uint8 [nbytes], in memory that kernels of `device` access by its address; MemoryError if it fails.

    The memory is unpinned when the array is deleted.
    """
    memory = mmap.mmap(-1, nbytes + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = np.frombuffer(memory, np.uint8)
    offset = -whole.ctypes.data % HUGE
    memory.madvise(mmap.MADV_HUGEPAGE)
    pinned = whole[offset : offset + nbytes]
    pinned[...] = 0  # so that pages exist, and are huge, before they are pinned
    driver, address = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(pinned.ctypes.data)
    context, ordinal = ctypes.c_void_p(), ctypes.c_int()
    codes = [
        driver.cuDeviceGet(ctypes.byref(ordinal), device.local_hardware_id),
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), ordinal),
        _within(driver, context, driver.cuMemHostRegister_v2, address, ctypes.c_size_t(nbytes), PORTABLE),
    ]
    if any(codes):
        raise MemoryError(f"{nbytes / 1e9:.1f} GB of host memory cannot be pinned: CUDA's driver returned {codes}")
    weakref.finalize(whole, _within, driver, context, driver.cuMemHostUnregister, address).atexit = False
    return pinned


def _within(driver, context, function, *args) -> int:
    """Calls a function of the driver in a context."""
    driver.cuCtxPushCurrent_v2(context)
    code = function(*args)
    driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
    return code
