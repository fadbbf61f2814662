"""The truth, in NumPy: entry formats, written from their byte maps alone, and attention, from its definition."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

E4M3 = ml_dtypes.float8_e4m3fn
E5M2 = ml_dtypes.float8_e5m2
BF16 = ml_dtypes.bfloat16
PLAIN = {"bf16": BF16, "f16": np.float16, "f32": np.float32}


def to_e4m3(x):
    """Rounded to nearest even, saturating at 448."""
    return np.clip(x, -448, 448).astype(E4M3)


def tile_scales(x, floor_exponent, largest=448):
    """Powers of two [..., 1] for tiles x [..., n]: 2 ** ceil(log2(amax / largest)), at least 2 ** floor_exponent."""
    amax = np.abs(x.astype(np.float64)).max(axis=-1, keepdims=True)
    amax = np.where(np.isinf(amax), 2.0**128, amax)  # infinity counts as the power of two after the largest float32
    mantissa, exponent = np.frexp(amax / largest)  # amax / largest = mantissa * 2 ** exponent, 0.5 <= mantissa < 1
    ceil = np.where(mantissa == 0.5, exponent - 1, exponent)
    scale = 2.0 ** np.maximum(np.where(amax == 0, floor_exponent, ceil), floor_exponent)
    return np.where(np.isnan(amax), np.nan, scale)


def as_bytes(x):
    """The bytes of the last axis."""
    return np.ascontiguousarray(x).view(np.uint8)


@dataclass(frozen=True)
class Truth:
    """How a format stores values, written from its byte map alone; tests of a new format add theirs to `FORMATS`."""

    encode: Callable[..., Iterable[np.ndarray]]
    """(float32 values [..., n_i], scales) to arrays whose bytes, side by side, are the entry."""
    decode: Callable[..., Iterable[np.ndarray]]
    """(field, sizes, scales) to float64 values; field(first, count, dtype) are `count` numbers at byte `first`."""
    page_parts: Callable[[Any], tuple[int, ...]] | None = None
    """Of a format whose pages are split, the bytes of an entry in each region of a page; one region if they are not."""
    planes: tuple[tuple[int, ...], ...] = ((0,), (1,))
    """Where keys and values lie apart: which of the arrays that `encode` returns belong to each."""


def encode(entry, parts, scales=(1.0, 1.0)):
    """Parts [..., n_i] to the bytes [..., nbytes] of an entry."""
    parts = [np.asarray(part, np.float32) for part in parts]
    if len(entry.format_names) == 1:
        return np.concatenate([as_bytes(piece) for piece in FORMATS[entry.format].encode(parts, scales)], axis=-1)
    runs = []
    for own, part, scale in zip(alone(entry), parts, scales, strict=True):
        row = encode(own, [part], [scale])
        runs += [row, np.zeros((*row.shape[:-1], -row.shape[-1] % 16), np.uint8)]
    return np.concatenate(runs, axis=-1)


def decode(entry, rows, scales=(1.0, 1.0)):
    """Bytes [..., nbytes] of an entry to its parts, float64 [..., n_i]."""
    if len(entry.format_names) > 1:
        runs = [rows[..., plane[0] :] for plane in planes(entry)]
        return tuple(decode(own, run, [scale])[0] for own, run, scale in zip(alone(entry), runs, scales, strict=True))

    def field(first, count, dtype):
        last = first + count * np.dtype(dtype).itemsize
        return np.ascontiguousarray(rows[..., first:last]).view(dtype).astype(np.float64)

    return tuple(FORMATS[entry.format].decode(field, entry.sizes, scales))


@dataclass(frozen=True)
class Alone:
    """An entry of a key or a value alone, in the format of its own."""

    format: str
    sizes: tuple[int]

    @property
    def format_names(self):
        """One."""
        return (self.format,)


def alone(entry):
    """The key and the value of an entry in which they have different formats."""
    return [Alone(name, (size,)) for name, size in zip(entry.format_names, entry.sizes, strict=True)]


def planes(entry):
    """Where keys and values lie apart: the bytes of an entry that each stores, in order."""
    if len(entry.format_names) > 1:
        first, found = 0, []
        for own in alone(entry):
            pieces = [as_bytes(x).size for x in FORMATS[own.format].encode([np.zeros(own.sizes, np.float32)], [1.0])]
            found.append(first + np.arange(sum(pieces[:2])))  # values and scales; what follows is padding
            first += sum(pieces) + -sum(pieces) % 16
        return found
    truth = FORMATS[entry.format]
    pieces = truth.encode([np.zeros((1, size), np.float32) for size in entry.sizes], (1.0, 1.0))
    ends = np.cumsum([as_bytes(piece).shape[-1] for piece in pieces])
    found = np.split(np.arange(ends[-1]), ends[:-1])
    return [np.concatenate([found[i] for i in plane]) for plane in truth.planes]


def encode_state(states):
    """Arrays [T, ...] of T states, by name, to bytes [T, nbytes]: one after the other, each padded to 16 bytes."""
    rows = [as_bytes(x.reshape(len(x), x[0].size if len(x) else 1)) for x in states.values()]
    return np.concatenate([np.pad(row, [(0, 0), (0, -row.shape[1] % 16)]) for row in rows], axis=1)


def decode_delta_rule(x, decay, rate, conv_weight, conv, delta):
    """A token of each request through the gated delta rule, in float64: (out, conv, delta)."""
    x, decay, rate, conv_weight, conv, delta = (
        np.asarray(a, np.float64) for a in (x, decay, rate, conv_weight, conv, delta)
    )
    (count, heads, keys, values), out, delta = delta.shape, np.zeros(delta.shape[:2] + delta.shape[3:]), delta.copy()
    tokens = np.concatenate([conv, x[:, None]], axis=1)
    mixed = (tokens * conv_weight.T).sum(axis=1)
    mixed = mixed / (1 + np.exp(-mixed))
    q, k = mixed[:, : x.shape[1] - heads * values].reshape(count, 2, -1, keys).swapaxes(0, 1)
    v = mixed[:, x.shape[1] - heads * values :].reshape(count, heads, values)
    for t, h in np.ndindex(count, heads):
        query, key = (part[t, h // (heads // k.shape[1])] for part in (q, k))
        query, key = (part / np.sqrt(part @ part + 1e-6) for part in (query, key))
        held = np.exp(decay[t, h])[:, None] * delta[t, h]
        delta[t, h] = held + np.outer(key, rate[t, h] * (v[t, h] - key @ held))
        out[t, h] = query @ delta[t, h] / np.sqrt(keys)
    return out, tokens[:, 1:], delta


def _plain(dtype):
    def decode(field, sizes, scales):
        firsts = np.cumsum([0, *sizes[:-1]]) * np.dtype(dtype).itemsize
        return [field(first, size, dtype) for first, size in zip(firsts, sizes, strict=True)]

    return Truth(lambda parts, scales: [part.astype(dtype) for part in parts], decode)


def _fp8(dtype, largest):
    def encode(parts, scales):
        quotients = [part / np.float32(s) for part, s in zip(parts, scales, strict=False)]
        return [np.clip(x, -largest, largest).astype(dtype) for x in quotients]

    def decode(field, sizes, scales):
        firsts = np.cumsum([0, *sizes[:-1]])
        return [field(first, n, dtype) * scale for first, n, scale in zip(firsts, sizes, scales, strict=False)]

    return Truth(encode, decode)


def _encode_ds_mla(parts, scales):
    tiles = parts[0].reshape(*parts[0].shape[:-1], -1, 128)
    scale = tile_scales(tiles, -13)
    values = to_e4m3((tiles / scale).astype(np.float32)).reshape(parts[0].shape)
    return values, scale[..., 0].astype(np.float32), parts[1].astype(BF16)


def _decode_ds_mla(field, sizes, scales):
    latent, rope = sizes
    scale = np.repeat(field(latent, latent // 128, np.float32), 128, axis=-1)
    return field(0, latent, E4M3) * scale, field(latent + latent // 32, rope, BF16)


def _encode_indexer(parts, scales):
    scale = tile_scales(parts[0], -22)
    return to_e4m3((parts[0] / scale).astype(np.float32)), scale.astype(np.float32)


def _decode_indexer(field, sizes, scales):
    return (field(0, sizes[0], E4M3) * field(sizes[0], 1, np.float32),)


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
POSITIVE_E4M3 = np.arange(1, 0x7F, dtype=np.uint8).view(E4M3).astype(np.float64)
"""All finite e4m3 values above 0, in order: byte n has index n - 1."""


def to_e2m1(x, scale):
    """x [..., tiles, tile] / scale [..., tiles, 1] as pairs of e2m1, [..., bytes]: the nearest, or the even one."""
    with np.errstate(invalid="ignore", over="ignore"):
        size = np.minimum(np.abs(x.astype(np.float64) / scale), 6.0)
    distance = np.abs(np.nan_to_num(size)[..., None] - E2M1)
    nearest = distance == distance.min(axis=-1, keepdims=True)
    odd = np.arange(8) % 2 == 1
    nearest &= ~(odd & (nearest.sum(axis=-1, keepdims=True) == 2))
    code = nearest.argmax(axis=-1).astype(np.uint8) | np.signbit(x).astype(np.uint8) << 3
    code = code.reshape(*code.shape[:-2], code.shape[-2] * code.shape[-1])
    return code[..., 0::2] | code[..., 1::2] << 4


def from_e2m1(pairs, scales):
    """Pairs of e2m1 [..., bytes] times the scales [..., tiles] of their tiles: float64 [..., values]."""
    pairs = pairs.astype(np.uint8)
    code = np.stack([pairs % 16, pairs // 16], axis=-1).reshape(*pairs.shape[:-1], 2 * pairs.shape[-1])
    value = np.where(code >= 8, -1.0, 1.0) * E2M1[code % 8]
    return value * np.repeat(scales, value.shape[-1] // scales.shape[-1], axis=-1)


def nearest_e4m3(amax):
    """amax / 6, divided in float32, as the nearest e4m3 value from 2**-9 to 448."""
    quotient = np.maximum((amax / np.float32(6)).astype(np.float32), np.float32(2.0**-9))
    return to_e4m3(quotient)


def e4m3_above(amax):
    """The smallest e4m3 value that is at least amax / 6, from 2**-9 to 448."""
    place = np.searchsorted(6 * POSITIVE_E4M3, amax.astype(np.float64))
    found = np.minimum(place + 1, 0x7E).astype(np.uint8)
    return np.where(np.isnan(amax), 0x7F, found).astype(np.uint8).view(E4M3)


def e8m0(scale):
    """Powers of two as bytes: the exponent plus 127; 255 for NaN."""
    return np.where(np.isnan(scale), 255, np.log2(scale) + 127).astype(np.uint8)


def from_e8m0(byte):
    """Bytes, as float64 numbers, to the powers of two that they mean; byte 0 means 0."""
    return np.where(byte == 255, np.nan, np.where(byte == 0, 0.0, 2.0 ** (byte - 127)))


def _tiles(x, tile):
    return x.reshape(*x.shape[:-1], x.shape[-1] // tile, tile)


def _quantised(x, tile, floor_exponent):
    """e4m3 values of x [..., n] and the e8m0 scales of their tiles."""
    tiles = _tiles(x, tile)
    scale = tile_scales(tiles, floor_exponent)
    return to_e4m3((tiles / scale).astype(np.float32)).reshape(x.shape), e8m0(scale[..., 0])


def _encode_v4(parts, scales):
    values, scale = _quantised(parts[0], 64, -22)
    padding = np.zeros((*scale.shape[:-1], -scale.shape[-1] % 8), np.uint8)
    return values, parts[1].astype(BF16), scale, padding


def _decode_v4(field, sizes, scales):
    latent, rope = sizes
    scale = from_e8m0(field(latent + 2 * rope, latent // 64, np.uint8))
    return field(0, latent, E4M3) * np.repeat(scale, 64, axis=-1), field(latent, rope, BF16)


def _encode_v41(parts, scales):
    return _quantised(np.concatenate(parts, axis=-1), 32, -22)


def _decode_v41(field, sizes, scales):
    count = sum(sizes)
    values = field(0, count, E4M3) * np.repeat(from_e8m0(field(count, count // 32, np.uint8)), 32, axis=-1)
    return values[..., : sizes[0]], values[..., sizes[0] :]


def _encode_nvfp4_ds_mla(parts, scales):
    tiles = _tiles(parts[0], 16)
    scale = e4m3_above(np.abs(tiles).max(axis=-1))
    count = scale.shape[-1]
    permuted = np.empty_like(scale)
    for tile in range(count):
        permuted[..., count // 4 * (tile % 4) + tile // 4] = scale[..., tile]
    return to_e2m1(tiles, scale.astype(np.float64)[..., None]), to_e4m3(parts[1]), permuted


def _decode_nvfp4_ds_mla(field, sizes, scales):
    latent, rope = sizes
    count = latent // 16
    permuted = field(latent // 2 + rope, count, E4M3)
    scale = np.stack([permuted[..., count // 4 * (tile % 4) + tile // 4] for tile in range(count)], axis=-1)
    return from_e2m1(field(0, latent // 2, np.uint8), scale), field(latent // 2, rope, E4M3)


def _encode_mxfp4_ds_mla(parts, scales):
    tiles = _tiles(parts[0], 32)
    scale = tile_scales(tiles, -124, 6)
    padding = np.zeros((*scale.shape[:-2], -scale.shape[-2] % 16), np.uint8)
    return to_e2m1(tiles, scale), e8m0(scale[..., 0]), padding, parts[1].astype(BF16)


def _decode_mxfp4_ds_mla(field, sizes, scales):
    latent, rope = sizes
    scale = from_e8m0(field(latent // 2, latent // 32, np.uint8))
    return from_e2m1(field(0, latent // 2, np.uint8), scale), field(latent // 2 + -(-latent // 512) * 16, rope, BF16)


def _encode_fp4_v41(parts, scales):
    tiles = _tiles(np.concatenate(parts, axis=-1), 16)
    scale = nearest_e4m3(np.abs(tiles).max(axis=-1))
    return to_e2m1(tiles, scale.astype(np.float64)[..., None]), scale


def _decode_fp4_v41(field, sizes, scales):
    count = sum(sizes)
    values = from_e2m1(field(0, count // 2, np.uint8), field(count // 2, count // 16, E4M3))
    return values[..., : sizes[0]], values[..., sizes[0] :]


def _encode_int8(parts, scales):
    found = [np.maximum(np.abs(x).max(axis=-1, keepdims=True) / np.float32(127), np.float32(1e-6)) for x in parts]
    with np.errstate(invalid="ignore"):
        values = [np.nan_to_num(np.rint(x / scale)).astype(np.int8) for x, scale in zip(parts, found, strict=True)]
    used = sum(x.shape[-1] + 4 for x in parts)
    return *values, *found, np.zeros((*parts[0].shape[:-1], -used % 16), np.uint8)


def _decode_int8(field, sizes, scales):
    firsts = np.cumsum([0, *sizes])
    return [field(firsts[i], n, np.int8) * field(firsts[-1] + 4 * i, 1, np.float32) for i, n in enumerate(sizes)]


def _encode_nvfp4(parts, scales):
    pairs, found = [], []
    for x, whole in zip(parts, scales, strict=True):
        tiles = _tiles((x / np.float32(whole)).astype(np.float32), 16)
        found.append(nearest_e4m3(np.abs(tiles).max(axis=-1)))
        pairs.append(to_e2m1(tiles, found[-1].astype(np.float64)[..., None]))
    return *pairs, *found


def _decode_nvfp4(field, sizes, scales):
    firsts, found = np.cumsum([0, *sizes]), []
    for first, size, whole in zip(firsts, sizes, scales, strict=False):
        own = field(firsts[-1] // 2 + first // 16, size // 16, E4M3)
        found.append(from_e2m1(field(first // 2, size // 2, np.uint8), own) * whole)
    return found


def _encode_indexer_mxfp4(parts, scales):
    tiles = _tiles(parts[0], 32)
    scale = tile_scales(tiles, -124, 6)
    return to_e2m1(tiles, scale), e8m0(scale[..., 0])


def _decode_indexer_mxfp4(field, sizes, scales):
    count = sizes[0]
    return (from_e2m1(field(0, count // 2, np.uint8), from_e8m0(field(count // 2, count // 32, np.uint8))),)


def _encode_kvfp4(parts, scales):
    """Both parts of an entry, one after the other, are tiled: an entry of a latent and one of a key have the same bytes
    as far as their values, and the scales of the second part follow those of the first."""
    pairs, found = [], []
    for part in parts:
        tiles = _tiles(part.astype(np.float64), 16)
        amax = np.abs(tiles).max(axis=-1, keepdims=True)
        # An infinite tile has the scale of the largest finite value.
        finite = np.minimum(amax, np.finfo(np.float32).max)
        scale = np.where(np.isnan(amax), np.nan, 2 ** np.ceil(np.log2(np.maximum(finite / 6, 1e-10))))
        sizes = np.abs(tiles / scale)
        code = sum((sizes >= bound).astype(np.uint8) for bound in (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0))
        code = (code + 8 * (tiles <= -(2.0**-126))).astype(np.uint8).reshape(part.shape)
        pairs.append(code[..., 1::2] * 16 + code[..., 0::2])
        found.append(e8m0(scale[..., 0]))
    return *pairs, *found


def _decode_kvfp4(field, sizes, scales):
    count = sum(sizes)
    values = from_e2m1(field(0, count // 2, np.uint8), from_e8m0(field(count // 2, count // 16, np.uint8)))
    return values[..., : sizes[0]], values[..., sizes[0] :]


def hadamard(n):
    """Sylvester's matrix of 1 and -1, [n, n]."""
    bits = np.arange(n)[:, None] & np.arange(n)
    return 1.0 - 2.0 * (np.array([bin(number).count("1") for number in bits.reshape(-1)]).reshape(n, n) % 2)


def _summed(x):
    """x [..., n] times `hadamard(n)`, summed in float32 in the order that the format defines."""
    place = np.arange(x.shape[-1])
    for step in range(len(place).bit_length() - 1):
        low = place >> step & 1 == 0
        x = np.where(low, x + x[..., place ^ 1 << step], x[..., place ^ 1 << step] - x)
    return x


def _encode_int4(parts, scales):
    pairs, found = [], []
    for part in parts:
        turned = _summed(part / np.float32(part.shape[-1]))
        amax = np.abs(turned).max(axis=-1, keepdims=True)
        found.append(np.maximum(amax / np.float32(7), np.float32(2.0**-30)))
        code = np.nan_to_num(np.rint(turned / found[-1])).astype(np.int8)
        pairs.append(((code[..., 0::2] % 16) + 16 * (code[..., 1::2] % 16)).astype(np.uint8))
    used = sum(part.shape[-1] // 2 + 4 for part in parts)
    return *pairs, *found, np.zeros((*parts[0].shape[:-1], -used % 16), np.uint8)


def _decode_int4(field, sizes, scales):
    first, found = 0, []
    for i, size in enumerate(sizes):
        pairs = field(first, size // 2, np.uint8).astype(np.int64)
        code = np.stack([pairs % 16, pairs // 16], axis=-1).reshape(*pairs.shape[:-1], size)
        scale = field(sum(sizes) // 2 + 4 * i, 1, np.float32)
        found.append((code - 16 * (code >= 8)) @ hadamard(size) * scale)
        first += size // 2
    return found


def _encode_indexer_mxfp8(parts, scales):
    scale = tile_scales(parts[0], -22)
    values = to_e4m3((parts[0] / scale).astype(np.float32))
    return values, np.repeat(e8m0(scale), parts[0].shape[-1] // 32, axis=-1)


def _decode_indexer_mxfp8(field, sizes, scales):
    count = sizes[0]
    return (field(0, count, E4M3) * np.repeat(from_e8m0(field(count, count // 32, np.uint8)), 32, axis=-1),)


def _kvfp4_regions(entry):
    values, scales = sum(entry.sizes) // 2, sum(entry.sizes) // 16
    return (values, scales) if entry.one_head else (values + scales,)


FORMATS = {
    **{name: _plain(dtype) for name, dtype in PLAIN.items()},
    "fp8": _fp8(E4M3, 448),
    "fp8_ds_mla": Truth(_encode_ds_mla, _decode_ds_mla),
    "indexer_fp8": Truth(_encode_indexer, _decode_indexer, lambda entry: (entry.head_dim, 4)),
    "fp8_e5m2": _fp8(E5M2, 57344),
    "fp8_v4": Truth(_encode_v4, _decode_v4, lambda entry: (entry.latent + 2 * entry.rope, -(-entry.latent // 512) * 8)),
    "fp8_v41": Truth(_encode_v41, _decode_v41),
    "fp8_v41_split": Truth(_encode_v41, _decode_v41, lambda entry: (sum(entry.sizes), sum(entry.sizes) // 32)),
    "nvfp4_ds_mla": Truth(_encode_nvfp4_ds_mla, _decode_nvfp4_ds_mla),
    "mxfp4_ds_mla": Truth(_encode_mxfp4_ds_mla, _decode_mxfp4_ds_mla),
    "fp4_v41": Truth(_encode_fp4_v41, _decode_fp4_v41),
    "fp4_v41_split": Truth(
        _encode_fp4_v41, _decode_fp4_v41, lambda entry: (sum(entry.sizes) // 2, sum(entry.sizes) // 16)
    ),
    "int8": Truth(_encode_int8, _decode_int8, planes=((0, 2), (1, 3))),
    "nvfp4": Truth(_encode_nvfp4, _decode_nvfp4, planes=((0, 2), (1, 3))),
    "indexer_mxfp4": Truth(
        _encode_indexer_mxfp4, _decode_indexer_mxfp4, lambda entry: (entry.head_dim // 2, entry.head_dim // 32)
    ),
    "kvfp4": Truth(_encode_kvfp4, _decode_kvfp4, _kvfp4_regions),
    "int4": Truth(_encode_int4, _decode_int4),
    "indexer_mxfp8": Truth(
        _encode_indexer_mxfp8, _decode_indexer_mxfp8, lambda entry: (entry.head_dim, entry.head_dim // 32)
    ),
}


def without_scale(q, q_scale, dtype):
    """Queries of e4m3 [..., H, D] in float64, as an operation multiplies them that converts queries to `dtype`.

    Those of a head are rounded once, after a product with the quotient of its scale and the largest one.
    """
    scale = np.asarray(q_scale, np.float32)
    share = np.broadcast_to(scale / scale.max(), q.shape[-2:-1])
    rounded = (np.asarray(q).astype(np.float32) * share[:, None]).astype(dtype)
    return rounded.astype(np.float64) * np.float64(scale.max())


ROPE_IN_VALUES = ("fp8_v4", "fp8_v41", "fp8_v41_split", "fp4_v41", "fp4_v41_split")
"""Formats of models that attend to whole entries: DeepSeek V4 has one head that is key and value."""


def keys_and_values(entry, latent, rope):
    """Keys [..., R + P] and values [..., V] of entries."""
    keys = np.concatenate([latent, rope], axis=-1)
    return keys, keys if entry.format in ROPE_IN_VALUES else latent


def seen(position, length, window=None, *, causal=True):
    """Which of a request's tokens the query token at `position` sees, bool [length].

    `window` and `causal` are those of `decode_mla`.
    """
    key = np.arange(length)
    found = key <= position if causal else np.ones(length, bool)
    if isinstance(window, tuple):
        left, right = window
        found &= (key >= position - left) | (left == -1)
        found &= (key <= position + right) | (right == -1)
    elif window is not None:
        found &= key > position - window
    return found


def seen_by_last(length, count, window=None, *, causal=True, mask=None, tree=None):
    """Which of a request's tokens its last `count` tokens see, bool [count, length]; see `seen`.

    `mask` is that of `decode_mla`.  `tree` [count, J] replaces the causal mask: whether each sees new token j, of those
    after the first `length` - `count` tokens.
    """
    first, key = length - count, np.arange(length)
    rows = [seen(first + t, length, window, causal=causal and tree is None) for t in range(count)]
    found = np.reshape(rows, (count, length)).astype(bool)
    if tree is not None:
        some = np.zeros((count, max(first, 0) + max(count, tree.shape[1])), bool)
        some[:, : max(first, 0)] = True
        some[:, max(first, 0) : max(first + tree.shape[1], 0)] = tree[:, max(-first, 0) :]
        found &= some[:, :length]
    if mask is not None:
        found &= np.asarray(mask(first + np.arange(count)[:, None], key[None]))
    return found


def attention(q, k, v, scale, *, seen=None, logit_cap=None, sinks=None):
    """Softmax attention of q [Q, Hq, D] to k [S, H, D], v [S, H, Dv]; query t sees the keys `seen`[t], bool [Q, S].

    Returns out [Q, Hq, Dv] and lse [Q, Hq]; 0 and -inf where no key is seen.
    """
    tokens, heads, _ = q.shape
    group = heads // k.shape[1] if k.shape[1] else 1
    out, lse = np.zeros((tokens, heads, v.shape[-1])), np.full((tokens, heads), -np.inf)
    for t in range(tokens):
        keys = slice(None) if seen is None else seen[t]
        if not k[keys].size:
            continue
        for h in range(heads):
            s = k[keys, h // group] @ q[t, h].astype(np.float64) * scale
            s = s if logit_cap is None else logit_cap * np.tanh(s / logit_cap)
            top = s.max()
            p = np.exp(s - top)
            lse[t, h] = top + np.log(p.sum())
            out[t, h] = p @ v[keys, h // group] / p.sum()
            if sinks is not None:
                out[t, h] /= 1 + np.exp(np.float64(sinks[h]) - lse[t, h])
    return out, lse


def experts(x, experts, weights, gate, up, down, rounded=lambda values: values, limit=np.inf, alpha=None, biases=None):
    """Tokens x [T, D] through their experts [T, K] of gate, up [E, I, D] and down [E, D, I], summed by `weights`.

    `rounded` is applied to the values before `down`; the results of `gate` are at most `limit`, and those of `up` lie
    between -limit and limit.  With `alpha`, g and u become g * sigmoid(alpha g) * (u + 1) instead of silu(g) * u;
    `biases` [E, I], [E, I] and [E, D] are added to the results of the matrices.
    """
    gate_bias, up_bias, down_bias = biases or [np.zeros(matrix.shape[:2]) for matrix in (gate, up, down)]
    out = np.zeros_like(x)
    for t, k in np.ndindex(*experts.shape):
        if 0 <= experts[t, k] < len(gate):
            e = int(experts[t, k])
            inner = np.minimum(gate[e] @ x[t] + gate_bias[e], limit)
            linear = np.clip(up[e] @ x[t] + up_bias[e], -limit, limit) + (alpha is not None)
            inner = inner / (1 + np.exp(-inner * (alpha or 1))) * linear
            out[t] += weights[t, k] * (down[e] @ rounded(inner) + down_bias[e])
    return out


def compressed(kv, gates, bias, norm, frequencies, *, rate, eps):
    """The compressed entries [T // rate, D] of DeepSeek-V4, given rows and gates [T, D] or [T, 2 D] of all tokens.

    bias is [rate, D] or [rate, 2 D].  Entry w is the softmax-weighted sum of the rows of tokens w * rate to (w + 1) *
    rate - 1; if rows are 2 D wide, of the last D values of these and the first D of the window before.  Then its mean
    square is made 1, it is multiplied by norm [D], and the last pairs of values turn by w * rate * frequencies.
    """
    size, entries = len(norm), []
    for w in range(len(kv) // rate):
        windows = [(w, slice(-size, None))]
        if kv.shape[1] > size and w:
            windows.append((w - 1, slice(size)))
        rows = [
            (kv[v * rate + r, own], gates[v * rate + r, own] + bias[r, own]) for v, own in windows for r in range(rate)
        ]
        values, logits = (np.stack(part).astype(np.float64) for part in zip(*rows, strict=True))
        p = np.exp(logits - logits.max(axis=0))
        total = (p * values).sum(axis=0) / p.sum(axis=0)
        entry = norm * total / np.sqrt((total**2).mean() + eps)
        rotary = entry[size - 2 * len(frequencies) :].reshape(-1, 2)
        turned = (rotary[:, 0] + 1j * rotary[:, 1]) * np.exp(1j * w * rate * frequencies)
        rotary[:] = np.stack([turned.real, turned.imag], axis=1)
        entries.append(entry)
    return np.stack(entries)
