"""Counters of a host pool."""

from dataclasses import dataclass


@dataclass
class Stats:
    """Counts since the pool was made, of blocks unless the name says bytes or seconds.

    An engine looks up prefixes itself: its `prefix_stats` have what it found, and hits and misses stay 0 here.
    Transfers between device and host are asynchronous and have no times here; `jaxkv offload` measures them.
    """

    stored: int = 0
    """From a cache to host memory."""
    stored_bytes: int = 0
    rejected: int = 0
    """Not stored, because all room was held."""
    loaded: int = 0
    """From host memory to a cache, including those that came from disk."""
    loaded_bytes: int = 0
    host_hits: int = 0
    """Keys that `matched` found in host memory."""
    disk_hits: int = 0
    """Keys that `matched` found on disk only."""
    misses: int = 0
    """Keys that `matched` did not count."""
    evicted: int = 0
    """Removed from host memory to make room."""
    written: int = 0
    """From host memory to disk."""
    written_bytes: int = 0
    write_seconds: float = 0.0
    """In the background."""
    read: int = 0
    """From disk to host memory."""
    read_bytes: int = 0
    read_seconds: float = 0.0
    damaged: int = 0
    """Damaged files on disk, which are kept under another name."""

    @property
    def write_rate(self) -> float:
        """Bytes/s to disk; 0 before the first."""
        return self.written_bytes / self.write_seconds if self.written else 0.0

    @property
    def read_rate(self) -> float:
        """Bytes/s from disk; 0 before the first."""
        return self.read_bytes / self.read_seconds if self.read else 0.0
