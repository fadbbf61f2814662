"""What lanes do with pieces of quantised latents, executed on the host, against the twin for the interpreter."""

import re
from contextlib import ExitStack
from types import SimpleNamespace
from unittest import mock

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental import pallas  # noqa: F401 (its warnings at import are not ours)

import jaxkv
from jaxkv_kernels.mosaic_gpu.interpreter.latent_pieces import InterpretedLatentPieces
from jaxkv_kernels.mosaic_gpu.latent_pieces import SCALES_NBYTES, LatentPieces
from jaxkv_kernels.mosaic_gpu.ptx import conversions_in_place, conversions_to_bf16

COLUMN_TILE = 1024
"""Bytes of a swizzled tile of 8 rows by 64 columns."""
BANKS, PHASE = 32, 8
"""Words that shared memory serves at once; lanes whose 16 bytes each are served together."""


class Lanes:
    """128 lanes: integers, and words of shared memory, are arrays with one element for each."""

    def __init__(self):
        thread = np.arange(128)
        self.arith = SimpleNamespace(
            addi=np.add, muli=np.multiply, shli=np.left_shift, shrui=np.right_shift,
            andi=np.bitwise_and, xori=np.bitwise_xor, remui=np.remainder,
        )  # fmt: skip
        self.mgpu = SimpleNamespace(
            utils=SimpleNamespace(thread_idx=lambda: thread, memref_ptr=lambda memory: (memory, 0))
        )

    @staticmethod
    def at(pointer, offset):
        memory, start = pointer
        return memory, start + offset

    def ptx(self, code, *operands, result_types=None, has_side_effects=False):
        del result_types, has_side_effects
        if code in (conversions_to_bf16.EXACT, conversions_to_bf16.SCALED):
            word, *scale = operands
            values = word.astype("<u4").view(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32).reshape(-1, 4)
            for factor in scale:
                values = values * factor[:, None]
            pairs = values.astype(ml_dtypes.bfloat16).view(np.uint16).astype(np.uint32)
            return [pairs[:, n] | pairs[:, n + 1] << 16 for n in (0, 2)]
        kind, offset = re.search(r"(\w+\.shared[.\w]*) .*\+ (\d+)\]", code).groups()
        (memory, place), *words = operands
        place = place + int(offset)
        if kind == "ld.shared.f32":
            return memory[place[:, None] + np.arange(4)].view(np.float32)[:, 0]
        self.assert_no_bank_conflicts(place)
        at = place[:, None] + np.arange(16)
        if kind == "ld.shared.v4.b32":
            return [*memory[at].view(np.uint32).T]
        assert kind == "st.shared.v4.b32", code
        memory[at] = np.stack(words, axis=1).astype("<u4").view(np.uint8)
        return None

    @staticmethod
    def assert_no_bank_conflicts(place):
        assert not (place % 16).any()
        for lanes in place.reshape(-1, PHASE):
            assert len({*(lanes // 16 % (BANKS // 4))}) == PHASE, lanes

    def patched(self):
        stack = ExitStack()
        for module in (conversions_in_place, conversions_to_bf16):
            stack.enter_context(
                mock.patch.multiple(
                    module, arith=self.arith, mgpu=self.mgpu, at=self.at, ptx=self.ptx, c32=int, i32=mock.Mock()
                )
            )
        stack.enter_context(mock.patch.object(conversions_to_bf16, "f32"))
        return stack


def unswizzled(memory, start, rows, columns, column_nbytes, row_nbytes):
    """The bf16 values [rows, columns] of swizzled tiles, from byte `start` on."""
    row, column = np.arange(rows)[:, None], np.arange(columns)
    chunk = column % 64 // 8 ^ row % 8
    place = row // 8 * row_nbytes + column // 64 * column_nbytes + row % 8 * 128 + chunk * 16 + column % 8 * 2
    return memory[start:].view(np.uint16)[place // 2].view(ml_dtypes.bfloat16)


@pytest.mark.parametrize("form", ["fp8", "fp8_ds_mla"])
def test_lanes_convert_as_the_twin(form):
    pieces, twin = (kind(jaxkv.MLAEntry(form)) for kind in (LatentPieces, InterpretedLatentPieces))
    rng = np.random.default_rng(0)
    halves, rest = (rng.integers(0, 256, size, np.uint8) for size in ((2, 64, 256), (64, pieces.rest_nbytes)))
    halves[halves & 0x7F == 0x7F] = 0  # NaN
    rest[rest & 0x7F == 0x7F] = 0
    if pieces.scaled:
        rest[:, :SCALES_NBYTES] = rng.standard_normal((64, 4), np.float32).view(np.uint8)
    parts, own, stage = np.zeros(5 * 8192, np.uint8), np.zeros(2 * 32768, np.uint8), 1
    scales = rest.reshape(-1) if pieces.scaled else None
    code = conversions_to_bf16
    with Lanes().patched():
        for piece, half in enumerate((1, 0)):
            chunks = code.convert_half(halves.reshape(-1), piece * 64 * 256, scales, half, pieces.rest_nbytes)
            if piece == 0:
                code.store_half(parts, 8192, 8192, COLUMN_TILE, chunks)
            else:
                code.store_half(own, stage * 32768, COLUMN_TILE, 4 * COLUMN_TILE, chunks)
        if pieces.scaled:
            code.store_wide_rope(parts, code.load_wide_rope(rest.reshape(-1), SCALES_NBYTES, pieces.rest_nbytes))
        else:
            code.store_rope(parts, code.convert_rope(rest.reshape(-1)))

    other, mine = (twin.load_half(jnp.asarray(halves), jnp.asarray(rest), piece, 1 - piece) for piece in range(2))
    rope = twin.load_rope(jnp.asarray(rest))
    for name, found, right in (
        ("rope", unswizzled(parts, 0, 64, 64, 8192, COLUMN_TILE), rope),
        ("other half", unswizzled(parts, 8192, 64, 256, 8192, COLUMN_TILE), other),
        ("own half", unswizzled(own, stage * 32768, 64, 256, COLUMN_TILE, 4 * COLUMN_TILE), mine),
    ):
        np.testing.assert_array_equal(found.view(np.uint16), np.asarray(right).view(np.uint16), name)
    assert not own[:32768].any()
