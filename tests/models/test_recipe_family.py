"""CONTRIBUTING's recipe for a model family, followed for Mistral without a window, whose weights have Llama's names."""

import json
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from jaxkv import models, serving
from jaxkv.models.families import FAMILIES
from jaxkv.models.families.family import Family, layer_weights, read_config
from jaxkv.models.layers import gqa, rope
from jaxkv.models.layers.block import pre_norm

LLAMA = Path(__file__).parents[1] / "data" / "models" / "llama"


def read(fields):
    fields.choice("sliding_window", None, default=None)
    rotary = rope.read(fields, {"llama3": rope.read_llama3}, interleaved=False)  # Mistral's own are not scaled
    return read_config(fields, gqa.read(fields), rotary)


MISTRAL = Family(read, partial(layer_weights, gqa.weights), pre_norm(gqa.attention))


def test_a_family_is_one_file_and_one_line(monkeypatch, tmp_path):
    shutil.copy(LLAMA / "model.safetensors", tmp_path)
    config = {**json.loads((LLAMA / "config.json").read_text()), "architectures": ["MistralForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="'MistralForCausalLM'"):
        models.load(tmp_path)
    monkeypatch.setitem(FAMILIES, "MistralForCausalLM", MISTRAL)
    engine = serving.Engine(models.load(tmp_path), num_blocks=4, max_requests=1, chunk=64)
    with np.load(LLAMA / "truth.npz") as truth:
        prompt, tokens = truth["prompts"][1, :63].tolist(), truth["tokens"][1].tolist()
    request = engine.submit(prompt, max_tokens=len(tokens), stop=())
    list(engine.run())
    assert request.generated == tokens
    (tmp_path / "config.json").write_text(json.dumps({**config, "sliding_window": 4096}))
    with pytest.raises(ValueError, match="`sliding_window` is 4096: expected None"):
        models.load(tmp_path)
