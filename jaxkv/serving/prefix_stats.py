"""Counters of prefix reuse."""

from dataclasses import dataclass


@dataclass
class PrefixCacheStats:
    """Counts tokens of requests when they join the batch.  A preempted request counts again when it rejoins."""

    tokens: int = 0
    """All tokens of these requests."""
    found: int = 0
    """Tokens whose entries were found, so that they were not computed."""
    loaded: int = 0
    """Found tokens whose blocks were loaded from host memory or disk; the others were on the device."""
