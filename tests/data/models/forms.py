"""Recorded checkpoints in other forms: biases of attention, and linear scaling of rotary embedding.

`forms.npz` holds, by the name of the form, the logits after `PROMPT`, float32 [97].  They are those of transformers
5.24.0 with torch 2.13.0, recorded by this file, in the environment that `record.py` describes:

    /tmp/huggingface/bin/python tests/data/models/forms.py
"""

import json
import tempfile
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

FOLDER = Path(__file__).parent
FILE = FOLDER / "forms.npz"
PROMPT = [7 * i**2 % 97 for i in range(32)]
LINEAR = {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}}
FORMS = {
    "llama, biases and linear scaling": ("llama", {**LINEAR, "attention_bias": True}),
    "smollm3, biases": ("smollm3", {"attention_bias": True}),
    "youtu, linear scaling": ("youtu", LINEAR),
}
"""The family, and changes to its config.json, by the name of the form."""


def write(form: str, folder: Path) -> None:
    """Writes a recorded checkpoint in another form; the biases are random."""
    family, changes = FORMS[form]
    weights, rng = load_file(FOLDER / family / "model.safetensors"), np.random.default_rng(0)
    if changes.get("attention_bias"):
        for name, weight in sorted(weights.items()):
            if ".self_attn." in name:
                bias = rng.standard_normal(len(weight)).astype(np.float32)
                weights[name.replace(".weight", ".bias")] = bias
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    values = json.loads((FOLDER / family / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, **changes}))


def _record(form: str) -> np.ndarray:
    import torch
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        write(form, Path(folder))
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        return model(torch.tensor([PROMPT])).logits[0, -1].numpy()


if __name__ == "__main__":
    np.savez_compressed(FILE, **{form: _record(form) for form in FORMS})
