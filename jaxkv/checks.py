"""Static checks of arguments, made once before dispatch.  Kernels assume valid arguments."""

from collections.abc import Callable
from typing import Any, cast, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from jaxkv.cache import KVCache
from jaxkv.layout.layout import CacheLayout
from jaxkv_kernels.addressing import MAX_SLOTS
from jaxkv_kernels.formats.entries import Entry
from jaxkv_kernels.integers import as_int

FLOATS = ("bfloat16", "float16", "float32")
QUERIES = (*FLOATS, "float8_e4m3fn")
"""The dtypes of the queries of attention and of the indexer."""
MAY_BE_EMPTY = ("T", "n", "P")
"""Axes that may have length 0: T new tokens, n blocks and P values of a rotary part.  All other axes must have at least
one element, but for those that an operation allows to be empty."""


class Dims:
    """The lengths of axes by letter.  The first array with an axis sets its length; later arrays must have the same.

    `known` lengths are set from the start.  Each comes with a phrase that explains in messages where it comes from.
    Besides axes `MAY_BE_EMPTY`, those of `may_be_empty` may have length 0.
    """

    def __init__(self, *may_be_empty: str, **known: tuple[int, str]):
        self._may_be_empty = (*MAY_BE_EMPTY, *may_be_empty)
        self._lengths = {name: length for name, (length, _) in known.items()}
        self._sources = {name: source for name, (_, source) in known.items()}

    def __getitem__(self, letter: str) -> int:
        return self._lengths[letter]

    def check(self, name: str, array: Any, axes: str, dtypes: tuple[str, ...] = FLOATS) -> jax.Array:
        """`array` as it is; ValueError unless it has the axes `axes` ("B Q H R") and one of `dtypes`."""
        if not hasattr(array, "shape") or not hasattr(array, "dtype"):
            raise ValueError(f"`{name}` is a {type(array).__name__}: expected an array [{axes.replace(' ', ', ')}]")
        letters = axes.split()
        shape = tuple(array.shape)
        want = [str(self._lengths[x]) if x in self._lengths else x for x in letters]
        problem = f"`{name}` has shape {shape}: expected [{', '.join(letters)}] = [{', '.join(want)}]"
        if len(shape) != len(letters):
            raise ValueError(problem)
        for letter, length in zip(letters, shape, strict=True):
            if self._lengths.setdefault(letter, length) != length:
                raise ValueError(f"{problem} ({letter} is {self._sources[letter]})")
            self._sources.setdefault(letter, f"that of `{name}`")
            if not length and not letter.startswith(self._may_be_empty):
                raise ValueError(f"{problem}, with {letter} at least 1")
        if str(array.dtype) not in dtypes:
            raise ValueError(f"`{name}` has dtype {array.dtype}: expected {' or '.join(dtypes)}")
        return array

    def check_ints(self, name: str, array: Any, axes: str) -> None:
        """ValueError unless `array` has the axes `axes` and an integer dtype."""
        self.check(name, array, axes, (str(array.dtype),) if _is_integer(array) else ("int32",))

    def check_running_sum(self, name: str, array: Any) -> None:
        """ValueError unless `array` holds integers [B + 1]."""
        Dims(**{"B+1": (self["B"] + 1, "one more than the rows of `block_tables`")}).check_ints(name, array, "B+1")


def _is_integer(array: Any) -> bool:
    return hasattr(array, "dtype") and jnp.issubdtype(array.dtype, jnp.integer)


@overload
def int32(array: ArrayLike) -> jax.Array: ...
@overload
def int32(array: None) -> None: ...
def int32(array: Any) -> Any:
    """Integers as int32.  Values out of range saturate, because wrapped values could be valid slots."""
    if array is None or isinstance(array, jax.ShapeDtypeStruct):
        return array
    limits = np.iinfo(np.int32)
    if isinstance(array, np.ndarray):
        return jnp.asarray(np.clip(array, limits.min, limits.max).astype(np.int32))
    if array.dtype == jnp.int32:
        return array
    wide = jnp.iinfo(array.dtype)
    return jnp.clip(array, max(limits.min, wide.min), min(limits.max, wide.max)).astype(jnp.int32)


def computed[R](function: Callable[..., R], *args: Any) -> R:
    """`function(*args)`; only its shapes and dtypes if an argument is a `jax.ShapeDtypeStruct` (`explain`)."""
    described = any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(args))
    # As for kernels: the user's program may have stricter rules than JAX's default ones.
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        return jax.eval_shape(function, *args) if described else function(*args)


def running_sum(array: ArrayLike) -> jax.Array:
    """A running sum of lengths as int32, as kernels expect it: no element is below 0 or below an earlier one.

    A sum that falls counts as the largest before it, so that a request at which it falls is empty.
    """
    return computed(lambda array: lax.cummax(jnp.maximum(int32(array), 0)), array)


def check_cache[E: Entry](cache: KVCache, *kinds: type[E], name: str = "cache") -> E:
    """The entry of `cache`; ValueError unless it is a KVCache of one of `kinds` with a buffer that fits its layout.

    Messages call it `name`.
    """
    if not isinstance(cache, KVCache):
        raise ValueError(f"`{name}` is a {type(cache).__name__}: expected a KVCache")
    layout, buffer = cache.layout, cache.buffer
    if not isinstance(layout.entry, kinds):
        wanted = " or ".join(kind.__name__ for kind in kinds)
        raise ValueError(f"`{name}` stores {layout.entry}: this operation takes a cache of {wanted}")
    parts: dict[str, tuple[Any, int]] = {f"{name}.buffer": (buffer, layout.size)}
    if layout.value_size is not None:
        if not isinstance(buffer, tuple) or len(buffer) != 2:
            raise ValueError(f"`{name}.buffer` is {describe(buffer)}: expected the pair (keys, values) of its layout")
        keys, values = buffer
        parts = {f"{name}.buffer[0]": (keys, layout.size), f"{name}.buffer[1]": (values, layout.value_size)}
    for what, (array, size) in parts.items():
        if getattr(array, "shape", None) != (size,) or array.dtype != layout.dtype:
            raise ValueError(f"`{what}` is {describe(array)}: expected its layout's {layout.dtype}[{size}]")
    return cast(E, layout.entry)


def layout_of(cache: KVCache | CacheLayout) -> CacheLayout:
    """The layout of a cache, or `cache` itself if it is a layout; ValueError for anything else."""
    layout = cache.layout if isinstance(cache, KVCache) else cache
    if isinstance(layout, CacheLayout):
        return layout
    raise ValueError(
        f"`cache` is {describe(cache)}: expected the KVCache whose blocks the tables list, or its CacheLayout, such as "
        "packed[name] of a PackedLayout"
    )


def check_one_buffer(name: str, layout: CacheLayout) -> None:
    """ValueError if keys and values have an array each; messages call the layout's cache `name`."""
    if layout.value_size is not None:
        raise ValueError(
            f"`{name}` has keys and values in arrays of {layout.size} and {layout.value_size} elements: expected one "
            "buffer, because its blocks are moved, or divided over devices, as parts of one array"
        )


def mla_dims(cache: KVCache) -> Dims:
    """The axes of queries and new values for a cache of `MLAEntry`: R and P have the lengths of the entry's parts."""
    latent, rope = cache.layout.entry.sizes
    return Dims(R=(latent, "the entry's latent"), P=(rope, "the entry's rope"))


def layer_index(layer: Any, cache: KVCache, name: str = "layer") -> jax.Array:
    """`layer` as an int32 scalar array, checked by `index_below` the number of layers."""
    return index_below(name, layer, cache.layout.num_layers, "layers of the cache")


def index_below(name: str, value: Any, count: int, what: str) -> jax.Array:
    """`value` as an int32 scalar array.

    A value on the host must be an integer (not a bool) from 0 to `count` - 1.  Of a JAX array, only shape and dtype are
    checked, because it may be traced.

    Raises:
      ValueError: `value` is not an integer or is out of range; `what` names the counted things in the message.
    """
    expected = f"expected an int from 0 to {count - 1} ({count} {what}), or an int32 scalar"
    if hasattr(value, "dtype") and not isinstance(value, np.generic | np.ndarray):
        if not _is_integer(value) or value.shape != ():
            raise ValueError(f"`{name}` is {describe(value)}: {expected}")
        return int32(value)
    number = as_int(value)
    if number is None:
        raise ValueError(f"`{name}` is {value!r}: {expected}")
    if not 0 <= number < count:
        raise ValueError(f"`{name}` is {number}: {expected}")
    return jnp.int32(number)


def softmax_scale(scale: ArrayLike) -> jax.Array:
    """`scale` as a float32 scalar; ValueError unless it is a number."""
    return _floats("scale", scale)


def positive_scale(name: str, scale: ArrayLike) -> jax.Array:
    """`scale` as a float32 scalar; ValueError unless it is a positive number."""
    return _floats(name, scale, positive=True)


def static_scale(scale: Any) -> float:
    """`scale` as a Python float; ValueError unless it is a number that is finite in float32."""
    number = isinstance(scale, int | float | np.integer | np.floating) and not isinstance(scale, bool)
    if not number or not np.isfinite(in_float32(scale)):
        raise ValueError(f"`scale` is {scale!r}: expected a number, finite in float32 (it is static)")
    return float(scale)


def entry_scale(name: str, scale: Any, cache: KVCache, *, heads: bool = False) -> jax.Array | None:
    """The scale of entries, or of their keys or values, as float32; None for a format without a scale.

    `name` is that of the argument: "v_scale" is for values, which may have a format of their own.  The scale is a
    scalar or, with `heads`, also one per head [H], or one per token and head [num_blocks, block_size, H].
    ValueError if a scale is missing, or is passed for a format without one.
    """
    entry, count = cache.layout.entry, cache.layout.num_heads
    part = -1 if name == "v_scale" else 0
    format, of = entry.format_names[part], {"k_scale": "keys", "v_scale": "values"}
    stored = of[name] if len(entry.format_names) > 1 else "entries"
    if not entry.scaled[part]:
        if scale is not None:
            raise ValueError(
                f"`{name}` is {describe(scale)}: expected None, as {stored} of format {format!r} have no scale"
            )
        return None
    if scale is None:
        raise ValueError(
            f"`{name}` is None: expected a number, as {stored} of format {format!r} are stored divided by a scale"
        )
    shape, pages = getattr(scale, "shape", ()), cache.layout.pages
    tokens = pages.num_blocks, pages.block_size, count
    if heads and shape not in ((), (count,), tokens):
        raise ValueError(
            f"`{name}` has shape {shape}: expected a scalar, [H] = [{count}] with one scale per head, or "
            f"[num_blocks, block_size, H] = {[*tokens]} with one per token and head"
        )
    scale = _floats(name, scale, shape if heads else (), positive=True)
    return jnp.broadcast_to(scale, (count,)) if heads and shape == () and isinstance(scale, jax.Array) else scale


def query_scale(scale: Any, q: Any, heads: int) -> jax.Array | None:
    """The scale of queries `q` of e4m3 as float32, scalar or [Hq]; None if there is none.

    ValueError if it has another shape, or `q` another dtype.
    """
    if scale is None:
        return None
    if str(q.dtype) in FLOATS:
        raise ValueError(
            f"`q_scale` is {describe(scale)}: expected None, as queries of {q.dtype} have no scale (multiply "
            "`scale` by it)"
        )
    shape = getattr(scale, "shape", ())
    if shape not in ((), (heads,)):
        raise ValueError(f"`q_scale` has shape {shape}: expected a scalar, or [Hq] = [{heads}] with one scale per head")
    return _floats("q_scale", scale, shape, positive=True)


def _floats(name: str, value: Any, shape: tuple[int, ...] = (), positive: bool = False) -> jax.Array:
    """`value` as float32 of `shape`; ValueError unless it holds real numbers, finite and, if `positive`, above 0.

    Whether they are finite and positive is checked only for Python and NumPy numbers.
    """
    dtype = getattr(value, "dtype", None)
    if dtype is None:
        real = isinstance(value, int | float) and not isinstance(value, bool)
    else:
        real = jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)
    if not real or getattr(value, "shape", ()) != shape:
        raise ValueError(f"`{name}` is {describe(value)}: expected a number, or a float scalar array")
    if isinstance(value, jax.ShapeDtypeStruct):
        return cast(jax.Array, value)  # described, not computed: `explain`
    if isinstance(value, int | float | np.generic | np.ndarray):
        known = in_float32(value)
        if not np.all(np.isfinite(known)) or (positive and not np.all(known > 0)):
            raise ValueError(f"`{name}` is {value}: expected a {'positive ' * positive}number, finite in float32")
    return jnp.asarray(value, jnp.float32)


def in_float32(value: Any) -> np.ndarray:
    """A number rounded to float32: inf if it is too large, 0 if it is too small.

    Subnormal numbers (below 2**-126) also become 0, because devices flush them to 0; a division by one would return
    NaN.
    """
    with np.errstate(over="ignore", under="ignore"):
        found = np.asarray(value).astype(np.float32)
    return np.where(np.abs(found) < np.finfo(np.float32).tiny, np.float32(0), found)


def float_dtype(name: str, dtype: Any) -> jnp.dtype:
    """`dtype` as a jnp dtype; ValueError unless it is bfloat16, float16 or float32."""
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found is None or str(found) not in FLOATS:
        raise ValueError(f"`{name}` is {dtype!r}: expected one of {', '.join(FLOATS)}")
    return found


def positive_int(name: str, value: Any, *, below: int | None = 2**31) -> int:
    """`value` as a Python int; ValueError unless it is a positive integer and less than `below` (None for no limit)."""
    number = _static_int(value)
    if number is None or number < 1 or (below is not None and number >= below):
        limit = "" if below is None else f" below {below}"
        raise ValueError(f"`{name}` is {value!r}: expected a positive int{limit} (it is static)")
    return number


def _static_int(value: Any) -> int | None:
    """`value` as a Python int; None if it is not an integer, or an array that may be traced."""
    return None if isinstance(value, jax.Array) else as_int(value)


def static_bool(name: str, value: Any) -> bool:
    """`value` as a Python bool; ValueError unless it is one, or NumPy's."""
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"`{name}` is {value!r}: expected True or False (it is static)")
    return bool(value)


def window_of(
    window: Any, causal: Any, capacity: int, q_len: int | None = None, *, tree: bool = False
) -> tuple[int | None, int | None]:
    """`window` and `causal` as kernels expect them.

    Args:
      window: as in `decode_mla`.
      causal: as in `decode_mla`.
      capacity: the tokens of a block table.
      q_len: query tokens per request; None if requests may have any number.
      tree: whether a `tree_mask` replaces the causal mask.

    Returns:
      `window` and `ahead` of `jaxkv_kernels.calls.DecodeCall`: how many tokens a query token sees up to its own, and
      how many after it.  Each is None if it excludes no token: (None, None) are all tokens, and (None, 0) is a causal
      mask without a window.

    Raises:
      ValueError: `causal` is not a bool; `window` is not None, a pair of limits or, with a causal mask, a positive int.
    """
    causal = static_bool("causal", causal)
    left, right = (-1, -1) if window is None else _sides(window, causal)
    behind = left + 1 if 0 <= left < min(capacity, MAX_SLOTS) - 1 else None
    alone = behind is not None and q_len == 1  # no token comes after the only query token
    if (causal or alone) and not tree:
        return behind, 0
    # The query tokens are the last ones of their request: at most `q_len` - 1 tokens come after any of them.
    most = MAX_SLOTS if q_len is None else q_len - 1
    return behind, right if 0 <= right < most else None


def _sides(window: Any, causal: bool) -> tuple[int, int]:
    """The limits (left, right) of a window; -1 for no limit."""
    if isinstance(window, tuple):
        left, right = map(_static_int, window) if len(window) == 2 else (None, None)
        if left is not None and right is not None and min(left, right) >= -1:
            return left, right
    elif (tokens := _static_int(window)) is not None and tokens > 0:
        if causal:
            return tokens - 1, -1
        raise ValueError(
            f"`window` is {window}: expected None or a tuple (left, right), because with `causal=False` no token is "
            "the last one"
        )
    raise ValueError(
        f"`window` is {window!r}: expected a positive int, or a tuple (left, right) of ints, each 0 or more, or -1 for "
        "no limit (it is static)"
    )


def logit_cap_of(value: Any) -> float | None:
    """`value` as it is; ValueError unless it is None or a number that, like its inverse, is a normal float32."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and not (number and 2.0**-126 <= in_float32(value) <= 2.0**126):
        raise ValueError(
            f"`logit_cap` is {value!r}: expected None, or a positive number (static) from 2**-126 to 2**126, so that "
            "float32 holds it and its inverse"
        )
    return value


def positive_number(name: str, value: Any) -> float | None:
    """`value` as it is; ValueError unless it is None or a positive number (static) that float32 holds."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and not (number and 0 < in_float32(value) < float("inf")):
        raise ValueError(f"`{name}` is {value!r}: expected None, or a positive number (static) that float32 holds")
    return value


def block_ids(name: str, ids: Any, num_blocks: int, *, distinct: bool = False) -> np.ndarray:
    """`ids` as int32 [n] on the host; ValueError unless all are valid blocks and, with `distinct`, no two are equal."""
    found = np.asarray(ids)
    if found.ndim != 1 or (found.size and not np.issubdtype(found.dtype, np.integer)):
        raise ValueError(f"`{name}` is {describe(ids)}: expected block ids, ints [n]")
    outside = found[(found < 0) | (found >= num_blocks)]
    if outside.size:
        raise ValueError(f"`{name}` contains {outside[0]}: expected block ids of the cache, from 0 to {num_blocks - 1}")
    some, counts = np.unique(found, return_counts=True)
    if distinct and (counts > 1).any():
        raise ValueError(f"`{name}` contains {some[counts > 1][0]} more than once: expected distinct blocks")
    return found.astype(np.int32)


def describe(value: Any) -> str:
    """`value` for a message: arrays by dtype and shape."""
    return f"{value.dtype}{list(value.shape)}" if hasattr(value, "dtype") else repr(value)
