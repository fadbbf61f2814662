"""Serving: an engine that batches requests as they come and go, and never computes a prefix twice that it can find."""

from jaxkv.serving.engine import Engine as Engine
from jaxkv.serving.prefix_stats import PrefixCacheStats as PrefixCacheStats
from jaxkv.serving.replicas import Replicas as Replicas
from jaxkv.serving.request import Request as Request
