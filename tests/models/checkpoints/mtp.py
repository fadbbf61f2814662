"""A recorded checkpoint with an MTP layer of random weights."""

import json
import shutil
from pathlib import Path

import numpy as np
import safetensors.numpy

FOLDER = Path(__file__).parents[2] / "data" / "models" / "deepseek_v3"
LAYER = "model.layers.3."


def with_mtp(folder, seed=0):
    """A copy of the recorded checkpoint with an MTP layer: the last layer's weights, and random ones."""
    shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns("truth.npz"), dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    weights = safetensors.numpy.load_file(folder / "model.safetensors")
    weights |= {
        name.replace("model.layers.2.", LAYER): weights[name] for name in weights if name.startswith("model.layers.2.")
    }
    rng = np.random.default_rng(seed)
    for name in ("enorm", "hnorm", "shared_head.norm"):
        weights[f"{LAYER}{name}.weight"] = rng.uniform(0.5, 1.5, 48).astype(np.float32)
    weights[f"{LAYER}eh_proj.weight"] = (rng.standard_normal((48, 96)) * 0.1).astype(np.float32)
    weights[f"{LAYER}embed_tokens.weight"] = weights["model.embed_tokens.weight"]
    weights[f"{LAYER}shared_head.head.weight"] = weights["lm_head.weight"]
    safetensors.numpy.save_file(weights, folder / "model.safetensors")
    return folder, weights
