"""Data parallel serving: one engine per device."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import chain

from jaxkv.models.model import Model
from jaxkv.models.parallel.data import DataParallel
from jaxkv.serving.engine import Engine
from jaxkv.serving.request import Request, uncancelled


class Replicas:
    """Serves requests from a cache on each device; for its user it is an `Engine`.

    A request goes to the engine with the fewest tokens to see through, and stays there: prefixes are shared on the same
    device alone.  Devices step at the same time, each driven by a thread.  Of several processes, each serves its own
    requests on its own devices.

    Args:
      model: from `jaxkv.models.load`, with `DataParallel`.
      **options: those of each `Engine`, but `offload`; `num_blocks` and `max_requests` are of one device.

    Raises:
      ValueError: the model is not data parallel, or an option is one that `Engine` refuses.
    """

    def __init__(self, model: Model, **options):
        if not isinstance(model.parallel, DataParallel):
            told = type(model.parallel).__name__
            raise ValueError(f"`model` has `parallel` {told}: expected DataParallel; for others there is `Engine`")
        if "offload" in options:
            raise ValueError(
                "`offload` is given, and the engines are several: expected none, for a pool is one engine's"
            )
        self.engines = [Engine(replica, **options) for replica in model.parallel.replicas(model)]
        self._threads = ThreadPoolExecutor(len(self.engines))
        self._drawn: list[tuple[Request, int]] = []
        """Tokens of steps that nobody was given yet."""

    def submit(self, prompt: Sequence[int], **options) -> Request:
        """Queues a request; arguments, result and errors are those of `Engine.submit`."""
        return min(self.engines, key=_load).submit(prompt, **options)

    def cancel(self, request: Request) -> None:
        """Ends a request that waits or runs, like `Engine.cancel`; ValueError for one that does neither."""
        mine = (engine for engine in self.engines if request in engine.waiting or request in engine.running)
        next(mine, self.engines[0]).cancel(request)

    def run(self) -> Iterator[tuple[Request, int]]:
        """Steps until nobody waits or runs; each new token with its request."""
        while any(engine.waiting or engine.running for engine in self.engines):
            yield from uncancelled(self.step())

    def step(self) -> list[tuple[Request, int]]:
        """A step of every engine: the new tokens.

        Where an engine raises, the others end their step first; their tokens come with the next.
        """
        steps = [self._threads.submit(engine.step) for engine in self.engines]
        wait(steps)
        self._drawn += chain.from_iterable(step.result() for step in steps if step.exception() is None)
        for step in steps:
            step.result()  # raises what it raised
        drawn, self._drawn = self._drawn, []
        return list(uncancelled(drawn))

    def warm_up(self) -> None:
        """Compiles all programs: later steps take only the time of their work."""
        list(self._threads.map(Engine.warm_up, self.engines))


def _load(engine: Engine) -> int:
    """Tokens of an engine's requests, those to come included."""
    return sum(len(request.prompt) + request.max_tokens for request in (*engine.waiting, *engine.running))
