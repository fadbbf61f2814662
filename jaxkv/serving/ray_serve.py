"""Replicas of an engine on Ray Serve: `replicas`, an application of them, and `PrefixRouter`, which finds prefixes.

Ray Serve starts the replicas, on one machine or on many, and starts those again that die.  Nothing else of jaxkv
imports this module, which needs the extra `ray`.
"""

import math
from collections.abc import AsyncIterator, Callable, Sequence
from hashlib import sha256
from queue import SimpleQueue
from random import random
from typing import Any, Unpack

from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from jaxkv.offload import BlockEvent, BlockEvents, prefix_keys
from jaxkv.serving.async_engine import AsyncEngine, Output
from jaxkv.serving.engine import Engine
from jaxkv.serving.request import RequestOptions
from jaxkv.serving.stats import EngineInfo, EngineStats

LOAD_FACTOR = 1.25
"""A replica gets a request for its prefix only if it then has at most this multiple of the mean number of requests, as
in consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam, 2016)."""
KEY_BYTES = 8
"""How many bytes of a block's key are reported.  If two blocks share them, requests may be routed less well."""
STATS_PERIOD = 0.5
"""Seconds between two reports of a replica."""


def replicas(make_engine: Callable[[], Engine], **options: Any) -> serve.Application:
    """An application for `ray.serve.run`, each of whose replicas has an engine in a process of its own.

        handle = serve.run(replicas(make_engine, num_replicas=2, ray_actor_options={"num_gpus": 1}))
        async for output in handle.options(stream=True).generate.remote(prompt, max_tokens=100):
            print(output.tokens)

    The handle has the methods of `Replica`, and `PrefixRouter` chooses the replica of a request.

    Args:
      make_engine: makes an engine and warms it up.  All replicas need the same model and sizes.
      options: of `ray.serve.deployment`.  `max_ongoing_requests` is how many requests of a replica may run or wait, by
        default 256; further ones wait in the router.
    """
    router = RequestRouterConfig(request_router_class=PrefixRouter, request_routing_stats_period_s=STATS_PERIOD)
    defaults = {"max_ongoing_requests": 256, "request_router_config": router}
    return serve.deployment(**defaults | options)(Replica).bind(make_engine)


class Replica:
    """An engine, as a deployment of Ray Serve."""

    def __init__(self, make_engine: Callable[[], Engine]):
        engine = make_engine()
        self._described = {
            "block_size": engine.block_size,
            "layout_fingerprint": engine.keys.layout,
            "model": engine.keys.model,
        }
        self._blocks = [_Blocks(events) for events in engine.block_events]
        self._info = engine.info
        self._engine = AsyncEngine(engine)

    async def generate(self, prompt: Sequence[int], **options: Unpack[RequestOptions]) -> AsyncIterator[Output]:
        """Yields the tokens of a request as they come.  If the caller goes away, the request is cancelled.

        The first output comes at once, without tokens: the request has been accepted.  The options and errors are those
        of `Engine.new_request`.
        """
        stream = self._engine.submit(prompt, **options)
        yield Output([], [], None)
        async for output in stream.outputs():
            yield output

    def info(self) -> EngineInfo:
        """What does not change."""
        return self._info

    def stats(self) -> EngineStats:
        """Numbers of the engine, now."""
        return self._engine.stats

    def record_routing_stats(self) -> dict[str, Any]:
        """What `PrefixRouter` knows of this replica.  Ray Serve calls this every `STATS_PERIOD` seconds."""
        return {"described": self._described, "keys": frozenset().union(*(blocks.keys() for blocks in self._blocks))}

    def check_health(self) -> None:
        """Raises a RuntimeError if the engine has ended, whereupon Ray Serve starts the replica again."""
        self._engine.check_open()


class _Blocks:
    """The first bytes of the keys of a pool's blocks."""

    def __init__(self, events: BlockEvents):
        self._new, self._keys = SimpleQueue[BlockEvent](), set[bytes]()
        events.subscribe(self._new.put)

    def keys(self) -> set[bytes]:
        """Those of now."""
        while not self._new.empty():
            event = self._new.get()
            keys = {key[:KEY_BYTES] for key in event.keys}
            if event.kind == "stored":
                self._keys |= keys
            else:
                self._keys -= keys
        return self._keys


class PrefixRouter(RequestRouter):
    """Prefers the replica with the longest prefix of a prompt, unless it has too many requests already.

    Among replicas that have equally much of it, a hash of the first block that they lack decides, so that prompts which
    share this block come to the same replica before that has reported it.
    """

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The replicas, in the order in which they are tried: those that accept no more requests are skipped."""
        loads = {replica: self.replica_queue_len_cache.get(replica.replica_id) or 0 for replica in candidate_replicas}
        most = math.ceil(LOAD_FACTOR * (sum(loads.values()) + 1) / max(len(loads), 1))
        keys = self._keys(candidate_replicas, pending_request)
        found = {replica: _found(keys, replica.routing_stats.get("keys", ())) for replica in candidate_replicas}
        longest = max(found.values(), default=0)
        missing = keys[longest : longest + 1]

        def rank(replica: RunningReplica) -> tuple:
            place = [sha256(key + replica.replica_id.unique_id.encode()).digest() for key in missing]
            return loads[replica] >= most, -found[replica], place, loads[replica], random()

        return [[replica] for replica in sorted(candidate_replicas, key=rank)]

    def _keys(self, candidates: list[RunningReplica], request: PendingRequest | None) -> list[bytes]:
        """The first bytes of the keys of a request's prompt; none if replicas have not reported yet."""
        described = next((replica.routing_stats["described"] for replica in candidates if replica.routing_stats), None)
        if described is None or request is None or request.metadata.call_method != "generate":
            return []
        prompt = request.args[0] if request.args else request.kwargs["prompt"]
        keys = prefix_keys(prompt, cache_salt=request.kwargs.get("cache_salt"), **described)
        return [key[:KEY_BYTES] for key in keys]


def _found(keys: Sequence[bytes], known: frozenset[bytes]) -> int:
    """How many leading keys are known."""
    return next((index for index, key in enumerate(keys) if key not in known), len(keys))
