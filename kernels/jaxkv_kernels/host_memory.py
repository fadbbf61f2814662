"""Memory of the host that kernels of a device read and write by its address."""

import ctypes
from weakref import WeakValueDictionary

import jax
import numpy as np

PINNED = "pinned_host"


class HostMemory:
    """Zeroed host memory: pinned if the device has pinned memory, so that its kernels can access it.

    XLA may copy an operand in pinned memory to the device, or move operations on it to the host.  Kernels therefore
    receive an address, and XLA does not know what they access: whoever creates the memory must keep it alive, and must
    order accesses by other data.
    """

    def __init__(self, nbytes: int, device: jax.Device):
        zeros = np.zeros(nbytes, np.uint8)
        if device.platform == "gpu":
            sharding = jax.sharding.SingleDeviceSharding(device, memory_kind=PINNED)
            pinned = jax.block_until_ready(jax.device_put(zeros, sharding))
            self.address = pinned.unsafe_buffer_pointer()
            memory = (ctypes.c_uint8 * nbytes).from_address(self.address)
            setattr(memory, "owner", pinned)  # noqa: B010 (lives as long as any view of the bytes)
            self.bytes = np.ctypeslib.as_array(memory)
        else:
            self.bytes = zeros
            self.address = zeros.ctypes.data
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
