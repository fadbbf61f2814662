"""The caches of models with sliding windows: groups, tables and blocks; what fits them; scales of their entries."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import models
from models.checkpoints.published_gqa import PUBLISHED_GQA
from support import toy_windows
from support.many_devices import mesh_of
from support.toy_windows import ALL, BLOCK, EVEN, FULL, UNEVEN, WINDOW, WINDOWED, one_table


@pytest.fixture(autouse=True)
def _family(monkeypatch):
    toy_windows.install(monkeypatch)


def described(kinds):
    return jax.eval_shape(lambda: toy_windows.random_model(kinds))


def test_gpt_oss_20b_has_two_tables_of_equal_blocks():
    config = models.ModelConfig.from_json(PUBLISHED_GQA["GPT-OSS"])
    held = jax.eval_shape(lambda: models.random_model(config))
    layout = held.layout(10)
    assert held.tables == tuple(layout.tables) == ("", "window")
    entry = jaxkv.KVEntry("bf16", head_dim=64)
    assert layout.groups == {
        "full_attention": jaxkv.Group(12, entry, 8),
        "sliding_window": jaxkv.Group(12, entry, 8, table="window", window=128),
    }
    assert [table.block_size for table in layout.tables.values()] == [64, 64]
    # A block has the entries of half of the layers, and no padding.
    assert {group.block_nbytes for group in layout.values()} == {64 * 12 * 8 * 2 * 64 * 2}
    assert len({group.size for group in layout.values()}) == 1


@pytest.mark.parametrize(
    ("kinds", "size"),
    [
        (UNEVEN, BLOCK // 2),
        ((WINDOWED,) * 5 + (FULL,), 1),  # 8 tokens of one layer have room for 1 token of five
        ((FULL,) * 5 + (WINDOWED,), BLOCK),  # padded: no table has larger blocks than the first
    ],
)
def test_blocks_of_windows_fit_in_the_others(kinds, size):
    layout = described(kinds).layout(4, BLOCK)
    assert {name: table.block_size for name, table in layout.tables.items()} == {"": BLOCK, "window": size}
    alone = jaxkv.CacheLayout(
        num_layers=kinds.count(FULL), num_blocks=1, block_size=BLOCK, num_heads=2, entry=described(EVEN).entry
    )
    assert layout["full_attention"].block_nbytes == alone.block_nbytes


def test_one_table_if_all_layers_have_a_window_or_none_has():
    layout = described(ALL).layout(4, BLOCK)
    assert described(ALL).tables == ("",)
    assert layout.groups == {"sliding_window": jaxkv.Group(1, described(EVEN).entry, 2, window=WINDOW)}
    assert described((FULL, FULL)).tables == ("",)
    assert isinstance(described((FULL, FULL)).layout(4, BLOCK), jaxkv.CacheLayout)


def test_devices_that_divide_tokens_keep_all_entries_in_one_table():
    held = dataclasses.replace(described(EVEN), parallel=models.ContextParallel(mesh_of(2), "x"))
    assert held.tables == ("",)
    layout = held.layout(4, BLOCK)
    assert (layout.num_layers, layout.block_size) == (2, BLOCK // 2)


class TestArguments:
    def test_a_cache_of_every_order_fits(self):
        for order in ("BLNHC", "BLHNC", "BHLNC"):
            cache = described(UNEVEN).cache(4, BLOCK, order)
            view, table = described(UNEVEN).windowed_view(cache)
            assert (view.layout.num_layers, view.layout.block_size, table) == (2, BLOCK // 2, "window")
            assert view.layout == described(UNEVEN).layout(4, BLOCK, order)["sliding_window"]

    def test_a_cache_without_these_groups_is_rejected(self):
        sizes = {"num_layers": 2, "num_blocks": 4, "block_size": BLOCK, "num_heads": 2}
        whole = jaxkv.CacheLayout(entry=described(EVEN).entry, **sizes)
        with pytest.raises(ValueError, match="`cache` does not have the model's groups"):
            described(EVEN).check_cache(jaxkv.KVCache.zeros(whole))
        with pytest.raises(ValueError, match="`order` is 'LBNHC'"):
            described(EVEN).layout(4, BLOCK, "LBNHC")

    def test_one_block_table_is_not_enough(self):
        cache, zeros = described(EVEN).cache(4, BLOCK), jnp.zeros((1, 1), jnp.int32)
        with pytest.raises(ValueError, match="`block_tables` has the tables '': expected the model's, '', 'window'"):
            models.prefill(described(EVEN), cache, zeros, zeros[0], zeros, zeros)


@pytest.mark.ci
def test_scales_are_those_of_one_table():
    held = toy_windows.random_model(UNEVEN, entry_format="fp8")
    prompts = [[1, 2, 3], list(range(90))]
    found, right = (
        models.calibrate(each, prompts, powers_of_two=False).params["entry_scales"] for each in (held, one_table(held))
    )
    assert found.keys() == right.keys() == {"k_scale", "v_scale"}
    for name, scales in right.items():
        assert scales.shape == (3, 2)
        np.testing.assert_allclose(found[name], scales, rtol=1e-5)
        assert len(np.unique(np.asarray(scales))) == 6
