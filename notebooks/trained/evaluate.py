"""What quantised entries and sparse attention cost the model in `model/`, and that moves of blocks cost nothing.

    python notebooks/trained/evaluate.py FOLDER     # of the tokens (train.py); ten minutes on a CPU; writes losses.json

Losses are those of windows of 1,024 tokens of held-out text, in nats per token.  The weights are those of the
checkpoint, converted to float32, so that only entries differ.  A difference is that from float32 entries and attention
to all tokens.  It is paired: the mean, over the windows, of the differences of their losses, with its standard error.
"""

import argparse
import json
import tempfile
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal

import corpus
import jax
import jax.numpy as jnp
import numpy as np
import train
from tokenizers import Tokenizer

import jaxkv
from jaxkv import models, offload
from jaxkv.bench import random_models
from jaxkv.models.layers.linear import product

RECORDED = Path(__file__).with_name("losses.json")
LENGTH, HALF, BATCH = train.LENGTH, train.LENGTH // 2, 4
"""Tokens of a window and of its halves, and windows that are computed at once."""
WINDOWS, SPARSE_WINDOWS, MOVED_WINDOWS, CALIBRATION_WINDOWS = 32, 8, 4, 8
NUMBERS = 16, 32, 64, 128, 256, 512
"""Of tokens to which sparse attention attends."""
MOVED = "bf16", "fp8_ds_mla", "kvfp4"
"""Formats of moved blocks.  Pages of `kvfp4` have two regions, the values of all tokens and their scales."""


@dataclass(frozen=True)
class Sparse(models.OneDevice):
    """One device, on which a query token attends to `number` of the tokens that it sees, in every layer.

    They are the "likeliest" ones, whose probabilities have the largest sums over heads, or the "last" ones.  DeepSeek
    V3.2's indexer is trained to predict these sums.
    """

    number: int = 512
    chosen: Literal["likeliest", "last"] = "likeliest"

    def prefill_mla(self, q_nope, q_pe, w_uk, w_uv, cache, tables, lengths, **options):
        """As in `OneDevice`, with absorbed queries."""
        q_latent = product("bqhn,hnr->bqhr", q_nope, w_uk)
        out = self.decode_mla(q_latent, q_pe, cache, tables, lengths, **options)
        return product("bqhr,hvr->bqhv", out, w_uv)

    def decode_mla(self, q_latent, q_pe, cache, tables, lengths, *, scale, layer, plan=None, implementation=None):
        """As in `OneDevice`, for entries without scales."""
        q_len, block_size = q_latent.shape[1], cache.layout.block_size
        positions = jnp.arange(tables.shape[1] * block_size, dtype=jnp.int32)
        seen = positions <= lengths[:, None, None] - q_len + jnp.arange(q_len, dtype=jnp.int32)[:, None]
        if self.chosen == "likeliest":
            queries = jnp.concatenate([q_latent, q_pe], axis=-1)
            ranks = probabilities(queries, cache, tables, seen, scale=scale, layer=layer).sum(axis=1)
        else:
            ranks = positions.astype(jnp.float32)
        ranks = jnp.where(seen, ranks, -jnp.inf)
        slots = jaxkv.select_topk(ranks, self.number, block_tables=tables, block_size=block_size)
        options = {"scale": scale, "layer": layer, "implementation": implementation}
        return self.decode_mla_sparse(q_latent, q_pe, cache, slots, **options)


def probabilities(queries, cache: jaxkv.KVCache, tables, seen, *, scale: float, layer) -> jax.Array:
    """The attention of absorbed queries [B, Q, H, R + P] to the tokens of block tables: float32 [B, H, Q, S].

    `seen` bool [B, Q, S] says which tokens a query token sees.
    """
    positions = jnp.broadcast_to(jnp.arange(seen.shape[-1], dtype=jnp.int32), (len(tables), seen.shape[-1]))
    slots = jaxkv.slots_for(tables, positions, cache)
    parts = jaxkv.read_mla(cache, slots.reshape(-1), layer=layer, dtype=queries.dtype)
    keys = jnp.concatenate(parts, axis=-1).reshape(*slots.shape, -1)
    scores = product("bqhc,bsc->bhqs", queries, keys) * scale
    return jax.nn.softmax(jnp.where(seen[:, None], scores, -jnp.inf), axis=-1)


def losses(model: models.Model, windows: np.ndarray) -> np.ndarray:
    """The losses of all tokens of the windows, float32 [windows, T], computed for a few windows at a time."""
    compiled = jax.jit(train.losses)
    return np.concatenate([compiled(model, windows[i : i + BATCH]) for i in range(0, len(windows), BATCH)])


def difference(found: np.ndarray, exact: np.ndarray) -> dict[str, float]:
    """The mean of losses [windows, T], and their difference from `exact`."""
    by_window = (found.astype(np.float64) - exact).mean(axis=1)
    error = by_window.std(ddof=1) / len(by_window) ** 0.5
    return {"loss": mean(found), "difference": float(by_window.mean()), "standard_error": float(error)}


def mean(found: np.ndarray) -> float:
    """The mean of losses."""
    return float(np.mean(found, dtype=np.float64))


def with_entries(folder: Path, form: str, calibration: np.ndarray) -> models.Model:
    """The model in float32 with entries of a format.  If that has scales, they fit the entries of `calibration`."""
    model = models.load(folder, dtype="float32", entry_format=form)
    return models.calibrate(model, calibration.tolist()) if model.entry.codec.scaled else model


def formats(folder: Path, windows: np.ndarray, calibration: np.ndarray) -> dict[str, Any]:
    """A row for each format, and the reasons against those that cannot store the entries."""
    attention, rows, left_out = models.ModelConfig.read(folder).attention, [], {}
    exact = losses(with_entries(folder, "f32", calibration), windows)
    for form in jaxkv.MLAEntry.formats:
        try:
            entry = attention.entry(form)
        except ValueError as error:
            left_out[form] = str(error)
            continue
        found = exact if form == "f32" else losses(with_entries(folder, form, calibration), windows)
        rows.append({"format": form, "bits_per_value": 8 * entry.nbytes / sum(entry.sizes), **difference(found, exact)})
        print(rows[-1], flush=True)
    return {"windows": len(windows), "rows": rows, "left_out": left_out}


def sparse(folder: Path, windows: np.ndarray) -> dict[str, Any]:
    """A row for each choice of tokens, with the losses of the second half of each window.

    Its query tokens see between 513 and 1,024 tokens, so that every choice leaves tokens out.
    """
    model, rows = models.load(folder, dtype="float32"), []
    exact = losses(model, windows)[:, HALF:]
    for chosen in ("likeliest", "last"):
        for number in NUMBERS:
            found = losses(replace(model, parallel=Sparse(number=number, chosen=chosen)), windows)[:, HALF:]
            rows.append({"chosen": chosen, "tokens": number, **difference(found, exact)})
            print(rows[-1], flush=True)
    return {"windows": len(windows), "rows": rows}


advance = jax.jit(train.advance, static_argnames=("start", "end"))


class Moves:
    """The first half of each window, prefilled into blocks of a cache, and the ways in which these blocks move.

    Every way returns the losses of the second half of each window, float32 [B, T / 2], computed from the moved blocks.

    Args:
      model: the model.
      windows: int32 [B, T + 1]; T / 2 tokens are whole blocks.
    """

    def __init__(self, model: models.Model, windows: np.ndarray):
        self.model, self.windows, self.length = model, windows, windows.shape[1] - 1
        count = self.length // 2 // model.usual_block_size
        ids = np.random.default_rng(0).permutation(4 * len(windows) * count).astype(np.int32)
        self.first, self.second, self.others, self.target = ids.reshape(4, len(windows), count)
        """Blocks int32 [B, M]: of both halves, of the second half of other requests, and to which the first moves."""
        self.cache, _ = advance(model, model.cache(ids.size), windows, self.first, start=0, end=self.length // 2)
        layout, self.name = self.cache.layout, models.fingerprint(model)
        options = {"block_size": layout.block_size, "layout_fingerprint": layout.fingerprint, "model": self.name}
        self.keys = [key for window in windows for key in offload.prefix_keys(window[: self.length // 2], **options)]

    def after(self, cache: jaxkv.KVCache, *blocks: np.ndarray) -> tuple[jaxkv.KVCache, np.ndarray]:
        """The cache and the losses of the second half, where the first is in these blocks."""
        reach = {"start": self.length // 2, "end": self.length}
        cache, found = advance(self.model, cache, self.windows, np.hstack(blocks), **reach)
        return cache, np.asarray(found)

    def not_moved(self) -> np.ndarray:
        """In the blocks in which they were stored."""
        return self.after(self.cache, self.first, self.second)[1]

    def shared(self) -> np.ndarray:
        """Blocks of a request that has stored its own second half, in the block tables of a further request."""
        cache, _ = self.after(self.cache, self.first, self.second)
        return self.after(cache, self.first, self.others)[1]

    def by_host(self) -> np.ndarray:
        """By host memory, to other blocks of an empty cache."""
        pool = offload.HostPool(self.cache.layout, len(self.keys))
        pool.store(self.cache, self.first.ravel(), self.keys)
        return self._loaded(pool)

    def by_disk(self) -> np.ndarray:
        """By a folder, in which another pool finds them."""
        layout = self.cache.layout
        with tempfile.TemporaryDirectory() as folder:
            disk = partial(offload.DiskPool, folder, layout, model=self.name)
            pool = offload.HostPool(layout, len(self.keys), disk=disk())
            pool.store(self.cache, self.first.ravel(), self.keys)
            pool.flush()
            return self._loaded(offload.HostPool(layout, len(self.keys), disk=disk()))

    def by_bytes(self) -> np.ndarray:
        """As bytes, to a cache with another order of axes and blocks of 48 tokens, of which the last is not full."""
        blocks = -(-self.length // 48)
        cache = self.model.cache(len(self.windows) * blocks, 48, "LBNHC")
        tables = np.random.default_rng(1).permutation(len(self.windows) * blocks).astype(np.int32).reshape(-1, blocks)
        for first, table in zip(self.first, tables, strict=True):
            rows = jaxkv.read_blocks(self.cache, first)
            received = np.frombuffer(np.asarray(rows).tobytes(), rows.dtype).reshape(rows.shape)
            converted = jaxkv.convert_blocks(received, self.cache.layout, cache.layout)
            cache = jaxkv.write_blocks(cache, table[: len(converted)], converted)
        return self.after(cache, tables)[1]

    def mistaken(self) -> np.ndarray:
        """The blocks of the next window instead, which shows how much the second half depends on the first."""
        return self.after(self.cache, np.roll(self.first, 1, axis=0), self.second)[1]

    def _loaded(self, pool: offload.HostPool) -> np.ndarray:
        cache = pool.load(jaxkv.KVCache.zeros(self.cache.layout), self.target.ravel(), self.keys)
        return self.after(cache, self.target, self.second)[1]


WAYS = {
    "not moved": Moves.not_moved,
    "shared with another request": Moves.shared,
    "host memory, to other blocks": Moves.by_host,
    "disk, read by another pool": Moves.by_disk,
    "bytes, to a cache of another order and block size": Moves.by_bytes,
    "mistaken for blocks of other text": Moves.mistaken,
}


def moves(folder: Path, windows: np.ndarray) -> dict[str, Any]:
    """A row for each format and way.  `equal` says whether all losses have the bits of those without a move."""
    rows = []
    for form in MOVED:
        moved = Moves(models.load(folder, dtype="float32", entry_format=form), windows)
        exact = moved.not_moved()
        for name, way in WAYS.items():
            found = way(moved)
            rows.append({"format": form, "way": name, "loss": mean(found), "equal": found.tobytes() == exact.tobytes()})
            print(rows[-1], flush=True)
    return {"windows": len(windows), "rows": rows}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the tokens")
    parser.add_argument(
        "--model", type=Path, default=train.MODEL, help="folder of the checkpoint (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, default=RECORDED, help="file to write (default: %(default)s)")
    args = parser.parse_args()
    held_out, training = (np.load(args.folder / f"{name}.npy") for name in ("held_out", "train"))
    windows, calibration = (
        corpus.windows(held_out, LENGTH, WINDOWS),
        corpus.windows(training, LENGTH, CALIBRATION_WINDOWS),
    )
    sample = corpus.sample(Tokenizer.from_file(str(args.folder / "tokenizer.json")), LENGTH, BATCH)
    model = models.load(args.model)

    def beside_bigrams(windows: np.ndarray) -> dict[str, Any]:
        """The losses of bigrams and of the model in its own dtype."""
        bigrams = corpus.bigram_loss(training, windows)
        return {"windows": len(windows), "bigrams": bigrams, "bf16": mean(losses(model, windows))}

    found = {
        "date": datetime.now(UTC).date().isoformat(),
        "command": "python notebooks/trained/evaluate.py FOLDER",
        **random_models.about(model),
        "tokens": {"training": len(training), "held_out": len(held_out), "window": LENGTH},
        "held_out": beside_bigrams(windows),
        "sample": {"files": corpus.SAMPLE, **beside_bigrams(sample)},
        "formats": formats(args.model, windows, calibration),
        "sparse": sparse(args.model, windows[:: WINDOWS // SPARSE_WINDOWS]),
        "moves": moves(args.model, windows[:: WINDOWS // MOVED_WINDOWS]),
    }
    args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
