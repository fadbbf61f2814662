"""Times a decode step's attention with expanded keys and values beside the same with latents, at DeepSeek R1's sizes.

    python notebooks/time_expanded.py expanded.json [--requests 64 --tokens 4096 --heads 128]

Both begin with a layer's new latents and queries and end with its values per head, in bf16, so that both multiply by
the two up-projections:

- `expanded`: expands the new latents, stores keys and values per head in a dense cache, and attends by XLA, as
  `clients/latents.md` does.  With 64 requests of 4,096 tokens, this cache of one layer has 17.2 GB.
- `latents`: stores the new latents, multiplies queries by the one up-projection, attends by `decode_mla`, and
  multiplies the results by the other.  The plan is made once, outside of what is timed, as for all layers of a step.

Both caches hold the same tokens.  The file has the relative difference of the first results, which rounding causes, the
times in bursts and sustained (`jaxkv/bench/timing.py`), and the rates of the device that were measured in the same run.
"""

import argparse
import shlex
import sys
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from jax import lax

import jaxkv
from jaxkv.bench.timing import Chain, measure_ceilings
from jaxkv.terminal.files import write_json

NOPE, ROPE, VALUE, LATENT = 128, 64, 128, 512
SCALE = (NOPE + ROPE) ** -0.5
BLOCK = 64
Expanded = dict[str, jax.Array]


class Fixed(NamedTuple):
    """What no step changes.  `k_b` and `v_b` [LATENT, H, 128], `q_pe` [B, H, ROPE]."""

    k_b: jax.Array
    v_b: jax.Array
    q_pe: jax.Array
    block_tables: jax.Array
    seq_lens: jax.Array
    plan: jaxkv.DecodePlan


def new_token(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A latent [B, LATENT] and a rotary key [B, ROPE], which depend on the last step's results, as in a model."""
    return tuple(jnp.split(x.reshape(len(x), -1)[:, : LATENT + ROPE], [LATENT], axis=1))


def expanded_step(i, carry: tuple[Expanded, jax.Array], fixed: Fixed) -> tuple[Expanded, jax.Array]:
    """One step of a dense cache, `k_nope` and `v` [B, H, S, 128] and `k_pe` [B, S, ROPE], and queries [B, H, 128]."""
    cache, q_nope = carry
    latent, k_pe = new_token(q_nope)
    new = {"k_nope": jnp.einsum("br,rhd->bhd", latent, fixed.k_b)[:, :, None], "k_pe": k_pe[:, None]}
    new["v"] = jnp.einsum("br,rhd->bhd", latent, fixed.v_b)[:, :, None]
    last = fixed.seq_lens[0] - 1
    cache = {name: lax.dynamic_update_slice_in_dim(cache[name], new[name], last, new[name].ndim - 2) for name in cache}
    product = partial(jnp.einsum, preferred_element_type=jnp.float32)
    scores = product("bhd,bhsd->bhs", q_nope, cache["k_nope"]) + product("bhd,bsd->bhs", fixed.q_pe, cache["k_pe"])
    seen = jnp.arange(scores.shape[-1]) < fixed.seq_lens[:, None, None]
    shares = jax.nn.softmax(jnp.where(seen, SCALE * scores, -1e30), axis=-1).astype(q_nope.dtype)
    return cache, jnp.einsum("bhs,bhsd->bhd", shares, cache["v"])


def latent_step(i, carry: tuple[jaxkv.KVCache, jax.Array], fixed: Fixed) -> tuple[jaxkv.KVCache, jax.Array]:
    """One step of a cache of latents, and queries [B, H, 128]."""
    cache, q_nope = carry
    latent, k_pe = new_token(q_nope)
    slots = jaxkv.slots_for(fixed.block_tables, fixed.seq_lens[:, None] - 1, cache)[:, 0]
    cache = jaxkv.write_mla(cache, latent, k_pe, slots, layer=0)
    q_latent = jnp.einsum("bhd,rhd->bhr", q_nope, fixed.k_b)
    tables, lens = fixed.block_tables, fixed.seq_lens
    out = jaxkv.decode_mla(q_latent, fixed.q_pe, cache, tables, lens, layer=0, scale=SCALE, plan=fixed.plan)
    return cache, jnp.einsum("bhr,rhd->bhd", out, fixed.v_b)


def normal(key: jax.Array, *shape: int, scale: float = 1.0) -> jax.Array:
    """Normal values in bf16."""
    return (scale * jax.random.normal(key, shape)).astype(jnp.bfloat16)


def main() -> None:
    """Measures both and writes the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", type=Path)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=4096, help="of each request, a multiple of 64")
    parser.add_argument("--heads", type=int, default=128, help="at least 5")
    parser.add_argument("--repeats", type=int, default=9, help="chains of which the median is reported")
    args = parser.parse_args()
    requests, tokens, heads = args.requests, args.tokens, args.heads
    if tokens % BLOCK or tokens < BLOCK:
        parser.error(f"--tokens is {tokens}: expected a positive multiple of {BLOCK}")
    if heads * VALUE < LATENT + ROPE:
        parser.error(f"--heads is {heads}: expected at least 5, because results are the next step's latents")
    keys = jax.random.split(jax.random.key(0), 6)
    weight = partial(normal, scale=LATENT**-0.5)
    k_b, v_b = weight(keys[0], LATENT, heads, NOPE), weight(keys[1], LATENT, heads, VALUE)
    latents, k_pe = normal(keys[2], tokens, LATENT), normal(keys[3], tokens, ROPE)  # of every request
    q_nope = normal(keys[4], requests, heads, NOPE)

    layout = jaxkv.CacheLayout(
        num_layers=1, num_blocks=requests * tokens // BLOCK, block_size=BLOCK, entry=jaxkv.MLAEntry("bf16")
    )
    shuffled = np.random.default_rng(0).permutation(layout.num_blocks).reshape(requests, -1)
    block_tables, seq_lens = jnp.asarray(shuffled, jnp.int32), jnp.full(requests, tokens, jnp.int32)
    plan = jaxkv.plan_decode(jaxkv.KVCache.zeros(layout), block_tables, seq_lens, num_heads=heads)
    fixed = Fixed(k_b, v_b, normal(keys[5], requests, heads, ROPE), block_tables, seq_lens, plan)

    # Arguments, because XLA would compute products of constants while compiling.
    @jax.jit
    def expanded(latents, k_pe, fixed: Fixed) -> Expanded:
        each = {"k_nope": jnp.einsum("tr,rhd->htd", latents, fixed.k_b), "k_pe": k_pe}
        each["v"] = jnp.einsum("tr,rhd->htd", latents, fixed.v_b)
        return {name: jnp.broadcast_to(value, (requests, *value.shape)) for name, value in each.items()}

    @jax.jit
    def paged(latents, k_pe, fixed: Fixed) -> jaxkv.KVCache:
        def write(request, cache):
            slots = jaxkv.slots_for(fixed.block_tables[request][None], jnp.arange(tokens)[None], cache)[0]
            return jaxkv.write_mla(cache, latents, k_pe, slots, layer=0)

        return lax.fori_loop(0, requests, write, jaxkv.KVCache.zeros(layout))

    device = jax.devices()[0]
    ceilings = measure_ceilings(device, repeats=args.repeats)
    first, rows = {}, {}
    sides: dict[str, tuple[Callable[..., Any], Callable[..., Any], int]] = {
        "expanded": (expanded_step, expanded, 2 * (heads * (NOPE + VALUE) + ROPE)),
        "latents": (latent_step, paged, layout.entry.nbytes),
    }
    for name, (step, cache, nbytes) in sides.items():
        once = jax.jit(lambda carry, fixed, step=step: step(0, carry, fixed), donate_argnums=0)
        carry = once((cache(latents, k_pe, fixed), q_nope + 0), fixed)
        first[name] = np.asarray(carry[1], np.float32)
        nbytes *= requests * tokens
        chain = Chain(step, carry, fixed, least=nbytes / 5e12).compile()
        timing = chain.time(carry, fixed, repeats=args.repeats, sustain=True)
        del carry
        seconds = timing.median
        rows[name] = {**asdict(timing), "cache_bytes": nbytes, "of_reading": nbytes / seconds / ceilings.read}
        sustained = "" if timing.sustained is None else f", sustained {1e3 * timing.sustained:.4f} ms"
        print(f"{name}: {1e3 * seconds:.4f} ms{sustained}; reads {nbytes / 1e9:.3f} GB of the cache", flush=True)
    difference = np.linalg.norm(first["latents"] - first["expanded"]) / np.linalg.norm(first["expanded"])
    print(f"relative difference of the first results: {difference:.4f}")
    found = {
        "date": datetime.now(UTC).date().isoformat(),
        "command": shlex.join(["python", *sys.argv]),
        "device": device.device_kind,
        "versions": {"jax": jax.__version__, "jaxlib": jaxlib.__version__, "jaxkv": jaxkv.__version__},
        "sizes": {"requests": requests, "tokens": tokens, "heads": heads, "block_size": BLOCK},
        "ceilings": asdict(ceilings),
        "difference": float(difference),
        "seconds": rows,
    }
    write_json(args.json, found)


if __name__ == "__main__":
    main()
