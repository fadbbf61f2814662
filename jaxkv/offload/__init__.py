"""Blocks that travel: from the cache to host memory and to disk, and back, named by what they contain."""

from jaxkv.offload.block_file import DamagedBlock as DamagedBlock
from jaxkv.offload.disk import DiskPool as DiskPool
from jaxkv.offload.host import HostPool as HostPool
from jaxkv.offload.host import LoadFailed as LoadFailed
from jaxkv.offload.keys import prefix_keys as prefix_keys
from jaxkv.offload.stats import Stats as Stats
