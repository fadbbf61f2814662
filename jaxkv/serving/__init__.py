"""Serving: an `Engine` that batches requests as they come and go, and reuses the prefixes that they share.

`Replicas` runs one engine per device under data parallelism.  Both return a `Request` from `submit`, and yield each new
token with its request from `run`.
"""

from jaxkv.serving.engine import Engine
from jaxkv.serving.prefix_stats import PrefixCacheStats
from jaxkv.serving.replicas import Replicas
from jaxkv.serving.request import Request

__all__ = [
    "Engine",
    "PrefixCacheStats",
    "Replicas",
    "Request",
]
