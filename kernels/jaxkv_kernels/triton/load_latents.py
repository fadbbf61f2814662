"""Loads latents, or parts of them, and rotary keys from where entries of any format begin."""

import triton
import triton.language as tl

from jaxkv_kernels.triton.arithmetic import rounded
from jaxkv_kernels.triton.widen import widened

SCALE_TILE = tl.constexpr(128)
"""Values of an `fp8_ds_mla` entry that share a scale."""


@triton.jit
def load_columns(place, known, SIZE: tl.constexpr, COLUMNS: tl.constexpr):
    """SIZE elements from each of the pointers `place` [n] as a tile [n, COLUMNS]; 0 past them, and where not known."""
    column = tl.arange(0, COLUMNS)[None, :]
    mask = known[:, None] if SIZE >= COLUMNS else known[:, None] & (column < SIZE)
    return tl.load(place[:, None] + column, mask=mask, other=0)


@triton.jit
def load_latent(
    place, known, FIRST: tl.constexpr, COLUMNS: tl.constexpr, LATENT: tl.constexpr,
    FORMAT: tl.constexpr, STORED: tl.constexpr, DTYPE: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Values FIRST, FIRST + 1, ... of latents [n, COLUMNS], as DTYPE; those of `fp8` as stored."""
    left: tl.constexpr = LATENT - FIRST
    if FORMAT == "fp8_ds_mla":
        scales = (place + LATENT).to(tl.pointer_type(tl.float32)) + FIRST // SCALE_TILE
        scale = load_columns(scales, known, left // SCALE_TILE, COLUMNS // SCALE_TILE)
        scale = tl.broadcast_to(scale[:, :, None], (scale.shape[0], scale.shape[1], SCALE_TILE))
        scale = tl.reshape(scale, (scale.shape[0], COLUMNS))
        return widened(load_columns(place + FIRST, known, left, COLUMNS), scale, DTYPE, NATIVE)
    if FORMAT == "fp8":
        return widened(load_columns(place + FIRST, known, left, COLUMNS), None, DTYPE, NATIVE)
    return rounded(load_columns(place.to(tl.pointer_type(STORED)) + FIRST, known, left, COLUMNS), DTYPE)


@triton.jit
def load_rope(
    place, known, LATENT: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr,
    FORMAT: tl.constexpr, STORED: tl.constexpr, DTYPE: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """SIZE rotary values as a tile [n, COLUMNS] of DTYPE; those of `fp8` as stored."""
    if FORMAT == "fp8_ds_mla":
        ropes = (place + LATENT + 4 * (LATENT // SCALE_TILE)).to(tl.pointer_type(tl.bfloat16))
        return rounded(load_columns(ropes, known, SIZE, COLUMNS), DTYPE)
    if FORMAT == "fp8":
        return widened(load_columns(place + LATENT, known, SIZE, COLUMNS), None, DTYPE, NATIVE)
    return rounded(load_columns(place.to(tl.pointer_type(STORED)) + LATENT, known, SIZE, COLUMNS), DTYPE)
