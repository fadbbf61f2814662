"""Engines whose devices step together, because each device has a part of the experts: one program of all layers."""

from collections.abc import Sequence
from dataclasses import replace

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxkv.cache import KVCache
from jaxkv.models.model import Model
from jaxkv.models.parallel.expert import DataExpertParallel
from jaxkv.serving.engine import Engine
from jaxkv.serving.program import run_layers
from jaxkv.serving.request import Request
from jaxkv.serving.step_inputs import NOTHING, Spans


class Lockstep:
    """Steps the engines of the devices of a model that divides requests and experts.

    Each engine plans its step, with its own requests, blocks and cache.  Then one program runs the layers of all
    devices, each on its own arrays; an engine without requests takes part with empty rows.  Each engine samples its
    own tokens.

    Args:
      model: from `jaxkv.models.load`, divided by `parallel`.
      parallel: how the model is divided.
      engines: an engine per device, in their order, of the same sizes.

    Raises:
      ValueError: the mesh has devices of other processes, or other axes.
    """

    def __init__(self, model: Model, parallel: DataExpertParallel, engines: Sequence[Engine]):
        mesh, axis = parallel.mesh, parallel.axis
        if mesh.size != len(engines) or mesh.size != mesh.shape[axis]:
            raise ValueError(
                f"`model` is on a mesh of {dict(mesh.shape)}, of which {len(engines)} devices are of this process: "
                f"expected {axis!r} as the only axis, and no other processes, as the devices step together"
            )
        self._engines = engines
        self._model = model
        self._sharding = NamedSharding(mesh, PartitionSpec(axis))
        self._layers = jax.jit(_layers, donate_argnames="cache")

    def step(self) -> list[tuple[Request, int]]:
        """Launches a step of all engines; returns the new tokens of the previous steps with their requests."""
        plans = [engine.plan() for engine in self._engines]
        if any(plans):
            logits = self._run(plans, chunks=any(plan.chunks for plan in plans if plan))
            for engine, plan, mine in zip(self._engines, plans, logits, strict=True):
                if plan is not None:
                    engine.launched(plan, mine)
        for engine, plan in zip(self._engines, plans, strict=True):
            engine.read(behind=plan is not None)  # without tokens in this step, there is nothing to wait for
        return [token for engine in self._engines for token in engine.take()]

    def warm_up(self) -> None:
        """Compiles all programs, so that later steps do not compile."""
        for chunks in (False, True):
            logits = self._run([None] * len(self._engines), chunks=chunks)
            for engine, mine in zip(self._engines, logits, strict=True):
                engine.warm_up_after(mine)

    def _run(self, plans: Sequence[Spans | None], *, chunks: bool) -> list[jax.Array]:
        """Runs the layers, with rows for chunks or without; the logits of each engine's rows, on its device."""
        pairs = zip(self._engines, plans, strict=True)
        batches = [engine.batches(plan or NOTHING, chunks=chunks) for engine, plan in pairs]
        rows = jax.tree.map(lambda *arrays: jax.device_put(np.concatenate(arrays), self._sharding), *batches)
        cache = jax.tree.map(self._joined, *[engine.cache for engine in self._engines])
        last = self._joined(*[engine.last for engine in self._engines])
        cache, logits = self._layers(self._model, cache, last, *rows)
        for engine, buffer in zip(self._engines, _parts(cache.buffer), strict=True):
            engine.cache = KVCache(buffer, cache.layout)
        return _parts(logits)

    def _joined(self, *arrays: jax.Array) -> jax.Array:
        """The concatenation of an array [n] of each device, without a copy."""
        (size,) = arrays[0].shape
        return jax.make_array_from_single_device_arrays((len(arrays) * size,), self._sharding, [*arrays])


def _parts(array: jax.Array) -> list[jax.Array]:
    """The part of each device, in the order of the devices."""
    return [shard.data for shard in sorted(array.addressable_shards, key=lambda shard: shard.index[0].start or 0)]


def _layers(model: Model, cache: KVCache, last, *rows) -> tuple[KVCache, jax.Array]:
    """`run_layers` on every device; `rows` are its batches."""
    return model.parallel.run(_on_each, model, cache, last, *rows)


def _on_each(model: Model, cache: KVCache, last, *rows) -> tuple[KVCache, jax.Array]:
    """`run_layers` on one device."""
    return run_layers(replace(model, parallel=model.parallel.inside), cache, last, *rows)
