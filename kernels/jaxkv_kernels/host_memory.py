"""Memory of the host that kernels of a device read and write by its address."""

import ctypes
from weakref import WeakValueDictionary

import jax
import numpy as np

from jaxkv_kernels.pinned_pages import pinned_pages

PINNED = "pinned_host"


class HostMemory:
    """Zeroed host memory: pinned if the device has pinned memory, so that its kernels can access it.

    XLA turns every operation that reads an array in pinned memory into work of the host.  Kernels therefore receive an
    address, and XLA does not know what they access: whoever creates the memory must keep it alive, and must order
    accesses by other data.
    """

    def __init__(self, nbytes: int, device: jax.Device):
        import os

        if device.platform == "gpu" and os.environ.get("HUGE"):
            self.bytes = pinned_pages(nbytes, device)
            self.address = self.bytes.ctypes.data
        elif device.platform == "gpu":
            sharding = jax.sharding.SingleDeviceSharding(device, memory_kind=PINNED)
            zeros = np.zeros(nbytes, np.uint8)
            self._array = jax.block_until_ready(jax.device_put(zeros, sharding))
            self.address = self._array.unsafe_buffer_pointer()
            self.bytes = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(self.address))
        else:
            self.bytes = np.zeros(nbytes, np.uint8)
            self.address = self.bytes.ctypes.data
        _LIVING[self.address] = self

    @property
    def words(self) -> np.ndarray:
        """The address as kernels receive it: int32 [2], the low half first."""
        return np.asarray([self.address], np.int64).view(np.int32)


_LIVING: WeakValueDictionary[int, HostMemory] = WeakValueDictionary()


def memory_at(words) -> HostMemory:
    """The memory with an address, as `words`; RuntimeError if it no longer exists."""
    address = int(np.asarray(words, np.int32).view(np.int64)[0])
    memory = _LIVING.get(address)
    if memory is None:
        raise RuntimeError(f"no host memory at address {address:#x}: keep its `HostEntries` as long as it is in use")
    return memory
