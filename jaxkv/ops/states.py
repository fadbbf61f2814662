"""Reading and storing the states of requests, such as those of recurrent layers."""

import itertools
from collections.abc import Mapping

import jax
from jax.typing import ArrayLike

from jaxkv.cache import KVCache
from jaxkv.checks import Dims, check_cache
from jaxkv.dispatch import Implementations, run
from jaxkv.ops.operation import Operation
from jaxkv.ops.samples import BATCH, array
from jaxkv.ops.writes import checked_slots, entries_of
from jaxkv_kernels import calls
from jaxkv_kernels.formats.states import StateEntry


def write_state(
    cache: KVCache[StateEntry],
    states: Mapping[str, ArrayLike],
    slots: ArrayLike,
    *,
    layer: ArrayLike,
    implementation: Implementations | None = None,
) -> KVCache[StateEntry]:
    """Stores states.

    Args:
      cache: a cache of `StateEntry`.
      states: by name, an array [T, ...] for each array of the entry, of any float dtype, which is
        converted to the entry's.
      slots: int32 [T], the slot of each state.  States whose slot is negative or past the cache are skipped.  If two
        have the same slot, it may hold a mixture of both afterwards.
      layer: int, or traced int32 scalar.  A traced layer outside the cache writes nothing.
      implementation: None (the best that supports the call), a name, or a sequence of names.

    Returns:
      The cache with T states stored and every other byte as it was; updated in place if `cache` is donated.

    Raises:
      ValueError: a name, shape, dtype or static layer is wrong.
    """
    shapes = check_cache(cache, StateEntry).shapes
    if not isinstance(states, Mapping) or set(states) != set(shapes):
        found = sorted(states) if isinstance(states, Mapping) else type(states).__name__
        raise ValueError(f"`states` is {found}: expected a mapping with the arrays {', '.join(shapes)}")
    # Axes are numbered, not named after their array: the name of an array may be any string.
    number = itertools.count()
    axes = {name: [f"n{next(number)}" for _ in shape] for name, shape in shapes.items()}
    lengths = ((axis, n) for name, shape in shapes.items() for axis, n in zip(axes[name], shape, strict=True))
    dims = Dims(**{axis: (n, "that of the entry") for axis, n in lengths})
    ordered = {name: dims.check(f"states[{name!r}]", states[name], " ".join(["T", *axes[name]])) for name in shapes}
    slots, layer = checked_slots("slots", slots, layer, cache, dims)
    call = calls.WriteState(**entries_of(cache), states=ordered, slots=slots, layer=layer)
    return KVCache(run(call, implementation), cache.layout)


def read_state(
    cache: KVCache[StateEntry],
    slots: ArrayLike,
    *,
    layer: ArrayLike,
    implementation: Implementations | None = None,
) -> dict[str, jax.Array]:
    """Returns states.

    Args:
      cache: a cache of `StateEntry`.
      slots: int32 [T], the slot of each state.
      layer: int, or traced int32 scalar.
      implementation: None (the best that supports the call), a name, or a sequence of names.

    Returns:
      By name, an array [T, ...] for each array of the entry, of the entry's dtype; 0 where the slot is negative or past
      the cache, or the layer is outside the cache.  New requests therefore read zeros from slot -1.

    Raises:
      ValueError: a shape, dtype or static layer is wrong.
    """
    check_cache(cache, StateEntry)
    slots, layer = checked_slots("slots", slots, layer, cache, Dims(), written=False)
    return run(calls.ReadState(**entries_of(cache), slots=slots, layer=layer), implementation)


_SLOTS = array("int32", BATCH)


def _sample_write(cache):
    states = {name: array("float32", BATCH, *shape) for name, shape in cache.layout.entry.shapes.items()}
    return (cache, states, _SLOTS), {"layer": 0}


OPERATIONS = (
    Operation(write_state, _sample_write, entries=(StateEntry,)),
    Operation(read_state, lambda cache: ((cache, _SLOTS), {"layer": 0}), entries=(StateEntry,)),
)
