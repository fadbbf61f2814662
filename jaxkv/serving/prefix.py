"""`Prefix`: the cached part of a request, and the blocks that hold it."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from jaxkv.serving.pool import BlockPool
from jaxkv.serving.request import Request
from jaxkv.serving.tiers import Tiers

BELOW = -1
"""Stands for a block id if the content is not on the device, but in host memory or on disk."""


@dataclass(frozen=True)
class Prefix:
    """The longest cached prefix of a request."""

    tokens: int
    """Length of the prefix.  It excludes the request's last token, whose logits must be computed."""
    blocks: list[int]
    """The blocks of the prefix: ids on the device, or `BELOW`."""
    copied: bool
    """Whether the last block must be copied, because the request will write to it and others hold it."""
    awaited: bool
    """Whether a running request computes the next full block."""

    @classmethod
    def of(
        cls, request: Request, running: Sequence[Request], pool: BlockPool, tiers: Tiers, block_size: int
    ) -> "Prefix":
        """Finds full blocks by key, and the first tokens of the next block in a block of a running request."""
        blocks = []
        for key in request.keys:
            block = pool.find(key)
            if block is None and key not in tiers:
                break
            blocks.append(BELOW if block is None else block)
        full = len(blocks)
        start = full * block_size
        key = request.keys[full : full + 1]
        if key and any(donor.keys[full : full + 1] == key and donor.filled < start + block_size for donor in running):
            return cls(start, blocks, False, True)
        common = {donor: _common(request, donor, full, block_size) for donor in running}
        donor = max(common, key=common.__getitem__, default=request)
        if common.get(donor):
            return cls(start + common[donor], [*blocks, donor.blocks[full]], True, False)
        tokens = min(start, len(request.tokens) - 1)
        copied = tokens < start and blocks[-1] != BELOW and not pool.is_free(blocks[-1])
        return cls(tokens, blocks, copied, False)

    def takes(self, count: int, pool: BlockPool) -> int:
        """The number of free blocks that a request of `count` blocks with this prefix takes."""
        kept = [block for block in self.blocks if block != BELOW and not pool.is_free(block)]
        return count - len(kept) + self.copied


def _common(request: Request, donor: Request, block: int, block_size: int) -> int:
    """The number of leading tokens that `request` can copy from the donor's block number `block`.

    It is 0 if earlier blocks differ.  Only tokens that `donor` has cached are counted, and not the request's last
    token.
    """
    if block and donor.keys[block - 1 : block] != request.keys[block - 1 : block]:
        return 0  # equal keys would mean equal earlier tokens
    start = block * block_size
    end = start + block_size
    ours = request.tokens[start : min(end, len(request.tokens) - 1)]
    theirs = donor.tokens[start : min(end, donor.cached)]
    pairs = zip(ours, theirs, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
