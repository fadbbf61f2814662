"""Reading and storing the states of requests, such as those of recurrent layers, and decode steps of the latter."""

import itertools
from collections.abc import Mapping
from typing import Any

import jax
from jax.typing import ArrayLike

from jaxkv import data_checks
from jaxkv.cache import KVCache
from jaxkv.checks import Dims, check_cache
from jaxkv.dispatch import Implementations, run
from jaxkv.ops.operation import Operation
from jaxkv.ops.samples import BATCH, array
from jaxkv.ops.writes import checked_slots, entries_of
from jaxkv_kernels import calls
from jaxkv_kernels.delta_rule import CONV, DELTA
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


def decode_delta_rule(
    x: ArrayLike,
    decay: ArrayLike,
    rate: ArrayLike,
    conv_weight: ArrayLike,
    cache: KVCache[StateEntry],
    read_slots: ArrayLike,
    write_slots: ArrayLike,
    *,
    layer: ArrayLike,
    implementation: Implementations | None = None,
) -> tuple[jax.Array, KVCache[StateEntry]]:
    """One token of each request through the gated delta rule, with the short convolution before it.

    The layers of Gated DeltaNet (arXiv 2412.06464; Qwen3-Next) and Kimi Delta Attention (arXiv 2510.26692; Kimi Linear)
    decode by it.  The channels C of `x` are queries [G, K], keys [G, K] and values [H, V], one after the other; value
    head h has the query and key of head h // (H / G).  In float32, for each request and head:

        x = silu(the sum of W - 1 tokens of the state and x, each times its column of conv_weight)
        q, k = q / |q| / sqrt(K), k / |k|, where |q|^2 = sum of q^2 + 1e-6
        S = exp(decay) S
        S = S + k (rate (v - S' k))'
        out = S' q

    Args:
      x: [T, C], bfloat16, float16 or float32, one token per request, before the convolution.
      decay: float32 [T, H, 1], the logarithms of the heads' decays; or [T, H, K], one per value of a key (Kimi Delta
        Attention).
      rate: float32 [T, H], the rates at which states are corrected.
      conv_weight: [C, W], bfloat16, float16 or float32.  The new token has the last column.
      cache: a cache of states with the arrays "conv" [W - 1, C], the tokens before the new one in order, and "delta"
        [H, K, V].  Both may have any of the dtypes of states.
      read_slots: int32 [T], the slot of the state before each token.  It is 0 if the slot is negative or past the
        cache, as for a new request.
      write_slots: int32 [T], the slot of the state after each token, which may be that of the state before.  Tokens
        whose slot is negative or past the cache are padding: their output is 0, and nothing is stored.  No token may
        write a slot that another one reads or writes: either may then have a mixture of states.
      layer: int, or traced int32 scalar.  If a traced layer is outside the cache, all tokens are padding.
      implementation: None (the best that supports the call), a name, or a sequence of names.

    Returns:
      The outputs, float32 [T, H, V], and the cache with the new states stored and every other byte as it was; updated
      in place if `cache` is donated.

    Raises:
      ValueError: a shape, dtype or static layer is wrong, or the cache has other arrays.
    """
    dims = _delta_rule_dims(check_cache(cache, StateEntry))
    dims.check("x", x, "T C")
    per_head = getattr(decay, "shape", ())[-1:] == (1,)
    dims.check("decay", decay, "T H 1" if per_head else "T H K", ("float32",))
    dims.check("rate", rate, "T H", ("float32",))
    dims.check("conv_weight", conv_weight, "C W")
    read_slots, layer = checked_slots("read_slots", read_slots, layer, cache, dims, written=False)
    write_slots, layer = checked_slots("write_slots", write_slots, layer, cache, dims)
    if data_checks.checking():
        data_checks.check_read_apart("read_slots", read_slots, write_slots)
    arrays: dict[str, Any] = {"x": x, "decay": decay, "rate": rate, "conv_weight": conv_weight}
    arrays |= {"read_slots": read_slots, "write_slots": write_slots}
    out, buffer = run(calls.DecodeDeltaRule(**entries_of(cache), **arrays, layer=layer), implementation)
    return out, KVCache(buffer, cache.layout)


def _delta_rule_dims(entry: StateEntry) -> Dims:
    """The lengths of the axes of a call on states of `entry`; ValueError if these are not states of the rule."""
    shapes = entry.shapes
    if set(shapes) != {CONV, DELTA} or len(shapes[CONV]) != 2 or len(shapes[DELTA]) != 3:
        raise ValueError(
            f"`cache` stores {entry}: expected states with the arrays {CONV!r} [W - 1, C] and {DELTA!r} [H, K, V]"
        )
    (taps, channels), (heads, keys, values) = shapes[CONV], shapes[DELTA]
    key_heads, rest = divmod(channels - heads * values, 2 * keys)
    if rest or key_heads < 1 or heads % key_heads:
        raise ValueError(
            f"`cache` has states with {channels} channels and {heads} heads of {keys} x {values}: expected 2 G K + H V "
            f"= {2 * keys} G + {heads * values} channels, with a divisor G of the {heads} heads"
        )
    of_entry = "that of the states"
    sizes = {"C": channels, "W": taps + 1, "H": heads, "K": keys, "V": values}
    return Dims(**{"1": (1, "one per head")}, **{axis: (size, of_entry) for axis, size in sizes.items()})


_SLOTS = array("int32", BATCH)


def _sample_write(cache):
    states = {name: array("float32", BATCH, *shape) for name, shape in cache.layout.entry.shapes.items()}
    return (cache, states, _SLOTS), {"layer": 0}


def _sample_delta_rule(cache):
    (heads, *_), (taps, channels) = (cache.layout.entry.shapes[name] for name in (DELTA, CONV))
    gates = array("float32", BATCH, heads, 1), array("float32", BATCH, heads)
    weight = array("bfloat16", channels, taps + 1)
    return (array("bfloat16", BATCH, channels), *gates, weight, cache, _SLOTS, _SLOTS), {"layer": 0}


OPERATIONS = (
    Operation(write_state, _sample_write, entries=(StateEntry,)),
    Operation(read_state, lambda cache: ((cache, _SLOTS), {"layer": 0}), entries=(StateEntry,)),
    Operation(decode_delta_rule, _sample_delta_rule, entries=(StateEntry,)),
)
