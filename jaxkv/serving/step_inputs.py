"""The inputs of a step, as arrays of static shape."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxkv.models.decoder import NewTokens
from jaxkv.models.sampling import Sampling, SamplingBatch
from jaxkv.models.split_cache import Staging
from jaxkv.serving.request import Request
from jaxkv_kernels.alignment import ALIGNMENT

GREEDY = Sampling()
ON_DEVICE = -1
"""Stands for a token that an earlier step has sampled, and that the host has not read yet."""

NOWHERE = np.iinfo(np.int32).max
"""The place of rows that sample no token."""

ALIGNED = ALIGNMENT // 4
"""Words of the alignment that kernels for GPUs require."""


class Span(NamedTuple):
    """Consecutive tokens of a request, which a step processes in one row."""

    request: Request
    start: int
    end: int
    samples: bool
    """Whether these tokens are the request's last, so that the step samples the next one."""
    drafts: Sequence[int] = ()
    """Drafts of the tokens after the request's last.  They are part of the span, and `end` is after them."""

    @classmethod
    def of(cls, request: Request, start: int, most: int) -> "Span":
        """The tokens from position `start` on, at most `most`."""
        end = min(start + most, request.length)
        return cls(request, start, end, end == request.length)

    @classmethod
    def last(cls, request: Request) -> "Span":
        """The last token of a request, and its drafts."""
        return cls(request, request.cached, request.length + len(request.drafts), True, request.drafts)

    def row(self, columns: int) -> list[int]:
        """Its tokens at the end of a row of `columns`; `ON_DEVICE` for the one that the host has not read yet."""
        known = [*self.request.tokens[self.start : self.end], *self.drafts]
        count = self.end - self.start
        return [0] * (columns - count) + known + [ON_DEVICE] * (count - len(known))


class Schedule(NamedTuple):
    """What a step processes."""

    prefill: list[Span]
    """Chunks of prompts."""
    decode: list[Span]
    """The last tokens of requests whose prompts are complete, with their drafts."""


NOTHING = Schedule([], [])


class InputBatch(NamedTuple):
    """A batch with one row per span; NumPy arrays on the host, JAX arrays inside a program."""

    tokens: Any
    """int32 [B, Q], new tokens, aligned to the end; `ON_DEVICE` for the request's last token on the device."""
    seq_lens: Any
    """int32 [B], the new tokens included; 0 for a row without a span."""
    block_tables: Any
    """int32 [B, M]; a dict of such arrays by the names of the tables, if there are several."""
    slot_mapping: Any
    """int32 [B, Q]; -1 for padding."""
    places: Any
    """int32 [B], where the request's last token is kept on the device; `NOWHERE` if the row samples none."""
    drafting: Any = None
    """`Drafting` in steps with drafts."""
    staging: Staging | None = None
    """Of chunks of prompts with latents in host memory: the blocks that come to the device."""

    @classmethod
    def of(
        cls, spans: Sequence[Span], count: int, columns: int, *, tables: Mapping[str, np.ndarray], block_size: int
    ) -> "InputBatch":
        """The tokens of the spans, at most `columns` each, in `count` rows.  Rows without a span are empty.

        `tables` are the block tables of running requests by place, int32 [places, M], by name.  Slots are those of the
        first, whose blocks have `block_size` tokens.
        """
        used, places = len(spans), [span.request.place for span in spans]
        given = {name: np.full((count, table.shape[1]), -1, np.int32) for name, table in tables.items()}
        for name, table in tables.items():
            given[name][:used] = table[places]
        main = next(iter(given.values()))
        rows = cls(
            tokens=np.zeros((count, columns), np.int32),
            seq_lens=np.zeros(count, np.int32),
            block_tables=main if len(given) == 1 else given,
            slot_mapping=np.full((count, columns), -1, np.int32),
            places=np.full(count, NOWHERE, np.int32),
        )
        rows.places[:used] = [place if span.samples else NOWHERE for place, span in zip(places, spans, strict=True)]
        rows.seq_lens[:used] = [span.end for span in spans]
        # As one array of lists: each assignment to a row would take longer than making its list.
        rows.tokens[:used] = np.asarray([span.row(columns) for span in spans], np.int32).reshape(used, columns)
        positions = rows.seq_lens[:used, None] - columns + np.arange(columns, dtype=np.int32)
        starts = np.asarray([span.start for span in spans], np.int32)[:, None]
        rows.slot_mapping[:used] = _slots(main[:used], positions, positions >= starts, block_size)
        return rows

    def drafted(self, spans: Sequence[Span], lookahead: int, block_size: int) -> "InputBatch":
        """The batch of these spans, with the inputs of drafts that write `lookahead` entries after the new ones."""
        count, used = len(self.seq_lens), len(spans)
        drafting = Drafting(
            following=np.full(count, -1, np.int32),
            lookahead=np.full((count, lookahead), -1, np.int32),
            choices=Choices.of(dict(enumerate(spans)), count),
        )
        drafting.following[:used] = [-1 if span.samples else span.request.tokens[span.end] for span in spans]
        positions = self.seq_lens[:used, None] + np.arange(lookahead, dtype=np.int32)
        ends = [span.request.most_entries if span.samples else 0 for span in spans]
        written = positions < np.asarray(ends, np.int32)[:, None]
        drafting.lookahead[:used] = _slots(self.block_tables[:used], positions, written, block_size)
        return self._replace(drafting=drafting)

    def staged(self, most: int, block_size: int) -> "InputBatch":
        """The batch of these chunks with the blocks that it attends to, at most so many, for latents in host memory."""
        return self._replace(staging=Staging.of(self.block_tables, self.seq_lens, count=most, block_size=block_size))

    def new_tokens(self, last) -> NewTokens:
        """The batch for `models.step`, given the last token of each place, int32 [places]."""
        # The last token is -1 if its logits were NaN.  The request has ended then, but the host does not know it yet.
        kept = jnp.maximum(last.at[self.places].get(mode="clip"), 0)
        tokens = jnp.where(self.tokens == ON_DEVICE, kept[:, None], self.tokens)
        return NewTokens(tokens, self.seq_lens, self.block_tables, self.slot_mapping)


class StepBatches(NamedTuple):
    """The batches of a step; None for one that has no rows."""

    prefill: InputBatch | None
    """The chunks of prompts."""
    decode: InputBatch | None
    """The last tokens of requests whose prompts are complete, with their drafts."""

    @property
    def present(self) -> list[InputBatch]:
        """Those that have rows, in the order of the rows of the step."""
        return [batch for batch in self if batch is not None]


class Choices(NamedTuple):
    """How the next tokens are chosen, with one row for each row of all batches."""

    places: Any
    """int32 [B], where the token is kept on the device; `NOWHERE` if the row samples none."""
    lengths: Any
    """int32 [B], the length of the request so far."""
    sampling: SamplingBatch
    """How the token is chosen; greedy if the row samples none."""

    @classmethod
    def of(cls, spans: Mapping[int, Span], count: int) -> "Choices":
        """The choices of `count` rows, given the spans by row."""
        places = np.full(count, NOWHERE, np.int32)
        lengths, samplings = np.zeros(count, np.int32), [GREEDY] * count
        for row, span in spans.items():
            if span.samples:
                places[row], lengths[row], samplings[row] = span.request.place, span.end, span.request.sampling
        return cls(places, lengths, SamplingBatch.of(samplings))


class Drafting(NamedTuple):
    """What a batch of a step with drafts has besides, one row per span."""

    following: Any
    """int32 [B], the token after the span; -1 if the step samples it."""
    lookahead: Any
    """int32 [B, L], the slots of the positions after the span; -1 where the request needs none."""
    choices: Choices


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Bundle[Arrays]:
    """Arrays of a step in one, which takes one copy to the device.  Each further copy would take the host longer than
    most of the other work of a step: of 2.6 ms for one request of DeepSeek-V2-Lite on an H100, five copies take 0.9."""

    words: Any
    """int32 [N], the bits of all arrays."""
    structure: Any = field(metadata={"static": True})
    """Of the arrays, as a pytree."""
    types: tuple[tuple[tuple[int, ...], np.dtype], ...] = field(metadata={"static": True})
    """The shape and the dtype, of 32 bits, of each array."""

    @classmethod
    def of(cls, arrays: Arrays) -> Self:
        """Bundles a pytree of NumPy arrays of 32 bits."""
        leaves, structure = jax.tree.flatten(arrays)
        words = np.zeros(sum(_aligned(leaf.size) for leaf in leaves), np.int32)
        start = 0
        for leaf in leaves:
            words[start : start + leaf.size] = leaf.reshape(-1).view(np.int32)
            start += _aligned(leaf.size)
        return cls(words, structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves))

    def arrays(self) -> Arrays:
        """The arrays, inside a program."""
        leaves, start = [], 0
        for shape, dtype in self.types:
            size = math.prod(shape)
            leaves.append(lax.bitcast_convert_type(self.words[start : start + size], dtype).reshape(shape))
            start += _aligned(size)
        return jax.tree.unflatten(self.structure, leaves)


def _aligned(words: int) -> int:
    """So many words, rounded up, so that XLA can pass a part of a bundle to a kernel without a copy."""
    return -(-words // ALIGNED) * ALIGNED


def _slots(block_tables: np.ndarray, positions: np.ndarray, written: np.ndarray, block_size: int) -> np.ndarray:
    """The slots of positions [B, Q]; -1 for those that are not written."""
    blocks = np.take_along_axis(block_tables, np.where(written, positions, 0) // block_size, axis=1)
    return np.where(written, blocks * block_size + positions % block_size, -1)
