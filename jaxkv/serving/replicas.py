"""Data parallel serving: one engine per device."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import override

import jax

from jaxkv.models.model import Model
from jaxkv.models.parallel.base import OneDevice
from jaxkv.models.parallel.data import DataParallel
from jaxkv.models.parallel.expert import DataExpertParallel
from jaxkv.serving.base import EngineBase, ends_engine
from jaxkv.serving.engine import Engine
from jaxkv.serving.lockstep import Lockstep
from jaxkv.serving.request import Request


class Replicas(EngineBase):
    """Serves requests from one cache per device, with the interface of `Engine`.

    A request goes to the engine with the fewest pending tokens and stays there; prefixes are shared only on the same
    device.  Devices step at the same time, each driven by a thread.  With several processes, each serves its own
    requests on its own devices.

    If the devices also divide the experts (`DataExpertParallel`), they step together, in one program (`Lockstep`), and
    one process has them all.

    An exception of any kind in a step of one engine ends all of them, as it does for one `Engine`.

    Args:
      model: from `jaxkv.models.load`, with `DataParallel` or `DataExpertParallel`.
      **options: those of `Engine`, except `offload`; `num_blocks` and `max_requests` are per device.

    Raises:
      ValueError: the model is not data parallel, or an option is invalid for `Engine`.
    """

    def __init__(self, model: Model, **options):
        super().__init__()
        if not isinstance(model.parallel, DataParallel):
            found = type(model.parallel).__name__
            raise ValueError(f"`model` has `parallel` {found}: expected DataParallel; for others, use `Engine`")
        if "offload" in options:
            raise ValueError("`offload` is given: expected none, because several engines cannot share a pool")
        self.engines = [Engine(replica, **options) for replica in _replicas(model)]
        self._lockstep = None
        if isinstance(model.parallel, DataExpertParallel):
            self._lockstep = Lockstep(model, model.parallel, self.engines)
        self._threads = ThreadPoolExecutor(len(self.engines))

    @property
    def waiting(self) -> list[Request]:
        """The waiting requests of all engines."""
        return [request for engine in self.engines for request in engine.waiting]

    @property
    @override
    def unfinished(self):
        return [request for engine in self.engines for request in engine.unfinished]

    def submit(self, prompt: Sequence[int], **options) -> Request:
        """Queues a request; arguments, result and errors are those of `Engine.submit`."""
        self.check_usable()
        return min(self.engines, key=_load).submit(prompt, **options)

    def cancel(self, request: Request) -> None:
        """Ends a waiting or running request; arguments and errors are those of `Engine.cancel`."""
        self.check_usable()
        next((engine for engine in self.engines if request in engine.unfinished), self.engines[0]).cancel(request)

    @override
    def check_usable(self):
        if self._ended_by is None:
            for engine in self.engines:
                if engine._ended_by is not None:  # outside a step, for example while it cancelled a request
                    self.end(engine._ended_by)
        super().check_usable()

    @override
    def _step(self):
        if self._lockstep is not None:
            self._new.extend(self._lockstep.step())
        else:
            for step in [self._threads.submit(engine.step) for engine in self.engines]:
                self._new.extend(step.result())

    @override
    def _release(self, error):
        self._threads.shutdown(cancel_futures=True)  # waits for steps that other engines are in
        for engine in self.engines:
            engine.end(error)

    @ends_engine
    def warm_up(self) -> None:
        """Compiles all programs, so that later steps do not compile."""
        if self._lockstep is not None:
            self._lockstep.warm_up()
        else:
            list(self._threads.map(Engine.warm_up, self.engines))


def _replicas(model: Model) -> Iterator[Model]:
    """Yields, for each device of this process, a model on that device alone.  No weight is copied."""
    arrays, structure = jax.tree.flatten(model.params)
    for shards in zip(*(array.addressable_shards for array in arrays), strict=True):
        params = jax.tree.unflatten(structure, [shard.data for shard in shards])
        yield replace(model, params=params, parallel=OneDevice(shards[0].device))


def _load(engine: Engine) -> int:
    """The load of an engine: tokens of its requests, including those still to be generated."""
    return sum(len(request.prompt) + request.max_tokens for request in (*engine.waiting, *engine.running))
