"""Storing and reading states at slots of a layer, with a kernel for each array of the entry.

A program moves one chunk of an array of one state, at most CHUNK bytes, as words.  Values are not converted, so that
every bit pattern stays as it is.  The padding after an array, to 16 bytes, is stored as zeros.

What bounds them: memory bandwidth.  A chunk is 64 bytes per thread, 16 registers, and takes no shared memory.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd

import jax
import jax.numpy as jnp

from jaxkv_kernels.addressing import Pages
from jaxkv_kernels.calls import ReadState, WriteState
from jaxkv_kernels.formats.states import ALIGNMENT, StateEntry
from jaxkv_kernels.triton.blocks import CHUNK, RUN_LIMIT, WARPS, WORDS
from jaxkv_kernels.triton.language import tl, triton
from jaxkv_kernels.triton.launch import launch
from jaxkv_kernels.triton.tiles import in_bytes, slots_of, token_address


def unsupported_reasons(call: WriteState | ReadState) -> Iterator[str]:
    """Reasons against a call that moves states."""
    if call.entry.nbytes > RUN_LIMIT:
        yield f"states of {call.entry.nbytes} bytes: supports at most {RUN_LIMIT}"


@dataclass(frozen=True)
class StateArray:
    """Where an array of a state lies.  Kernels receive it as a constant."""

    first: int
    """Bytes from the start of the state."""
    length: int
    """Words of the array."""
    padded: int
    """Words with the padding after them."""
    word: tl.dtype
    """The widest type to whose size all addresses are aligned."""
    chunk: int
    """The number of words that a program moves, a power of two."""

    @property
    def chunks(self) -> int:
        """Chunks per array."""
        return triton.cdiv(self.padded, self.chunk)


def state_arrays(entry: StateEntry, pages: Pages) -> dict[str, StateArray]:
    """The arrays of a state by name; strides of `pages` are in bytes."""
    found, steps = {}, (pages.offset, pages.layer_stride, pages.block_stride, pages.token_stride)
    for field in (field for field in entry.fields() if field.name in entry.shapes):
        word = gcd(8, field.nbytes, field.offset, *steps)
        padded = (field.nbytes + -field.nbytes % ALIGNMENT) // word
        chunk = min(CHUNK // word, triton.next_power_of_2(padded))
        found[field.name] = StateArray(field.offset, field.nbytes // word, padded, WORDS[word], chunk)
    return found


@jax.jit
def write_state(call: WriteState) -> jax.Array:
    """The buffer with states stored; slots outside the cache are skipped."""
    buffer, slots = call.buffer, call.slots
    if not slots.size:
        return buffer
    pages, layer = in_bytes(call.pages, buffer.dtype.itemsize), jnp.reshape(call.layer, (1,))
    arrays = state_arrays(call.entry, pages)
    for name, _, dtype in call.entry.arrays:
        array, values = arrays[name], call.states[name].astype(dtype)
        (buffer,) = launch(
            _store_array, (values, slots, layer), updated=(buffer,), grid=(slots.size * array.chunks,), warps=WARPS,
            PAGES=pages, ARRAY=array,
        )  # fmt: skip
    return buffer


@jax.jit
def read_state(call: ReadState) -> dict[str, jax.Array]:
    """States by name; those of slots outside the cache are 0."""
    buffer, slots, found = call.buffer, call.slots, {}
    if not slots.size:
        return {name: jnp.zeros((0, *shape), dtype) for name, shape, dtype in call.entry.arrays}
    pages, layer = in_bytes(call.pages, buffer.dtype.itemsize), jnp.reshape(call.layer, (1,))
    arrays = state_arrays(call.entry, pages)
    for name, shape, dtype in call.entry.arrays:
        result, array = jax.ShapeDtypeStruct((slots.size, *shape), jnp.dtype(dtype)), arrays[name]
        (found[name],) = launch(
            _load_array, (buffer, slots, layer), (result,), grid=(slots.size * array.chunks,), warps=WARPS,
            PAGES=pages, ARRAY=array,
        )  # fmt: skip
    return found


@triton.jit
def _chunk_of(slots, layers, PAGES: tl.constexpr, ARRAY: tl.constexpr):
    """The chunk of this program: its state, the state's layer and slot, whether it is in the cache, and the words."""
    chunk = tl.program_id(0)
    state = chunk // ARRAY.chunks
    layer, slot = tl.load(layers), tl.load(slots + state)
    known = (slot >= 0) & (slot < slots_of(layer, PAGES))
    return state, layer, slot, known, chunk % ARRAY.chunks * ARRAY.chunk + tl.arange(0, ARRAY.chunk)


@triton.jit
def _in_cache(buffer, layer, slot, PAGES: tl.constexpr, ARRAY: tl.constexpr):
    """A pointer to the first word of the array of a state in the cache."""
    return (token_address(buffer, layer, slot, 0, PAGES) + ARRAY.first).to(tl.pointer_type(ARRAY.word))


@triton.jit
def _in_row(rows, state, ARRAY: tl.constexpr):
    """A pointer to the first word of the array of a state in `rows`."""
    return rows.to(tl.pointer_type(ARRAY.word)) + state.to(tl.int64) * ARRAY.length


@triton.jit
def _store_array(rows, slots, layers, buffer, PAGES: tl.constexpr, ARRAY: tl.constexpr):
    state, layer, slot, known, word = _chunk_of(slots, layers, PAGES, ARRAY)
    if known:
        values = tl.load(_in_row(rows, state, ARRAY) + word, mask=word < ARRAY.length, other=0)
        tl.store(_in_cache(buffer, layer, slot, PAGES, ARRAY) + word, values, mask=word < ARRAY.padded)


@triton.jit
def _load_array(buffer, slots, layers, rows, PAGES: tl.constexpr, ARRAY: tl.constexpr):
    state, layer, slot, known, word = _chunk_of(slots, layers, PAGES, ARRAY)
    if known:
        values = tl.load(_in_cache(buffer, layer, slot, PAGES, ARRAY) + word, mask=word < ARRAY.length, other=0)
    else:
        values = tl.zeros(word.shape, ARRAY.word)
    tl.store(_in_row(rows, state, ARRAY) + word, values, mask=word < ARRAY.length)
