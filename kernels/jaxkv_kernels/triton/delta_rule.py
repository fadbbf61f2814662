"""A decode step of the gated delta rule, whose states are updated where they lie in the cache.

It computes what `jaxkv_kernels/delta_rule.py` defines, in two kernels:

    convolve   one program per request and COLUMNS channels
        load the last W - 1 tokens and the new one | convolution, SiLU | store its channels, and the last W - 1 tokens

    advance    one program per request, head and tile of `columns` values
        load the tile [K, columns] of the state, q, k, v | divide q and k by their lengths | decay, update |
        store the tile | output

A program of `advance` reads its tile once, keeps it in registers, and writes it once.  No other program touches that
tile, so that a state may be updated in place or move to another slot.  The convolution has a kernel of its own because
all tiles of a head need the channels of its key: no program could replace the tokens before them in place while others
may still read them.

What bounds them: memory bandwidth.  In Qwen3-Next, the matrices of the rule are 95 % of the bytes of a state, and the
tokens of the convolution are the rest.  A tile of 128 x 32 values takes 32 registers per thread, and shared memory only
for the sums over K of the warps.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxkv_kernels.calls import DecodeDeltaRule
from jaxkv_kernels.delta_rule import CONV, DELTA, NORM_EPS
from jaxkv_kernels.formats.states import ALIGNMENT
from jaxkv_kernels.triton.arithmetic import as_float32, rounded
from jaxkv_kernels.triton.language import tl, triton
from jaxkv_kernels.triton.launch import element_type, launch
from jaxkv_kernels.triton.tiles import in_bytes, slots_of, token_address
from jaxkv_kernels.tuning import configuration, require

MOST_KEYS, MOST_TAPS = 256, 8
"""Limits of K and W, so that a tile fits in registers."""
CHANNELS, WARPS = 512, 4
"""Channels and warps per program of `convolve`: with four taps, 16 values per thread."""


@dataclass(frozen=True)
class DeltaRuleConfig:
    """The tiles of `advance`.

    With the defaults, 64 requests with Qwen3-Next's sizes take 0.081 ms on an H200, 0.075 of them in `advance`; a copy
    of the states takes 0.066.  No others have been timed.

    Raises:
      ValueError: a number is not a power of two.
    """

    SEARCH: ClassVar[dict[str, tuple[Any, ...]]] = {"columns": (8, 16, 32, 64, 128), "warps": (1, 2, 4, 8)}

    columns: int = 32
    """Values of a head per program.  A row of 32 float32 values is a line of 128 bytes of the L2 cache."""
    warps: int = 4

    def __post_init__(self):
        for name in ("columns", "warps"):
            number = getattr(self, name)
            require(number > 0 and number & (number - 1) == 0, self, name, "a power of two")


@dataclass(frozen=True)
class Sizes:
    """The sizes of a layer, and where the arrays of a state lie.  Kernels receive it as a constant."""

    channels: int
    """C."""
    taps: int
    """W."""
    key_heads: int
    """G."""
    heads: int
    """H."""
    keys: int
    """K."""
    values: int
    """V."""
    key_rows: int
    """K as a power of two, and likewise W."""
    tap_rows: int
    conv: int
    """Bytes from the start of a state to each array."""
    delta: int
    conv_padding: int
    """Values of the padding after each array."""
    delta_padding: int
    conv_type: tl.dtype
    delta_type: tl.dtype

    @classmethod
    def of(cls, call: DecodeDeltaRule) -> "Sizes":
        """Those of a call."""
        fields = {field.name: field for field in call.entry.fields()}
        padding = {
            name: -fields[name].nbytes % ALIGNMENT // jnp.dtype(dtype).itemsize for name, _, dtype in call.entry.arrays
        }
        types = {name: element_type(dtype) for name, _, dtype in call.entry.arrays}
        channels, taps = call.conv_weight.shape
        heads, keys, values = call.entry.shapes[DELTA]
        return cls(
            channels=channels,
            taps=taps,
            key_heads=(channels - heads * values) // (2 * keys),
            heads=heads,
            keys=keys,
            values=values,
            key_rows=triton.next_power_of_2(keys),
            tap_rows=triton.next_power_of_2(taps),
            conv=fields[CONV].offset,
            delta=fields[DELTA].offset,
            conv_padding=padding[CONV],
            delta_padding=padding[DELTA],
            conv_type=types[CONV],
            delta_type=types[DELTA],
        )


def unsupported_reasons(call: DecodeDeltaRule) -> Iterator[str]:
    """Reasons against a call."""
    taps, keys = call.conv_weight.shape[1], call.entry.shapes[DELTA][1]
    if keys > MOST_KEYS:
        yield f"keys of {keys} values: supports at most {MOST_KEYS}"
    if taps > MOST_TAPS:
        yield f"a convolution of {taps} tokens: supports at most {MOST_TAPS}"
    pages = in_bytes(call.pages, call.buffer.dtype.itemsize)
    step = gcd(pages.offset, pages.layer_stride, pages.block_stride, pages.token_stride)
    size = max(jnp.dtype(dtype).itemsize for _, _, dtype in call.entry.arrays)
    if step % size:
        yield f"states at multiples of {step} bytes: supports multiples of {size}, the size of their values"


@jax.jit
def decode_delta_rule(call: DecodeDeltaRule) -> tuple[jax.Array, jax.Array]:
    """The outputs, and the buffer with the next states; tokens whose slot to write is outside the cache are skipped."""
    buffer, sizes, config = call.buffer, Sizes.of(call), configuration(DeltaRuleConfig())
    count, shape = call.x.shape[0], (call.x.shape[0], sizes.heads, sizes.values)
    if not count:
        return jnp.zeros(shape, jnp.float32), buffer
    pages, layer = in_bytes(call.pages, buffer.dtype.itemsize), jnp.reshape(call.layer, (1,))
    slots = call.read_slots, call.write_slots, layer
    columns = min(CHANNELS, triton.next_power_of_2(sizes.channels))
    tiles = triton.cdiv(sizes.channels, columns)
    buffer, mixed = launch(
        _convolve, (call.x, call.conv_weight, *slots), (jax.ShapeDtypeStruct(call.x.shape, jnp.float32),),
        updated=(buffer,), grid=(count * tiles,), warps=WARPS,
        PAGES=pages, SIZES=sizes, COLUMNS=columns, TILES=tiles,
    )  # fmt: skip
    columns = min(config.columns, triton.next_power_of_2(sizes.values))
    tiles = triton.cdiv(sizes.values, columns)
    buffer, out = launch(
        _advance, (mixed, call.decay, call.rate, *slots), (jax.ShapeDtypeStruct(shape, jnp.float32),),
        updated=(buffer,), grid=(count * sizes.heads * tiles,), warps=config.warps,
        PAGES=pages, SIZES=sizes, COLUMNS=columns, TILES=tiles,
        PER_CHANNEL=call.decay.shape[-1] > 1, EPS=NORM_EPS, SCALE=sizes.keys**-0.5,
    )  # fmt: skip
    return out, buffer


@triton.jit
def _slots(read_slots, write_slots, layers, request, PAGES: tl.constexpr):
    """The layer of the call, the slots of a request, and whether each is in the cache."""
    layer, source, target = tl.load(layers), tl.load(read_slots + request), tl.load(write_slots + request)
    count = slots_of(layer, PAGES)
    return layer, source, (source >= 0) & (source < count), target, (target >= 0) & (target < count)


@triton.jit
def _array(buffer, layer, slot, PAGES: tl.constexpr, FIRST: tl.constexpr, TYPE: tl.constexpr):
    """A pointer to the first value of an array of a state."""
    return (token_address(buffer, layer, slot, 0, PAGES) + FIRST).to(tl.pointer_type(TYPE))


@triton.jit
def _store_padding(array, program, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """Program 0 of an array of a state stores COUNT zeros after its FIRST values, as `write_state` does."""
    if COUNT > 0:
        place = tl.arange(0, 8)
        mask = place < tl.where(program == 0, COUNT, 0)
        tl.store(array + FIRST + place, tl.zeros((8,), array.dtype.element_ty), mask=mask)


@triton.jit
def _convolve(
    x, weight, read_slots, write_slots, layers, buffer, mixed,
    PAGES: tl.constexpr, SIZES: tl.constexpr, COLUMNS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0) // TILES
    layer, source, begun, target, known = _slots(read_slots, write_slots, layers, request, PAGES)
    channel = tl.program_id(0) % TILES * COLUMNS + tl.arange(0, COLUMNS)
    inside = channel < SIZES.channels
    row = request.to(tl.int64) * SIZES.channels + channel
    if known:
        # Rows are tokens; the last one is new.
        tap = tl.arange(0, SIZES.tap_rows)[:, None]
        place = tap * SIZES.channels + channel[None, :]
        held = _array(buffer, layer, source, PAGES, SIZES.conv, SIZES.conv_type) + place
        before = tl.where(begun, SIZES.taps - 1, 0)  # rows of the state that are loaded
        tokens = as_float32(tl.load(held, mask=(tap < before) & inside[None, :], other=0))
        new = as_float32(tl.load(x + row, mask=inside, other=0))
        tokens = tl.where(tap == SIZES.taps - 1, new[None, :], tokens)
        weights = tl.load(
            weight + channel[None, :] * SIZES.taps + tap, mask=(tap < SIZES.taps) & inside[None, :], other=0
        )
        summed = tl.sum(tokens * as_float32(weights), axis=0)
        tl.store(mixed + row, summed / (1 + tl.exp(-summed)), mask=inside)
        # The tokens move up by a row, in place: all threads must have loaded theirs.
        tl.debug_barrier()
        moved = _array(buffer, layer, target, PAGES, SIZES.conv, SIZES.conv_type)
        kept = (tap > 0) & (tap < SIZES.taps) & inside[None, :]
        tl.store(moved + (place - SIZES.channels), rounded(tokens, SIZES.conv_type), mask=kept)
        _store_padding(moved, tl.program_id(0) % TILES, (SIZES.taps - 1) * SIZES.channels, SIZES.conv_padding)
    else:
        tl.store(mixed + row, tl.zeros((COLUMNS,), tl.float32), mask=inside)


@triton.jit
def _advance(
    mixed, decay, rate, read_slots, write_slots, layers, buffer, out,
    PAGES: tl.constexpr, SIZES: tl.constexpr, COLUMNS: tl.constexpr, TILES: tl.constexpr,
    PER_CHANNEL: tl.constexpr, EPS: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) // TILES
    request, head = row // SIZES.heads, row % SIZES.heads
    layer, source, begun, target, known = _slots(read_slots, write_slots, layers, request, PAGES)
    column = tl.program_id(0) % TILES * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < SIZES.values
    result = out + row.to(tl.int64) * SIZES.values + column
    if known:
        key = tl.arange(0, SIZES.key_rows)
        wanted = key < SIZES.keys
        place = head.to(tl.int64) * (SIZES.keys * SIZES.values) + (key[:, None] * SIZES.values + column[None, :])
        held = _array(buffer, layer, source, PAGES, SIZES.delta, SIZES.delta_type) + place
        before = tl.where(begun, SIZES.keys, 0)  # rows of the state that are loaded
        state = as_float32(tl.load(held, mask=(key < before)[:, None] & inside[None, :], other=0))

        channels = mixed + request.to(tl.int64) * SIZES.channels
        first = head // (SIZES.heads // SIZES.key_heads) * SIZES.keys
        q = tl.load(channels + first + key, mask=wanted, other=0)
        k = tl.load(channels + SIZES.key_heads * SIZES.keys + first + key, mask=wanted, other=0)
        v = tl.load(channels + 2 * SIZES.key_heads * SIZES.keys + head * SIZES.values + column, mask=inside, other=0)
        q *= tl.rsqrt(tl.sum(q * q, axis=0) + EPS) * SCALE
        k *= tl.rsqrt(tl.sum(k * k, axis=0) + EPS)

        if PER_CHANNEL:
            state *= tl.exp(tl.load(decay + row.to(tl.int64) * SIZES.keys + key, mask=wanted, other=0))[:, None]
        else:
            state *= tl.exp(tl.load(decay + row))
        change = tl.load(rate + row) * (v - tl.sum(k[:, None] * state, axis=0))
        state += k[:, None] * change[None, :]
        updated = _array(buffer, layer, target, PAGES, SIZES.delta, SIZES.delta_type)
        tl.store(updated + place, rounded(state, SIZES.delta_type), mask=wanted[:, None] & inside[None, :])
        tl.store(result, tl.sum(q[:, None] * state, axis=0), mask=inside)
        program = tl.program_id(0) % (SIZES.heads * TILES)
        _store_padding(updated, program, SIZES.heads * SIZES.keys * SIZES.values, SIZES.delta_padding)
    else:
        tl.store(result, tl.zeros((COLUMNS,), tl.float32), mask=inside)
