"""What prefix reuse has spared an engine."""

from dataclasses import dataclass


@dataclass
class PrefixCacheStats:
    """Tokens of the requests that joined the batch; one that was sent back counts again when it joins again."""

    tokens: int = 0
    """In all."""
    found: int = 0
    """Of these, not computed: their entries were found."""
    loaded: int = 0
    """Of those found, in blocks that came from the host or from disk; the others were on the device."""
