"""What a lane does with a tile of quantised entries, against its twin for the interpreter (`-m gpu`)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas  # noqa: F401 (its warnings at import are not ours)
from jax.experimental.pallas import mosaic_gpu as plgpu

import jaxkv
from jaxkv_kernels.mosaic_gpu.attention.quantised.tiles import (
    GROUP,
    GROUPS,
    INVERSES,
    STATS,
    STEPS,
    InterpretedTiles,
    N,
    QuantisedTiles,
)
from jaxkv_kernels.mosaic_gpu.runtime.launch import kernel
from jaxkv_kernels.mosaic_gpu.runtime.registers import WGMMA, store
from jaxkv_kernels.mosaic_gpu.runtime.shared_memory import IN_BOUNDS, swizzled
from support.hopper import on_hopper

FORMATS = ["fp8", "fp8_ds_mla"]
STAGES, STAGE = 2, 1


def shape(dtype, *sizes):
    return jax.ShapeDtypeStruct(sizes, dtype)


def raw_entries(entry):
    """Bytes of two stages: e4m3 values without NaN, and whatever those of the other parts make."""
    found = np.random.default_rng(0).integers(0, 256, (STAGES, 64, entry.nbytes), np.uint8)
    found[..., :512][found[..., :512] & 0x7F == 0x7F] = 0
    if entry.nbytes == 576:
        found[found & 0x7F == 0x7F] = 0
    else:
        found[..., 512:528] = np.random.default_rng(1).standard_normal((STAGES, 64, 4), np.float32).view(np.uint8)
        found[..., 528:] = found[..., 528:] & 0xBF  # finite bf16
    return jnp.asarray(found.reshape(STAGES, -1))


def run(body, out_types, scratch, *operands, stages=1):
    """The arrays that `body` stores."""
    return jax.jit(kernel(body, interpret=False, out_type=out_types, num_threads=1, thread_name="wg",
                          scratch_types=scratch, auto_barriers=True, kernel_name="probe"))(*operands)  # fmt: skip


def stage_raw(raw_ref, k, full):
    for stage in range(STAGES):
        plgpu.copy_gmem_to_smem(raw_ref.at[stage], k.at[stage], full, oob_mode=IN_BOUNDS)
    plgpu.barrier_wait(full)


def staged(raw):
    return {"k": plgpu.SMEM(raw.shape, jnp.uint8), "full": plgpu.Barrier(num_arrivals=STAGES)}


@on_hopper
class TestLanes:
    """Bit by bit."""

    @pytest.mark.parametrize("form", FORMATS)
    def test_keys(self, form):
        entry = jaxkv.MLAEntry(form)
        tiles, raw = QuantisedTiles(entry), raw_entries(entry)

        def body(raw_ref, latent_ref, rope_ref, k, full):
            stage_raw(raw_ref, k, full)
            for group in range(9):
                into = latent_ref.at[group] if group < 8 else rope_ref
                store(into, tiles.convert_keys(tiles.load_keys(k, jnp.int32(STAGE), group), group))

        types = shape(jnp.float16, 8, 64, 64), shape(tiles.rope_dtype, 64, 64)
        latent, rope = run(body, types, staged(raw), raw)
        twin = InterpretedTiles(entry)
        for group in range(9):
            found = latent[group] if group < 8 else rope
            right = twin.convert_keys(twin.load_keys(raw, STAGE, group), group)
            np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(right, np.float32), str(group))

    @pytest.mark.parametrize("form", FORMATS)
    def test_values(self, form):
        entry = jaxkv.MLAEntry(form)
        tiles, raw = QuantisedTiles(entry), raw_entries(entry)

        def body(raw_ref, out_ref, k, full):
            stage_raw(raw_ref, k, full)
            for step in range(STEPS):
                loaded = tiles.load_values(k, jnp.int32(STAGE), step)
                for group in range(GROUPS):
                    store(out_ref.at[step, group], tiles.convert_values(loaded, group))

        found = run(body, shape(jnp.float16, STEPS, GROUPS, GROUP, N), staged(raw), raw)
        twin = InterpretedTiles(entry)
        for step in range(STEPS):
            for group in range(GROUPS):
                right = twin.convert_values(twin.load_values(raw, STAGE, step), group)
                np.testing.assert_array_equal(found[step, group], right, f"{step} {group}")

    def test_scales(self):
        entry = jaxkv.MLAEntry("fp8_ds_mla")
        tiles, raw = QuantisedTiles(entry), raw_entries(entry)

        def body(raw_ref, out_ref, k, full):
            stage_raw(raw_ref, k, full)
            for group, scales in enumerate(tiles.load_scales(k, jnp.int32(STAGE))):
                store(out_ref.at[group], scales)

        found = run(body, shape(jnp.float32, GROUPS, 64), staged(raw), raw)
        np.testing.assert_array_equal(found, np.stack(InterpretedTiles(entry).load_scales(raw, STAGE)))

    @pytest.mark.parametrize("form", FORMATS)
    def test_clear(self, form):
        entry = jaxkv.MLAEntry(form)
        tiles, raw = QuantisedTiles(entry), raw_entries(entry)

        def body(raw_ref, out_ref, k, full):
            stage_raw(raw_ref, k, full)
            tiles.clear(k, jnp.int32(STAGE), jnp.int32(5), jnp.int32(17))
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(k, out_ref)
            plgpu.wait_smem_to_gmem(0)

        found = np.asarray(run(body, shape(jnp.uint8, *raw.shape), staged(raw), raw)).reshape(STAGES, 64, -1)
        right = np.asarray(raw).reshape(STAGES, 64, -1).copy()
        right[STAGE, 5:17] = 0
        np.testing.assert_array_equal(found, right)

    def test_over_warps(self):
        tiles = QuantisedTiles(jaxkv.MLAEntry("fp8"))
        x = jnp.asarray(np.random.default_rng(0).integers(-99, 99, (64, N)), jnp.float32)

        def body(x_ref, out_ref, stats):
            x = plgpu.load(x_ref, layout=WGMMA, optimized=False)
            for side in range(2):
                store(out_ref.at[side, 0], tiles.over_warps("max", x, stats, side))
                store(out_ref.at[side, 1], tiles.over_warps("add", x, stats, side))

        found = run(body, shape(jnp.float32, 2, 2, N), {"stats": plgpu.SMEM((STATS, N), jnp.float32)}, x)
        for side in range(2):
            np.testing.assert_array_equal(found[side], np.stack([x.max(axis=0), x.sum(axis=0)]))

    @pytest.mark.parametrize("rows", [8, 16])
    def test_results(self, rows):
        entry = jaxkv.MLAEntry("fp8")
        parts = jnp.asarray(np.random.default_rng(0).standard_normal((GROUPS, GROUP, N)), jnp.bfloat16)

        def body(x_ref, out_ref):
            loaded = [plgpu.load(x_ref.at[n], layout=WGMMA, optimized=False) for n in range(GROUPS)]
            for place in range(2):
                QuantisedTiles(entry).store_rows(out_ref, jnp.int32(place), loaded)

        found = run(body, shape(jnp.bfloat16, 2, rows, 512), {}, parts)

        class Stored(dict):
            shape = (2, rows, 512)

        right = Stored()
        InterpretedTiles(entry).store_rows(right, 0, list(parts))
        for place in range(2):
            np.testing.assert_array_equal(
                np.asarray(found[place], np.float32), np.asarray(right[0], np.float32), str(place)
            )

    @pytest.mark.parametrize("form", FORMATS)
    @pytest.mark.parametrize("rows", [8, 16])
    def test_queries(self, form, rows):
        tiles = QuantisedTiles(jaxkv.MLAEntry(form))
        rng = np.random.default_rng(0)
        latent, rope = (
            jnp.asarray(rng.standard_normal((2, rows, n)) * 2.0 ** rng.integers(-40, 40, (2, rows, 1)), jnp.bfloat16)
            for n in (512, 64)
        )
        latent = latent.at[0, 3].set(0)

        def body(latent_ref, rope_ref, q_ref, qr_ref, stats_ref, q, qr, stats):
            raw = tiles.load_queries(latent_ref, rope_ref, jnp.int32(1))
            tiles.store_queries(q, qr, stats, jnp.int32(STAGE), raw)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(q.at[STAGE], q_ref)
            plgpu.copy_smem_to_gmem(qr.at[STAGE], qr_ref)
            plgpu.copy_smem_to_gmem(stats, stats_ref)
            plgpu.wait_smem_to_gmem(0)

        types = shape(jnp.float16, N, 512), shape(tiles.rope_dtype, N, 64), shape(jnp.float32, STATS, N)
        scratch = {
            "q": swizzled(STAGES, N, 512, dtype=jnp.float16),
            "qr": swizzled(STAGES, N, 64, dtype=tiles.rope_dtype),
            "stats": plgpu.SMEM((STATS, N), jnp.float32),
        }
        q, qr, stats = run(body, types, scratch, latent, rope)
        twin, right = InterpretedTiles(jaxkv.MLAEntry(form)), []
        for like in (q, qr, stats):
            right.append(dict.fromkeys(range(STATS)))
            right[-1] = type("Stored", (dict,), {"dtype": like.dtype})()
        twin.store_queries(*right, STAGE, twin.load_queries(latent, rope, 1))
        np.testing.assert_array_equal(np.asarray(q, np.float32), np.asarray(right[0][STAGE], np.float32))
        np.testing.assert_array_equal(np.asarray(qr, np.float32), np.asarray(right[1][STAGE], np.float32))
        np.testing.assert_array_equal(stats[INVERSES + STAGE], right[2][INVERSES + STAGE])
