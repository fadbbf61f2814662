"""Layouts as JSON, and the programs and checkpoints with caches that other processes read."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import jaxkv
from jaxkv.testing.random_layouts import draw_entry, draw_layout, draw_state
from support.compare import assert_same_bits

KINDS = (jaxkv.MLAEntry, jaxkv.KVEntry, jaxkv.IndexerEntry)
LAYOUT = jaxkv.CacheLayout(num_layers=2, num_blocks=4, block_size=4, entry=jaxkv.MLAEntry("f32", latent=32, rope=8))


@pytest.mark.parametrize("seed", range(200))
def test_a_text_makes_an_equal_layout(seed):
    rng = np.random.default_rng(seed)
    layout = draw_layout(rng, draw_state(rng) if seed % 8 == 0 else draw_entry(rng, KINDS))
    found = jaxkv.CacheLayout.from_json(layout.to_json())
    assert found == layout
    assert hash(found) == hash(layout)
    assert (found.fingerprint, found.pages) == (layout.fingerprint, layout.pages)
    assert found.to_json() == layout.to_json()


def test_what_is_not_a_layout_is_rejected():
    whole = json.loads(LAYOUT.to_json())
    wrong = ["", "{", "[]", "null", "1", '"x"', "{}", json.dumps([whole]), json.dumps(whole | {"more": 1})]
    wrong += [json.dumps({name: x for name, x in whole.items() if name != left_out}) for left_out in whole]
    wrong += [json.dumps(whole | {"entry": entry}) for entry in (1, {}, {"kind": "Path"}, {"kind": "MLAEntry", "x": 1})]
    wrong += [json.dumps(whole | {name: x}) for name in whole for x in ([], -(2**70), {"a": 1})]
    wrong += [json.dumps(whole | {name: "x"}) for name in whole if name != "packed"]  # which is a text, or None
    for text in wrong:
        with pytest.raises(ValueError):  # noqa: PT011 (many messages, of arguments and of the text)
            jaxkv.CacheLayout.from_json(text)
    with pytest.raises(ValueError, match="MLAEntry format 'mine': expected one of"):
        jaxkv.CacheLayout.from_json(LAYOUT.to_json().replace('"f32"', '"mine"', 1))
    with pytest.raises(ValueError, match=r"`text` is '\[\]': expected a text that `CacheLayout.to_json` made"):
        jaxkv.CacheLayout.from_json("[]")


def step(cache, kv_c, k_pe, slots):
    cache = jaxkv.write_mla(cache, kv_c, k_pe, slots, layer=1)
    return jaxkv.read_mla(cache, slots, layer=1), cache


@pytest.mark.parametrize("packed", [False, True])
def test_a_program_with_a_cache_is_exported(packed):
    pytest.importorskip("flatbuffers", reason="jax.export needs flatbuffers")
    layout = LAYOUT
    if packed:
        groups = {"latent": jaxkv.Group(2, LAYOUT.entry), "indexer": jaxkv.Group(2, jaxkv.IndexerEntry("f32"))}
        layout = jaxkv.PackedLayout(num_blocks=4, block_size=4, groups=groups)["latent"]
    arguments = jaxkv.KVCache.zeros(layout), jnp.ones((2, 32)), jnp.ones((2, 8)), jnp.asarray([0, 9])
    text = export.export(jax.jit(step))(*arguments).serialize()
    found, right = export.deserialize(text).call(*arguments), step(*arguments)
    assert found[1].layout == layout
    for x, y in zip(*map(jax.tree.leaves, (found, right)), strict=True):
        assert_same_bits(x, y)


def test_a_checkpoint_with_a_cache(tmp_path):
    checkpoint = pytest.importorskip("orbax.checkpoint", reason="needs orbax-checkpoint")
    cache = jaxkv.KVCache(jnp.arange(LAYOUT.size, dtype=jnp.float32), LAYOUT)
    saved = {"cache": cache, "lengths": jnp.asarray([3, 4])}
    with checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", saved)
        checkpointer.wait_until_finished()
        found = checkpointer.restore(tmp_path / "state", jax.eval_shape(lambda: saved))
    assert found["cache"].layout == LAYOUT
    assert_same_bits(found["cache"].buffer, cache.buffer)
