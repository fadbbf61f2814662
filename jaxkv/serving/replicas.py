"""Data parallel serving: one engine per device."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import chain

from jaxkv.models.model import Model
from jaxkv.models.parallel.data import DataParallel
from jaxkv.models.parallel.data_expert import DataExpertParallel
from jaxkv.serving.engine import Engine
from jaxkv.serving.lockstep import Lockstep
from jaxkv.serving.request import Request, uncancelled


class Replicas:
    """Serves requests from one cache per device, with the interface of `Engine`.

    A request goes to the engine with the fewest pending tokens and stays there; prefixes are shared only on the same
    device.  Devices step at the same time, each driven by a thread.  With several processes, each serves its own
    requests on its own devices.

    If the devices also divide the experts (`DataExpertParallel`), they step together, in one program (`Lockstep`), and
    one process has them all.

    Args:
      model: from `jaxkv.models.load`, with `DataParallel` or `DataExpertParallel`.
      **options: those of `Engine`, except `offload`; `num_blocks` and `max_requests` are per device.

    Raises:
      ValueError: the model is not data parallel, or an option is invalid for `Engine`.
    """

    def __init__(self, model: Model, **options):
        if not isinstance(model.parallel, DataParallel):
            found = type(model.parallel).__name__
            raise ValueError(f"`model` has `parallel` {found}: expected DataParallel; for others, use `Engine`")
        if "offload" in options:
            raise ValueError("`offload` is given: expected none, because several engines cannot share a pool")
        self.engines = [Engine(replica, **options) for replica in model.parallel.replicas(model)]
        self._lockstep = None
        if isinstance(model.parallel, DataExpertParallel):
            self._lockstep = Lockstep(model, model.parallel, self.engines)
        self._threads = ThreadPoolExecutor(len(self.engines))
        self._drawn: list[tuple[Request, int]] = []
        """Tokens of finished steps that have not been returned yet."""

    def submit(self, prompt: Sequence[int], **options) -> Request:
        """Queues a request; arguments, result and errors are those of `Engine.submit`."""
        return min(self.engines, key=_load).submit(prompt, **options)

    def cancel(self, request: Request) -> None:
        """Ends a waiting or running request, like `Engine.cancel`.  ValueError if it has already ended."""
        mine = (engine for engine in self.engines if request in engine.waiting or request in engine.running)
        next(mine, self.engines[0]).cancel(request)

    def run(self) -> Iterator[tuple[Request, int]]:
        """Steps until all requests have ended; yields each new token with its request."""
        while any(engine.waiting or engine.running for engine in self.engines):
            yield from uncancelled(self.step())

    def step(self) -> list[tuple[Request, int]]:
        """Runs one step of every engine; returns the new tokens.

        If an engine raises, the others finish their step first, and the next call returns their tokens.
        """
        if self._lockstep is not None:
            return list(uncancelled(self._lockstep.step()))
        steps = [self._threads.submit(engine.step) for engine in self.engines]
        wait(steps)
        self._drawn += chain.from_iterable(step.result() for step in steps if step.exception() is None)
        for step in steps:
            step.result()  # raises the step's error
        drawn, self._drawn = self._drawn, []
        return list(uncancelled(drawn))

    def warm_up(self) -> None:
        """Compiles all programs, so that later steps do not compile."""
        if self._lockstep is not None:
            self._lockstep.warm_up()
        else:
            list(self._threads.map(Engine.warm_up, self.engines))


def _load(engine: Engine) -> int:
    """The load of an engine: tokens of its requests, including those still to be generated."""
    return sum(len(request.prompt) + request.max_tokens for request in (*engine.waiting, *engine.running))
