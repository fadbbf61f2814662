"""Trains the model in `model/`: MLA of DeepSeek V2's form, 2.9 million weights, on Python sources.

    python notebooks/trained/train.py tokens FOLDER   # the tokenizer and the tokens, on a CPU, in two minutes
    python notebooks/trained/train.py train FOLDER    # on a GPU, in minutes; needs optax

The model is jaxkv's own: in every step, `models.forward` stores the latents of whole sequences in a paged cache
and attends to it, and gradients pass through the cache.  Weights are kept in float32 and saved in bfloat16, with the
names of DeepSeek's checkpoints.  The latent of 512 values, many for so small a model, is that of the published models,
because some entry formats are for this size only.
"""

import argparse
import json
import shutil
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from jaxkv import models
from jaxkv.models import ModelConfig
from jaxkv.models.weights.build import Build
from jaxkv.models.weights.parameters import parameters

MODEL = Path(__file__).with_name("model")
CONFIG = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "attention_bias": False,
    "bos_token_id": None,
    "eos_token_id": 0,
    "first_k_dense_replace": 4,
    "hidden_act": "silu",
    "hidden_size": 192,
    "intermediate_size": 512,
    "kv_lora_rank": 512,
    "max_position_embeddings": 1024,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "v_head_dim": 32,
    "vocab_size": 2048,
}
LENGTH, BATCH, STEPS = 1024, 16, 5000
PEAK, WARM_UP, DECAY = 4e-3, 200, 0.1
"""The highest learning rate, the steps until it is reached, and the decay of weights."""


def initial(config: ModelConfig, key: jax.Array):
    """Weights in float32, in the tree of a checkpoint: normal with variance 1 / inputs, and less before residual sums.

    Embeddings have the variance 1 / hidden, as the rows of the output matrix, which are the same.
    """
    leaves, structure = jax.tree.flatten(parameters(config, mtp=False))
    arrays = []
    for weight, own in zip(leaves, jax.random.split(key, len(leaves)), strict=True):
        if len(weight.shape) == 1:
            arrays.append(jnp.ones(weight.shape))
            continue
        before_sum = weight.name.endswith(("o_proj.weight", "down_proj.weight"))
        variance = 1 / weight.shape[-1] / (2 * config.num_layers if before_sum else 1)
        arrays.append(variance**0.5 * jax.random.normal(own, weight.shape))
    return jax.tree.unflatten(structure, arrays)


def model_of(config: ModelConfig, weights) -> models.Model:
    """The model with these weights, which may be traced."""
    build = Build(config, "float32", None, "xla", None, False)
    return build.model(dict(weights))  # of which it replaces the layers


def losses(model: models.Model, windows) -> jax.Array:
    """The loss of each token that follows another in `windows`, int32 [B, T + 1]: nats, float32 [B, T]."""
    requests, length = windows.shape[0], windows.shape[1] - 1
    blocks = -(-length // model.usual_block_size)
    tables = jnp.arange(requests * blocks, dtype=jnp.int32).reshape(requests, blocks)
    return advance(model, model.cache(requests * blocks), windows, tables, 0, length)[1]


def advance(
    model: models.Model, cache: jaxkv.KVCache, windows, tables, start: int, end: int
) -> tuple[jaxkv.KVCache, jax.Array]:
    """The cache with the tokens from `start` to `end` of windows [B, T + 1], and the losses of those that follow them.

    `tables` int32 [B, M] has the blocks of each window; the tokens before `start` are in the cache.
    """
    positions = jnp.broadcast_to(jnp.arange(start, end, dtype=jnp.int32), (windows.shape[0], end - start))
    lengths, slots = jnp.full(windows.shape[0], end, jnp.int32), jaxkv.slots_for(tables, positions, cache)
    cache, x = models.forward(model, cache, windows[:, start:end], lengths, tables, slots)
    logits, following = jax.nn.log_softmax(models.head(model, x)), windows[:, start + 1 : end + 1]
    return cache, -jnp.take_along_axis(logits, following[:, :, None], axis=-1)[:, :, 0]


def train(folder: Path, destination: Path, steps: int, batch: int) -> None:
    """Trains with the tokens in `folder`, and writes a checkpoint."""
    import optax

    config = ModelConfig.from_json(CONFIG)
    stream = jnp.asarray(np.load(folder / "train.npy"), jnp.int32)
    rate = optax.warmup_cosine_decay_schedule(0.0, PEAK, WARM_UP, steps, 0.05 * PEAK)
    matrices = jax.tree.map(lambda weight: len(weight.shape) > 1, parameters(config, mtp=False))
    adam = optax.adamw(rate, b2=0.98, weight_decay=DECAY, mask=matrices)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), adam)

    @jax.jit
    def update(weights, state, key):
        starts = jax.random.randint(key, (batch,), 0, len(stream) - LENGTH)
        windows = stream[starts[:, None] + jnp.arange(LENGTH + 1)]
        loss, gradients = jax.value_and_grad(lambda weights: losses(model_of(config, weights), windows).mean())(weights)
        changes, state = optimizer.update(gradients, state, weights)
        return optax.apply_updates(weights, changes), state, loss

    weights = initial(config, jax.random.key(0))
    print(f"{sum(array.size for array in jax.tree.leaves(weights)):,} weights, {len(stream):,} tokens", flush=True)
    state, key, start = optimizer.init(weights), jax.random.key(1), time.perf_counter()
    for step in range(steps):
        weights, state, loss = update(weights, state, jax.random.fold_in(key, step))
        if step % 100 == 0 or step == steps - 1:
            print(f"step {step}: loss {loss:.3f}, {time.perf_counter() - start:.0f} s", flush=True)
    save(config, weights, folder / "tokenizer.json", destination)


def save(config: ModelConfig, weights, tokenizer: Path, destination: Path) -> None:
    """Writes a checkpoint in bfloat16."""
    from safetensors.flax import save_file

    destination.mkdir(parents=True, exist_ok=True)
    described = jax.tree.leaves(parameters(config, mtp=False))
    arrays = {weight.name: array for weight, array in zip(described, jax.tree.leaves(weights), strict=True)}
    arrays = {name: array.astype(jnp.bfloat16) for name, array in arrays.items()}
    save_file(arrays, destination / "model.safetensors", metadata={"format": "pt"})
    (destination / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    if tokenizer != destination / "tokenizer.json":
        shutil.copy(tokenizer, destination / "tokenizer.json")


def prepare(folder: Path) -> None:
    """Writes the tokenizer and the tokens."""
    import corpus

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = corpus.make_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, held_out in (("train", False), ("held_out", True)):
        stream = corpus.tokens(tokenizer, corpus.texts(held_out=held_out))
        np.save(folder / f"{name}.npy", stream)
        print(f"{name}: {len(stream):,} tokens")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("tokens", "train"))
    parser.add_argument("folder", type=Path, help="of the tokenizer and the tokens")
    parser.add_argument("--model", type=Path, default=MODEL, help="folder of the checkpoint (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--batch", type=int, default=BATCH, help="sequences per step")
    args = parser.parse_args()
    if args.what == "tokens":
        prepare(args.folder)
    else:
        train(args.folder, args.model, args.steps, args.batch)


if __name__ == "__main__":
    main()
