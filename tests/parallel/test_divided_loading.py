"""Checkpoints that several devices divide: what each of them reads, and float8 weights with their scales."""

import re

import jax
import numpy as np
import pytest

from jaxkv import models
from jaxkv.models.weights.safetensors_file import SafetensorsFile
from models.checkpoints.fp8 import RECORDED, larger, logits, recorded
from support.many_devices import mesh_of, on_several_devices

pytestmark = on_several_devices


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A model with float8 weights, and with their values in float32."""
    return larger(tmp_path_factory.mktemp("larger"))


@pytest.mark.ci
@pytest.mark.parametrize("kind", ["TensorParallel", "ExpertParallel"])
def test_float8_weights_are_divided_with_their_scales(folders, kind):
    small, whole = folders
    parallel = getattr(models, kind)(mesh_of(2), "x")
    model, right = models.load(small, parallel=parallel), models.load(whole)
    layer = model.params["layers"][1]
    for weight in (layer["attention"]["o"], layer["mixture"]["shared"]["up"], layer["mixture"]["experts"]["down"]):
        shapes = {
            (shard.data.shape, of.shape) for of in (weight.values, weight.scales) for shard in of.addressable_shards
        }
        assert len(shapes) == 2
        assert all(np.prod(part) * 2 == np.prod(of) for part, of in shapes)
    found, expected = logits(model), logits(right)
    assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()


@pytest.mark.ci
def test_tiles_are_not_cut(folders, tmp_path):
    small, _ = recorded("deepseek_v3", tmp_path)
    parallel = models.TensorParallel(mesh_of(2), "x")
    message = "`parallel` divides the weight 'model.layers.0.self_attn.o_proj.weight' (48, 48), which is in float8, "
    with pytest.raises(ValueError, match=re.escape(message) + "into parts of 24 rows .* cuts its tiles of 128 x 128"):
        models.load(small, parallel=parallel)
    one, two = (models.load(small, parallel=kind, fp8_weights="expand") for kind in (None, parallel))
    assert jax.tree.all(jax.tree.map(np.array_equal, one.params, two.params))


@pytest.mark.parametrize("kind", ["TensorParallel", "ExpertParallel"])
def test_devices_read_only_their_parts(monkeypatch, kind):
    read, found = SafetensorsFile.read, {}

    def recording(file, name, index):
        found.setdefault(name, []).append([part.stop - part.start for part in index])
        return read(file, name, index)

    monkeypatch.setattr(SafetensorsFile, "read", recording)
    models.load(RECORDED / "deepseek_v3", parallel=getattr(models, kind)(mesh_of(4), "x"))
    assert found["model.layers.0.self_attn.o_proj.weight"] == [[48, 12]] * 4
    assert found["model.layers.0.mlp.gate_proj.weight"] == [[16, 48]] * 4
    expert = found["model.layers.1.mlp.experts.7.down_proj.weight"]
    assert expert == ([[48, 4]] * 4 if kind == "TensorParallel" else [[48, 16]])
    assert found["model.embed_tokens.weight"] == [[97, 48]]
