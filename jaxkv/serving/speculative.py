"""`SpeculativeEngine`: continuous batching with drafts by the model's MTP layer."""

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, override

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.cache import KVCache
from jaxkv.checks import positive_int
from jaxkv.models.decoder import final_norm, forward, output
from jaxkv.models.model import Model
from jaxkv.models.parallel.data import DataParallel
from jaxkv.models.sampling import Sampling, sample
from jaxkv.models.speculative import draft, verify
from jaxkv.serving.base import EngineBase, ends_engine
from jaxkv.serving.pool import BlockPool
from jaxkv.serving.request import Held, Request, stop_tokens, token_ids
from jaxkv.serving.table import tables_of
from jaxkv_kernels.addressing import one_array

GREEDY = Sampling()


@dataclass
class AcceptanceStats:
    """How many drafts were accepted."""

    steps: int = 0
    """Verifications, counted per request."""
    drafted: int = 0
    accepted: int = 0

    @property
    def rate(self) -> float:
        """The accepted fraction of all drafts; 0 without drafts."""
        return self.accepted / max(self.drafted, 1)

    @property
    def tokens_per_step(self) -> float:
        """New tokens per request and step: the accepted drafts, and one token of the model's own."""
        return 1 + self.accepted / max(self.steps, 1)


class SpeculativeEngine(EngineBase):
    """Serves requests from one cache, with several new tokens per step if drafts of the MTP layer are right.

    Every step prefills a chunk of one prompt.  For every request whose prompt is complete, it also verifies the drafts
    of the previous step, appends the model's own tokens, and drafts the next ones.  The tokens of a request are those
    of `Engine`, up to rounding, whatever its `Sampling`.

    A request reserves the blocks of all its tokens when it joins, so that none is preempted; the others wait.  Prefixes
    are not reused, and requests cannot be cancelled.  As with `Engine`, an exception of any kind in a step ends the
    engine.

    Args:
      model: from `jaxkv.models.load` with `mtp`.
      num_blocks: blocks of the cache, shared by all requests.
      num_speculative_tokens: drafts per step.  The MTP layer is trained for one; further drafts use its own output.
      block_size: tokens per block; default the model's `usual_block_size`.
      order: order of the cache's axes.
      max_requests: requests that run at once.
      chunk: prompt tokens per step.

    Raises:
      ValueError: an argument is out of range, the model has no MTP layer, or it is data parallel.
    """

    def __init__(
        self,
        model: Model,
        *,
        num_blocks: int,
        num_speculative_tokens: int = 1,
        block_size: int | None = None,
        order: str = "BLNHC",
        max_requests: int = 32,
        chunk: int = 256,
    ):
        super().__init__()
        if "mtp" not in model.params:
            raise ValueError("`model` has no layer of multi-token prediction: load it with `mtp=True`")
        if isinstance(model.parallel, DataParallel):
            raise ValueError("`model` is data parallel, with requests of its own on each device: expected another one")
        self.model = model
        self.num_speculative_tokens = positive_int("num_speculative_tokens", num_speculative_tokens)
        block_size = model.usual_block_size if block_size is None else block_size
        self.block_size = positive_int("block_size", block_size)
        self.max_requests = positive_int("max_requests", max_requests)
        self.chunk = positive_int("chunk", chunk)
        tables = tables_of(model.layout(num_blocks, block_size, order), block_size)
        if len(tables) > 1 or not tables[0].plain:
            raise ValueError("`model` has several block tables, windows or states: expected `Engine`, which has these")
        cache = model.cache(num_blocks, block_size, order)
        # Committed to its device, like the caches that programs return: jit compiles separately for committed arrays.
        self.cache = jax.device_put(cache, one_array(cache.buffer).sharding)
        self.pool = BlockPool(num_blocks)
        self.acceptance = AcceptanceStats()
        longest, least = self._entries(model.config.max_position_embeddings, 0), self._entries(1, 1)
        if num_blocks * block_size < least:
            raise ValueError(
                f"`num_blocks` is {num_blocks}, of {block_size} tokens: expected at least {-(-least // block_size)}, "
                f"because a token with its drafts takes {least} entries"
            )
        self.table_blocks = min(num_blocks, -(-longest // block_size))
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._drafts: dict[Request, list[int]] = {}
        """The drafts of requests whose prompt is complete."""
        self._prefill, self._verify = (
            jax.jit(step, donate_argnames="cache", compiler_options=model.compiler_options)
            for step in (_prefill_step, _verify_step)
        )

    def submit(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int = 64,
        sampling: Sampling = GREEDY,
        stop: Collection[int] | None = None,
    ) -> Request:
        """Queues a request; the arguments and the result are those of `Engine.submit`.

        Raises:
          RuntimeError: an exception has ended the engine.
          TypeError: a token id (of `prompt`, `stop`) is not an integer, or `sampling` is not a Sampling.
          ValueError: the prompt is empty, holds an id outside the vocabulary, or is too long: with `max_tokens` and the
            drafts after them, it would exceed the cache or the model's `max_position_embeddings`.
        """
        self.check_usable()
        vocabulary, prompt = self.model.config.vocab_size, token_ids("prompt", prompt)
        if not prompt or not all(0 <= token < vocabulary for token in prompt):
            raise ValueError(f"`prompt` is {prompt!r}: expected one or more token ids from 0 to {vocabulary - 1}")
        entries = self._entries(len(prompt), positive_int("max_tokens", max_tokens))
        if entries > (table := self.table_blocks * self.block_size):
            limit = "num_blocks" if self.table_blocks == self.pool.num_blocks else "max_position_embeddings"
            raise ValueError(
                f"`prompt` has {len(prompt)} tokens and `max_tokens` is {max_tokens}, {entries} entries with those of "
                f"drafts: because of `{limit}`, a request's table holds {table}; shorten them"
            )
        if not isinstance(sampling, Sampling):
            raise TypeError(f"`sampling` is {sampling!r}: expected a Sampling")
        request = Request(prompt, max_tokens, sampling, stop_tokens(stop, self.model.config.stop_tokens))
        self.waiting.append(request)
        return request

    @property
    @override
    def unfinished(self):
        return [*self.running, *self.waiting]

    @override
    def _step(self):
        self._admit()
        self._prefill_next()
        self._verify_ready()

    @override
    def _release(self, error):
        self.pool.clear()
        unfinished = [request for request in dict.fromkeys(self.unfinished) if request.finish_reason is None]
        for request in unfinished:
            request.reset()
        self.waiting, self.running, self._drafts = deque(unfinished), [], {}
        self.cache.buffer.delete()  # unless a program that did not return has donated it

    @ends_engine
    def warm_up(self) -> None:
        """Compiles the programs by running them without requests, so that later steps do not compile."""
        self.cache, *_ = self._prefill(self.model, self.cache, self._inputs([], 1, self.chunk))
        self.cache, *_ = self._verify(self.model, self.cache, self._verify_inputs([]))

    def _entries(self, prompt: int, max_tokens: int) -> int:
        """The number of entries that a request needs at most.

        Its last token needs none.  The last step starts at the second to last token, and writes 2 K - 1 entries after
        it: those of K drafts, and of the K - 1 positions after them, which the MTP layer uses for the next drafts.
        """
        return prompt + max_tokens + 2 * self.num_speculative_tokens - 2

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.max_requests:
            request = self.waiting[0]
            blocks = -(-self._entries(len(request.prompt), request.max_tokens) // self.block_size)
            if blocks > self.pool.num_free:
                return
            request.held[""] = Held([self.pool.take() for _ in range(blocks)])
            self.running.append(request)
            self.waiting.popleft()

    def _prefill_next(self) -> None:
        request = next((request for request in self.running if request not in self._drafts), None)
        if request is None:
            return
        end = request.cached + min(self.chunk, request.missing)
        new, following = request.tokens[request.cached : end], request.tokens[end : end + 1]
        inputs = self._inputs([(request, new, following)], 1, self.chunk)
        self.cache, drawn, drafts = self._prefill(self.model, self.cache, inputs)
        request.cached = end
        if not request.missing:
            self._drafts[request] = np.asarray(drafts)[0].tolist()
            self._append(request, np.asarray(drawn).tolist())

    def _verify_ready(self) -> None:
        ready = [request for request in self.running if request in self._drafts]
        if not ready:
            return
        inputs = self._verify_inputs(ready)
        self.cache, *found = self._verify(self.model, self.cache, inputs)
        tokens, counts, drafts = (array.tolist() for array in jax.device_get(found))
        for request, row, accepted, following in zip(ready, tokens, counts, drafts, strict=False):
            self.acceptance.steps += 1
            self.acceptance.drafted += self.num_speculative_tokens
            self.acceptance.accepted += accepted
            request.cached += accepted + 1
            self._drafts[request] = following
            self._append(request, row[: accepted + 1])

    def _append(self, request: Request, tokens: list[int]) -> None:
        """Appends tokens until the request ends, which a negative token also causes."""
        for token in tokens:
            if token < 0:
                request.finish_reason = "nan"
            else:
                request.append(token)
                self._new.append((request, token))
            if request.finish_reason:
                self.running.remove(request)
                del self._drafts[request]
                for block in request.blocks:
                    self.pool.release(block)
                request.held[""], request.cached = Held(), 0
                break

    def _verify_inputs(self, ready: list[Request]) -> "_Inputs":
        todo = [(request, [request.tokens[-1], *self._drafts[request]], []) for request in ready]
        return self._inputs(todo, self.max_requests, self.num_speculative_tokens + 1)

    def _inputs(self, todo: list[tuple[Request, list[int], list[int]]], count: int, columns: int) -> "_Inputs":
        """The arrays of a step, given each request with its new tokens and, if known, the token after them."""
        further = self.num_speculative_tokens - 1
        inputs = _Inputs(
            tokens=np.zeros((count, columns), np.int32),
            following=np.full(count, -1, np.int32),
            seq_lens=np.zeros(count, np.int32),
            block_tables=np.full((count, self.table_blocks), -1, np.int32),
            slot_mapping=np.full((count, columns + further), -1, np.int32),
            temperature=np.zeros(count, np.float32),
            top_p=np.ones(count, np.float32),
            seeds=np.zeros(count, np.uint32),
        )
        for row, (request, new, following) in enumerate(todo):
            first, end = columns - len(new), request.cached + len(new)
            inputs.tokens[row, first:] = new
            inputs.following[row] = (following or [-1])[0]
            inputs.seq_lens[row] = end
            blocks, positions = np.asarray(request.blocks, np.int32), np.arange(request.cached, end + further)
            inputs.block_tables[row, : len(blocks)] = blocks
            slots = blocks[positions // self.block_size] * self.block_size + positions % self.block_size
            inputs.slot_mapping[row, first:] = slots
            inputs.temperature[row] = request.sampling.temperature
            inputs.top_p[row] = request.sampling.top_p
            inputs.seeds[row] = request.sampling.seed
        return inputs


class _Inputs(NamedTuple):
    """The inputs of a step with K drafts, one row per request."""

    tokens: Any
    """int32 [B, Q], new tokens, aligned to the end."""
    following: Any
    """int32 [B], the token of the prompt after them; -1 if they are the last."""
    seq_lens: Any
    """int32 [B], the new tokens included; 0 for a row without a request."""
    block_tables: Any
    slot_mapping: Any
    """int32 [B, Q + K - 1], the slots of the new tokens and of the K - 1 positions after them; -1 for padding."""
    temperature: Any
    top_p: Any
    seeds: Any

    @property
    def batch(self) -> tuple[Any, Any, Any, Any]:
        """The arguments of `forward` for the new tokens."""
        return self.tokens, self.seq_lens, self.block_tables, self.slot_mapping[:, : self.tokens.shape[1]]

    @property
    def sampling(self) -> tuple[Any, Any, Any]:
        """The options of `sample`."""
        return self.temperature, self.top_p, self.seeds


def _prefill_step(model: Model, cache: KVCache, inputs: _Inputs) -> tuple[KVCache, jax.Array, jax.Array]:
    """Prefills a chunk; returns the cache, the token after it [B], and drafts of those after that [B, K]."""
    cache, x = forward(model, cache, *inputs.batch)
    hidden = final_norm(model, x)
    drawn = sample(output(model, hidden[:, -1]), *inputs.sampling, inputs.seq_lens)
    last = jnp.where(inputs.following < 0, drawn, inputs.following)
    tokens = jnp.concatenate([inputs.tokens[:, 1:], last[:, None]], axis=1)
    index = inputs.seq_lens, inputs.block_tables, inputs.slot_mapping
    cache, drafts = draft(model, cache, hidden, tokens, *index)
    return cache, drawn, drafts


def _verify_step(model: Model, cache: KVCache, inputs: _Inputs) -> tuple[KVCache, jax.Array, jax.Array, jax.Array]:
    """Verifies drafts and makes the next; returns the cache, `sampled` and `accepted` of `verify`, and drafts [B, K].

    The MTP layer processes the positions of the last token and of the accepted drafts.  They move to the end of the
    row, where `draft` expects them.
    """
    cache, hidden, sampled, accepted = verify(model, cache, *inputs.batch, *inputs.sampling)
    rejected = inputs.tokens.shape[1] - 1 - accepted

    def moved(array):
        columns = jnp.arange(array.shape[1], dtype=jnp.int32)[None] - rejected[:, None]
        columns = jnp.maximum(columns, 0).reshape(*columns.shape, *[1] * (array.ndim - 2))
        return jnp.take_along_axis(array, columns, axis=1)

    slots = moved(inputs.slot_mapping)
    slots = jnp.where(jnp.arange(slots.shape[1], dtype=jnp.int32)[None] < rejected[:, None], -1, slots)
    lengths = jnp.where(inputs.seq_lens > 0, inputs.seq_lens - rejected, 0)
    cache, drafts = draft(model, cache, moved(hidden), moved(sampled), lengths, inputs.block_tables, slots)
    return cache, sampled, accepted, drafts
