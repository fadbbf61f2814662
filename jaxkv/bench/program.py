"""The program of a workload, which is lowered and compiled before its cache is made."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import export, lax

import jaxkv
from jaxkv.bench.inputs import Varying, arguments, filled, inputs
from jaxkv.bench.kernel_times import KernelTimes, time_kernels
from jaxkv.bench.timing import Chain, Timing
from jaxkv.bench.workload import Workload

UNCHECKED = [export.DisabledSafetyCheck.custom_call(name) for name in ("triton_kernel_call", "triton_kernel_call_ffi")]
"""Triton's kernels, which are not guaranteed to run with other versions of JAX.  These programs are never saved."""


@dataclass(frozen=True)
class Measured:
    """The measurements of a workload."""

    implementation: str
    """The implementation that ran the call."""
    timing: Timing
    kernels: KernelTimes | None
    compile: float
    """Seconds to trace, lower and compile a chain of calls."""


class Program:
    """The calls of a workload, lowered.  NotImplementedError if the named implementation does not support them."""

    def __init__(self, workload: Workload, *, implementation: str | None):
        start = time.perf_counter()
        self._workload, self._layout = workload, workload.layout
        self._varying, self._shared = inputs(workload)
        function = getattr(jaxkv, workload.operation)

        def call(cache, varying, shared, layer):
            args, options = arguments(workload, cache, varying, shared, layer)
            return function(*args, **options, implementation=implementation)

        cache: Any = jax.eval_shape(lambda: jaxkv.KVCache.zeros(self._layout))
        if workload.planned:

            def plan(index):
                empty = jaxkv.KVCache.zeros(self._layout)  # of which a plan uses only the layout
                return jaxkv.plan_decode(
                    empty,
                    *index,
                    num_heads=workload.heads,
                    q_len=workload.q_len,
                    implementation=implementation,  # type: ignore[arg-type]
                )

            self._shared = self._shared._replace(plan=jax.jit(plan)(self._shared.index))
        once = self._varying._replace(others=())
        args, options = arguments(workload, cache, once, self._shared, 0)
        self.implementation = implementation or str(jaxkv.explain(function, *args, **options).chosen)
        # Lowering a Pallas kernel takes seconds, so lower the call once and use it in all programs.
        layer = jax.ShapeDtypeStruct((), jnp.int32)
        exported = export.export(jax.jit(call), disabled_checks=UNCHECKED)(cache, once, self._shared, layer)
        self._call: Any = exported.call
        result = jax.tree.unflatten(exported.out_tree, exported.out_avals)
        if isinstance(result, jaxkv.DecodePlan) and result.schedule is None:
            raise NotImplementedError(f"{workload.operation}: {self.implementation} has nothing to compute")
        result, written = _divided(result)
        self._writes, sets = written is not None, workload.sets
        self._outs = [jax.tree.map(lambda out: jnp.zeros(out.shape, out.dtype), result) for _ in range(sets)]
        carry, fixed = (self._varying, self._outs), (cache, self._shared)
        if self._writes:
            carry, fixed = (cache, *carry), self._shared
        step = self._write if self._writes else self._read
        self._chain = Chain(step, carry, fixed, least=sets * workload.least_seconds)
        self._seconds = time.perf_counter() - start

    def compile(self) -> "Program":
        """Compiles the program; returns it."""
        start = time.perf_counter()
        self._chain.compile()
        self._seconds += time.perf_counter() - start
        return self

    def measure(self, *, repeats: int) -> Measured:
        """Fills a cache and times the calls.  Can be called once, because it donates the inputs."""
        cache, layer = filled(self._workload), jnp.int32(self._workload.visited[0])
        once, state = (self._write_once, jax.new_ref(cache.buffer)) if self._writes else (self._read_once, cache)
        sets = self._workload.sets
        kernels = time_kernels(once, state, self._varying, self._shared, layer, repeats=repeats)
        del state  # if this is a Ref, it holds a copy of the cache
        carry, fixed = (self._varying, self._outs), (cache, self._shared)
        if self._writes:
            carry, fixed = (cache, *carry), self._shared
        timing = self._chain.time(carry, fixed, repeats=repeats, sustain=True)
        kernels = kernels and kernels.divided(sets)
        return Measured(self.implementation, timing.divided(sets), kernels, self._seconds)

    def _write(self, i, carry, shared):
        """A call for each set of values, which writes; each set has a result of its own, if it has one."""
        cache, varying, outs = carry[0], carry[1], list(carry[2])
        for number, (each, layer) in enumerate(self._turn(varying, _layer(i, varying))):
            outs[number], cache = _divided(self._call(cache, each, shared, layer))
        return cache, lax.optimization_barrier(varying), outs

    def _read(self, i, carry, fixed):
        """A call for each set of values, which reads; each set has a result of its own."""
        cache, shared = fixed
        varying, outs = carry[0], list(carry[1])
        for number, (each, layer) in enumerate(self._turn(varying, _layer(i, varying))):
            outs[number] = self._call(cache, each, shared, layer)
            varying, outs = lax.optimization_barrier((varying, outs))
        return varying, outs

    def _turn(self, varying: Varying, layer) -> Iterator[tuple[Varying, Any]]:
        """The inputs and the layer of a call for each set of values; `layer` if there is one set.

        With several sets, layers are constants: a kernel that looked one up would take as long as a short copy.
        """
        alike, layers = varying._replace(others=()), self._workload.visited
        yield alike, layer if self._workload.sets == 1 else jnp.int32(layers[0])
        for number, values in enumerate(varying.others, 1):
            yield alike._replace(values=values), jnp.int32(layers[number % len(layers)])

    def _read_once(self, cache, varying, shared, layer):
        """A call for each set of values."""
        return [self._call(cache, each, shared, place) for each, place in self._turn(varying, layer)]

    def _write_once(self, ref, varying, shared, layer):
        """A call for each set of values that writes to a Ref in place; returns a value to wait for.

        Unlike a donated cache, the Ref can be passed to several calls.
        """
        cache, outs = jaxkv.KVCache(ref[...], self._layout), []
        for each, place in self._turn(varying, layer):
            out, cache = _divided(self._call(cache, each, shared, place))
            outs.append(out)
        ref[...] = cache.buffer
        return lax.optimization_barrier((layer, outs))


def _divided(result) -> tuple[Any, Any]:
    """Divides the result of a call into the cache that it has written and the rest, which comes first.

    Either is None if there is none.
    """
    if isinstance(result, jaxkv.KVCache):
        return None, result
    wrote = isinstance(result, tuple) and isinstance(result[-1], jaxkv.KVCache)
    return (result[:-1], result[-1]) if wrote else (result, None)


def _layer(i, varying: Varying):
    return varying.layers[lax.rem(i, jnp.int32(varying.layers.size))]
