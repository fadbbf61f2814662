"""Continuous batching: requests join and leave while one compiled program of each kind runs."""

import operator
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from functools import partial

import jax
import numpy as np

from jaxkv.cache import KVCache
from jaxkv.dispatch.validate import positive_int
from jaxkv.models.decoder import decode, prefill
from jaxkv.models.model import Model
from jaxkv.models.parallel.data import DataParallel
from jaxkv.models.sampling import Sampling
from jaxkv.models.weights.fingerprint import fingerprint
from jaxkv.offload import HostPool, prefix_keys
from jaxkv.ops.blocks import copy_blocks
from jaxkv.serving.pool import BlockPool
from jaxkv.serving.prefix import BELOW, Prefix
from jaxkv.serving.prefix_stats import PrefixCacheStats
from jaxkv.serving.request import Request, uncancelled
from jaxkv.serving.step_inputs import Rows
from jaxkv.serving.tiers import Tiers

GREEDY = Sampling()
NOWHERE = -1
"""A block id outside every cache."""


class Engine:
    """Serves requests from one cache.

    Every step prefills a chunk of one prompt, and decodes one token of every request whose prompt is complete.  Prefill
    and decode are compiled once each, for static shapes.  If blocks run out, new requests wait.  If a running request
    needs a block and none is free, the most recent request is preempted and recomputed later.

    A request reuses the longest prefix of its tokens that is cached, and computes the rest.  Full blocks are found by
    their content until they are evicted, whether a request holds them or not.  If a running request has a block that
    begins with the next tokens, this block is copied.  With `offload`, full blocks are also stored in host memory.
    The blocks that a step fills are copied while the next step runs, so steps do not wait, and an evicted block is
    already stored.  Blocks that are found in the pool are loaded when their request joins, and that step waits for
    them.  Blocks that cannot be loaded are computed.  None of this changes the generated tokens, except through the
    rounding of logits.

    Args:
      model: from `jaxkv.models.load`.
      num_blocks: blocks of the cache, shared by all requests.
      block_size: tokens per block.
      order: order of the cache's axes.
      max_requests: requests that run at once, which is the number of rows of the decode program.
      max_len: the most cached tokens of a request, rounded up to blocks; default the capacity of the cache or the
        model's `max_position_embeddings`, whichever is less.
      chunk: prompt tokens per step, which is the number of columns of the prefill program.
      offload: a pool that also stores the blocks, in host memory and, if it has a disk pool, on disk.  It must be made
        for `model.layout(n, block_size, order)` with any number n of blocks, and may outlive the engine.

    Raises:
      ValueError: an argument is out of range; `offload` was made for another layout, or is passed although the cache is
        on several devices; or the model is data parallel (use `Replicas`).
    """

    def __init__(
        self,
        model: Model,
        *,
        num_blocks: int,
        block_size: int = 64,
        order: str = "BLNHC",
        max_requests: int = 32,
        max_len: int | None = None,
        chunk: int = 256,
        offload: HostPool | None = None,
    ):
        if isinstance(model.parallel, DataParallel):
            raise ValueError("`model` is data parallel, with requests of its own on each device: expected `Replicas`")
        self.model = model
        cache, layout = model.cache(num_blocks, block_size, order), model.layout(num_blocks, block_size, order)
        # Committed to its device, like the caches that loads return: jit compiles separately for committed arrays.
        self.cache = jax.device_put(cache, cache.buffer.sharding)
        self.pool = BlockPool(num_blocks)
        self.tiers = Tiers(offload)
        self.tiers.check(self.cache, layout)
        self.prefix_stats = PrefixCacheStats()
        # Without a pool, keys do not leave this engine, so they need not name the model.
        name = "" if offload is None else fingerprint(model)
        self._keys = partial(prefix_keys, block_size=block_size, layout_fingerprint=layout.fingerprint, model=name)
        self.block_size = block_size
        self.max_requests = positive_int("max_requests", max_requests)
        self.chunk = positive_int("chunk", chunk)
        if max_len is None:
            max_len = min(num_blocks * block_size, model.config.max_position_embeddings)
        else:
            max_len = positive_int("max_len", max_len)
        self.table_blocks = _blocks(max_len, block_size)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        """Running requests, oldest first.  The last is preempted first."""
        # The cache is donated, so that it is updated in place.
        self._prefill = jax.jit(_prefill_step, donate_argnames="cache")
        self._decode = jax.jit(_decode_step, donate_argnames="cache")
        copy = model.parallel.per_device(partial(copy_blocks, implementation=model.implementation))
        self._copy = jax.jit(copy, donate_argnums=0)

    def submit(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int = 64,
        sampling: Sampling = GREEDY,
        stop: Collection[int] | None = None,
    ) -> Request:
        """Queues a request.

        Args:
          prompt: token ids, at least one.
          max_tokens: the most tokens to generate.
          sampling: how tokens are chosen; default greedy.
          stop: token ids that end the request; the stop token is included in the result.  Default: those of the
            checkpoint.

        Returns:
          The request.  `step` and `run` append its tokens.

        Raises:
          TypeError: a token id is not an integer, or `sampling` is not a Sampling.
          ValueError: the prompt is empty, holds an id outside the vocabulary, or is too long: with `max_tokens`, it
            would exceed the block table or the cache.
        """
        vocabulary = self.model.config.vocab_size
        if isinstance(prompt, str):
            raise TypeError(f"`prompt` is {prompt!r}: expected token ids; tokenize the text first")
        prompt = tuple(map(operator.index, prompt))
        outside = [token for token in prompt if not 0 <= token < vocabulary]
        if not prompt or outside:
            problem = f"has token id {outside[0]}" if outside else "is empty"
            raise ValueError(f"`prompt` {problem}: expected one or more token ids from 0 to {vocabulary - 1}")
        # The last token needs no entry, because no token attends to it.
        entries = len(prompt) + positive_int("max_tokens", max_tokens) - 1
        table, cache = (blocks * self.block_size for blocks in (self.table_blocks, self.pool.num_blocks))
        if entries > min(table, cache):
            raise ValueError(
                f"`prompt` has {len(prompt)} tokens and `max_tokens` is {max_tokens}, {entries} entries: a request's "
                f"table holds {table} and the cache {cache}; shorten them, or make the engine with more blocks"
            )
        if not isinstance(sampling, Sampling):
            raise TypeError(f"`sampling` is {sampling!r}: expected a Sampling")
        stop = self.model.config.stop_tokens if stop is None else stop
        request = Request(prompt, max_tokens, sampling, frozenset(stop))
        self.waiting.append(request)
        return request

    def cancel(self, request: Request) -> None:
        """Ends a waiting or running request and frees its blocks.  ValueError if it has already ended.

        `run` yields no further tokens of it.  A token that the current step has sampled is still in
        `request.generated`.
        """
        if request in self.waiting:
            self.waiting.remove(request)
        elif request in self.running:
            self._leave(request)
        else:
            raise ValueError(f"`request` neither waits nor runs: it ended with {request.finish_reason!r}")
        request.finish_reason = "cancelled"

    def run(self) -> Iterator[tuple[Request, int]]:
        """Steps until all requests have ended; yields each new token with its request."""
        while self.waiting or self.running:
            yield from uncancelled(self.step())

    def step(self) -> list[tuple[Request, int]]:
        """Runs one step and returns the new tokens with their requests.

        If the logits of a request are NaN, it ends with `finish_reason` "nan" and no further token; the others
        continue.
        """
        return [*self._prefill_next(), *self._decode_ready()]

    def warm_up(self) -> None:
        """Compiles the programs by running them without requests, so that later steps do not compile."""
        self._advance(self._prefill, [], count=1, columns=self.chunk)
        self._advance(self._decode, [], count=self.max_requests, columns=1)
        self.cache = self.tiers.warm_up(self._copy(self.cache, _ids(NOWHERE), _ids(NOWHERE)))

    def _prefill_next(self) -> list[tuple[Request, int]]:
        unfinished = [request for request in self.running if request.missing > 1]
        # A request joins only after earlier prompts are cached, so that it can share their prefixes.
        while not unfinished and self._admit():
            unfinished = [request for request in self.running if request.missing > 1]
        return self._advance(self._prefill, unfinished[:1], count=1, columns=self.chunk) if unfinished else []

    def _decode_ready(self) -> list[tuple[Request, int]]:
        for request in list(self.running):
            # This request may have been preempted to make room for an older one.
            if request.missing == 1 and request in self.running:
                self._make_room(request)
        ready = [request for request in self.running if request.missing == 1]
        return self._advance(self._decode, ready, count=self.max_requests, columns=1) if ready else []

    def _advance(self, program, requests: list[Request], *, count: int, columns: int) -> list[tuple[Request, int]]:
        """Runs a program on the next tokens of these requests; returns the sampled tokens."""
        rows = Rows.of(requests, count, columns, table_blocks=self.table_blocks, block_size=self.block_size)
        self.cache, drawn = program(self.model, self.cache, rows)
        new = []
        for request, length, token in zip(requests, rows.seq_lens.tolist(), np.asarray(drawn).tolist(), strict=False):
            if token >= 0:  # negative if the logits were NaN
                self._fill(request, length)
            request.cached = length
            if request.missing:
                continue  # the prompt is not complete: ignore the sampled token
            if token < 0:
                request.finish_reason = "nan"
            else:
                request.append(token)
                new.append((request, token))
            if request.finish_reason:
                self._leave(request)
        return new

    def _admit(self) -> bool:
        """Admits the first request of the queue if a row and enough blocks are free."""
        if not self.waiting or len(self.running) == self.max_requests:
            return False
        request = self.waiting[0]
        self._extend_keys(request)
        prefix = Prefix.of(request, self.running, self.pool, self.tiers, self.block_size)
        if prefix.takes(_blocks(len(request.tokens), self.block_size), self.pool) > self.pool.num_free:
            return False
        if BELOW in prefix.blocks:
            self._load(request, prefix)
            return self._admit()  # all blocks that could be loaded are on the device now
        self.running.append(self.waiting.popleft())
        request.blocks = [self.pool.share(block) for block in prefix.blocks]
        request.cached = prefix.tokens
        self.prefix_stats.tokens += len(request.tokens)
        self.prefix_stats.found += prefix.tokens
        self._own(request)
        return True

    def _load(self, request: Request, prefix: Prefix) -> None:
        """Loads the blocks of a prefix that are not on the device; if that fails, the request computes them."""
        # Hold all blocks of the prefix, so that loading one does not evict another.
        blocks = [block if block == BELOW else self.pool.share(block) for block in prefix.blocks]
        contents = {}
        for index, block in enumerate(blocks):
            if block == BELOW:
                blocks[index] = contents[request.keys[index]] = self.pool.take()
        try:
            self.cache, loaded = self.tiers.load(self.cache, contents)
            if loaded:
                self.prefix_stats.loaded += len(contents) * self.block_size
                for key, block in contents.items():
                    self.pool.name(block, key)
        finally:
            self._release(blocks)

    def _extend_keys(self, request: Request) -> None:
        """Adds the keys of the request's full blocks to `request.keys`."""
        known = len(request.keys) * self.block_size
        if len(request.tokens) - known >= self.block_size:
            request.keys += self._keys(request.tokens[known:], after=request.keys[-1] if known else None)

    def _fill(self, request: Request, length: int) -> None:
        """Registers the keys of the blocks that become full at `length` cached tokens, and stores them in the tiers."""
        self._extend_keys(request)
        filled = range(request.cached // self.block_size, length // self.block_size)
        contents = {request.keys[index]: request.blocks[index] for index in filled}
        for key, block in contents.items():
            self.pool.name(block, key)
        self.tiers.store(self.cache, contents)

    def _make_room(self, request: Request) -> None:
        """Takes the blocks for a running request's next token; preempts the most recent requests if none is free."""
        while self._lacks(request) > self.pool.num_free:
            latest = self.running[-1]
            self._leave(latest)
            self.waiting.appendleft(latest)
            if latest is request:
                return
        self._own(request)

    def _lacks(self, request: Request) -> int:
        """The number of free blocks that `_own` takes: for new blocks, and for copies of shared ones."""
        shared = map(self.pool.is_shared, request.blocks[request.cached // self.block_size :])
        return _blocks(len(request.tokens), self.block_size) - len(request.blocks) + sum(shared)

    def _own(self, request: Request) -> None:
        """Gives a request its own blocks for the tokens that it will write: new ones, and copies of shared ones."""
        for index in range(request.cached // self.block_size, _blocks(len(request.tokens), self.block_size)):
            if index == len(request.blocks):
                request.blocks.append(self.pool.take())
            elif self.pool.is_shared(shared := request.blocks[index]):
                request.blocks[index] = self.pool.take()
                self.cache = self._copy(self.cache, _ids(shared), _ids(request.blocks[index]))
                self.pool.release(shared)

    def _leave(self, request: Request) -> None:
        """Removes a request from the batch and releases its blocks.  Blocks that other requests share remain held."""
        self.running.remove(request)
        self._release(request.blocks)
        request.blocks, request.cached = [], 0

    def _release(self, blocks: list[int]) -> None:
        # Release the last block first, so that it is evicted first: a block is useless without those before it.
        for block in reversed(blocks):
            self.pool.release(block)


def _blocks(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)


def _ids(block: int) -> np.ndarray:
    return np.asarray([block], np.int32)


def _prefill_step(model: Model, cache: KVCache, rows: Rows) -> tuple[KVCache, jax.Array]:
    cache, logits = prefill(model, cache, rows.tokens, rows.seq_lens, rows.block_tables, rows.slot_mapping)
    return cache, rows.draw(logits)


def _decode_step(model: Model, cache: KVCache, rows: Rows) -> tuple[KVCache, jax.Array]:
    tokens, slots = rows.tokens[:, 0], rows.slot_mapping[:, 0]
    cache, logits = decode(model, cache, tokens, rows.seq_lens, rows.block_tables, slots)
    return cache, rows.draw(logits)
