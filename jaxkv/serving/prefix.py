"""How much of a request is known before it is computed, and where."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from jaxkv.serving.pool import BlockPool
from jaxkv.serving.request import Request
from jaxkv.serving.tiers import Tiers

BELOW = -1
"""In place of a block's id: its content is not on the device, but in a tier below."""


@dataclass(frozen=True)
class Prefix:
    """The longest known prefix of a request."""

    tokens: int
    """Its length; without the request's last token, whose logits are needed."""
    blocks: list[int]
    """Where it is on the device, or `BELOW`."""
    copied: bool
    """Whether the last block must be copied: the request will write into it, and others hold it."""

    @classmethod
    def of(
        cls, request: Request, running: Sequence[Request], pool: BlockPool, tiers: Tiers, block_size: int
    ) -> "Prefix":
        """What is found by the request's keys, and the part of a block that follows where a running request has it."""
        blocks = []
        for key in request.keys:
            block = pool.find(key)
            if block is None and key not in tiers:
                break
            blocks.append(BELOW if block is None else block)
        start = len(blocks) * block_size
        common = {donor: _common(request, donor, len(blocks), block_size) for donor in running}
        donor = max(common, key=common.__getitem__, default=request)
        if common.get(donor):
            return cls(start + common[donor], [*blocks, donor.blocks[len(blocks)]], True)
        tokens = min(start, len(request.tokens) - 1)
        return cls(tokens, blocks, tokens < start and blocks[-1] != BELOW and not pool.is_free(blocks[-1]))

    def takes(self, count: int, pool: BlockPool) -> int:
        """How many of the pool's free blocks a request of `count` blocks takes that has this prefix."""
        kept = [block for block in self.blocks if block != BELOW and not pool.is_free(block)]
        return count - len(kept) + self.copied


def _common(request: Request, donor: Request, block: int, block_size: int) -> int:
    """How many tokens of a block both have, `donor` has cached, and are not the request's last; 0 unless all before."""
    if block and donor.keys[block - 1 : block] != request.keys[block - 1 : block]:
        return 0  # a key stands for all tokens so far
    start = block * block_size
    ours, theirs = request.tokens[start:-1], donor.tokens[start : donor.cached]
    pairs = zip(ours[:block_size], theirs[:block_size], strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
