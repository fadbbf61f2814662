"""Serving: an `Engine` that batches requests as they come and go, and reuses the prefixes that they share.

`SpeculativeEngine` drafts tokens with the model's MTP layer.  `Replicas` runs one engine per device under data
parallelism.  All return a `Request` from `submit`, and yield each new token with its request from `run`.
"""

from jaxkv.serving.engine import Engine
from jaxkv.serving.prefix import PrefixCacheStats
from jaxkv.serving.replicas import Replicas
from jaxkv.serving.request import Request
from jaxkv.serving.speculative import AcceptanceStats, SpeculativeEngine

__all__ = [
    "AcceptanceStats",
    "Engine",
    "PrefixCacheStats",
    "Replicas",
    "Request",
    "SpeculativeEngine",
]
