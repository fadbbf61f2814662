"""Serving: an `Engine` that batches requests as they come and go, and reuses the prefixes that they share.

With `drafts=MTP()` or `drafts=NGram()`, it verifies drafts of the model's MTP layer, or drafts that are copied from
earlier tokens of a request, and a step may add several tokens to a request.

`Replicas` runs one engine per device under data parallelism, and `Leader` one model over several processes.  All return
a `Request` from `submit`, and yield each new token with its request from `run`.  `AsyncEngine` runs any of them in a
thread, for requests of any threads and event loops.
"""

from jaxkv.serving.async_engine import AsyncEngine, Output, Stream
from jaxkv.serving.drafts import MTP, AcceptanceStats, NGram
from jaxkv.serving.engine import Engine
from jaxkv.serving.export import ExportedBlocks
from jaxkv.serving.host_latents import HostLatents, LatentMemory
from jaxkv.serving.prefix import PrefixCacheStats
from jaxkv.serving.processes import Leader, follow
from jaxkv.serving.replicas import Replicas
from jaxkv.serving.request import Request, TokenLogprobs
from jaxkv.serving.stats import EngineInfo, EngineStats, HostTime

__all__ = [
    "MTP",
    "AcceptanceStats",
    "AsyncEngine",
    "Engine",
    "EngineInfo",
    "EngineStats",
    "ExportedBlocks",
    "HostLatents",
    "HostTime",
    "LatentMemory",
    "Leader",
    "NGram",
    "Output",
    "PrefixCacheStats",
    "Replicas",
    "Request",
    "Stream",
    "TokenLogprobs",
    "follow",
]
