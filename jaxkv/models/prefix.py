"""How much of a request is known before it is computed, and where."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from jaxkv.models.pool import BlockPool
from jaxkv.models.request import Request
from jaxkv.models.tiers import Tiers


@dataclass(frozen=True)
class Prefix:
    """The longest known prefix of a request."""

    tokens: int
    """Its length; without the request's last token, whose logits are needed."""
    blocks: list[int | None]
    """Where it is on the device; None for a block that is in a tier below."""
    copied: bool
    """Whether the last block must be copied: the request will write into it, and others hold it."""

    @classmethod
    def of(
        cls, request: Request, running: Sequence[Request], pool: BlockPool, tiers: Tiers, block_size: int
    ) -> "Prefix":
        """What is found by the request's keys, and the part of a block that follows where a running request has it."""
        found = [(pool.find(key), key) for key in request.keys]
        known = takewhile(lambda pair: pair[0] is not None or pair[1] in tiers, found)
        blocks = [block for block, _ in known]
        start = len(blocks) * block_size
        donors = [donor for donor in running if donor.keys[: len(blocks)] == request.keys[: len(blocks)]]
        common = [_common(request, donor, start, block_size) for donor in donors]
        if most := max(common, default=0):
            blocks.append(donors[common.index(most)].blocks[len(blocks)])
            return cls(start + most, blocks, True)
        tokens = min(start, len(request.tokens) - 1)
        return cls(tokens, blocks, tokens < start and blocks[-1] is not None and not pool.is_free(blocks[-1]))

    def takes(self, count: int, pool: BlockPool) -> int:
        """How many of the pool's free blocks a request of `count` blocks takes that has this prefix."""
        kept = [block for block in self.blocks if block is not None and not pool.is_free(block)]
        return count - len(kept) + self.copied


def _common(request: Request, donor: Request, start: int, count: int) -> int:
    """How many of `count` tokens from `start` are the same, `donor` has cached, and are not the request's last."""
    ours, theirs = request.tokens[start:-1][:count], donor.tokens[start : donor.cached][:count]
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs, strict=False)))
