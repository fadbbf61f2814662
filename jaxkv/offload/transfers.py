"""Rows between a device and the memory of its host: asynchronous, on the device's own copy engines."""

import jax
import numpy as np

HostArray = jax.Array | np.ndarray
"""An array in pinned memory, which devices read and write by themselves, or NumPy's where a device cannot."""

PINNED = "pinned_host"
PINNING_PLATFORMS = ("gpu",)
"""Where pinning takes time and is kept; on CPUs it is a name for memory like any other."""


def to_host(rows: jax.Array) -> HostArray:
    """Starts the copy of an array on a device into host memory; whoever reads it waits for it."""
    if not has_pinned_memory(rows.sharding):
        return np.asarray(rows)
    return jax.device_put(rows, rows.sharding.with_memory_kind(PINNED))


def to_device(rows: HostArray, sharding: jax.sharding.Sharding) -> jax.Array:
    """Starts the copy of an array in host memory to a device."""
    return jax.device_put(rows, sharding)


def to_pinned(rows: np.ndarray, sharding: jax.sharding.Sharding) -> HostArray:
    """NumPy's array where `to_host` puts arrays of that sharding."""
    return jax.device_put(rows, sharding.with_memory_kind(PINNED)) if has_pinned_memory(sharding) else rows


def to_numpy(rows: HostArray) -> np.ndarray:
    """NumPy's array of one in host memory; waits for it."""
    if isinstance(rows, np.ndarray):
        return rows
    # JAX keeps a copy that it made for NumPy as long as the array: as long as this other one of the same memory.
    return np.asarray(jax.make_array_from_single_device_arrays(rows.shape, rows.sharding, [rows]))


def reserve(nbytes: int, device: jax.Device) -> None:
    """Has that much memory pinned, for arrays to come.

    Pinning takes half a second a GB on an H200's host.  JAX keeps what it has once pinned, so arrays that come and go
    do not pay.
    """
    sharding = jax.sharding.SingleDeviceSharding(device)
    if device.platform in PINNING_PLATFORMS and has_pinned_memory(sharding):
        try:
            jax.block_until_ready(to_pinned(np.zeros(nbytes, np.uint8), sharding))
        except jax.errors.JaxRuntimeError as error:
            raise MemoryError(
                f"{nbytes / 1e9:.1f} GB of host memory cannot be pinned: make the pool smaller, or on GPUs raise "
                f"XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB, 64 unless it is set ({error})"
            ) from error


def has_pinned_memory(sharding: jax.sharding.Sharding) -> bool:
    """Whether all devices have pinned memory on their host."""
    return all(
        PINNED in (memory.kind for memory in device.addressable_memories()) for device in sharding.addressable_devices
    )
