"""Experts divided over devices: the tokens are Hugging Face's, and each device holds its experts whole."""

import json
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import models, serving
from models.checkpoints.mtp import with_mtp
from support.cases import further
from support.compare import assert_same_bits
from support.many_devices import mesh_of, on_several_devices
from support.recorded import FOLDER, recorded

pytestmark = on_several_devices


@cache
def load(family, devices):
    return models.load(FOLDER / family, parallel=models.ExpertParallel(mesh_of(devices), "x"))


def served(engine, family, count):
    """The tokens of the recorded prompts, and the recorded ones."""
    todo = [engine.submit(prompt, max_tokens=count, stop=()) for prompt, _ in recorded(family)]
    list(engine.run())
    return [request.generated for request in todo], [right[:count] for _, right in recorded(family)]


@pytest.mark.parametrize(
    ("family", "devices"),
    [
        further("deepseek_v3", 4),
        pytest.param("deepseek_v32", 2, marks=pytest.mark.slow),
        pytest.param("deepseek_v2_lite", 2, marks=pytest.mark.slow),
        pytest.param("longcat_flash", 2, marks=pytest.mark.slow),  # its logits are those of one device, see below
    ],
)
def test_the_engine(family, devices):
    engine = serving.Engine(
        load(family, devices), num_blocks=40, block_size=16, max_requests=4, chunk=64, max_num_batched_tokens=132
    )
    found, right = served(engine, family, 16)
    assert found == right


@pytest.mark.ci
def test_eight_devices_have_the_logits_of_one():
    """A model with 16 experts and 8 heads; its own device has none of the experts of some tokens."""
    values = json.loads((FOLDER / "deepseek_v3" / "config.json").read_text())
    values |= dict(num_attention_heads=8, num_key_value_heads=8, n_routed_experts=16, n_group=4)
    config = models.ModelConfig.from_json(values)
    batch = jnp.asarray([[5, 7, 11]]), jnp.asarray([3]), jnp.asarray([[1]]), jnp.asarray([[16, 17, 18]])

    def logits(parallel):
        model = models.random_model(config, parallel=parallel)
        return np.asarray(jax.jit(models.prefill)(model, model.cache(2, 16), *batch)[1])

    one, many = logits(None), logits(models.ExpertParallel(mesh_of(8), "x"))
    assert np.abs(one - many).max() < 1e-5 * np.abs(one).max()


@pytest.mark.ci
@pytest.mark.parametrize("divided", [models.TensorParallel, models.ExpertParallel])
def test_experts_without_weights_count_once(divided):
    """A layer of LongCat-Flash has the logits of one device; half of all tokens' experts return their input."""
    values = json.loads((FOLDER / "longcat_flash" / "config.json").read_text()) | {"num_layers": 1}
    config = models.ModelConfig.from_json({**values, "zero_expert_num": values["n_routed_experts"]})
    batch = jnp.asarray([[5, 7, 11]]), jnp.asarray([3]), jnp.asarray([[1]]), jnp.asarray([[16, 17, 18]])

    def logits(parallel):
        model = models.random_model(config, parallel=parallel)
        return np.asarray(jax.jit(models.prefill)(model, model.cache(2, 16), *batch)[1])

    one, many = logits(None), logits(divided(mesh_of(2), "x"))
    assert np.abs(one - many).max() < 1e-5 * np.abs(one).max()


@pytest.mark.parametrize("divided", [models.TensorParallel, models.ExpertParallel])
def test_experts_packed_in_one_tensor_are_divided(divided):
    whole, many = (models.load(FOLDER / "mistral4", parallel=parallel) for parallel in (None, divided(mesh_of(2), "x")))
    for (path, array), one in zip(jax.tree.leaves_with_path(many.params), jax.tree.leaves(whole.params), strict=True):
        assert_same_bits(array, one, path)
        if any(getattr(key, "key", None) == "experts" for key in path):
            assert array.addressable_shards[1].data.size == one.size // 2


def test_every_device_holds_its_experts_whole():
    whole, divided = models.load(FOLDER / "deepseek_v3"), load("deepseek_v3", 4)
    stacks = 0
    for (path, array), one in zip(
        jax.tree.leaves_with_path(divided.params), jax.tree.leaves(whole.params), strict=True
    ):
        assert_same_bits(array, one, path)
        if any(getattr(key, "key", None) == "experts" for key in path):
            stacks += 1
            shards = sorted(array.addressable_shards, key=lambda shard: shard.index[0].start)
            assert [shard.data.shape for shard in shards] == [(3, *one.shape[1:])] * 4
            assert [shard.index[0].start for shard in shards] == [0, 3, 6, 9]
        elif path[-1].key in models.parallel.tensor.DIVIDED:
            assert array.addressable_shards[0].data.size == one.size // 4
    assert stacks == 6


@pytest.mark.slow  # experts on several devices and drafts are tested apart
def test_drafts_on_several_devices(tmp_path):
    folder, _ = with_mtp(tmp_path)
    model = models.load(folder, parallel=models.ExpertParallel(mesh_of(4), "x"), mtp=True)
    engine = serving.Engine(model, num_blocks=40, block_size=16, max_requests=4, chunk=64, drafts=serving.MTP())
    found, right = served(engine, "deepseek_v3", 8)
    assert found == right


@pytest.mark.parametrize(
    ("family", "devices", "message"),
    [
        ("deepseek_v3", 8, "`parallel` divides the experts over 8 devices, and the model has 12: expected a multiple"),
        ("deepseek_v3", 3, "`parallel` divides the model over 3 devices, and num_heads is 4"),
        ("longcat_flash", 3, "`parallel` divides the experts over 3 devices, and the model has 8: expected a multiple"),
        ("youtu", 2, "`parallel` divides experts, and the model has none: expected TensorParallel"),
    ],
)
def test_models_that_cannot_be_divided_are_rejected(family, devices, message):
    with pytest.raises(ValueError, match=message):
        load(family, devices)
