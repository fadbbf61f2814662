"""Record tiny checkpoints and what the models of Hugging Face transformers make of them.

Every family is built offline from its configuration, tiny, with random float32 weights, and written by
`save_pretrained` to a folder of its name next to this file: `config.json` and `model.safetensors` (or two shards and
their index). `truth.npz` holds what the model answers to prompts of 1, 63, 64, 65 and 200 tokens, one at a time, in
float32 with eager attention:

    prompts       [prompts, longest]         token ids, padded with -1 (int32)
    prompt_lens   [prompts]                  tokens of each prompt (int32)
    logits        [prompts, longest, vocab]  of every prompt position; 0 on the padding (float32)
    tokens        [prompts, 64]              the greedy continuation (int32)
    step_logits   [prompts, 64, vocab]       the logits that chose each of those tokens (float32)
    versions      []                         the versions that made the file (string)

The continuation is that of `generate` with the cache; a forward pass of the whole sequence without it must agree. So
that another implementation can be held to the same tokens, prompts are drawn until every choice is clear: the two best
logits of a step, and the last chosen and first rejected candidate of each expert routing and of each of the indexer's
selections, lie further apart than float32 rounding can move them.

Names of weights are those that `save_pretrained` writes.  So is `config.json`, except that some families have it with
the keys of the published checkpoints (`PUBLISHED`).
DeepSeek-V3.2 is what transformers makes of it: the indexer scores in float32, without Hadamard rotation or fp8.
The norms of GLM's latents have the epsilon of its checkpoints (`LATENT_EPS`), which transformers does not use.

Run it on Python 3.11 in an environment of its own, with the CPU build of torch:

    uv venv --python 3.11 /tmp/huggingface
    uv pip install --python /tmp/huggingface --torch-backend cpu torch==2.13.0 transformers==5.24.0
    /tmp/huggingface/bin/python tests/data/models/record.py [family ...]

Running it again with the same versions on the same machine gives the same bytes.
"""

import itertools
import json
import sys
import zlib
from pathlib import Path

import numpy as np
import torch
import transformers
from configurations import BIAS, CENTRED, FAMILIES, LATENT_EPS, PUBLISHED, SHARDS, TINY, TODAYS_KEYS
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

LENGTHS = (1, 63, 64, 65, 200)  # a block of 64 tokens, one less, one more
STEPS = 64
LOGIT_MARGIN = 1e-3  # between the two best logits, relative to the largest magnitude of the step
CHOICE_MARGIN = 2e-5  # the same at the edge of every top-k inside the model; float32 rounding moves these by 1e-6
MASKED = -1e30  # masks are -inf or the most negative float32


class Margins(TorchDispatchMode):
    """Notes how clearly every top-k of the code under it was decided."""

    def __init__(self):
        super().__init__()
        self.smallest = float("inf")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten.topk.default:
            scores, k = args[:2]
            if k < scores.shape[-1]:
                self.smallest = min(self.smallest, margin(scores, k))
        return func(*args, **kwargs)


def margin(scores: torch.Tensor, k: int) -> float:
    """The smallest gap between the k-th and the next score of a row, relative to the row's largest magnitude."""
    best = scores.sort(dim=-1, descending=True).values[..., k - 1 : k + 1]
    largest = scores.masked_fill(scores < MASKED, 0).abs().amax(-1).clamp_min(1e-30)  # all may be 0: unclear, not NaN
    gaps = (best[..., 0] - best[..., 1]) / largest
    return gaps.masked_fill(best[..., 1] < MASKED, float("inf")).min().item()  # none was rejected: clear


def build(family: str) -> torch.nn.Module:
    """A model of the family, its weights large enough for attention and routing to have preferences."""
    model_type, changes = FAMILIES[family]
    outer = {} if "text_config" in changes else TINY
    if "num_layers" in changes:  # LongCat's own name, which sets `num_hidden_layers`, too
        outer = {name: value for name, value in TINY.items() if name not in ("num_hidden_layers", "intermediate_size")}
    if family == "deepseek_v4":  # has no dense layers, and `intermediate_size` would be that of the experts
        outer = {name: value for name, value in TINY.items() if name != "intermediate_size"}
    config = AutoConfig.for_model(model_type, **{**outer, **changes})
    known = AutoModelForCausalLM if type(config) in AutoModelForCausalLM._model_mapping else AutoModelForImageTextToText
    model = known.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    for name, weight in itertools.chain(model.named_parameters(), model.named_buffers()):
        if name.endswith("bias"):  # the routing's correction bias is a buffer
            weight.normal_(0, BIAS.get(family, 0.25))
        elif name.endswith("tid2eid"):  # the experts of each token id, which differ
            weight.copy_(torch.stack([torch.randperm(changes["n_routed_experts"])[: weight.shape[1]] for _ in weight]))
        elif name.endswith("A_log"):
            weight.uniform_(-6, 0)  # some heads remember the whole prompt, others few tokens
        elif family in CENTRED and name.endswith("norm.weight") and "linear_attn" not in name:
            weight.uniform_(-0.5, 0.5)
        elif isinstance(weight, torch.nn.Parameter):
            weight.normal_(0, 0.25) if weight.ndim > 1 else weight.uniform_(0.5, 1.5)
    correct(model)
    return model


def correct(model: torch.nn.Module) -> None:
    """Give the norms of latents of GLM's models the epsilon that their checkpoints state, as Z.ai's own code does."""
    if model.config.model_type in LATENT_EPS:
        for name, module in model.named_modules():
            if name.endswith(("q_a_layernorm", "kv_a_layernorm")):
                module.variance_epsilon = model.config.rms_norm_eps


def answer(model: torch.nn.Module, prompt: torch.Tensor) -> dict[str, torch.Tensor] | None:
    """Logits [T, vocab] of a prompt, its continuation [64] and the logits of each step; None if one is unclear."""
    with Margins() as margins:
        run = model.generate(
            prompt[None],
            attention_mask=torch.ones_like(prompt)[None],
            max_new_tokens=STEPS,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        whole = model(run.sequences[:, :-1], use_cache=False).logits[0]
    tokens, step_logits = run.sequences[0, len(prompt) :], torch.cat(run.logits)
    if margin(step_logits, 1) < LOGIT_MARGIN or margins.smallest < CHOICE_MARGIN:
        return None
    steps = whole[len(prompt) - 1 :]
    require_close(steps, step_logits)
    torch.testing.assert_close(steps.argmax(-1), tokens, rtol=0, atol=0)
    return {"prompts": prompt, "logits": whole[: len(prompt)], "tokens": tokens, "step_logits": step_logits}


def clear_answer(model: torch.nn.Module, length: int) -> dict[str, torch.Tensor]:
    """The answer to the first random prompt of this length whose choices are all clear."""
    drawn = (answer(model, torch.randint(TINY["vocab_size"], (length,))) for _ in range(1000))
    return next(filter(None, drawn))


def record(model: torch.nn.Module) -> dict[str, np.ndarray]:
    """All arrays of `truth.npz`."""
    answers = [clear_answer(model, length) for length in LENGTHS]

    def padded(name, value):
        rows = [answer[name] for answer in answers]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value).numpy()

    return {
        "prompts": padded("prompts", -1).astype(np.int32),
        "prompt_lens": np.asarray(LENGTHS, np.int32),
        "logits": padded("logits", 0),
        "tokens": padded("tokens", -1).astype(np.int32),
        "step_logits": padded("step_logits", 0),
        "versions": np.array(f"transformers {transformers.__version__}, torch {torch.__version__}"),
    }


def require_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Raise unless logits agree to a tolerance relative to the largest."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5 * expected.abs().max().item())


def save(model: torch.nn.Module, family: str, folder: Path) -> None:
    """Write the checkpoint, config.json with the published keys where those differ."""
    model.save_pretrained(folder, max_shard_size=SHARDS.get(family, "1GB"))
    (folder / "generation_config.json").unlink()  # says nothing
    for file in folder.glob("*.safetensors"):
        file.chmod(0o644)  # save_pretrained hides them from other users
    if family in PUBLISHED:
        path = folder / "config.json"
        config = {**json.loads(path.read_text()), **PUBLISHED[family]}
        text = config.get("text_config", config)
        if text is not config:
            text |= PUBLISHED["kimi"]
        rope = text.pop("rope_parameters")
        theta, kind = rope.pop("rope_theta"), rope.pop("rope_type")
        text |= {"rope_theta": theta, "rope_scaling": None if kind == "default" else {"type": kind, **rope}}
        text["torch_dtype"] = text.pop("dtype")
        for name in TODAYS_KEYS:
            text.pop(name, None)
        path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def require_same(model: torch.nn.Module, folder: Path, truth: dict[str, np.ndarray]) -> None:
    """Raise unless the written checkpoint is the model that was recorded."""
    written = json.loads((folder / "config.json").read_text())
    # Transformers knows Kimi's text model by its own name only.
    config = type(model.config).from_dict({**written, "model_type": model.config.model_type})
    again = type(model).from_pretrained(folder, config=config, attn_implementation="eager")
    correct(again)
    prompt = torch.from_numpy(truth["prompts"][-1:]).long()  # the longest has no padding
    require_close(again(prompt).logits[0], torch.from_numpy(truth["logits"][-1]))


def require_sparse(model: torch.nn.Module, truth: dict[str, np.ndarray]) -> None:
    """Raise unless attention to all tokens, not to the indexer's choice, continues the longest prompt otherwise."""
    for module in model.modules():
        if hasattr(module, "index_topk"):
            module.index_topk = TINY["max_position_embeddings"]
    prompt = torch.from_numpy(truth["prompts"][-1:]).long()
    logits = model(torch.cat((prompt, torch.from_numpy(truth["tokens"][-1:, :-1]).long()), 1)).logits[0, -STEPS:]
    same = logits.argmax(-1).numpy() == truth["tokens"][-1]
    print(f"without the sparse path, {same.sum()} of the {STEPS} choices after the longest prompt are the same")
    if same.all():
        raise ValueError("the sparse path decides no token: lower index_topk")


@torch.no_grad()
def main(families: list[str]) -> None:
    """Write one folder per family."""
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    for family in families or FAMILIES:
        torch.manual_seed(zlib.crc32(family.encode()))
        model = build(family)
        truth = record(model)
        folder = Path(__file__).with_name(family)
        save(model, family, folder)
        require_same(model, folder, truth)
        if hasattr(model.config, "index_topk"):
            require_sparse(model, truth)
        np.savez_compressed(folder / "truth.npz", **truth)
        print(f"{family}: {sum(file.stat().st_size for file in folder.iterdir())} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
