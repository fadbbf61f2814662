"""Blocks outside a cache: in host memory, on disk and in other processes, under keys that identify their contents.

`prefix_keys` computes a key for each full block of a prompt.  A `HostPool` stores blocks of a cache in host memory and
loads them back into any block; with a `DiskPool`, it also writes them to files that later processes can load.  A load
that stops half-way raises `LoadFailed`.  A damaged file raises `DamagedBlock`; its contents never reach a cache.

`HotRows` is a cache in host memory (`HostEntries`), of which the device has the rows that sparse attention used last.
"""

from jaxkv.offload.block_file import DamagedBlock
from jaxkv.offload.connector import Arrival, Connector, Pull
from jaxkv.offload.disk import DiskPool
from jaxkv.offload.events import BlockEvent, BlockEvents
from jaxkv.offload.host import HostPool, LoadFailed, Stats
from jaxkv.offload.hot_rows import HostEntries, HotRows
from jaxkv.offload.keys import prefix_keys
from jaxkv.offload.remote import BlockServer, RemoteBlocks
from jaxkv.offload.transports import JaxTransport, NixlTransport, Transport
from jaxkv.ops.rows import read_rows

__all__ = [
    "Arrival",
    "BlockEvent",
    "BlockEvents",
    "BlockServer",
    "Connector",
    "DamagedBlock",
    "DiskPool",
    "HostEntries",
    "HostPool",
    "HotRows",
    "JaxTransport",
    "LoadFailed",
    "NixlTransport",
    "Pull",
    "RemoteBlocks",
    "Stats",
    "Transport",
    "prefix_keys",
    "read_rows",
]
