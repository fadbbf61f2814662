"""`calibrate`: scales of cached entries from the values that prompts produce."""

import math
import operator
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxkv.cache import KVCache
from jaxkv.models.cache_groups import MAIN
from jaxkv.models.config import GQA
from jaxkv.models.decoder import final_norm, forward, output
from jaxkv.models.model import Model
from jaxkv.models.speculative import mtp_forward
from jaxkv.models.weights import entry_scales
from jaxkv.ops.gathers import gather_kv, gather_mla
from jaxkv_kernels.addressing import one_array
from jaxkv_kernels.formats.bits import FP8_MAX, power_of_two_scale
from jaxkv_kernels.formats.format import unquantised

CHUNK = 256
"""Tokens of a prompt that run at once."""
HEADROOM = 2
"""How many times larger than all observed values an entry may be before it saturates.

It costs no precision: e4m3 has the same relative precision from 448 down to 2**-6."""


def calibrate(model: Model, prompts: Sequence[Sequence[int]], *, powers_of_two: bool = True) -> Model:
    """The model with scales of cached entries that fit the entries of `prompts`.

    Runs the prompts with unquantised entries and takes the largest magnitude of each layer, for keys and values (GQA)
    of each KV head.  A scale is such that values of twice that magnitude do not saturate; it is the smallest such power
    of two by default, because then all readers of the entries agree on them bit for bit.  The scale of a layer or head
    whose entries are all 0 is 1.

    The entries of an existing cache were stored with other scales: make a new cache.

    Args:
      model: from `load`, with an entry format that has scales (`fp8`), on any devices.
      prompts: token ids, at least one per prompt.  A few hundred tokens of text like that to be served are enough,
        because the scale depends on the largest values only.
      powers_of_two: whether scales are powers of two; otherwise they are twice the largest magnitude / 448.

    Returns:
      The model with the same weights, and other scales.

    Raises:
      TypeError: a token id is not an integer.
      ValueError: the entry format has no scales, the model has recurrent layers, `prompts` or a prompt is empty, a
        token id is outside the vocabulary, or entries of a layer are inf or NaN.
    """
    if not model.entry.codec.scaled:
        raise ValueError(
            f"`model` has entries of format {model.entry_format!r}, which has no scales: expected 'fp8'; pass "
            "`entry_format` to `load`"
        )
    if model.config.recurrent is not None:
        raise ValueError("`model` has recurrent layers: calibration supports models with attention in all layers")
    checked = [_checked(model, i, prompt) for i, prompt in enumerate(prompts)]
    if not checked:
        raise ValueError("`prompts` is empty: expected one prompt or more")
    largest = {}
    for name, found in _largest(model, checked).items():
        if not np.isfinite(found).all():
            layer = int(np.argwhere(~np.isfinite(found))[0][0])
            raise ValueError(f"`prompts`: entries of layer {layer} are inf or NaN, so they have no scale")
        largest[name] = _scale(found, powers_of_two)
    placed = entry_scales.placed(largest, model.parallel)
    return replace(model, params={**model.params, "entry_scales": placed})


def _scale(largest: np.ndarray, powers_of_two: bool) -> np.ndarray:
    """Scales float32 for the magnitudes `largest`."""
    smallest = float(np.finfo(np.float32).tiny)
    if powers_of_two:
        scale = power_of_two_scale(jnp.asarray(HEADROOM * largest), round(math.log2(smallest)))[0]
    else:
        scale = np.maximum(HEADROOM * largest / np.float32(FP8_MAX), np.float32(smallest))
    return np.where(largest > 0, np.asarray(scale), np.float32(1))


def _checked(model: Model, number: int, prompt: Sequence[int]) -> list[int]:
    tokens, vocabulary = [operator.index(token) for token in prompt], model.config.vocab_size
    outside = [token for token in tokens if not 0 <= token < vocabulary]
    if not tokens or outside:
        problem = f"has token id {outside[0]}" if outside else "is empty"
        raise ValueError(f"`prompts[{number}]` {problem}: expected one or more token ids from 0 to {vocabulary - 1}")
    return tokens


def _largest(model: Model, prompts: list[list[int]]) -> dict[str, np.ndarray]:
    """The largest magnitudes of entries, by the names and in the shapes of the model's scales."""
    plain = replace(model, entry_format=unquantised(model.dtype), params={**model.params, "entry_scales": {}})
    # Each device that has requests of its own runs other prompts, and needs as many rows as the others.
    rows = model.parallel.divisions_of_rows
    tables, blocks = _tables(plain, max(map(len, prompts)))
    cache = plain.cache(blocks)
    cache = jax.device_put(cache, one_array(cache.buffer).sharding)
    held = {name: np.tile(table, (rows, 1)) for name, table in tables.items()}
    advance = jax.jit(_advance, donate_argnums=1)
    magnitudes = jax.jit(model.parallel.per_device(partial(_magnitudes, plain)))
    found: dict[str, np.ndarray] = {}
    for first in range(0, len(prompts), rows):
        group = prompts[first : first + rows]
        for start in range(0, max(map(len, group)), CHUNK):
            cache = advance(plain, cache, *_chunk(group, start, rows), held if len(held) > 1 else held[MAIN])
        # Entries of earlier, longer prompts remain in the cache.  They count anyway.
        for name, each in magnitudes(cache, tables).items():
            # [n, layers, heads] of n caches, which hold different tokens or heads, or one that all devices have.
            each, attention = np.asarray(each), model.config.attention
            if not isinstance(attention, GQA):
                each = each.max(axis=(0, 2))
            elif model.num_kv_heads < attention.num_kv_heads:
                each = np.moveaxis(each, 0, 1).reshape(each.shape[1], -1)
            else:
                each = each.max(axis=0)
            found[name] = np.maximum(each, found.get(name, 0))
    return found


def _tables(model: Model, tokens: int) -> tuple[dict[str, np.ndarray], int]:
    """The block tables of a request of `tokens` tokens, int32 [M] by name, and how many blocks they have together."""
    layout: Any = model.layout(1)
    tables, first = {}, 0
    for name in model.tables:
        size = model.usual_block_size if name == MAIN else layout.tables[name].block_size
        end = first + math.ceil(tokens / size)
        tables[name], first = np.arange(first, end, dtype=np.int32), end
    return tables, first


def _chunk(prompts: list[list[int]], start: int, rows: int) -> tuple[np.ndarray, ...]:
    """Tokens, the tokens after them (-1 if unknown), lengths and slots of prompts from the position `start` on."""
    tokens = np.zeros((rows, CHUNK), np.int32)
    following, slots = np.full_like(tokens, -1), np.full_like(tokens, -1)
    lengths = np.zeros(rows, np.int32)
    for row, prompt in enumerate(prompts):
        new = np.asarray(prompt[start : start + CHUNK], np.int32)
        if len(new):
            after = np.asarray(prompt[start + 1 : start + CHUNK + 1], np.int32)
            first = CHUNK - len(new)
            tokens[row, first:], following[row, first : first + len(after)] = new, after
            slots[row, first:] = start + np.arange(len(new))
            lengths[row] = start + len(new)
    return tokens, following, lengths, slots


def _advance(model: Model, cache: KVCache, tokens, following, seq_lens, slots, block_tables) -> KVCache:
    """Stores the entries of a chunk, those of the MTP layer included."""
    cache, x = forward(model, cache, tokens, seq_lens, block_tables, slots)
    if "mtp" in model.params:
        hidden = final_norm(model, x)
        last = output(model, hidden[:, -1:]).argmax(axis=-1).astype(jnp.int32)
        following = jnp.where(following < 0, last, following)
        cache, _ = mtp_forward(model, cache, hidden, following, seq_lens, block_tables, slots)
    return cache


def _magnitudes(model: Model, cache: KVCache, tables) -> dict[str, jax.Array]:
    """The largest magnitudes in one device's cache, float32 [1, layers, heads], by the names of scales."""
    view, table = model.windowed_view(cache)
    first, second = _magnitudes_of_group(model, cache, tables[MAIN])
    if table != MAIN:  # the layers with a window follow those without
        both = zip((first, second), _magnitudes_of_group(model, view, tables[table]), strict=True)
        attention: Any = model.config.attention
        full = [layer for layer in range(model.num_cache_layers) if layer not in attention.windowed]
        order = np.argsort([*full, *attention.windowed])
        first, second = (jnp.concatenate(parts)[order] for parts in both)
    first, second = first[None], second[None]
    latent = cache.layout.entry.one_head
    return {"kv_scale": jnp.maximum(first, second)} if latent else {"k_scale": first, "v_scale": second}


def _magnitudes_of_group(model: Model, cache: KVCache, table) -> list[jax.Array]:
    """The largest magnitudes in the blocks `table` of a group: of both parts of entries, float32 [layers, heads]."""
    tokens = table.size * cache.layout.block_size
    options = {"total": tokens, "dtype": jnp.float32, "implementation": model.implementation}
    gather = gather_mla if cache.layout.entry.one_head else gather_kv

    def of_layer(layer):
        parts = gather(cache, table[None], jnp.asarray([0, tokens], jnp.int32), layer=layer, **options)
        return [jnp.abs(part).max(axis=(0, -1)).reshape(-1) for part in parts]

    return lax.map(of_layer, jnp.arange(cache.layout.num_layers, dtype=jnp.int32))
