"""Mosaic GPU kernels that convert entries, and `merge_states`: interpreted on any machine; the suites on a Hopper GPU.

The suites of writes and gathers, with all formats, are in `test_copies.py`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas  # noqa: F401 (its warnings at import are not ours)

import jaxkv
from jaxkv_kernels import calls
from jaxkv_kernels.mosaic_gpu.entry_fields import fields_of
from jaxkv_kernels.mosaic_gpu.entry_lanes import teams
from jaxkv_kernels.mosaic_gpu.kernels import MosaicGPU
from jaxkv_kernels.mosaic_gpu.runtime.device import BULK_COPIES, interpreting
from support import suites
from support.arrays import as_float64
from support.cases import slow
from support.compare import assert_close, assert_same_bits
from support.hopper import on_gpus
from support.suites.writes import new_tokens

LATENTS, KEYS = jaxkv.MLAEntry("fp8_ds_mla", latent=256, rope=16), jaxkv.IndexerEntry()
HEADS = jaxkv.KVEntry("fp8", head_dim=24, value_dim=8)


class Mosaic:
    """What every suite of these kernels says of itself."""

    implementation = "mosaic_gpu"
    gaps = ("results of",)  # of values that do not fill the chunks of lanes


@on_gpus(BULK_COPIES)
class TestMerge(Mosaic, suites.Merge):
    """The whole suite, on the GPU."""


CASES = [(LATENTS, "packed, bfloat16", 1), (HEADS, "BHLNC", 2), slow(LATENTS, "gaps, offset", 1), (KEYS, "BLNHC", 1)]
"""Two scales per entry; a scale per head; scales that lie apart."""
NARROW = [
    (jaxkv.MLAEntry("nvfp4_ds_mla", latent=128, rope=16), "packed, bfloat16", 1),
    (jaxkv.MLAEntry("mxfp4_ds_mla", latent=128, rope=16), "BLNHC padded", 1),
    (jaxkv.MLAEntry("fp8_v4", latent=128, rope=16), "packed, uint8", 1),
    (jaxkv.KVEntry("int8", head_dim=24, value_dim=8), "BHLNC", 2),
    (jaxkv.KVEntry("nvfp4", head_dim=64, value_dim=64), "BLNHC", 2),
]
"""Permuted scales; padded scales; scales that lie apart, in padded pages; scales of whole arrays; two scales."""


@pytest.mark.usefixtures("interpreted")
class TestInterpretedWrites(Mosaic, suites.RotatedChecks):
    """Encoded entries, and that nothing else is written."""

    @pytest.mark.parametrize(("entry", "name", "heads"), [*CASES, *NARROW])
    def test_entries(self, entry, name, heads):
        layout = suites.layout_of(name, entry, num_heads=heads, block_size=3)
        self.check(layout, 1, self.slots(layout, np.random.default_rng(0)), "nan")

    def test_keys_rotated_by_angles(self):
        for name, interleaved in (("packed, bfloat16", False), ("BLNHC", True)):
            self.check_rotated(LATENTS, name, interleaved)

    def test_values_of_another_dtype(self):
        layout = suites.layout_of("BLNHC", jaxkv.MLAEntry("bf16", latent=128, rope=16))
        parts = [part.astype(jnp.float32) for part in new_tokens(layout.entry, 1, 9)]
        cache = self.write(jaxkv.KVCache.zeros(layout), parts, jnp.arange(9), 1, {})
        rounded = [part.astype(jnp.bfloat16) for part in parts]
        expected = jaxkv.write_mla(
            jaxkv.KVCache.zeros(layout), *(part[:, 0] for part in rounded), jnp.arange(9), layer=1, implementation="xla"
        )
        assert_same_bits(cache.buffer, expected.buffer)


@pytest.mark.usefixtures("interpreted")
class TestInterpretedGathers(Mosaic, suites.GatherChecks):
    """Likewise, with first tokens that are not 0, requests without tokens, and rows without a token."""

    @pytest.mark.parametrize(("entry", "name", "heads"), [CASES[0], slow(*CASES[1]), CASES[2], CASES[3], *NARROW])
    def test_entries(self, entry, name, heads):
        scene = suites.scenes.scene(entry, num_heads=heads, block_size=16, lengths=(0, 2, 17, 0, 21))
        layout = suites.layout_of(name, entry, num_heads=heads, block_size=16)
        self.check(scene, layout, 1, ((0, 0), (1, 2), (15, 17), (0, 0), (3, 21)))


@pytest.mark.usefixtures("interpreted")
class TestInterpretedReads(Mosaic, suites.ReadChecks):
    """By the kernel of gathers, with a request per slot."""

    @pytest.mark.parametrize(("entry", "name", "heads"), [CASES[0], slow(*CASES[1]), CASES[3]])
    def test_entries(self, entry, name, heads):
        scene = suites.scenes.scene(entry, num_heads=heads, block_size=16, lengths=(0, 2, 17, 0, 21))
        self.check(scene, suites.layout_of(name, entry, num_heads=heads, block_size=16), 1, count=13)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(("parts", "dtype"), [(3, "bfloat16"), slow(10, "float32")])
def test_partial_results_are_merged(parts, dtype):
    rng = np.random.default_rng(0)
    outs = jnp.asarray(rng.standard_normal((parts, 5, 24)), dtype).at[1].set(jnp.nan)
    lses = jnp.asarray(rng.normal(0, 5, (parts, 5)), jnp.float32)
    lses = lses.at[1].set(jnp.nan).at[0, 2].set(jnp.inf).at[:, 3].set(-jnp.inf)
    found = jaxkv.merge_states(outs, lses, implementation="mosaic_gpu")
    right = jaxkv.merge_states(outs, lses, implementation="xla")
    for one, other in zip(found, right, strict=True):
        assert_close(one, as_float64(other))


@pytest.mark.parametrize("parts", [2, 20])
def test_merging_lowers(parts):
    shape = jax.ShapeDtypeStruct
    arrays = shape((parts, 64, 128, 512), jnp.bfloat16), shape((parts, 64, 128), jnp.float32)
    merge = jax.jit(lambda outs, lses: MosaicGPU().merge_states(calls.MergeStates(outs=outs, lses=lses)))
    text = merge.trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 1


def test_explain_reports_unsupported_results():
    shape = jax.ShapeDtypeStruct
    with interpreting(True):
        found = jaxkv.explain(jaxkv.merge_states, shape((2, 5, 12), jnp.bfloat16), shape((2, 5), jnp.float32))
    assert found.reasons["mosaic_gpu"] == ("results of 12 values: supports multiples of 8 up to 2048",)


@pytest.mark.parametrize(
    ("entry", "lanes", "rounds"),
    [(jaxkv.MLAEntry("fp8_ds_mla"), 32, [2, 1]), (HEADS, 16, [1, 1]), (jaxkv.MLAEntry("fp8", 1024, 64), 32, [4, 1])],
)
def test_teams_are_as_large_as_the_largest_field_asks_for(entry, lanes, rounds):
    layout = jaxkv.CacheLayout(num_layers=2, num_blocks=4, block_size=64, num_heads=1, entry=entry)
    fields = fields_of(entry, layout.pages, 1)
    found = teams(fields, 100)
    assert found.lanes == lanes
    assert [found.rounds(field) for field in fields] == rounds
    assert found.together == 1
    assert teams(fields, 10**6).together == (2 if sum(rounds) <= 4 else 1)
