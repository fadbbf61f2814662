"""A table of rows in POSIX shared memory, without JAX, so that any process on the machine can use it.

Torn reads: a process copies rows out under a shared `flock` of the memory, and changes them under an exclusive one,
which the kernel releases if the process dies.  A row that is being written counts as empty until it is complete.
"""

import fcntl
import os
import time
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from unittest import mock

import numpy as np


class SharedTable:
    """Rows by keys of 32 bytes.  If it is full, those that were put or copied least recently are evicted."""

    def __init__(self, num_rows: int, row_bytes: int, name: str | None = None):
        """Attaches to the memory `name` of a table of equal size.  Without a name, creates one, which `close` ends."""
        size, self.created = num_rows * (40 + row_bytes), name is None
        # Without the patch (Python 3.13: `track=False`), memory ends with the first process that was attached to it.
        register = resource_tracker.register if self.created else mock.Mock()
        with mock.patch.object(resource_tracker, "register", register):
            self.memory = SharedMemory(name, self.created, size if self.created else 0)  # zeros
        if self.memory.size != size:
            self.memory.close()
            raise ValueError(f"{name} is a table of another size")
        self.name, buffer = self.memory.name, self.memory.buf
        self.used = np.frombuffer(buffer, np.uint64, num_rows)  # the time of its last use; 0 if the row is empty
        self.keys = np.frombuffer(buffer, np.uint64, num_rows * 4, num_rows * 8).reshape(num_rows, 4)
        self.rows = np.frombuffer(buffer, np.uint8, num_rows * row_bytes, num_rows * 40).reshape(num_rows, row_bytes)
        self.file = os.open(f"/dev/shm/{self.name}", os.O_RDWR)  # one per object: two of a process exclude each other

    def close(self):
        del self.used, self.keys, self.rows  # memory to which arrays refer cannot be closed
        os.close(self.file)
        self.memory.close()
        if self.created:
            self.memory.unlink()

    def find(self, key: bytes) -> np.ndarray:
        """The number of the row [1], or none [0].  Without the lock, that is a guess."""
        return np.flatnonzero((self.keys == np.frombuffer(key, np.uint64)).all(1) & (self.used > 0))[:1]

    def put(self, keys, rows, timeout: float):
        """Raises BlockingIOError if others have the lock for `timeout` seconds."""
        self._lock(fcntl.LOCK_EX, timeout)
        try:
            now = self.used.max() + np.uint64(1)
            for key, row in list(zip(keys, rows, strict=True))[: len(self.used)]:
                if not len(self.find(key)):  # else another process has put it
                    n = self.used.argmin()
                    self.used[n] = 0
                    self.keys[n], self.rows[n] = np.frombuffer(key, np.uint64), row
                    self.used[n] = now
        finally:
            fcntl.flock(self.file, fcntl.LOCK_UN)

    def copy(self, keys, timeout: float) -> np.ndarray:
        """Raises LookupError if a row is missing, and BlockingIOError as `put` does."""
        self._lock(fcntl.LOCK_SH, timeout)
        try:
            found = np.concatenate([self.find(key) for key in keys])
            if len(found) < len(keys):
                raise LookupError(f"{len(keys) - len(found)} of {len(keys)} rows are missing")
            self.used[found] = self.used.max() + np.uint64(1)  # other readers may write it, too: any order will do
            return self.rows[found]
        finally:
            fcntl.flock(self.file, fcntl.LOCK_UN)

    def _lock(self, operation, timeout):
        deadline = time.monotonic() + timeout
        while True:
            try:
                return fcntl.flock(self.file, operation | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(0.0005)
