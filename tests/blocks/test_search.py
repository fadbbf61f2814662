"""Beam search and best-of-n inside one `lax.while_loop` find what they find on the host without a cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from blocks.search import BLOCK_SIZE, search, search_on_host
from support import toy_model

WIDTH, COUNT, STOP = 4, 14, 25
PARAMS = toy_model.random_params()
MODEL = toy_model.ToyModel(PARAMS)


def gumbel(seed):
    return np.random.default_rng(seed).gumbel(size=(COUNT, WIDTH, toy_model.VOCAB)).astype(np.float32)


CASES = {
    "beams, which copy the prompt's last block": (toy_model.prompt(10, 1), None),
    "beams after a prompt of whole blocks": (toy_model.prompt(12, 3), None),
    "samples": (toy_model.prompt(10, 1), gumbel(1)),
}
"""In each, some sequences end before others."""


def searched(prompt, noise, num_blocks):
    cache = MODEL.cache(num_blocks, BLOCK_SIZE, "BLNHC")  # of NaN: whatever is read without having been written shows
    options = dict(num_blocks=num_blocks, width=WIDTH, count=COUNT, stop=STOP)
    return jax.device_get(search(MODEL, cache, jnp.asarray(prompt), noise, **options)[:4])


@pytest.mark.parametrize(("prompt", "noise"), CASES.values(), ids=CASES)
def test_tokens_and_blocks_in_use(prompt, noise):
    expected, scores, used = search_on_host(PARAMS, prompt, noise, width=WIDTH, count=COUNT, stop=STOP)
    assert used.max() < WIDTH * len(prompt) / BLOCK_SIZE  # fewer than prompts alone would need without sharing
    tokens, found_scores, found_used, ok = searched(prompt, noise, int(used.max()))
    assert ok
    assert tokens.tolist() == expected.tolist()
    np.testing.assert_allclose(found_scores, scores, rtol=1e-5)
    assert found_used.tolist() == used.tolist()


def test_with_one_block_too_few_it_reports_failure():
    prompt, _ = CASES["beams, which copy the prompt's last block"]
    *_, used = search_on_host(PARAMS, prompt, width=WIDTH, count=COUNT, stop=STOP)
    _, _, found_used, ok = searched(prompt, None, int(used.max()) - 1)
    assert not ok
    assert found_used.max() == used.max() - 1


def test_the_cache_is_updated_in_place():
    layout = MODEL.layout(2**16, BLOCK_SIZE)
    cache = jaxkv.KVCache(jax.ShapeDtypeStruct((layout.size,), layout.dtype), layout)
    arguments = MODEL, cache, jnp.zeros(10, jnp.int32)
    compiled = search.lower(*arguments, num_blocks=2**16, width=WIDTH, count=COUNT, stop=STOP).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= layout.nbytes
    assert memory.temp_size_in_bytes < layout.nbytes / 10
