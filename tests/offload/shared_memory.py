"""A connector written from the documentation alone: blocks that the processes of a machine share."""

import numpy as np

from jaxkv import offload
from offload.shared_table import SharedTable


class SharedMemoryBlocks(offload.Connector):
    """Blocks in a `SharedTable`: at most `num_blocks`, of which the least recently used are evicted."""

    def __init__(self, layout, num_blocks: int, name: str | None = None):
        self.layout, self.dtype = layout, np.dtype(layout.dtype)
        self.table = SharedTable(num_blocks, layout.size // layout.num_blocks * self.dtype.itemsize, name)
        self.close = self.table.close

    def __contains__(self, key):
        return len(self.table.find(key)) > 0

    def offer(self, cache, blocks, keys):
        rows = np.asarray(offload.read_rows(cache, blocks))
        self.table.put(keys, rows.view(np.uint8), timeout=0.1)  # raises if others are too slow: not stored

    def pull(self, keys, sharding):
        return Copying(self, keys)


class Copying(offload.Pull):
    def __init__(self, connector, keys):
        self.connector, self.keys = connector, keys

    def poll(self, timeout):
        keys = self.keys[:16]  # not all of them, because other requests wait
        try:
            rows = self.connector.table.copy(keys, timeout) if keys else None
        except BlockingIOError:  # others have the lock
            return []
        self.keys = self.keys[16:]
        return [offload.Arrival(keys, rows.view(self.connector.dtype))] if keys else []

    def release(self):
        self.keys = []
