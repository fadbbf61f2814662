"""What entry formats cost in accuracy, on the recorded models of the tests.

    python notebooks/accuracy/entry_formats.py measure FILE      # a few minutes on a CPU
    python notebooks/accuracy/entry_formats.py table README      # rewrites what stands between the marks `accuracy`

Attention: the models' own queries, latents, keys and values, computed in float32, are recorded while a prompt of 200
tokens is prefilled.  Each is attended to once as it is, in float64, and once encoded and decoded, with a softmax in
float64, so that the error is that of the entries alone.  A query token sees the tokens before it and itself.

Tokens: the float32 model computes the logits of a recorded prompt and of the 64 tokens that it generated greedily, all
with entries of the format, and a token counts as different if it no longer has the largest logit.
"""

import argparse
import json
import platform
import re
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from jax.experimental import io_callback

import jaxkv
import jaxkv.models
from jaxkv.models.parallel.one_device import OneDevice

ROOT = Path(__file__).parents[2]
MODELS = ROOT / "tests" / "data" / "models"
RECORDED = Path(__file__).with_suffix(".json")
BLOCK_SIZE = 64


@dataclass(frozen=True, eq=False)
class Recorder(OneDevice):
    """The device of a model whose attention also records its queries and softmax scales, layer by layer."""

    calls: list[tuple[list[np.ndarray], float]] = field(default_factory=list)

    def _record(self, queries, scale):
        io_callback(
            lambda *arrays: self.calls.append(([*map(np.asarray, arrays)], scale)), None, *queries, ordered=True
        )

    def _recorded(self, attend, q, args, scale, options):
        self._record(q, scale)
        return attend(*q, *args, scale=scale, **options)

    def prefill_mla(self, q_nope, q_pe, w_uk, *args, scale, **options):
        """As in `OneDevice`; what is recorded is the absorbed queries."""
        self._record((jnp.einsum("bqhn,hnr->bqhr", q_nope, w_uk, precision="highest"), q_pe), scale)
        return super().prefill_mla(q_nope, q_pe, w_uk, *args, scale=scale, **options)

    def decode_mla(self, q_latent, q_pe, *args, scale, **options):
        """As in `OneDevice`."""
        return self._recorded(super().decode_mla, (q_latent, q_pe), args, scale, options)

    def decode_mla_sparse(self, q_latent, q_pe, *args, scale, **options):
        """As in `OneDevice`."""
        return self._recorded(super().decode_mla_sparse, (q_latent, q_pe), args, scale, options)

    def decode_kv(self, q, *args, scale, **options):
        """As in `OneDevice`."""
        return self._recorded(super().decode_kv, (q,), args, scale, options)


def families(kind) -> list[str]:
    """The recorded models with this kind of entries, and with weights of their own."""
    found = sorted(path.parent.name for path in MODELS.glob("*/truth.npz") if "sharded" not in path.parent.name)
    configs = {name: json.loads((MODELS / name / "config.json").read_text()) for name in found}
    return [name for name in found if ("kv_lora_rank" in configs[name]) == (kind is jaxkv.MLAEntry)]


def prefill(model, tokens: np.ndarray) -> tuple[jaxkv.KVCache, np.ndarray]:
    """The cache and the logits [B, Q, vocab] after prefilling tokens [B, Q]."""
    batch, length = tokens.shape
    blocks = -(-length // BLOCK_SIZE)
    tables = jnp.arange(batch * blocks, dtype=jnp.int32).reshape(batch, blocks)
    positions = jnp.broadcast_to(jnp.arange(length), (batch, length))
    slots = jaxkv.slots_for(tables, positions, block_size=BLOCK_SIZE)
    lengths = jnp.full(batch, length, jnp.int32)

    @jax.jit
    def run(model, cache):
        cache, x = jaxkv.models.forward(model, cache, tokens, lengths, tables, slots)
        return cache, jaxkv.models.head(model, x)

    cache, logits = run(model, model.cache(batch * blocks, BLOCK_SIZE))
    return cache, np.asarray(logits)


def recorded_attention(family: str):
    """The entry of a float32 model, and of each layer: queries [Q, H, n_i], values [S, H, n_i], softmax scale."""
    recorder = Recorder()
    model = jaxkv.models.load(MODELS / family, dtype="float32", entry_format="f32", parallel=recorder)
    with np.load(MODELS / family / "truth.npz") as truth:
        tokens = truth["prompts"][-1:]
    cache, _ = prefill(model, tokens)
    jax.effects_barrier()
    tables = jnp.arange(-(-tokens.shape[1] // BLOCK_SIZE), dtype=jnp.int32)[None]
    gather = jaxkv.gather_mla if isinstance(model.entry, jaxkv.MLAEntry) else jaxkv.gather_kv
    layout = model.layout(tables.size, BLOCK_SIZE)
    cache = cache.view(layout["latent"]) if isinstance(layout, jaxkv.PackedLayout) else cache
    options = {"total": tokens.shape[1], "dtype": jnp.float32, "implementation": "xla"}
    found = []
    for layer, (queries, scale) in enumerate(recorder.calls):
        values = gather(cache, tables, jnp.asarray([0, tokens.shape[1]]), layer=layer, **options)
        values = [np.asarray(x).reshape(tokens.shape[1], -1, x.shape[-1]) for x in values]
        found.append(([q[0] for q in queries], values, scale))
    return model.entry, found


def attend(queries, k, v, scale) -> np.ndarray:
    """Causal attention in float64: queries [Q, Hq, D], k [S, H, D], v [S, H, Dv]."""
    group = queries.shape[1] // k.shape[1]
    k, v = (np.repeat(x.astype(np.float64), group, axis=1) for x in (k, v))
    scores = np.einsum("qhd,shd->hqs", queries.astype(np.float64), k) * scale
    scores = np.where(np.tri(len(queries), len(k), dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.einsum("hqs,shv->qhv", weights / weights.sum(axis=-1, keepdims=True), v)


def stored(entry, values) -> list[np.ndarray]:
    """Values [S, H, n_i] as they are read from entries; rotary parts are padded with zeros where tiles need it."""
    scales = (jnp.float32(1),) * 2 if entry.codec.scaled else (None, None)
    padded = [np.pad(x, ((0, 0), (0, 0), (0, n - x.shape[-1]))) for x, n in zip(values, entry.sizes, strict=True)]
    found = entry.decode(entry.encode([jnp.asarray(x) for x in padded], scales), jnp.float32, scales)
    return [np.asarray(x)[..., : value.shape[-1]] for x, value in zip(found, values, strict=True)]


def entry_for(kind, form: str, sizes):
    """The entry of a format that can hold arrays of these sizes."""
    for rope in (sizes[1], 16, 32, 64):
        try:
            return kind(form, sizes[0], rope)
        except ValueError as error:
            reason = error
    raise reason


def attention_errors(kind) -> dict[str, list[float]]:
    """By format, the relative error of the results of each layer of each model with this kind of entries."""
    found: dict[str, list[float]] = {}
    for family in families(kind):
        own, layers = recorded_attention(family)
        for queries, values, scale in layers:
            q = np.concatenate(queries, axis=-1)

            def result(parts, q=q, scale=scale):
                latents = kind is jaxkv.MLAEntry
                return attend(q, np.concatenate(parts, axis=-1) if latents else parts[0], parts[not latents], scale)

            exact = result(values)
            for form in kind.formats:
                error = result(stored(entry_for(kind, form, own.sizes), values)) - exact
                found.setdefault(form, []).append(float(np.linalg.norm(error) / np.linalg.norm(exact)))
    return found


def different_tokens(family: str, form: str) -> tuple[int, int] | None:
    """How many of the recorded greedy tokens no longer have the largest logit, of how many; None if unsupported."""
    try:
        model = jaxkv.models.load(MODELS / family, dtype="float32", entry_format=form)
    except ValueError:
        return None  # the format cannot store the model's rotary part, of 8 values
    with np.load(MODELS / family / "truth.npz") as truth:
        prompts, lengths, tokens = (truth[name] for name in ("prompts", "prompt_lens", "tokens"))
    steps = tokens.shape[1]
    sequences = np.zeros((len(prompts), prompts.shape[1] + steps), np.int32)
    for row, prompt, length, generated in zip(sequences, prompts, lengths, tokens, strict=True):
        row[: length + steps] = [*prompt[:length], *generated]
    _, logits = prefill(model, sequences)
    likeliest = [x[length - 1 : length - 1 + steps].argmax(axis=-1) for x, length in zip(logits, lengths, strict=True)]
    return int((np.stack(likeliest) != tokens).sum()), tokens.size


def measure(file: Path) -> None:
    """Records all formats."""
    rows = []
    for kind in (jaxkv.MLAEntry, jaxkv.KVEntry):
        errors = attention_errors(kind)
        for form in kind.formats:
            counts = [found for family in families(kind) if (found := different_tokens(family, form))]
            entry = kind.typical(form)
            rows.append(
                {
                    "entries": kind.__name__,
                    "format": form,
                    "bits_per_value": 8 * entry.nbytes / sum(entry.sizes),
                    "error_median": float(np.median(errors[form])),
                    "error_largest": max(errors[form]),
                    "different": sum(n for n, _ in counts),
                    "tokens": sum(n for _, n in counts),
                }
            )
            print(rows[-1], flush=True)
    about = {
        "date": datetime.now(UTC).date().isoformat(),
        "command": f"python notebooks/accuracy/entry_formats.py measure {file.name}",
        "device": platform.machine(),
        "versions": {"jax": jax.__version__, "jaxlib": jaxlib.__version__, "jaxkv": jaxkv.__version__},
        "models": families(jaxkv.MLAEntry) + families(jaxkv.KVEntry),
    }
    file.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


def table() -> str:
    """The recorded numbers as a Markdown table."""
    lines = [
        "| entries | format | bits per value | attention error, median | largest | tokens that differ |",
        "|---|---|---|---|---|---|",
    ]
    for row in json.loads(RECORDED.read_text())["rows"]:
        tokens = f"{row['different']} of {row['tokens']:,}" if row["tokens"] else "-"
        lines.append(
            f"| `{row['entries']}` | `{row['format']}` | {row['bits_per_value']:.2f} | {row['error_median']:.1e} | "
            f"{row['error_largest']:.1e} | {tokens} |"
        )
    return "\n".join(lines)


def rewrite(file: Path) -> None:
    """Rewrites the table in a README."""
    text = file.read_text()
    new = re.sub(r"(<!-- accuracy -->\n).*?(<!-- /accuracy -->)", partial(_between, table()), text, flags=re.DOTALL)
    file.write_text(new)


def _between(content: str, match: re.Match) -> str:
    return f"{match[1]}{content}\n{match[2]}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=("measure", "table"))
    parser.add_argument("file", type=Path)
    args = parser.parse_args()
    (measure if args.action == "measure" else rewrite)(args.file)
