"""One model over several processes: `Leader` serves in process 0, and `follow` repeats what it does in the others.

With `Exchange`, processes that have requests of their own agree on their common steps.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import count
from typing import Any, Unpack, override

import jax

from jaxkv.models.sampling import Sampling
from jaxkv.serving.base import EngineBase, restores
from jaxkv.serving.engine import Engine
from jaxkv.serving.request import Request, RequestOptions

WAIT_MS = 10_000
"""How long a follower waits for a message at a time.  It waits again and again."""
KEPT = 1000
"""The last messages that are kept.  A follower is never so far behind, because steps wait for all processes."""

TOGETHER = "this process serves a model together with others: if one of them has ended, start all of them again"
"""What is added to an error in a step."""

LEFT = "left"
"""The value of a process that takes part in no further exchange."""

_numbers = count()
"""Counts leaders in process 0, calls of `follow` in the others, and `Exchange` in all: equal numbers share messages."""


@contextmanager
def _together() -> Iterator[None]:
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        error.add_note(TOGETHER)
        raise


class Leader(EngineBase):
    """The engine of process 0, for a model on the devices of several processes.

    All processes call `jax.distributed.initialize`, load the model on one mesh and make the same `Engine`.  Process 0
    then makes a Leader of its engine and uses it like an engine, also in an `AsyncEngine`; the others call
    `follow(engine)`.  Each step runs in all processes, with the same requests.

    As everywhere in JAX, all processes end if one does: the others end with an error, at the latest about
    `heartbeat_timeout_seconds` of `jax.distributed.initialize` later (100 by default; 20 is enough for processes of one
    data center), and whoever started them starts them again.  An exception in a step ends this
    engine, and `follow` in the others: one process cannot be restored without the others.

    Args:
      engine: of process 0.

    Raises:
      ValueError: this is not process 0, there is only one, or the engine has requests, connectors or a
        `max_time_between_tokens`.  Processes would have to agree on when a block has arrived, and on times.
    """

    def __init__(self, engine: Engine):
        super().__init__()
        _check(engine)
        if jax.process_index() != 0:
            raise ValueError(f"this is process {jax.process_index()}: expected process 0; call `follow` in the others")
        self.engine = engine
        self._messages = _Messages()
        self._new: list[list[Any]] = []
        """What has happened since the last message."""
        self._send(["begin", _ready(engine)])

    @property
    @override
    def unfinished(self):
        return self.engine.unfinished

    @property
    @override
    def _streams(self):
        return self.engine._streams

    @property
    @override
    def stats(self):
        return self.engine.stats

    @override
    def new_request(self, prompt: Sequence[int], **options: Unpack[RequestOptions]) -> Request:
        return self.engine.new_request(prompt, **options)  # type: ignore[bad-argument-type]

    @override
    def add(self, request):
        self._add(request, _described(request))

    @override
    def cancel(self, request, *, finish_reason="cancelled"):
        self.check_usable()
        if request not in self.unfinished:
            self.engine.cancel(request)  # which says why it cannot
        self._cancel(request, finish_reason)

    @restores
    def _add(self, request: Request, described: dict[str, Any]) -> None:
        self._new.append(["add", described])
        self.engine.add(request)

    @restores
    def _cancel(self, request: Request, finish_reason: str) -> None:
        self._new.append(["cancel", request.number, finish_reason])
        self.engine.cancel(request, finish_reason=finish_reason)

    @restores
    def warm_up(self) -> None:
        """Compiles all programs in all processes, and waits for them."""
        self._send(["warm_up"])
        self.engine.warm_up()

    def close(self) -> None:
        """Ends `follow` in the other processes.  Requests that have not ended stay as they are."""
        self._send(["close"])

    @override
    def _step(self):
        if self._new or self.unfinished:  # else messages would be sent without end
            with _together():
                self._send(["step"])
                self.engine._step()

    @override
    def _restore(self):
        self._new = []
        self._send(["fail"])
        raise RuntimeError("one of several processes cannot be restored without the others")

    @override
    def _release(self):
        self.engine._release()

    def _send(self, what: list[Any]) -> None:
        message, self._new = [self._new, what], []
        self._messages.send(json.dumps(message))


@_together()
def follow(engine: Engine) -> None:
    """Repeats what the `Leader` of process 0 does, until that is closed.

    Args:
      engine: of this process, made with the arguments of process 0.

    Raises:
      ValueError: this is process 0, or the engine is not as `Leader` expects it, or not like that of process 0.
      RuntimeError: the `Leader` has ended because of an exception.
      JaxRuntimeError: process 0 has ended.
    """
    _check(engine)
    if jax.process_index() == 0:
        raise ValueError("this is process 0: expected another one; make a `Leader` in process 0")
    requests: dict[int, Request] = {}
    for message in _Messages().received():
        events, (what, *details) = json.loads(message)
        for event, *arguments in events:
            if event == "add":
                request = _request(*arguments)
                engine.add(request)
                requests[request.number] = request
            else:
                number, reason = arguments
                engine.cancel(requests[number], finish_reason=reason)
        if what == "close":
            return
        if what == "fail":
            raise RuntimeError("the `Leader` of process 0 has ended because of an exception")
        if what == "begin" and details != [_ready(engine)]:
            raise ValueError(
                f"the engine of process 0 has the programs {details[0]}, and this one {_ready(engine)}: expected "
                "engines with the same arguments, which have not been warmed up; call `warm_up` of the Leader"
            )
        if what == "warm_up":
            engine.warm_up()
        elif what == "step":
            engine.step()
        requests = {number: request for number, request in requests.items() if request.finish_reason is None}


class _Store:
    """The key-value store of `jax.distributed`, for the processes of one engine."""

    def __init__(self):
        from jax._src import distributed  # JAX has no public name for its store

        self._client: Any = distributed.global_state.client
        self._prefix = f"jaxkv/serving/{next(_numbers)}"

    def set(self, key: str, message: str) -> None:
        self._client.key_value_set(f"{self._prefix}/{key}", message, allow_overwrite=True)

    def delete(self, key: str) -> None:
        self._client.key_value_delete(f"{self._prefix}/{key}")

    def wait_for(self, key: str) -> str:
        """The message; JaxRuntimeError if process 0 ends, which has the store."""
        while True:
            try:
                return self._client.blocking_key_value_get(f"{self._prefix}/{key}", WAIT_MS)
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise


class _Messages:
    """Messages of process 0 to all others, in order."""

    def __init__(self):
        self._store, self._sent = _Store(), count()

    def send(self, message: str) -> None:
        number = next(self._sent)
        self._store.set(str(number), message)
        if number >= KEPT:
            self._store.delete(str(number - KEPT))

    def received(self) -> Iterator[str]:
        for number in count():
            yield self._store.wait_for(str(number))


class Exchange:
    """Exchanges a value of each process with all others, once per step.  Every process takes part in every exchange."""

    def __init__(self):
        self._store, self._number = _Store(), 0

    @_together()
    def all_gather(self, value: Any) -> list[Any]:
        """The values of all processes, in their order; anything that JSON can have.

        Raises:
          RuntimeError: another process has left.
          JaxRuntimeError: process 0 has ended.
        """
        own, number = jax.process_index(), self._number
        self._store.set(f"{number}/{own}", json.dumps(value))
        values = [
            value if process == own else json.loads(self._store.wait_for(f"{number}/{process}"))
            for process in range(jax.process_count())
        ]
        if number:
            self._store.delete(f"{number - 1}/{own}")  # all take part in this exchange, and have read the last one
        self._number += 1
        if LEFT in values:
            raise RuntimeError(f"process {values.index(LEFT)} has ended its engine because of an exception: {TOGETHER}")
        return values

    def leave(self) -> None:
        """Makes the next exchange of all others fail, or the one after it if they are in one that this process left."""
        for number in (self._number, self._number + 1):
            self._store.set(f"{number}/{jax.process_index()}", json.dumps(LEFT))


def _ready(engine: Engine) -> list[list[int]]:
    """The shapes of steps with a program, one of which every process must choose for a step."""
    return sorted(map(list, engine.buckets.ready))


def _described(request: Request) -> dict[str, Any]:
    """A request as JSON can have it."""
    described = {
        "prompt": request.prompt,
        "max_tokens": request.max_tokens,
        "sampling": asdict(request.sampling),
        "stop": sorted(request.stop),
        "priority": request.priority,
        "num_logprobs": request.num_logprobs,
        "cache_salt": [part.hex() for part in request.cache_salt],
    }
    return json.loads(json.dumps(described, default=lambda number: number.item()))  # of NumPy


def _request(described: dict[str, Any]) -> Request:
    """The request that was described."""
    return Request(
        **described
        | {
            "prompt": tuple(described["prompt"]),
            "sampling": Sampling(**described["sampling"]),
            "stop": frozenset(described["stop"]),
            "cache_salt": tuple(map(bytes.fromhex, described["cache_salt"])),
        }
    )


def _check(engine: Engine) -> None:
    """ValueError unless several processes can step engines like this one together."""
    if jax.process_count() == 1:
        raise ValueError("there is one process: expected several, after `jax.distributed.initialize`")
    if engine.tiers.has_connectors:
        raise ValueError("`engine` has connectors: expected none, because processes may get blocks at different steps")
    if engine.step_times is not None:
        raise ValueError(
            "`engine` has a `max_time_between_tokens`: expected none, because processes measure different times and "
            "would run different programs"
        )
    if engine.unfinished:
        raise ValueError(f"`engine` has {len(engine.unfinished)} requests that have not ended: expected none")
