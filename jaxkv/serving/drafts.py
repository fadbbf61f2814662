"""Drafts of the next tokens, which a step verifies: `MTP` and `NGram`, an option of `Engine`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from jaxkv.cache import KVCache
from jaxkv.checks import positive_int
from jaxkv.models.decoder import hidden_states, output
from jaxkv.models.model import Model
from jaxkv.models.sampling import sample
from jaxkv.models.speculative import accept, draft
from jaxkv.serving.request import TOKEN_BYTES, Request
from jaxkv.serving.step_inputs import Bundle, InputBatch, StepBatches
from jaxkv.serving.table import TableKind


class Drafts(Protocol):
    """How the next tokens are drafted: `MTP` or `NGram`."""

    @property
    def num_speculative_tokens(self) -> int:
        """The most drafts of a request that a step verifies."""

    @property
    def lookahead(self) -> int:
        """How many entries after those of its tokens a step writes."""

    @property
    def program(self) -> Callable[..., tuple[KVCache, jax.Array, "Verified"]]:
        """The program of a step, with the arguments of `verify_and_draft`."""

    def check(self, model: Model, tables: Sequence[TableKind]) -> None:
        """ValueError unless this can draft for the model, whose cache has these tables."""

    def following(self, request: Request, drafted: Sequence[int]) -> Sequence[int]:
        """Drafts of the tokens after those of a request, at most `num_speculative_tokens`; `drafted` are the step's."""


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

    @property
    def program(self):
        """`verify_and_draft`."""
        return verify_and_draft

    def check(self, model: Model, tables: Sequence[TableKind]) -> None:
        """ValueError unless the layer can draft for this model, whose cache has these tables."""
        if "mtp" not in model.params:
            raise ValueError("`model` has no layer of multi-token prediction: load it with `mtp=True`")
        _check_tables(self, tables)

    def following(self, request: Request, drafted: Sequence[int]) -> Sequence[int]:
        """The drafts that the step has made."""
        return drafted


@dataclass(frozen=True)
class NGram:
    """Drafts that are copied from earlier tokens of the request (prompt lookup, vLLM's method "ngram").

    The last tokens of the request, at most `prompt_lookup_max`, are searched in its earlier ones.  The drafts are the
    tokens that followed them where as many as possible of them occur first.  If fewer than `prompt_lookup_min` occur,
    the step has no drafts of this request.  This helps where answers repeat the prompt: summaries, edits of text or
    code, and answers about documents.

    The search runs on the host.  It needs no weights, and supports every model whose cache has one table that keeps all
    entries.  Models with recurrent states, windows or compressed attention have other tables.

    Args:
      num_speculative_tokens: the most drafts per step.
      prompt_lookup_max: the most tokens that are searched.
      prompt_lookup_min: the least tokens that must be found.

    Raises:
      ValueError: an argument is not positive, or `prompt_lookup_min` is more than `prompt_lookup_max`.
    """

    num_speculative_tokens: int = 4
    prompt_lookup_max: int = 4
    prompt_lookup_min: int = 2

    def __post_init__(self):
        for name in ("num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min"):
            positive_int(name, getattr(self, name))
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"`prompt_lookup_min` is {self.prompt_lookup_min}: expected at most `prompt_lookup_max`, "
                f"{self.prompt_lookup_max}"
            )

    @property
    def lookahead(self) -> int:
        """0: drafts come from the host."""
        return 0

    @property
    def program(self):
        """`verify_drafts`."""
        return verify_drafts

    def check(self, model: Model, tables: Sequence[TableKind]) -> None:
        """ValueError unless the cache has one table that keeps all entries: drafts may be rejected."""
        _check_tables(self, tables)

    def following(self, request: Request, drafted: Sequence[int]) -> Sequence[int]:
        """The tokens after an earlier occurrence of the request's last tokens; none if there is no such occurrence."""
        end = _end_of_match(request.token_bytes, self.prompt_lookup_min, self.prompt_lookup_max)
        return request.tokens[end : end + self.num_speculative_tokens] if end else []


def _end_of_match(tokens: bytearray, least: int, most: int) -> int:
    """Where the first occurrence of the last tokens ends, of as many as possible from `least` to `most`; 0 if none.

    At least one token follows it.
    """
    end = 0
    for count in range(least, min(most, len(tokens) // TOKEN_BYTES - 1) + 1):
        # One more token occurs nowhere before the end of this occurrence, so that all searches together read once.
        start = _find(tokens, tokens[-count * TOKEN_BYTES :], max(end - count, 0))
        if start < 0:
            break
        end = start + count
    return end


def _find(tokens: bytearray, wanted: bytearray, first: int) -> int:
    """The place of the first occurrence from token `first` on that ends before the last token; -1 if there is none."""
    place, last = first * TOKEN_BYTES, len(tokens) - TOKEN_BYTES
    while (place := tokens.find(wanted, place, last)) % TOKEN_BYTES and place >= 0:
        place += 1  # bytes of several tokens
    return place // TOKEN_BYTES


def _check_tables(drafts: Drafts, tables: Sequence[TableKind]) -> None:
    """ValueError unless entries of rejected drafts can be overwritten, and have replaced nothing that is needed."""
    if len(tables) > 1 or not tables[0].plain:
        raise ValueError(
            f"`drafts` is {drafts}, and the cache has the tables {', '.join(repr(table.name) for table in tables)}, "
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
    """int32 [B, K], drafts of the tokens after these, or [B, 0] if the step makes none."""


def verify_and_draft(
    model: Model, cache: KVCache, last, inputs: Bundle[StepBatches]
) -> tuple[KVCache, jax.Array, Verified]:
    """The layers, the choice of the next tokens, and the next drafts, in one program.

    The arguments are those of `run_layers`.  `last` is returned as it is: the host reads all tokens before it launches
    the next step.
    """
    batches = inputs.arrays()
    cache, hidden = hidden_states(model, cache, *[batch.new_tokens(last) for batch in batches.present])
    verified = []
    for batch, x in zip(batches.present, hidden, strict=True):
        follow = _verify if batch is batches.decode else _prefill
        cache, found = follow(model, cache, batch, x)
        verified.append(found)
    return cache, last, jax.tree.map(lambda *rows: jnp.concatenate(rows), *verified)


def verify_drafts(
    model: Model, cache: KVCache, last, inputs: Bundle[StepBatches]
) -> tuple[KVCache, jax.Array, Verified]:
    """The layers and the choice of the next tokens, in one program; the arguments are those of `verify_and_draft`."""
    batches = inputs.arrays()
    cache, hidden = hidden_states(model, cache, *[batch.new_tokens(last) for batch in batches.present])
    # The host finds the tokens of a row at its end, however wide it is.
    columns = 1 if batches.decode is None else batches.decode.tokens.shape[1]
    verified = []
    for batch, x in zip(batches.present, hidden, strict=True):
        if batch is batches.decode:
            sampled, accepted = _accepted(model, batch, x)
        else:
            drawn = _drawn(model, batch, x)
            sampled, accepted = _alone(drawn, columns), jnp.zeros_like(drawn)
        verified.append(Verified(sampled, accepted, jnp.zeros((len(sampled), 0), jnp.int32)))
    return cache, last, jax.tree.map(lambda *rows: jnp.concatenate(rows), *verified)


def _drawn(model: Model, batch: InputBatch, hidden) -> jax.Array:
    """The tokens after chunks of prompts, int32 [B], given the hidden states of the chunks."""
    return sample(output(model, hidden[:, -1]), batch.drafting.choices.sampling, batch.drafting.choices.lengths)


def _accepted(model: Model, batch: InputBatch, hidden) -> tuple[jax.Array, jax.Array]:
    """`Verified.sampled` and `accepted`, given the hidden states of the last tokens and of the drafts."""
    choices, padding = batch.drafting.choices, batch.slot_mapping < 0
    return accept(output(model, hidden), batch.tokens, padding, batch.seq_lens, choices.sampling)


def _alone(drawn, columns: int) -> jax.Array:
    """`Verified.sampled` of rows without drafts: int32 [B, columns]."""
    return jnp.pad(drawn[:, None], [(0, 0), (columns - 1, 0)])


def _prefill(model: Model, cache: KVCache, batch: InputBatch, hidden) -> tuple[KVCache, Verified]:
    """The tokens after chunks of prompts, and the first drafts, given the hidden states of the chunks."""
    following, lookahead, _ = batch.drafting
    drawn = _drawn(model, batch, hidden)
    following = jnp.where(following < 0, drawn, following)
    tokens = jnp.concatenate([batch.tokens[:, 1:], following[:, None]], axis=1)
    slots = jnp.concatenate([batch.slot_mapping, lookahead], axis=1)
    cache, drafts = draft(model, cache, hidden, tokens, batch.seq_lens, batch.block_tables, slots)
    return cache, Verified(_alone(drawn, drafts.shape[1] + 1), jnp.zeros_like(drawn), drafts)


def _verify(model: Model, cache: KVCache, batch: InputBatch, hidden) -> tuple[KVCache, Verified]:
    """Verifies drafts and makes the next, given the hidden states of the last tokens and of the drafts.

    The MTP layer processes the positions of the last token and of the accepted drafts.  They move to the end of the
    row, where `draft` expects them.
    """
    sampled, accepted = _accepted(model, batch, hidden)
    new = (batch.slot_mapping >= 0).sum(axis=1, dtype=jnp.int32)
    rejected = jnp.maximum(new - 1 - accepted, 0)

    def moved(array):
        columns = jnp.arange(array.shape[1], dtype=jnp.int32)[None] - rejected[:, None]
        columns = jnp.maximum(columns, 0).reshape(*columns.shape, *[1] * (array.ndim - 2))
        return jnp.take_along_axis(array, columns, axis=1)

    slots = moved(jnp.concatenate([batch.slot_mapping, batch.drafting.lookahead], axis=1))
    slots = jnp.where(jnp.arange(slots.shape[1], dtype=jnp.int32)[None] < rejected[:, None], -1, slots)
    lengths = batch.seq_lens - rejected
    cache, drafts = draft(model, cache, moved(hidden), moved(sampled), lengths, batch.block_tables, slots)
    return cache, Verified(sampled, accepted, drafts)
