"""The truth, in NumPy float64: encoders, decoders and attention, written from the byte maps alone."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

E4M3 = ml_dtypes.float8_e4m3fn
BF16 = ml_dtypes.bfloat16
PLAIN = {"bf16": BF16, "f16": np.float16, "f32": np.float32}


def to_e4m3(x):
    """Rounded to nearest even, saturating at 448."""
    return np.clip(x, -448, 448).astype(E4M3)


def tile_scales(x, floor_exponent):
    """Power-of-two scales [..., 1] of tiles x [..., n]: 2 ** ceil(log2(amax / 448)), at least 2 ** floor_exponent."""
    amax = np.abs(x.astype(np.float64)).max(axis=-1, keepdims=True)
    mantissa, exponent = np.frexp(amax / 448)  # amax / 448 = mantissa * 2 ** exponent, 0.5 <= mantissa < 1
    ceil = np.where(mantissa == 0.5, exponent - 1, exponent)
    return 2.0 ** np.maximum(np.where(amax == 0, floor_exponent, ceil), floor_exponent)


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
    """Of a format whose pages are split, the bytes of each part of an entry."""


def encode(entry, parts, scales=(1.0, 1.0)):
    """Parts [..., n_i] to the bytes [..., nbytes] of an entry."""
    parts = [np.asarray(part, np.float32) for part in parts]
    return np.concatenate([as_bytes(piece) for piece in FORMATS[entry.format].encode(parts, scales)], axis=-1)


def decode(entry, rows, scales=(1.0, 1.0)):
    """Bytes [..., nbytes] of an entry to its parts, float64 [..., n_i]."""

    def field(first, count, dtype):
        last = first + count * np.dtype(dtype).itemsize
        return np.ascontiguousarray(rows[..., first:last]).view(dtype).astype(np.float64)

    return tuple(FORMATS[entry.format].decode(field, entry.sizes, scales))


def _plain(dtype):
    def decode(field, sizes, scales):
        firsts = np.cumsum([0, *sizes[:-1]]) * np.dtype(dtype).itemsize
        return [field(first, size, dtype) for first, size in zip(firsts, sizes, strict=True)]

    return Truth(lambda parts, scales: [part.astype(dtype) for part in parts], decode)


def _encode_fp8(parts, scales):
    return [to_e4m3(part / np.float32(s)) for part, s in zip(parts, scales, strict=False)]


def _decode_fp8(field, sizes, scales):
    return field(0, sizes[0], E4M3) * scales[0], field(sizes[0], sizes[1], E4M3) * scales[1]


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


FORMATS = {
    **{name: _plain(dtype) for name, dtype in PLAIN.items()},
    "fp8": Truth(_encode_fp8, _decode_fp8),
    "fp8_ds_mla": Truth(_encode_ds_mla, _decode_ds_mla),
    "indexer_fp8": Truth(_encode_indexer, _decode_indexer, lambda entry: (entry.head_dim, 4)),
}


def attention(q, k, v, scale, *, ends=None, window=None, logit_cap=None, sinks=None):
    """Softmax attention of q [Q, Hq, D] to k [S, H, D], v [S, H, Dv]; query t sees keys below ends[t].

    Returns out [Q, Hq, Dv] and lse [Q, Hq]; 0 and -inf where no key is seen.
    """
    tokens, heads, _ = q.shape
    group = heads // k.shape[1] if k.shape[1] else 1
    out, lse = np.zeros((tokens, heads, v.shape[-1])), np.full((tokens, heads), -np.inf)
    for t in range(tokens):
        end = k.shape[0] if ends is None else min(max(ends[t], 0), k.shape[0])
        begin = 0 if window is None else max(end - window, 0)
        if end <= begin:
            continue
        for h in range(heads):
            s = k[begin:end, h // group] @ q[t, h].astype(np.float64) * scale
            s = s if logit_cap is None else logit_cap * np.tanh(s / logit_cap)
            top = s.max()
            p = np.exp(s - top)
            lse[t, h] = top + np.log(p.sum())
            out[t, h] = p @ v[begin:end, h // group] / p.sum()
            if sinks is not None:
                out[t, h] /= 1 + np.exp(np.float64(sinks[h]) - lse[t, h])
    return out, lse


def experts(x, experts, weights, gate, up, down, rounded=lambda values: values):
    """Tokens x [T, D] through their experts [T, K] of gate, up [E, I, D] and down [E, D, I], summed by `weights`.

    `rounded` is applied to the values before `down`.
    """
    out = np.zeros_like(x)
    for t, k in np.ndindex(*experts.shape):
        if 0 <= experts[t, k] < len(gate):
            e = int(experts[t, k])
            inner = gate[e] @ x[t]
            out[t] += weights[t, k] * (down[e] @ rounded(inner / (1 + np.exp(-inner)) * (up[e] @ x[t])))
    return out
