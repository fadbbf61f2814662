"""Continuous batching: requests join and leave while few compiled programs run, without waiting for the host."""

import operator
import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, override

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxkv.checks import positive_int, positive_number
from jaxkv.layout.layout import CacheLayout
from jaxkv.layout.packed import PackedLayout
from jaxkv.models.cache_groups import MAIN
from jaxkv.models.model import Model
from jaxkv.models.parallel.data import DataParallel
from jaxkv.models.sampling import Sampling
from jaxkv.models.split_cache import SplitCache
from jaxkv.models.weights.fingerprint import fingerprint
from jaxkv.offload import Connector, prefix_keys
from jaxkv.offload.events import BlockEvents
from jaxkv.offload.keys import salt_parts
from jaxkv.offload.transfers import check_rows, padded_ids, padded_rows, row_of, to_device
from jaxkv.ops.blocks import copy_blocks
from jaxkv.ops.rows import devices_of, read_rows, write_rows
from jaxkv.serving import program
from jaxkv.serving.base import EngineBase, restores
from jaxkv.serving.block_manager import BlockManager
from jaxkv.serving.buckets import Buckets, Shape
from jaxkv.serving.drafts import AcceptanceStats, Drafts, Verified
from jaxkv.serving.export import ExportedBlocks
from jaxkv.serving.host_latents import HostLatents
from jaxkv.serving.pool import BlockPool
from jaxkv.serving.prefix import Prefix, PrefixCacheStats
from jaxkv.serving.program import Found
from jaxkv.serving.program_cache import Compilable, Program
from jaxkv.serving.request import Request, stop_tokens, token_ids
from jaxkv.serving.stats import EngineInfo, EngineStats, HostTime
from jaxkv.serving.step_inputs import GREEDY, NOTHING, Bundle, Choices, InputBatch, Schedule, Span, StepBatches
from jaxkv.serving.step_times import StepTimes
from jaxkv.serving.table import capacity, tables_of
from jaxkv.serving.tiers import Tiers
from jaxkv_kernels.addressing import one_array
from jaxkv_kernels.integers import as_int

LOAD_TIMEOUT = 0.01
"""The most seconds that a step waits for the disk, if there is nothing to compute until blocks are loaded."""


class Engine(EngineBase):
    """Serves requests from one cache.

    Every step decodes one token of every request whose prompt is complete, and prefills chunks of one or more prompts.
    Programs are compiled for a few static shapes (`Buckets`), and a step runs the smallest that holds its requests and
    chunks.  `warm_up` compiles them ahead; without it, all steps run the largest, one with chunks and one without.  The
    shape does not change the generated tokens, except through the rounding of logits.

    If blocks run out, new requests wait.  If a running request needs a block and none is free, the most recent request
    of the lowest priority is preempted and recomputed later.

    The host works one step behind the device: it launches a step before it reads the tokens of the previous one.
    Sampled tokens stay on the device, where the next step uses them.  If a stop token ends a request, the next step has
    already been launched with it, and the token of that step is discarded.

    A request reuses the longest prefix of its tokens that is cached, and computes the rest.  Full blocks are found by
    their content until they are evicted, whether a request holds them or not.  If a block on the device begins with the
    next tokens, it is copied, unless the cache has several tables of entries; if a running request is computing the
    next block, the request waits for that.
    With `connectors`, full blocks are also offered to others: a `HostPool` stores them in host memory.  They are copied
    while later steps run, so steps do not wait, and an evicted block is already stored.  Blocks that a connector has
    are loaded while the steps of other requests run.  Their request has its place and all its blocks meanwhile, so that
    later requests take only what is left; a request with the same prefix waits.  Blocks that cannot be loaded are
    computed.  None of this changes the generated tokens, except through the rounding of logits.

    With `drafts`, a step verifies the drafts of every request whose prompt is complete, and appends the model's own
    tokens up to the first that differs from its draft.  The host waits for every step then.

    If the layout of the model's cache has several block tables, a request has blocks of each.  Blocks that lie before
    the window of their table are released while the request runs, and can still be found by their content.  A state
    (`StateEntry`) is stored where a step ends.  So that this is the end of a block, where other requests can use the
    state, chunks end there too; and a step processes only one chunk of a request.  If entries of more tokens are found
    than there is a state for, a chunk also ends after the last block of states among them, for later requests.  Choose
    `chunk` as long as a step may take then, and `max_num_batched_tokens` for as many chunks as prompts should be
    prefilled together.

    Args:
      model: from `jaxkv.models.load`.
      num_blocks: blocks of the cache, shared by all requests.
      block_size: tokens per block, of the first table if there are several; default the model's `usual_block_size`.
      order: order of the cache's axes.
      max_requests: requests that run at once.
      max_len: the most cached tokens of a request, rounded up to blocks; default the capacity of the cache or the
        model's `max_position_embeddings`, whichever is less.
      chunk: prompt tokens per row of a step.  A prompt takes as many rows as it needs; the last may be partly empty.
      max_num_batched_tokens: tokens per step, padding included.  Requests whose prompts are complete come first, and
        prompts take what is left.  Default: eight chunks beside `max_requests` requests.
      max_time_between_tokens: seconds that a step should take at most while requests decode.  Prompts then take no more
        chunks per step than that allows, by the times of earlier steps.  At first, and if even the fewest chunks take
        longer, a step has the fewest for which there is a program, so that prompts always continue.  Steps without
        chunks, and those in which nothing decodes, are not affected.  Default: no bound.
      connectors: where blocks are also offered and found, such as a `HostPool`, in the order of the search.
        Each must be made for `model.layout(n, block_size, order)` with any number n of blocks, and may outlive the
        engine.  If the model is on devices of several processes, the engine of each process has a `HostPool` of its
        own, and others are rejected; a block is found if all processes have it.
      drafts: how the next tokens are drafted, by `MTP` or `NGram`, so that a step may add several tokens to a request;
        default not at all.
      host_latents: keeps the latents of all blocks in host memory, by a `HostLatents`, so that `num_blocks` may be more
        than the device has memory for; for models with sparse latent attention on one device, in the order BLNHC.  It
        excludes `connectors` and `drafts`, and `export` and `adopt`.  By default, latents are on the device.

    Raises:
      ValueError: an argument is out of range; a connector was made for another layout or number of devices, or is not
        a `HostPool` although the model is on devices of several processes; the model is data parallel (use `Replicas`),
        or cannot draft as `drafts` says; or its cache has tables that are not supported, with `drafts` several or other
        than those of entries that requests keep; or `host_latents` cannot be combined with the model or with another
        option.
      MemoryError: there is not so much host memory.
    """

    def __init__(
        self,
        model: Model,
        *,
        num_blocks: int,
        block_size: int | None = None,
        order: str = "BLNHC",
        max_requests: int = 32,
        max_len: int | None = None,
        chunk: int = 64,
        max_num_batched_tokens: int | None = None,
        max_time_between_tokens: float | None = None,
        connectors: Sequence[Connector] = (),
        drafts: Drafts | None = None,
        host_latents: HostLatents | None = None,
    ):
        super().__init__()
        if isinstance(model.parallel, DataParallel):
            raise ValueError("`model` is data parallel, with requests of its own on each device: expected `Replicas`")
        self.model, self.host_latents = model, host_latents
        if host_latents is not None:
            if not isinstance(host_latents, HostLatents):
                raise TypeError(f"`host_latents` is {host_latents!r}: expected a HostLatents")
            host_latents.check(model, order=order, drafts=drafts, connectors=connectors)
        block_size = model.usual_block_size if block_size is None else block_size
        layout = model.layout(num_blocks, block_size, order)
        self.block_size, self._layout = block_size, layout
        self.max_requests = positive_int("max_requests", max_requests)
        self.pool = BlockPool(num_blocks)
        self.prefix_stats = PrefixCacheStats()
        self.host_time = HostTime()
        self.chunk = positive_int("chunk", chunk)
        self._columns = 1 if drafts is None else 1 + drafts.num_speculative_tokens
        """Tokens per row of a request whose prompt is complete: its last, and the drafts after it."""
        decoded = max_requests * self._columns
        if max_num_batched_tokens is None:
            max_num_batched_tokens = decoded + 8 * chunk
        if positive_int("max_num_batched_tokens", max_num_batched_tokens) < decoded + chunk:
            raise ValueError(
                f"`max_num_batched_tokens` is {max_num_batched_tokens}: expected at least {decoded + chunk}, for "
                f"{decoded} tokens of `max_requests` {max_requests} and a `chunk` of {chunk}"
            )
        tables = tables_of(layout, block_size, divided=model.parallel.divides_tokens)
        if num_blocks < len(tables):
            names = ", ".join(repr(table.name) for table in tables)
            raise ValueError(
                f"`num_blocks` is {num_blocks}: expected at least {len(tables)}, because every request has a block of "
                f"each of the tables {names}"
            )
        self.drafts = drafts
        self.acceptance = AcceptanceStats()
        if drafts is not None:
            drafts.check(model, tables)
        self._state_size = max((table.block_size for table in tables if table.states), default=0)
        """Tokens per block of states; 0 if there are none."""
        self.step_times: StepTimes | None = None
        """The times of steps, if there is a bound on them."""
        if (bound := positive_number("max_time_between_tokens", max_time_between_tokens)) is not None:
            self.step_times = StepTimes(bound, lambda shape: shape.chunks * chunk + shape.requests * self._columns)
        self.buckets = Buckets(
            max_requests,
            budget=max_num_batched_tokens,
            columns=self._columns,
            chunk=chunk,
            max_chunks=max_requests if self._state_size else None,
            within=None if self.step_times is None else self.step_times.within,
        )
        most_chunks = 1 if self._state_size else max(shape.chunks for shape in self.buckets.shapes)
        self._step_tokens = chunk * most_chunks
        """The most tokens of a request that a step processes."""
        self._capacity = capacity(tables, num_blocks, self._step_tokens)
        """The most cached tokens of a request that has the cache for itself."""
        if max_len is None:
            max_len = min(self._capacity, model.config.max_position_embeddings)
        self._table_blocks = -(-positive_int("max_len", max_len) // block_size)
        """The most blocks of a request, of the first table."""
        self._new_cache: Callable[[], Any] | None = partial(model.cache, num_blocks, block_size, order)
        """Makes a cache; None after the end of an engine with `host_latents`, whose host memory it refers to."""
        if host_latents is not None:
            longest = self._table_blocks * block_size
            self._new_cache = host_latents.caches(
                model, num_blocks=num_blocks, block_size=block_size, max_requests=max_requests, max_len=longest
            )
        self._allocate()
        blocks = self.cache.keys if isinstance(self.cache, SplitCache) else self.cache
        self.tiers = Tiers(connectors, blocks, layout, model.implementation)
        self.keys = PrefixKeys(model, layout)
        copy = partial(
            SplitCache.copy_block if host_latents is not None else copy_blocks, implementation=model.implementation
        )
        self.block_manager = BlockManager(
            tables,
            self.pool,
            self.tiers,
            keys=self.keys,
            copy=jax.jit(model.parallel.per_device(copy), donate_argnums=0),
            places=self.max_requests,
            max_len=max_len,
        )
        self._forget = jax.jit(SplitCache.forget, donate_argnums=0)
        self._submitted = 0
        self.waiting: list[Request] = []
        """Waiting requests, in the order in which they join: by priority, then by age."""
        self.running: list[Request] = []
        """Running requests, in the same order.  The last is preempted first."""
        self._places = list(range(self.max_requests))
        """Free places of running requests."""
        self._new: deque[tuple[Request, int]] = deque()
        self._launched: deque[tuple[Any, dict[int, Span]]] = deque()
        """Steps whose tokens have not been read: the sampled tokens and their log probabilities (None if no request
        needs them), or `Verified` with drafts; and the span of each row."""
        # Donated arrays are updated in place.
        self.program = program.run_layers if drafts is None else drafts.program
        self._layers = Program(
            self.program,
            donate=("cache", "last"),
            keeps_first=True,
            compiler_options=lambda shape: model.compiler_options(prefill=shape.chunks > 0),
        )
        self._draw = Program(program.draw, donate=("last",))
        self._logprobs = jax.jit(program.logprobs)

    def _allocate(self) -> None:
        """Makes the arrays on the device that steps donate."""
        assert self._new_cache is not None
        cache = self._new_cache()
        sharding = jax.tree.leaves(cache)[0].sharding
        # Committed to its device, like the caches that loads return: jit compiles separately for committed arrays.
        self.cache = jax.device_put(cache, sharding)
        self.last = jax.device_put(jnp.zeros(self.max_requests, jnp.int32), _replicated(sharding))
        """The last sampled token of every running request, on the device."""

    @override
    def new_request(  # type: ignore[override]  # as a dict of RequestOptions may have further keys
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int = 64,
        sampling: Sampling = GREEDY,
        stop: Collection[int] | None = None,
        priority: int = 0,
        logprobs: int | None = None,
        cache_salt: str | bytes | Sequence[str | bytes] | None = None,
    ) -> Request:
        """Makes a request, which `submit` queues.

        Args:
          prompt: token ids, at least one.
          max_tokens: the most tokens to generate.
          sampling: how tokens are chosen; default greedy.
          stop: token ids that end the request; the stop token is included in the result.  Default: those of the
            checkpoint (`model.config.stop_tokens`); a warning if it states none.
          priority: requests of higher priority join first.  If no row or too few blocks are free, they preempt running
            requests of lower priority.
          logprobs: for how many most likely tokens, 0 to 20, `Request.logprobs` has the log probabilities at the
            position of each generated token, beside that of the token itself.  They are those of the model, before
            temperature and filters.  Steps with such requests run one more program.  It is compiled when it is first
            needed, for each number of rows.  Default: none.
          cache_salt: requests share cached blocks only if they have the same salt, in this engine and in its
            connectors.  It may have several parts, for example the name of a tenant and that of an adapter.

        Raises:
          TypeError: a token id (of `prompt`, `stop`) or `priority` is not an integer, or `sampling` is not a Sampling.
          ValueError: the prompt is empty, holds an id outside the vocabulary, or is too long: with `max_tokens`, it
            would exceed the block table or the cache.  `logprobs` is out of range, or the engine has `drafts`; or
            `cache_salt` is not as `prefix_keys` expects it.
        """
        prompt = self._checked_prompt(prompt)
        # The last token needs no entry, because no token attends to it.
        entries = len(prompt) + positive_int("max_tokens", max_tokens) - 1
        table, cache = self.block_manager.max_len, self._capacity
        if entries > min(table, cache):
            small = "num_blocks" if entries > cache else "max_len"
            raise ValueError(
                f"`prompt` has {len(prompt)} tokens and `max_tokens` is {max_tokens}, {entries} entries: a request's "
                f"table holds {table} and the cache {cache}; shorten them, or make the engine with a larger `{small}`"
            )
        if not isinstance(sampling, Sampling):
            raise TypeError(f"`sampling` is {sampling!r}: expected a Sampling")
        if logprobs is not None:
            logprobs = self._checked_logprobs(logprobs)
        stop = stop_tokens(stop, self.model.config.stop_tokens)
        options = {"num_logprobs": logprobs, "cache_salt": salt_parts(cache_salt)}
        return Request(prompt, max_tokens, sampling, stop, operator.index(priority), **options)

    def _checked_prompt(self, prompt: Sequence[int]) -> tuple[int, ...]:
        vocabulary = self.model.config.vocab_size
        prompt = token_ids("prompt", prompt)
        outside = [token for token in prompt if not 0 <= token < vocabulary]
        if not prompt or outside:
            problem = f"has token id {outside[0]}" if outside else "is empty"
            raise ValueError(f"`prompt` {problem}: expected one or more token ids from 0 to {vocabulary - 1}")
        return prompt

    @property
    def info(self) -> EngineInfo:
        """What does not change, for servers."""
        most = min(self.block_manager.max_len, self._capacity)
        return EngineInfo(most, self.max_requests, frozenset(self.model.config.stop_tokens))

    @override
    def add(self, request):
        self.check_usable()
        self._submitted += 1
        request.number = self._submitted
        insort(self.waiting, request, key=_rank)

    def _checked_logprobs(self, logprobs: int) -> int:
        count = as_int(logprobs)
        if count is None or not 0 <= count <= program.MAX_LOGPROBS:
            raise ValueError(f"`logprobs` is {logprobs!r}: expected None, or an int, 0 to {program.MAX_LOGPROBS}")
        if self.drafts is not None:
            raise ValueError(
                f"`logprobs` is {logprobs}, and the engine has `drafts`, whose program verifies them and "
                "returns no logits: expected None, or make the engine without drafts"
            )
        return count

    @override
    def cancel(self, request: Request, *, finish_reason: str = "cancelled") -> None:
        """Ends a waiting or running request and frees its blocks.

        `run` yields no further tokens of it.  Tokens that the last call of `step` returned are still in
        `request.generated`; those that the device has sampled since then are discarded.

        Args:
          request: of this engine.
          finish_reason: the request's `finish_reason` then, for example "stop" if its text contains a stop string.

        Raises:
          RuntimeError: the engine has ended, because it could not be restored after an exception.
          ValueError: the request has already ended.
        """
        self.check_usable()
        if request not in self.waiting and request not in self.running:
            raise ValueError(f"`request` neither waits nor runs: it ended with {request.finish_reason!r}")
        self._cancel(request, finish_reason)

    def export(
        self, prompt: Sequence[int], *, cache_salt: str | bytes | Sequence[str | bytes] | None = None
    ) -> ExportedBlocks:
        """Copies the blocks that hold the longest prefix of a prompt which the cache has, for `adopt`.

        Blocks that are only in connectors are not copied.  The copy is an array on the device, which later steps do not
        change.

        Args:
          prompt: token ids, at least one.  To export what a request has left, pass its `tokens`.
          cache_salt: that of the request.

        Returns:
          The blocks.  `num_tokens` is 0 if the cache has nothing of the prompt.

        Raises:
          TypeError, ValueError: the prompt or the salt is not as `new_request` expects it.
          ValueError: the engine has `host_latents`.
          RuntimeError: the engine has ended, because it could not be restored after an exception.
        """
        self._check_can_move_blocks("export")
        request = self._unscheduled(prompt, cache_salt)
        found = self.block_manager.cached_prefix(request, self.running)
        blocks = self.block_manager.blocks_of_prefix(request, found.tokens)
        rows = read_rows(self.cache, padded_ids(found.on_device), implementation=self.model.implementation)
        return ExportedBlocks(
            prompt=request.prompt[:-1],
            cache_salt=request.cache_salt,
            num_tokens=found.tokens,
            model=self.keys.model,
            layout=self.keys.layout,
            keys=tuple(key for _, _, key in blocks),
            rows=rows[: len(blocks)],
        )

    def adopt(self, exported: ExportedBlocks) -> int:
        """Writes blocks that an engine has exported to the cache, where requests find them as those of a prefix.

        The engine has the same model and the same layout, and may be in another process or on another machine.  Blocks
        go to free blocks, and evict the ones that have been free for longest.  If too few are free, the last ones are
        left out.  Blocks that the cache has are not written again.

        Args:
          exported: from `export`; its rows may be a NumPy array or on other devices.

        Returns:
          How many leading tokens of the prompt the cache has now.

        Raises:
          ValueError: the blocks are of another model or layout, or their keys or their number are not those of the
            prompt.
          TypeError: `exported` is not an ExportedBlocks.
          ValueError: the engine has `host_latents`.
          RuntimeError: the engine has ended, because it could not be restored after an exception.
        """
        self._check_can_move_blocks("adopt")
        if not isinstance(exported, ExportedBlocks):
            raise TypeError(f"`exported` is a {type(exported).__name__}: expected an ExportedBlocks, from `export`")
        for what, theirs, ours in (
            ("model", exported.model, self.keys.model),
            ("layout", exported.layout, self.keys.layout),
        ):
            if theirs != ours:
                raise ValueError(
                    f"`exported.{what}` is {theirs!r}: expected {ours!r}, the fingerprint of this engine's {what}; "
                    "blocks of others cannot be used" + " (`jaxkv.convert_blocks` converts rows)" * (what == "layout")
                )
        request = self._unscheduled(exported.prompt, exported.cache_salt)
        self._check_exported(request, exported)
        # Before anything changes: there may be no memory for a copy on the device.
        rows = to_device(exported.rows, one_array(self.cache.buffer).sharding)
        self._adopt(request, exported.num_tokens, padded_rows(rows))
        return self.block_manager.cached_prefix(request, self.running).tokens

    def _check_can_move_blocks(self, method: str) -> None:
        """Raises an error if the engine has ended, or if latents are in host memory."""
        self.check_usable()
        if self.host_latents is not None:
            raise ValueError(
                f"`{method}` moves blocks of a cache on the device, and the engine has `host_latents`: expected an "
                "engine without"
            )

    def _check_exported(self, request: Request, exported: ExportedBlocks) -> None:
        """ValueError unless the exported blocks are those of the prefix of a request."""
        tokens, limit = exported.num_tokens, len(exported.prompt)
        if as_int(tokens) is None or not 0 <= tokens <= limit:
            raise ValueError(f"`exported.num_tokens` is {tokens!r}: expected 0 to {limit}, the length of its prompt")
        try:
            keys = tuple(key for _, _, key in self.block_manager.blocks_of_prefix(request, tokens))
        except IndexError:
            keys = ()  # no prefix ends there: it would need a part of a block of which only the whole has a key
        if keys != tuple(exported.keys):
            raise ValueError(
                f"`exported.keys` are not those of the first {tokens} tokens of its prompt: expected what `export` "
                "returned, unchanged"
            )
        check_rows("`exported.rows`", exported.rows, len(keys), row_of(self._layout, devices_of(self.cache)))

    @restores
    def _adopt(self, request: Request, tokens: int, rows: jax.Array) -> None:
        write = partial(write_rows, implementation=self.model.implementation)
        self.cache = self.block_manager.adopt(self.cache, request, tokens, rows, write)

    def _unscheduled(self, prompt: Sequence[int], cache_salt) -> Request:
        """A request that finds prefixes of all of a prompt, without being queued."""
        # Requests compute their last token, so that there is one more.
        request = Request((*self._checked_prompt(prompt), 0), 1, GREEDY, frozenset(), cache_salt=salt_parts(cache_salt))
        self.block_manager.extend_keys(request)
        return request

    @restores
    def _cancel(self, request: Request, finish_reason: str) -> None:
        request.finish(finish_reason)  # first: it does not continue if this is interrupted
        request.cancelled = True
        if request in self.waiting:
            self.waiting.remove(request)
        else:
            self._leave(request)

    @property
    @override
    def unfinished(self):
        return [*self.running, *self.waiting]

    @property
    def block_events(self) -> list[BlockEvents]:
        """Which blocks come to the cache and leave it, and likewise those of each host pool among the connectors."""
        return [self.pool.events, *self.tiers.events]

    @property
    @override
    def _streams(self):
        return [self._new]

    @property
    @override
    def stats(self):
        return EngineStats(
            waiting=len(self.waiting),
            running=len(self.running),
            num_blocks=self.pool.num_blocks,
            free_blocks=self.pool.num_free,
            prefix=replace(self.prefix_stats),
            acceptance=replace(self.acceptance),
            host_time=replace(self.host_time),
        )

    @override
    def _step(self):
        # Launches a step, and reads the previous one.
        start = time.perf_counter()
        schedule = self.schedule()
        if schedule is None and not self._launched:
            waits = time.perf_counter()
            self._advance_loads(timeout=LOAD_TIMEOUT)
            self.host_time.waited += time.perf_counter() - waits
        if schedule is not None:
            shape = self.buckets.fit(schedule)
            self.launched(schedule, shape, self._run_layers(schedule, shape))
        self.read(behind=schedule is not None)
        self.host_time.steps += 1
        self.host_time.seconds += time.perf_counter() - start

    @override
    def _restore(self):
        self.tiers.leave_others()
        # The tokens that were read are right, and everything else follows from them: requests are recomputed when they
        # join again.  The cache is made again even if no program has donated it, because a program that failed after
        # it was launched may have computed it.
        self._release()
        self.tiers.drop_failed_offers()
        self._places[:] = range(self.max_requests)
        self._allocate()
        jax.block_until_ready((self.cache, self.last))  # an error now means that the device is lost

    @override
    def _release(self):
        if self.host_latents is not None:
            self._await_launched()
            if self._ended_by is not None:
                self._new_cache = None
        self._launched.clear()
        if self.step_times is not None:
            self.step_times.clear()
        self.pool.clear()
        self.block_manager.clear()
        while self._new and (last := self._new[-1])[1] >= len(last[0].tokens):
            self._new.pop()  # interrupted before the request had it
        requests = dict.fromkeys(self.unfinished)
        for request in requests:
            request.reset()
        self.waiting = sorted((request for request in requests if request.finish_reason is None), key=_rank)
        self.running = []
        for array in jax.tree.leaves((self.cache, self.last)):
            array.delete()  # unless a program that did not return has donated it

    def _await_launched(self) -> None:
        """Waits until no program writes to the host memory of `host_latents` any more."""
        with suppress(jax.errors.JaxRuntimeError):  # of a program that failed
            jax.block_until_ready([found for found, _ in self._launched])  # launched by any thread
        with suppress(jax.errors.JaxRuntimeError):
            jax.effects_barrier()  # launched by this thread, whose call may have been interrupted before it returned

    def _run_layers(self, schedule: Schedule, shape: Shape) -> Found | Verified:
        """Runs the layers; returns what they found."""
        inputs = self.inputs(schedule, shape)
        self.cache, self.last, found = self._layers(shape, self.model, self.cache, self.last, inputs)
        return found

    def warm_up(self, *, wait: bool = True) -> None:
        """Compiles the programs, and runs them without requests, so that later steps do not compile.

        An interrupt does not wait for the compiler.

        Args:
          wait: whether to wait for all programs.  Without, this returns when the largest are compiled, which hold every
            step.  The others are compiled while the engine serves, and steps run them as soon as they are ready.
        """
        self.check_usable()
        _ = self.keys.model
        self.buckets.compile({shape: self._prepared(shape) for shape in self.buckets.shapes}, wait=wait)
        self._run_without_requests()

    def _prepared(self, shape: Shape) -> list[Callable[[], Compilable]]:
        """Functions that lower or find the programs of a step.  They do not refer to this engine or to its cache."""
        cache, last = jax.tree.map(described, (self.cache, self.last))
        prepared: list[Callable[[], Compilable]]
        prepared = [partial(self._layers.prepare, shape, self.model, cache, last, self.inputs(NOTHING, shape))]
        return prepared + self.prepared_after(shape)

    def prepared_after(self, shape: Shape) -> list[Callable[[], Compilable]]:
        """Functions that lower or find the programs that follow the layers in a step of this shape."""
        if self.drafts is not None:
            return []
        rows, last = sum(shape), described(self.last)
        logits = jax.ShapeDtypeStruct((rows, self.model.config.vocab_size), jnp.float32, sharding=last.sharding)
        return [partial(self._draw.prepare, rows, logits, last, Bundle.of(Choices.of({}, rows)))]

    @restores
    def _run_without_requests(self) -> None:
        ready = self.buckets.ready.copy()
        for shape in [shape for shape in self.buckets.shapes if shape in ready]:  # in one order in all processes
            self.warm_up_after(self._run_layers(NOTHING, shape))

    def warm_up_after(self, found) -> None:
        """Compiles the programs that follow the layers, given what these found without requests."""
        if self.drafts is None:
            self._drawn(found.logits, {})
        self.cache = self.block_manager.warm_up(self.cache)
        if self.host_latents is not None:
            self.cache = self._forget(self.cache, np.int32(self.max_requests))

    # A step consists of the following methods, and of a program between them.  `Lockstep` runs that program for the
    # engines of several devices.

    def schedule(self) -> Schedule | None:
        """The tokens that the next step processes, for which requests have blocks then; None if there are none.

        Requests whose prompts are complete have all of theirs.  Prompts take what is left of the budget, in the order
        of their requests, and others join until it is used up.  `Buckets.fit` leaves chunks to a later step if requests
        have joined whose prompts were found whole, so that too few rows are left.
        """
        if self.step_times is not None:
            self.step_times.scheduled()
        self._advance_loads()
        for request in list(self.running):
            if request.place >= 0 and request.missing:
                self._make_room(request, self._reach(request))
        left = self.buckets.most_chunks(sum(request.missing == 1 for request in self.running))
        chunks = dict[Request, list[Span]]()
        for request in self.running:
            if request.missing > 1:
                chunks[request] = self._chunks(request, left)
                left -= len(chunks[request])
        while left > 0 and (joined := self._admit()):  # others may leave, and even join again
            chunks[joined] = self._chunks(joined, left)
            left -= len(chunks[joined])
        prefill = [span for request in self.running for span in chunks.get(request, ())]
        decode = [Span.last(request) for request in self.running if request.missing == 1]
        if self.host_latents is not None:
            del prefill[self._most_staged(prefill) :]
        return Schedule(prefill, decode) if prefill or decode else None

    def inputs(self, schedule: Schedule, shape: Shape) -> Bundle[StepBatches]:
        """The inputs of a step of this shape."""
        return Bundle.of(self.batches(schedule, shape))

    def batches(self, schedule: Schedule, shape: Shape) -> StepBatches:
        """The batches of a step of this shape."""
        prefill = self._batch(schedule.prefill, shape.chunks, self.chunk)
        decode = self._batch(schedule.decode, shape.requests, self._columns)
        if self.host_latents is not None:
            prefill = prefill and prefill.staged(self._table_blocks, self.block_size)
        return StepBatches(prefill, decode)

    def _batch(self, spans: list[Span], count: int, columns: int) -> InputBatch | None:
        if not count:
            return None
        batch = InputBatch.of(spans, count, columns, tables=self.block_manager.arrays, block_size=self.block_size)
        return batch if self.drafts is None else batch.drafted(spans, self.drafts.lookahead, self.block_size)

    def launched(self, schedule: Schedule, shape: Shape, found) -> None:
        """Takes note of a step of these tokens, given what its program found; draws tokens at random, if any are."""
        rows = {**dict(enumerate(schedule.prefill)), **dict(enumerate(schedule.decode, shape.chunks))}
        if self.drafts is None:
            logits, tokens = found
            if any(span.request.sampling.temperature for span in rows.values()):
                tokens = self._drawn(logits, rows)
            needed = any(span.request.num_logprobs is not None and span.samples for span in rows.values())
            found = tokens, self._logprobs(logits, tokens) if needed else None
        for array in jax.tree.leaves(found):
            array.copy_to_host_async()
        self._launched.append((found, rows))
        if self.step_times is not None:
            self.step_times.launched(shape)
        for request, _, end, samples, _ in rows.values():
            request.cached = end
            request.unread += samples

    def read(self, *, behind: bool) -> None:
        """Reads the tokens of the launched steps, or of all but the last if `behind`; they can be taken then.

        With drafts, reads all: how many tokens the next step starts with depends on how many drafts were accepted.
        """
        while len(self._launched) > (behind and self.drafts is None):
            self._read()

    def _drawn(self, logits, rows: dict[int, Span]) -> jax.Array:
        """The next token of each row, as the request's `sampling` says."""
        choices = Bundle.of(Choices.of(rows, len(logits)))
        self.last, tokens = self._draw(len(logits), logits, self.last, choices)
        return tokens

    def _most_staged(self, spans: Sequence[Span]) -> int:
        """How many of these chunks a step can process if latents are in host memory.

        The blocks that the chunks of a step attend to are on the device together, one layer at a time.  There is room
        for those of the longest request.
        """
        blocks = set[int]()
        for count, (request, _, end, *_) in enumerate(spans):
            blocks.update(request.held[MAIN].blocks[: -(-end // self.block_size)])
            if len(blocks) > self._table_blocks:
                return count
        return len(spans)

    def _chunks(self, request: Request, most: int) -> list[Span]:
        """The chunks of a request's prompt, at most so many, that the next step processes; none if it decodes."""
        if request.missing <= 1:
            return []
        end = self._end(request)
        starts = range(request.cached, end, self.chunk)[:most]
        return [Span.of(request, start, min(self.chunk, end - start)) for start in starts]

    def _end(self, request: Request, start: int | None = None) -> int:
        """Where the next step of a request ends at most: it has `start` cached tokens, by default as many as now."""
        start = request.cached if start is None else start
        end = min(request.length, start + self._step_tokens)
        if start < request.checkpoint < end:
            return request.checkpoint
        if self._state_size and end - end % self._state_size > start:
            end -= end % self._state_size  # the state after a whole block, which other requests can use
        return end

    def _reach(self, request: Request, start: int | None = None) -> int:
        """Where the entries end that the next step of a request writes at most, those of drafts included."""
        end = self._end(request, start)
        if self.drafts is None or end < request.length:
            return end
        return min(end + len(request.drafts) + self.drafts.lookahead, request.most_entries)

    def _read(self) -> None:
        """Waits for the oldest launched step and appends its tokens to their requests."""
        found, spans = self._launched.popleft()
        start = time.perf_counter()
        found = jax.tree.map(lambda array: np.asarray(array).tolist(), found)
        self.host_time.waited += time.perf_counter() - start
        if self.step_times is not None:
            self.step_times.read()
        for row, span in spans.items():
            request = span.request
            if request.finish_reason:
                continue  # it was cancelled or ended after this step was launched
            if self.drafts is None:
                tokens, logprobs = found
                if span.samples and request.num_logprobs is not None and tokens[row] >= 0:
                    # In place of one that an interrupted read may have left without its token.
                    new = len(request.tokens) - len(request.prompt)
                    request.logprobs[new:] = [logprobs.of_row(row, request.num_logprobs)]
                self._append(span, [tokens[row]])
                continue
            accepted, columns = found.accepted[row], len(found.sampled[row])
            first = columns - 1 - len(span.drafts)
            self._append(span, found.sampled[row][first : first + accepted + 1])
            self.acceptance.add(len(span.drafts), accepted)
            if span.samples and not request.finish_reason:
                drafts = self.drafts.following(request, found.drafts[row])
                request.drafts = [*drafts[: request.most_entries - request.length]]

    def _append(self, span: Span, tokens: list[int]) -> None:
        """Appends the tokens that a step sampled after a span: its accepted drafts, and the one after them."""
        request, (*accepted, last) = span.request, tokens
        rejected = len(span.drafts) - len(accepted)
        request.cached -= rejected
        request.unread -= span.samples
        for token in accepted:
            self._receive(request, token)
        if last >= 0:  # negative if the logits were NaN
            end = min(span.end - rejected, len(request.tokens))  # a stop token may be among the accepted drafts
            self.block_manager.fill(self.cache, request, span.start, end)
            request.filled = end
        if span.samples:  # else the prompt is not complete: ignore the sampled token
            self._receive(request, last)
        if request.finish_reason:
            self._leave(request)

    def _receive(self, request: Request, token: int) -> None:
        """Appends the next token to a request, unless that has ended with an earlier token."""
        if request.finish_reason:
            return
        if token < 0:
            request.finish("nan")
        else:
            self._new.append((request, len(request.tokens)))
            request.append(token)

    def _admit(self) -> Request | None:
        """Admits the first waiting request if there is a place and enough blocks, or if preemption can free them.

        Returns the request.
        """
        if not self.waiting:
            return None
        request = self.waiting[0]
        if not self._places and self.running[-1].priority >= request.priority:
            return None
        self.block_manager.extend_keys(request)
        while True:
            prefix = self.block_manager.prefix(request, self.running)
            if prefix.awaited:
                return None
            request.checkpoint = prefix.lacks_state_at
            end = self._reach(request, prefix.tokens)
            if not self._places or self.block_manager.blocks_to_join(request, prefix, end) > self.pool.num_free:
                if not self._preempt_for(request, prefix):
                    return None
            else:
                break
        insort(self.running, request, key=_rank)
        self.waiting.remove(request)
        request.place = self._places.pop()
        if self.host_latents is not None:
            self.cache = self._forget(self.cache, np.int32(request.place))
        self.block_manager.allocate(request, prefix)
        request.cached = request.filled = prefix.tokens
        self.cache = self.block_manager.ensure_writable(self.cache, request, end)
        if prefix.is_offloaded:
            request.cached, request.filled, request.loading = 0, 0, prefix.tokens
            self.block_manager.load(self.cache, request, prefix)
        else:
            self._count_prefix(request)
        return request

    def _advance_loads(self, *, timeout: float = 0) -> None:
        """Continues to load blocks for requests that have joined; waits for the disk if there is a timeout."""
        self.cache, ended = self.block_manager.advance_loads(self.cache, timeout=timeout)
        for request, loaded in ended.items():
            if loaded:
                request.cached, request.filled, request.loading = request.loading, request.loading, 0
                self.prefix_stats.loaded += loaded
                self._count_prefix(request)
            else:
                self.preempt(request)  # what cannot be loaded is computed

    def _count_prefix(self, request: Request) -> None:
        self.prefix_stats.tokens += len(request.tokens)
        self.prefix_stats.found += request.cached

    def _preempt_for(self, request: Request, prefix: Prefix) -> bool:
        """Frees the place and the blocks of one running request of lower priority than a waiting one.

        Returns whether anything was freed; not if the waiting request would not fit even without all of them.
        """
        others = [other for other in self.running if other.priority >= request.priority]
        held = {block for other in others for block in other.blocks}
        count = self.block_manager.count(request, prefix, self._reach(request, prefix.tokens))
        needed = count + prefix.copied - len(held.intersection(prefix.on_device))
        if len(others) == len(self.running) or needed > self.pool.num_blocks - len(held):
            return False
        self._free_some()
        return True

    def _free_some(self) -> None:
        """Reads the launched steps, which may end requests; if there are none, preempts the last running request."""
        if self._launched:
            self._read()
        else:
            self.preempt(self.running[-1])

    def preempt(self, request: Request) -> None:
        """Sends a running request, of which no launched step is unread, back to the waiting ones, without its blocks.

        When it joins again, it continues with the tokens that it would have had, up to rounding.
        """
        insort(self.waiting, request, key=_rank)
        self._leave(request)

    def _make_room(self, request: Request, end: int) -> None:
        """Takes the blocks of a running request up to token `end`; preempts the most recent requests if needed."""
        if self.block_manager.has_blocks_up_to(request, end):
            return
        while request.place >= 0 and self.block_manager.missing_blocks(request, end) > self.pool.num_free:
            self._free_some()
        if request.place >= 0:
            self.cache = self.block_manager.ensure_writable(self.cache, request, end)

    def _leave(self, request: Request) -> None:
        """Removes a request from the batch and releases its blocks."""
        self.running.remove(request)
        self._places.append(request.place)
        self.block_manager.free(request)
        request.leave()


class PrefixKeys:
    """Computes the keys of an engine's blocks: `prefix_keys`, with names of its model and of its layout."""

    def __init__(self, model: Model, layout: CacheLayout | PackedLayout):
        self._model, self.layout = model, layout.fingerprint

    @cached_property
    def model(self) -> str:
        """The fingerprint of the model.  Reads all weights when it is first used."""
        return fingerprint(self._model)

    def __call__(self, tokens: Sequence[int], **options) -> list[bytes]:
        """The keys; `options` are the other arguments of `prefix_keys`, `block_size` among them."""
        return prefix_keys(tokens, layout_fingerprint=self.layout, model=self.model, **options)


def _rank(request: Request) -> tuple[int, int]:
    return request.rank


def described(array: jax.Array) -> jax.ShapeDtypeStruct:
    """The shape, dtype and place of an array, which may have been donated."""
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)


def _replicated(sharding):
    """Where arrays lie that all devices of a cache's sharding have."""
    return NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else sharding
