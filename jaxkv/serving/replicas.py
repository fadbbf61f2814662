"""Data parallel serving: one engine per device, and engines whose devices step together because they divide experts."""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, Unpack, override

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxkv.cache import KVCache
from jaxkv.models.model import Model
from jaxkv.models.parallel.base import OneDevice
from jaxkv.models.parallel.data import DataParallel
from jaxkv.models.parallel.expert import DataExpertParallel
from jaxkv.serving.base import EngineBase, restores
from jaxkv.serving.buckets import Shape
from jaxkv.serving.engine import Engine, described
from jaxkv.serving.exchange import Exchange
from jaxkv.serving.program_cache import Compilable, Program
from jaxkv.serving.request import Request, RequestOptions
from jaxkv.serving.stats import EngineStats
from jaxkv.serving.step_inputs import NOTHING, Bundle, Schedule


class Replicas(EngineBase):
    """Serves requests from one cache per device, with the interface of `Engine`.

    A request goes to the engine with the fewest pending tokens and stays there; prefixes are shared only on the same
    device.  Devices step at the same time, each driven by a thread.  With several processes, each serves its own
    requests on its own devices.

    If the devices also divide the experts (`DataExpertParallel`), they step together, in one program (`Lockstep`).
    With several processes, all of them then make the same `Replicas` and call the same methods of these, except those
    of requests: a call of `step` waits for those of the other processes, `run` steps until no process has a request,
    and `warm_up` waits for all programs.  An exception in a step ends the engines of all processes.

    After an exception of any kind in a step, the next call continues, as it does for one `Engine`.  The others finish
    their step first.  If the devices step together, all engines are restored, and otherwise only that which raised it.
    If one of them cannot be restored, all end.

    Args:
      model: from `jaxkv.models.load`, with `DataParallel` or `DataExpertParallel`.
      **options: those of `Engine`, except `connectors`; `num_blocks` and `max_requests` are per device.

    Raises:
      ValueError: the model is not data parallel, or an option is invalid for `Engine`.
    """

    def __init__(self, model: Model, **options):
        super().__init__()
        if not isinstance(model.parallel, DataParallel):
            found = type(model.parallel).__name__
            raise ValueError(f"`model` has `parallel` {found}: expected DataParallel; for others, use `Engine`")
        if "connectors" in options:
            raise ValueError("`connectors` are given: expected none, because several engines cannot share them")
        if options.get("host_latents") is not None and isinstance(model.parallel, DataExpertParallel):
            raise ValueError(
                f"`host_latents` is {options['host_latents']}, and `model` has `parallel` DataExpertParallel: expected "
                "DataParallel, because one program steps all devices, and host memory is that of one; leave out "
                "`host_latents`, or divide no experts"
            )
        self.engines = [Engine(replica, **options) for replica in _replicas(model)]
        self._lockstep: Lockstep | None = None
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

    @property
    @override
    def stats(self):
        return EngineStats.total([engine.stats for engine in self.engines])

    @override
    def new_request(self, prompt, **options: Unpack[RequestOptions]):
        return self.engines[0].new_request(prompt, **options)

    @override
    def add(self, request):
        self.check_usable()
        min(self.engines, key=_load).add(request)

    @override
    def cancel(self, request, *, finish_reason="cancelled"):
        self.check_usable()
        engine = next((engine for engine in self.engines if request in engine.unfinished), self.engines[0])
        engine.cancel(request, finish_reason=finish_reason)

    @property
    @override
    def _streams(self):
        return [stream for engine in self.engines for stream in engine._streams]

    @override
    def check_usable(self):
        if self._ended_by is None:
            for engine in self.engines:
                if engine._ended_by is not None:  # outside a step, for example while it cancelled a request
                    self.end(engine._ended_by)
        super().check_usable()

    @override
    def run(self):
        if self._lockstep is not None:
            self._lockstep.runs = self._lockstep.has_others
        return super().run()

    @property
    @override
    def steps_with_others(self):
        return self._lockstep is not None and self._lockstep.has_others

    @property
    @override
    def _continues(self):
        return bool(self.unfinished) or (self._lockstep is not None and self._lockstep.runs)

    @override
    def _step(self):
        if self._lockstep is not None:
            self._lockstep.step()
        else:
            for step in [self._threads.submit(engine._advance) for engine in self.engines]:
                step.result()

    @override
    def _restore(self):
        if self._lockstep is not None:
            self._lockstep.leave_others()
        self._join_threads()
        self._threads = ThreadPoolExecutor(len(self.engines))
        for engine in self.engines:
            if self._lockstep is not None:
                engine.changing = True  # one program steps all engines, and donates all caches
            engine._recover()
            if engine._ended_by is not None:
                raise engine._ended_by

    @override
    def _release(self):
        self._join_threads()
        for engine in self.engines:
            engine._ended_by = self._ended_by
            engine._release()

    def _join_threads(self) -> None:
        """Waits for the steps that engines are in."""
        self._threads.shutdown(cancel_futures=True)

    @restores
    def warm_up(self, *, wait: bool = True) -> None:
        """Compiles the programs, so that later steps do not compile; `wait` as in `Engine.warm_up`."""
        if self._lockstep is not None:
            self._lockstep.warm_up(wait=wait)
        else:
            list(self._threads.map(partial(Engine.warm_up, wait=wait), self.engines))


def _replicas(model: Model) -> Iterator[Model]:
    """Yields, for each device of this process, a model on that device alone.  No weight is copied."""
    arrays, structure = jax.tree.flatten(model.params)
    for shards in zip(*(array.addressable_shards for array in arrays), strict=True):
        params = jax.tree.unflatten(structure, [shard.data for shard in shards])
        yield replace(model, params=params, parallel=OneDevice(shards[0].device))


def _load(engine: Engine) -> int:
    """The load of an engine: tokens of its requests, including those still to be generated."""
    return sum(len(request.prompt) + request.max_tokens for request in (*engine.waiting, *engine.running))


class Lockstep:
    """Steps the engines of the devices of a model that divides requests and experts.

    Each engine plans its step, with its own requests, blocks and cache.  Then one program runs the layers of all
    devices, each on its own arrays.  It is the smallest that holds the rows of every engine, and an engine without
    requests takes part with empty rows.  Each engine samples its own tokens.

    Args:
      model: from `jaxkv.models.load`, divided by `parallel`.
      parallel: how the model is divided.
      engines: an engine per device of this process, in their order, of the same sizes.

    Attributes:
      runs: with several processes, whether one of them had a request at the beginning of the last step.

    Raises:
      ValueError: the mesh has other axes, or engines of several processes have a `max_time_between_tokens`.
    """

    def __init__(self, model: Model, parallel: DataExpertParallel, engines: Sequence[Engine]):
        mesh, axis = parallel.mesh, parallel.axis
        if mesh.size != mesh.shape[axis]:
            raise ValueError(
                f"`model` is on a mesh of {dict(mesh.shape)}: expected {axis!r} as the only axis, as all devices step "
                "together"
            )
        self._exchange: Exchange | None = None
        if mesh.size != len(engines):
            if any(engine.step_times is not None for engine in engines):
                raise ValueError(
                    "`max_time_between_tokens` is given: expected none with several processes, which measure different "
                    "times and would run different programs"
                )
            self._exchange = Exchange()
        self.runs = False
        self._engines = engines
        self._model = model
        self._buckets = engines[0].buckets
        for engine in engines[1:]:
            engine.buckets = self._buckets
            if engine.step_times is not None and engines[0].step_times is not None:
                engine.step_times.measured = engines[0].step_times.measured  # by which the buckets choose
        self._sharding = NamedSharding(mesh, PartitionSpec(axis))
        self._layers = Program(_on_devices(engines[0].program), donate=("cache", "last"), keeps_first=True)

    def step(self) -> None:
        """Launches a step of all engines, and reads the tokens of the previous ones."""
        start, waited = time.perf_counter(), [engine.host_time.waited for engine in self._engines]
        schedules = [engine.schedule() for engine in self._engines]
        every = [schedule for schedule in schedules if schedule is not None]
        if self._exchange is not None:
            every += self._of_other_processes(self._exchange, every)
        if every:
            shape = self._buckets.fit(*every)
            found = self._run(schedules, shape)
            for engine, schedule, mine in zip(self._engines, schedules, found, strict=True):
                if schedule is not None:
                    engine.launched(schedule, shape, mine)
        for engine, schedule in zip(self._engines, schedules, strict=True):
            engine.read(behind=schedule is not None)  # without tokens in this step, there is nothing to wait for
        # The host waits for the devices one after the other, and all engines wait meanwhile.
        seconds = time.perf_counter() - start
        together = sum(engine.host_time.waited - before for engine, before in zip(self._engines, waited, strict=True))
        for engine, before in zip(self._engines, waited, strict=True):
            engine.host_time.waited = before + together
            engine.host_time.steps += 1
            engine.host_time.seconds += seconds

    def _of_other_processes(self, exchange: Exchange, own: Sequence[Schedule]) -> list[Schedule]:
        """Sends the sizes of this step to the other processes, and returns schedules of the sizes of theirs."""
        sizes = [[len(schedule.prefill), len(schedule.decode)] for schedule in own]
        unfinished = any(engine.unfinished for engine in self._engines)
        gathered = exchange.all_gather([sizes, unfinished, len(self._buckets.ready)])
        if len({ready for *_, ready in gathered}) > 1:
            raise RuntimeError(
                f"the processes have compiled {[ready for *_, ready in gathered]} programs: expected as many in all; "
                "call `warm_up` in all of them before the first step, or in none"
            )
        self.runs = any(unfinished for _, unfinished, _ in gathered)
        return [Schedule([None] * chunks, [None] * rows) for sizes, *_ in gathered for chunks, rows in sizes]

    @property
    def has_others(self) -> bool:
        """Whether other processes step with this one."""
        return self._exchange is not None

    def leave_others(self) -> None:
        """RuntimeError if other processes step with this one, which they then cannot any more."""
        if self._exchange is not None:
            self._exchange.leave()
            raise RuntimeError("one of several processes cannot be restored without the others")

    def warm_up(self, *, wait: bool = True) -> None:
        """Compiles the programs, so that later steps do not compile; `wait` as in `Engine.warm_up`.

        With several processes, `wait` is required, because all must have the same programs.
        """
        if self._exchange is not None and not wait:
            raise ValueError("`wait` is False: expected True, because all processes must have the same programs")
        nothing = [None] * len(self._engines)
        self._buckets.compile({shape: self._prepared(shape) for shape in self._buckets.shapes}, wait=wait)
        ready = self._buckets.ready.copy()
        for shape in [shape for shape in self._buckets.shapes if shape in ready]:  # in one order in all processes
            for engine, mine in zip(self._engines, self._run(nothing, shape), strict=True):
                engine.warm_up_after(mine)

    def _prepared(self, shape: Shape) -> list[Callable[[], Compilable]]:
        """Functions that lower or find the programs of a step.  They do not refer to the engines or to their caches."""
        model, *others = self._inputs([None] * len(self._engines), shape)
        prepared = [partial(self._layers.prepare, shape, model, *jax.tree.map(described, others))]
        return prepared + [prepare for engine in self._engines for prepare in engine.prepared_after(shape)]

    def _run(self, schedules: Sequence[Schedule | None], shape: Shape) -> list[Any]:
        """Runs the layers; returns what they found for each engine's rows, on its device."""
        cache, last, found = self._layers(shape, *self._inputs(schedules, shape))
        for engine, buffer, mine in zip(self._engines, _parts(cache.buffer), _parts(last), strict=True):
            engine.cache, engine.last = KVCache(buffer, cache.layout), mine
        arrays, structure = jax.tree.flatten(found)
        return [jax.tree.unflatten(structure, mine) for mine in zip(*map(_parts, arrays), strict=True)]

    def _inputs(self, schedules: Sequence[Schedule | None], shape: Shape) -> tuple[Any, ...]:
        """The arguments of `_layers` for a step of this shape, of all engines."""
        pairs = zip(self._engines, schedules, strict=True)
        inputs = [engine.inputs(schedule or NOTHING, shape) for engine, schedule in pairs]
        joined = jax.tree.map(
            lambda *words: jax.make_array_from_process_local_data(self._sharding, np.concatenate(words)), *inputs
        )
        cache = jax.tree.map(self._joined, *[engine.cache for engine in self._engines])
        last = self._joined(*[engine.last for engine in self._engines])
        return self._model, cache, last, joined

    def _joined(self, *arrays: jax.Array) -> jax.Array:
        """The concatenation of an array [n] of each device, without a copy."""
        (size,) = arrays[0].shape
        whole = self._sharding.num_devices * size
        return jax.make_array_from_single_device_arrays((whole,), self._sharding, [*arrays])


def _parts(array: jax.Array) -> list[jax.Array]:
    """The part of each device, in the order of the devices."""
    return [shard.data for shard in sorted(array.addressable_shards, key=lambda shard: shard.index[0].start or 0)]


def _on_devices(program: Callable) -> Callable[..., tuple[KVCache, jax.Array, Any]]:
    """The program of an engine, on every device."""

    def layers(model: Model, cache: KVCache, last, inputs: Bundle) -> tuple[KVCache, jax.Array, Any]:
        def on_each(model: Model, cache: KVCache, last, inputs: Bundle) -> tuple[KVCache, tuple[jax.Array, Any]]:
            cache, *rest = program(replace(model, parallel=model.parallel.inside), cache, last, inputs)
            return cache, tuple(rest)

        cache, rest = model.parallel.run(on_each, model, cache, last, inputs)
        return cache, *rest

    layers.__qualname__ = f"{program.__qualname__} on devices"  # by which executables are kept
    return layers
