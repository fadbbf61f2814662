"""Record 20 drawn configurations per family, as `save_pretrained` writes them, and what the models answer.

A drawn configuration is saved once, to see the names, shapes and dtypes of its weights. These are then filled from a
seed (`tests/support/drawn.py`), loaded with `from_pretrained` and run in float32 with eager attention, without a cache.
The answer is the greedy continuation of a prompt by 8 tokens. As in `record.py`, prompts are drawn until every choice
is clear.

Run it in the environment of `record.py`:

    PYTHONPATH=tests /tmp/huggingface/bin/python tests/data/models/record_drawn.py [family ...]
"""

import json
import sys
import tempfile
import zlib
from pathlib import Path

import numpy as np
import torch
import transformers
from draw import DRAWS
from record import CHOICE_MARGIN, LOGIT_MARGIN, Margins, correct, margin
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from support.drawn import Case, save, write

CASES, STEPS = 20, 8
SEEDS = 100
"""How many are tried for a case."""
PROMPT = 20, 80
"""The tokens of a prompt, at least and at most."""
PROMPTS = 300
"""How many are tried."""


def drawn(family: str, number: int) -> Case:
    """Case `number` of a family: the first of its seeds that has a clear answer."""
    model_type, draw = DRAWS[family]
    for seed in range(SEEDS * number, SEEDS * (number + 1)):
        rng = np.random.default_rng([zlib.crc32(family.encode()), seed])
        config = AutoConfig.for_model(model_type, **draw(rng))
        dtype = (torch.float32, torch.float32, torch.bfloat16, torch.float16)[rng.integers(4)]
        with tempfile.TemporaryDirectory() as name:
            case, model = checkpoint(config, seed, dtype, Path(name))
        answer = clear_answer(model, rng)
        if answer is not None:
            return case._replace(**answer)
        print(f"{family} {number}: no clear prompt with seed {seed}")
    raise ValueError("no clear prompt")


def checkpoint(config, seed: int, dtype: torch.dtype, folder: Path) -> tuple[Case, torch.nn.Module]:
    """The case without an answer, and its model."""
    known = AutoModelForCausalLM if type(config) in AutoModelForCausalLM._model_mapping else AutoModelForImageTextToText
    options = {"attn_implementation": "eager", "experts_implementation": "eager"}  # others need multiples of 16 bytes
    model = known.from_config(config, dtype=dtype, **options)
    model.save_pretrained(folder)
    data = (folder / "model.safetensors").read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    del header["__metadata__"]
    tensors = [(name, entry["dtype"], entry["shape"]) for name, entry in sorted(header.items())]
    config, generation = (json.loads((folder / f"{name}config.json").read_text()) for name in ("", "generation_"))
    case = Case(seed, config, generation, tensors, [], [], [])
    write(folder, case)
    model, found = known.from_pretrained(folder, dtype=torch.float32, output_loading_info=True, **options)
    if wrong := {name: names for name, names in found.items() if names}:
        raise ValueError(f"the saved weights are not those of the model: {wrong}")
    correct(model)
    return case, model.eval()


def clear_answer(model: torch.nn.Module, rng: np.random.Generator) -> dict | None:
    """The prompt, its continuation and the last logits; None if no prompt has clear choices."""
    vocab = model.config.get_text_config().vocab_size
    for _ in range(PROMPTS):
        prompt = rng.integers(0, vocab, rng.integers(PROMPT[0], PROMPT[1] + 1)).tolist()
        tokens = []
        for _ in range(STEPS):
            with Margins() as margins:
                found = model(torch.tensor([prompt + tokens]), use_cache=False).logits[0, -1:].double()
            if margin(found, 1) < LOGIT_MARGIN or margins.smallest < CHOICE_MARGIN:
                break
            tokens.append(int(found.argmax()))
        else:
            return {
                "prompt": prompt,
                "tokens": tokens,
                "logits": [float(f"{logit:.7g}") for logit in found[0].tolist()],
            }
    return None


@torch.no_grad()
def main(families: list[str]) -> None:
    """Write one file per family."""
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    for family in families or DRAWS:
        found = [drawn(family, number) for number in range(CASES)]
        save(family, found)
        print(f"{family}: {[len(case.prompt) for case in found]}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
