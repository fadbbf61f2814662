"""What a lane does with a tile of quantised entries, against its twin for the interpreter (`-m gpu`)."""

from itertools import chain

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas  # noqa: F401 (its warnings at import are not ours)
from jax.experimental.pallas import mosaic_gpu as plgpu

import jaxkv
from jaxkv_kernels.mosaic_gpu.interpreter.quantised import (
    InterpretedHeads,
    InterpretedInt8,
    InterpretedLatents,
    InterpretedNvfp4,
    InterpretedRowTiles,
)
from jaxkv_kernels.mosaic_gpu.quantised_tiles import (
    GROUP,
    INVERSES,
    STATS,
    STEPS,
    HeadTiles,
    Int8Tiles,
    LatentTiles,
    N,
    Nvfp4Tiles,
    RowTiles,
)
from jaxkv_kernels.mosaic_gpu.runtime.launch import kernel
from jaxkv_kernels.mosaic_gpu.runtime.registers import WGMMA, store
from jaxkv_kernels.mosaic_gpu.runtime.shared_memory import IN_BOUNDS, swizzled
from support.hopper import on_hopper

STAGES, STAGE = 2, 1
KINDS = {
    "fp8": (LatentTiles, InterpretedLatents, jaxkv.MLAEntry("fp8")),
    "fp8_ds_mla": (LatentTiles, InterpretedLatents, jaxkv.MLAEntry("fp8_ds_mla")),
    "heads of 128": (HeadTiles, InterpretedHeads, jaxkv.KVEntry("fp8", 128)),
    "heads of 256": (HeadTiles, InterpretedHeads, jaxkv.KVEntry("fp8", 256, 128)),
    "int8": (Int8Tiles, InterpretedInt8, jaxkv.KVEntry("int8", 256, 128)),
    "nvfp4": (Nvfp4Tiles, InterpretedNvfp4, jaxkv.KVEntry("nvfp4", 256)),
    "heads apart": (HeadTiles, InterpretedHeads, jaxkv.KVEntry("fp8", 128, 256), True),
    "narrow heads apart": (RowTiles, InterpretedRowTiles, jaxkv.KVEntry("fp8", 64), True),
    "int8 apart": (Int8Tiles, InterpretedInt8, jaxkv.KVEntry("int8", 256, 128), True),
    "narrow int8 apart": (Int8Tiles, InterpretedInt8, jaxkv.KVEntry("int8", 64), True),
    "nvfp4 apart": (Nvfp4Tiles, InterpretedNvfp4, jaxkv.KVEntry("nvfp4", 128, 256), True),
}
"""The arguments of tiles are an entry, and whether its keys and values lie apart."""
SCALED = "fp8_ds_mla", "int8", "int8 apart", "narrow int8 apart"
every_kind = pytest.mark.parametrize("kind", KINDS)


def tiles_of(kind):
    """The tiles, and their twin."""
    tiles, twin, *arguments = KINDS[kind]
    return tiles(*arguments), twin(*arguments)


def shape(dtype, *sizes):
    return jax.ShapeDtypeStruct(sizes, dtype)


def raw_entries(tiles):
    """Bytes of two stages: e4m3 values without NaN, and whatever those of the other parts make."""
    found = []
    for n, memory in enumerate(tiles.raw_types(STAGES)):
        *sizes, last = memory.shape
        values = np.random.default_rng(n).integers(0, 256, (*sizes, last * memory.dtype.itemsize), np.uint8)
        values[values & 0x7F == 0x7F] = 0
        if tiles.entry.format == "fp8_ds_mla":
            rows = values.reshape(STAGES, 64, tiles.entry.nbytes)
            rows[..., 512:528] = np.random.default_rng(1).standard_normal((STAGES, 64, 4), np.float32).view(np.uint8)
            rows[..., 528:] &= 0xBF  # finite bf16
        found.append(jnp.asarray(values.view(memory.dtype)))
    return found


def run(body, out_types, scratch, *operands):
    """The arrays that `body` stores."""
    return jax.jit(
        kernel(
            body,
            interpret=False,
            out_type=out_types,
            num_threads=1,
            thread_name="wg",
            scratch_types=scratch,
            kernel_name="probe",
        )
    )(*operands)


def stage_raw(refs, raw, full):
    """Copies two stages to shared memory."""
    for ref, into in zip(refs, raw, strict=True):
        for stage in range(STAGES):
            options = {"oob_mode": IN_BOUNDS} if len(ref.shape) == 2 else {}
            plgpu.copy_gmem_to_smem(ref.at[stage], into.at[stage], full, **options)
    plgpu.barrier_wait(full)


def staged(tiles):
    """Shared memory for `stage_raw`."""
    raw = tiles.raw_types(STAGES)
    return {"raw": raw, "full": plgpu.Barrier(num_arrivals=STAGES * len(raw))}


@on_hopper
class TestLanes:
    """Bit by bit."""

    @every_kind
    def test_keys(self, kind):
        tiles, twin = tiles_of(kind)
        raw = raw_entries(tiles)

        def body(*refs, **scratch):
            *sources, out, last = refs
            stage_raw(sources, **scratch)
            for group in range(tiles.key_groups):
                loaded = tiles.load_keys(scratch["raw"], jnp.int32(STAGE), group)
                into = last if group == tiles.key_groups - 1 else out.at[group]
                store(into, tiles.convert_keys(loaded, group))

        types = shape(jnp.float16, tiles.key_groups, 64, 64), shape(tiles.query_dtypes[-1], 64, 64)
        found, last = run(body, types, staged(tiles), *raw)
        for group in range(tiles.key_groups):
            one = last if group == tiles.key_groups - 1 else found[group]
            right = twin.convert_keys(twin.load_keys(raw, STAGE, group), group)
            np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(right, np.float32), str(group))

    @every_kind
    def test_values(self, kind):
        tiles, twin = tiles_of(kind)
        raw = raw_entries(tiles)

        def body(*refs, **scratch):
            *sources, out = refs
            stage_raw(sources, **scratch)
            for step in range(STEPS):
                loaded = tiles.load_values(scratch["raw"], jnp.int32(STAGE), step)
                for group in range(tiles.value_groups):
                    store(out.at[step, group], tiles.convert_values(loaded, group))

        found = run(body, shape(jnp.float16, STEPS, tiles.value_groups, GROUP, N), staged(tiles), *raw)
        for step in range(STEPS):
            for group in range(tiles.value_groups):
                right = twin.convert_values(twin.load_values(raw, STAGE, step), group)
                np.testing.assert_array_equal(found[step, group], right, f"{step} {group}")

    @pytest.mark.parametrize("kind", SCALED)
    def test_scales(self, kind):
        tiles, twin = tiles_of(kind)
        raw = raw_entries(tiles)

        def body(*refs, **scratch):
            *sources, out = refs
            stage_raw(sources, **scratch)
            for n, scales in enumerate(chain(*tiles.load_scales(scratch["raw"], jnp.int32(STAGE)))):
                store(out.at[n], scales)

        right = np.stack([*chain(*twin.load_scales(raw, STAGE))])
        np.testing.assert_array_equal(run(body, shape(jnp.float32, *right.shape), staged(tiles), *raw), right)

    @every_kind
    def test_clear(self, kind):
        tiles, _ = tiles_of(kind)
        raw = raw_entries(tiles)

        def body(*refs, **scratch):
            *sources, out = refs
            stage_raw(sources, **scratch)
            tiles.clear(scratch["raw"], jnp.int32(STAGE), jnp.int32(5), jnp.int32(17))
            plgpu.commit_smem()
            for stage in range(STAGES):
                plgpu.copy_smem_to_gmem(scratch["raw"][-1].at[stage], out.at[stage])
            plgpu.wait_smem_to_gmem(0)

        found = np.asarray(run(body, shape(raw[-1].dtype, *raw[-1].shape), staged(tiles), *raw)).reshape(STAGES, 64, -1)
        right = np.asarray(raw[-1]).reshape(STAGES, 64, -1).copy()
        right[STAGE, 5:17] = 0
        np.testing.assert_array_equal(found, right)

    def test_over_warps(self):
        tiles, _ = tiles_of("fp8")
        x = jnp.asarray(np.random.default_rng(0).integers(-99, 99, (64, N)), jnp.float32)

        def body(x_ref, out_ref, stats):
            x = plgpu.load(x_ref, layout=WGMMA, optimized=False)
            for side in range(2):
                store(out_ref.at[side, 0], tiles.over_warps("max", x, stats, side))
                store(out_ref.at[side, 1], tiles.over_warps("add", x, stats, side))

        found = run(body, shape(jnp.float32, 2, 2, N), {"stats": plgpu.SMEM((STATS, N), jnp.float32)}, x)
        for side in range(2):
            np.testing.assert_array_equal(found[side], np.stack([x.max(axis=0), x.sum(axis=0)]))

    @pytest.mark.parametrize("kind", ["fp8", "heads of 128"])
    @pytest.mark.parametrize("rows", [8, 16])
    def test_results(self, kind, rows):
        tiles, twin = tiles_of(kind)
        groups = tiles.value_groups
        parts = jnp.asarray(np.random.default_rng(0).standard_normal((groups, GROUP, N)), jnp.bfloat16)

        def body(x_ref, out_ref):
            loaded = [plgpu.load(x_ref.at[n], layout=WGMMA, optimized=False) for n in range(groups)]
            for place in range(2):
                tiles.store_rows(out_ref, jnp.int32(place), loaded)

        found = run(body, shape(jnp.bfloat16, 2, rows, GROUP * groups), {}, parts)

        class Stored(dict):
            shape = (2, rows, GROUP * groups)

        right = Stored()
        twin.store_rows(right, 0, list(parts))
        for place in found:
            np.testing.assert_array_equal(np.asarray(place, np.float32), np.asarray(right[0], np.float32))

    @every_kind
    @pytest.mark.parametrize("rows", [8, 16])
    def test_queries(self, kind, rows):
        tiles, twin = tiles_of(kind)
        rng = np.random.default_rng(0)
        queries = [
            jnp.asarray(
                rng.standard_normal((2, rows, 64 * n)) * 2.0 ** rng.integers(-40, 40, (2, rows, 1)), jnp.bfloat16
            )
            for n in tiles.query_groups
        ]
        queries[0] = queries[0].at[1, 3].set(0)

        def body(*refs, q, stats):
            sources, (*outs, stats_ref) = refs[: len(queries)], refs[len(queries) :]
            tiles.store_queries(q, stats, jnp.int32(STAGE), tiles.load_queries(sources, jnp.int32(1)))
            plgpu.commit_smem()
            for ref, out in zip(q, outs, strict=True):
                plgpu.copy_smem_to_gmem(ref.at[STAGE], out)
            plgpu.copy_smem_to_gmem(stats, stats_ref)
            plgpu.wait_smem_to_gmem(0)

        sizes = list(zip(tiles.query_groups, tiles.query_dtypes, strict=True))
        types = [*(shape(d, N, 64 * n) for n, d in sizes), shape(jnp.float32, STATS, N)]
        scratch = {
            "q": tuple(swizzled(STAGES, N, 64 * n, dtype=d) for n, d in sizes),
            "stats": plgpu.SMEM((STATS, N), jnp.float32),
        }
        *found, stats = run(body, types, scratch, *queries)
        right = [type("Stored", (dict,), {"dtype": like.dtype})() for like in (*found, stats)]
        twin.store_queries(right[:-1], right[-1], STAGE, twin.load_queries(queries, 1))
        for one, stored in zip(found, right[:-1], strict=True):
            np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(stored[STAGE], np.float32))
        np.testing.assert_array_equal(stats[INVERSES + STAGE], right[-1][INVERSES + STAGE])
