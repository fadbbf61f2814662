"""One model over several processes: `Leader` serves in process 0, and `follow` repeats what it does in the others."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import count
from typing import Any, Unpack, override

import jax

from jaxkv.models.sampling import Sampling
from jaxkv.serving.base import EngineBase, restores
from jaxkv.serving.engine import Engine
from jaxkv.serving.exchange import Store, together
from jaxkv.serving.request import Request, RequestOptions

KEPT = 1000
"""The last messages that are kept.  A follower is never so far behind, because steps wait for all processes."""


class Leader(EngineBase):
    """The engine of process 0, for a model on the devices of several processes.

    All processes call `jax.distributed.initialize`, load the model on one mesh and make the same `Engine`.  Process 0
    then makes a Leader of its engine and uses it like an engine, also in an `AsyncEngine`; the others call
    `follow(engine)`.  Each step runs in all processes, with the same requests.  Each process may give its engine a
    `HostPool` of its own (`model.cache_parts`): a request finds the blocks that all processes have.

    As everywhere in JAX, all processes end if one does: the others end with an error, at the latest about
    `heartbeat_timeout_seconds` of `jax.distributed.initialize` later (100 by default; 20 is enough for processes of one
    data center), and whoever started them starts them again.  An exception in a step ends this
    engine, and `follow` in the others: one process cannot be restored without the others.

    Args:
      engine: of process 0.

    Raises:
      ValueError: this is not process 0, there is only one, or the engine has requests, a `max_time_between_tokens`, or
        connectors although its model is on devices of this process alone.  Processes would have to agree on times.
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
            with together():
                self._send(["step"])
                self.engine._step()

    @override
    def _restore(self):
        self._new = []
        self._send(["fail"])
        self.engine.tiers.leave_others()
        raise RuntimeError("one of several processes cannot be restored without the others")

    @override
    def _release(self):
        self.engine._release()

    def _send(self, what: list[Any]) -> None:
        message, self._new = [self._new, what], []
        self._messages.send(json.dumps(message))


@together()
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


class _Messages:
    """Messages of process 0 to all others, in order."""

    def __init__(self):
        self._store, self._sent = Store(), count()

    def send(self, message: str) -> None:
        number = next(self._sent)
        self._store.set(str(number), message)
        if number >= KEPT:
            self._store.delete(str(number - KEPT))

    def received(self) -> Iterator[str]:
        for number in count():
            yield self._store.wait_for(str(number))


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
    if engine.tiers.has_connectors and engine.tiers.exchange is None:
        raise ValueError(
            "`engine` has connectors, and a model on devices of this process alone: expected no connectors, or a model "
            "on devices of all processes"
        )
    if engine.step_times is not None:
        raise ValueError(
            "`engine` has a `max_time_between_tokens`: expected none, because processes measure different times and "
            "would run different programs"
        )
    if engine.unfinished:
        raise ValueError(f"`engine` has {len(engine.unfinished)} requests that have not ended: expected none")
