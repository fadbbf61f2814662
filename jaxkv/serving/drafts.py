"""Drafts of the next tokens, which a step verifies: an option of `Engine`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxkv.cache import KVCache
from jaxkv.checks import positive_int
from jaxkv.models.decoder import hidden_states, output
from jaxkv.models.model import Model
from jaxkv.models.sampling import sample
from jaxkv.models.speculative import accept, draft
from jaxkv.serving.step_inputs import InputBatch
from jaxkv.serving.table import TableKind


@dataclass(frozen=True)
class MTP:
    """Drafts by the model's layer of multi-token prediction, which the step that verifies the last ones makes.

    Args:
      num_speculative_tokens: drafts per step.  The layer is trained for one; further drafts use its own output.

    Raises:
      ValueError: the argument is not positive.
    """

    num_speculative_tokens: int = 1

    def __post_init__(self):
        positive_int("num_speculative_tokens", self.num_speculative_tokens)

    @property
    def lookahead(self) -> int:
        """How many entries after those of a step's tokens the layer writes, to make the drafts after the first."""
        return self.num_speculative_tokens - 1

    def check(self, model: Model, tables: Sequence[TableKind]) -> None:
        """ValueError unless the layer can draft for this model, whose cache has these tables."""
        if "mtp" not in model.params:
            raise ValueError("`model` has no layer of multi-token prediction: load it with `mtp=True`")
        if len(tables) > 1 or not tables[0].plain:
            raise ValueError(
                f"`drafts` is {self}, and the cache has the tables {', '.join(repr(table.name) for table in tables)}, "
                "with windows or states: expected one table that keeps all entries, or no `drafts`"
            )


@dataclass
class AcceptanceStats:
    """How many drafts were accepted."""

    steps: int = 0
    """Verifications of one draft or more, counted per request."""
    drafted: int = 0
    """Verified drafts.  There are none after a prefix that was found, and fewer before the last of `max_tokens`."""
    accepted: int = 0

    def add(self, drafted: int, accepted: int) -> None:
        """Counts the drafts of a request that a step verified, and how many of them it accepted."""
        self.steps += drafted > 0
        self.drafted += drafted
        self.accepted += accepted

    @property
    def rate(self) -> float:
        """The accepted fraction of all drafts; 0 without drafts."""
        return self.accepted / max(self.drafted, 1)

    @property
    def tokens_per_step(self) -> float:
        """New tokens per request and step: the accepted drafts, and one token of the model's own."""
        return 1 + self.accepted / max(self.steps, 1)


class Verified(NamedTuple):
    """What a step with K drafts found, one row per span."""

    sampled: Any
    """int32 [B, K + 1], the model's tokens after the last token and the drafts; -1 if the logits are NaN.  Aligned to
    the end; all after the first that is not its draft are meaningless."""
    accepted: Any
    """int32 [B], how many leading drafts are the model's tokens."""
    drafts: Any
    """int32 [B, K], drafts of the tokens after these."""


def verify_and_draft(model: Model, cache: KVCache, last, *batches: InputBatch) -> tuple[KVCache, Verified]:
    """The layers, the choice of the next tokens, and the next drafts, in one program.

    The arguments are those of `run_layers`.  The last batch has the tokens to verify, those before it have chunks of
    prompts.
    """
    cache, hidden = hidden_states(model, cache, *[batch.new_tokens(last) for batch in batches])
    verified = []
    for batch, x in zip(batches, hidden, strict=True):
        follow = _verify if batch is batches[-1] else _prefill
        cache, found = follow(model, cache, batch, x)
        verified.append(found)
    return cache, jax.tree.map(lambda *rows: jnp.concatenate(rows), *verified)


def _prefill(model: Model, cache: KVCache, batch: InputBatch, hidden) -> tuple[KVCache, Verified]:
    """The tokens after chunks of prompts, and the first drafts, given the hidden states of the chunks."""
    following, lookahead, choices = batch.drafting
    drawn = sample(output(model, hidden[:, -1]), choices.sampling, choices.lengths)
    following = jnp.where(following < 0, drawn, following)
    tokens = jnp.concatenate([batch.tokens[:, 1:], following[:, None]], axis=1)
    slots = jnp.concatenate([batch.slot_mapping, lookahead], axis=1)
    cache, drafts = draft(model, cache, hidden, tokens, batch.seq_lens, batch.block_tables, slots)
    sampled = jnp.pad(drawn[:, None], [(0, 0), (drafts.shape[1], 0)])
    return cache, Verified(sampled, jnp.zeros_like(drawn), drafts)


def _verify(model: Model, cache: KVCache, batch: InputBatch, hidden) -> tuple[KVCache, Verified]:
    """Verifies drafts and makes the next, given the hidden states of the last tokens and of the drafts.

    The MTP layer processes the positions of the last token and of the accepted drafts.  They move to the end of the
    row, where `draft` expects them.
    """
    (_, lookahead, choices), padding = batch.drafting, batch.slot_mapping < 0
    sampled, accepted = accept(output(model, hidden), batch.tokens, padding, batch.seq_lens, choices.sampling)
    rejected = jnp.maximum((~padding).sum(axis=1, dtype=jnp.int32) - 1 - accepted, 0)

    def moved(array):
        columns = jnp.arange(array.shape[1], dtype=jnp.int32)[None] - rejected[:, None]
        columns = jnp.maximum(columns, 0).reshape(*columns.shape, *[1] * (array.ndim - 2))
        return jnp.take_along_axis(array, columns, axis=1)

    slots = moved(jnp.concatenate([batch.slot_mapping, lookahead], axis=1))
    slots = jnp.where(jnp.arange(slots.shape[1], dtype=jnp.int32)[None] < rejected[:, None], -1, slots)
    lengths = batch.seq_lens - rejected
    cache, drafts = draft(model, cache, moved(hidden), moved(sampled), lengths, batch.block_tables, slots)
    return cache, Verified(sampled, accepted, drafts)
