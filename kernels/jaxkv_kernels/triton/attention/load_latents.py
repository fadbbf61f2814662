"""Loads latents, or parts of them, and rotary keys from where entries of any format begin, as tiles to multiply."""

import triton
import triton.language as tl

from jaxkv_kernels.triton.codecs.e4m3_pairs import halves, load_pairs
from jaxkv_kernels.triton.codecs.widen import widened
from jaxkv_kernels.triton.entries.tiles import load_pieces
from jaxkv_kernels.triton.runtime.arithmetic import rounded

SCALE_TILE = tl.constexpr(128)
"""Values of an `fp8_ds_mla` entry that share a scale."""


@triton.jit
def load_latent(
    place, known, FIRST: tl.constexpr, COLUMNS: tl.constexpr, LATENT: tl.constexpr,
    FORMAT: tl.constexpr, STORED: tl.constexpr, DTYPE: tl.constexpr, NATIVE: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Values FIRST, FIRST + 1, ... of latents: tiles [n, COLUMNS] of DTYPE; of `fp8` two, in halves, as stored."""
    left: tl.constexpr = LATENT - FIRST
    if FORMAT == "fp8_ds_mla":
        scales = (place + LATENT).to(tl.pointer_type(tl.float32)) + FIRST // SCALE_TILE
        scale = load_pieces(scales, known, left // SCALE_TILE, COLUMNS // SCALE_TILE)
        scale = tl.broadcast_to(scale[:, :, None], (scale.shape[0], scale.shape[1], SCALE_TILE))
        scale = tl.reshape(scale, (scale.shape[0], COLUMNS))
        found = (widened(load_pieces(place + FIRST, known, left, COLUMNS), scale, DTYPE, NATIVE),)
    elif FORMAT == "fp8":
        found = halves(load_pairs(place + FIRST, known, left, COLUMNS, EVEN), DTYPE, NATIVE)
    else:
        found = (rounded(load_pieces(place.to(tl.pointer_type(STORED)) + FIRST, known, left, COLUMNS), DTYPE),)
    return found


@triton.jit
def load_rope(
    place, known, LATENT: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr,
    FORMAT: tl.constexpr, STORED: tl.constexpr, DTYPE: tl.constexpr, NATIVE: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """SIZE rotary values in the same way."""
    if FORMAT == "fp8_ds_mla":
        ropes = (place + LATENT + 4 * (LATENT // SCALE_TILE)).to(tl.pointer_type(tl.bfloat16))
        found = (rounded(load_pieces(ropes, known, SIZE, COLUMNS), DTYPE),)
    elif FORMAT == "fp8":
        found = halves(load_pairs(place + LATENT, known, SIZE, COLUMNS, EVEN), DTYPE, NATIVE)
    else:
        found = (rounded(load_pieces(place.to(tl.pointer_type(STORED)) + LATENT, known, SIZE, COLUMNS), DTYPE),)
    return found
