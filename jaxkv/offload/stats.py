"""Counters of a host pool."""

from dataclasses import dataclass


@dataclass
class Stats:
    """Counts since the pool was made.  They count blocks, unless the name ends in bytes or seconds.

    An engine looks up prefixes itself, so hits and misses stay 0 here; see its `prefix_stats`.  Transfers between
    device and host are asynchronous and are not timed here; `jaxkv bench offload` measures them.
    """

    stored: int = 0
    """Blocks copied from a cache to host memory."""
    stored_bytes: int = 0
    rejected: int = 0
    """Blocks that were not stored, because all memory was held."""
    loaded: int = 0
    """Blocks copied from host memory to a cache, including those that came from disk."""
    loaded_bytes: int = 0
    host_hits: int = 0
    """Keys that `matched` found in host memory."""
    disk_hits: int = 0
    """Keys that `matched` found on disk only."""
    misses: int = 0
    """Keys passed to `matched` that it did not count, because they or earlier ones were missing."""
    evicted: int = 0
    """Blocks removed from host memory to make room."""
    written: int = 0
    """Blocks written from host memory to disk."""
    written_bytes: int = 0
    write_seconds: float = 0.0
    """Time of writes, which run in the background."""
    read: int = 0
    """Blocks read from disk to host memory."""
    read_bytes: int = 0
    read_seconds: float = 0.0
    damaged: int = 0
    """Damaged files that were found on disk.  They are kept under another name."""

    @property
    def write_rate(self) -> float:
        """Bytes/s written to disk; 0 before the first write."""
        return self.written_bytes / self.write_seconds if self.written else 0.0

    @property
    def read_rate(self) -> float:
        """Bytes/s read from disk; 0 before the first read."""
        return self.read_bytes / self.read_seconds if self.read else 0.0
