"""What a pool of blocks has done so far."""

from dataclasses import dataclass


@dataclass
class Stats:
    """Counts since the pool was made, in blocks, bytes and seconds.

    Transfers between the device and the host have no seconds here: they are asynchronous, and nobody waits to see one
    end.  `jaxkv offload` measures them.
    """

    stored_blocks: int = 0
    """From a cache to host memory."""
    stored_bytes: int = 0
    loaded_blocks: int = 0
    """From host memory to a cache; those that came from disk first included."""
    loaded_bytes: int = 0
    host_hits: int = 0
    """Keys that `matched` found in host memory."""
    disk_hits: int = 0
    """Keys that `matched` found on disk only."""
    misses: int = 0
    """Keys that `matched` found nowhere, and those after them."""
    evictions: int = 0
    """Blocks that left host memory for others."""
    refused: int = 0
    """Blocks that `store` did not take, as all room was held."""
    disk_written_blocks: int = 0
    disk_written_bytes: int = 0
    disk_write_seconds: float = 0.0
    disk_read_blocks: int = 0
    disk_read_bytes: int = 0
    disk_read_seconds: float = 0.0
