"""What entry formats cost in accuracy, on the recorded models of the tests.

    python notebooks/accuracy/entry_formats.py      # a quarter of an hour on a CPU; writes entry_formats.json beside it

Attention: the models' own queries, latents, keys and values, computed in float32, are recorded while a prompt of 200
tokens is prefilled.  Each is attended to once as it is, in float64, and once encoded and decoded, with a softmax in
float64, so that the error is that of the entries alone.  A query token sees what the model lets it see: the tokens
before it and itself, those of a window or of the indexer's choice, and the compressed entries of DeepSeek-V4.  Of keys
of indexers, the error is that of the scores.

Tokens: the float32 model computes the logits of a recorded prompt and of the 64 tokens that it generated greedily, all
with entries of the format, and a token counts as different if it no longer has the largest logit.  An indexer's keys
have the format of the latents if that is unquantised, else `indexer_fp8`; for the formats of these keys alone, latents
are float32.
"""

import json
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from jax.experimental import io_callback

import jaxkv
import jaxkv.models
from jaxkv.models.config import GQA, MLA, CompressedAttention
from jaxkv.models.parallel.base import OneDevice
from jaxkv_kernels.addressing import slots_for

ROOT = Path(__file__).parents[2]
MODELS = ROOT / "tests" / "data" / "models"
RECORDED = Path(__file__).with_suffix(".json")
BLOCK_SIZE = 64


class Call(NamedTuple):
    """One call of a layer's attention, or of its indexer."""

    queries: list[np.ndarray]
    """[Q, H, n_i]."""
    values: list[np.ndarray]
    """[S, Hkv, n_i], the arrays of entries that the queries may see."""
    seen: np.ndarray
    """bool [Q, S]."""
    scale: float
    sinks: np.ndarray | None = None
    weights: np.ndarray | None = None
    """[Q, H], those of an indexer's heads."""


@dataclass(frozen=True, eq=False)
class Recorder(OneDevice):
    """The device of a model with one request, whose attention also records its inputs, layer by layer."""

    calls: list[Call] = field(default_factory=list)
    indexed: list[Call] = field(default_factory=list)
    """The calls of the indexer."""

    def _record(self, calls, queries, parts, scale, *, window=None, **arrays):
        """`parts` are of (cache, layer, block table or None, slots [Q, K] or None, counts [Q] or None)."""
        layouts = [cache.layout for cache, *_ in parts]
        parts = [(every_entry(cache, layer), *rest) for cache, layer, *rest in parts]

        def note(queries, parts, arrays):
            queries = [np.asarray(x)[0] for x in queries]
            held = [
                entries(layout, *part, len(queries[0]), window) for layout, part in zip(layouts, parts, strict=True)
            ]
            values = [np.concatenate(x) for x in zip(*(values for values, _ in held), strict=True)]
            seen = np.concatenate([seen for _, seen in held], axis=1)
            arrays = {name: np.asarray(x).reshape(-1, queries[0].shape[1]) for name, x in arrays.items()}
            calls.append(Call(queries, values, seen, scale, **arrays))

        arrays = {name: x for name, x in arrays.items() if x is not None}
        io_callback(note, None, queries, parts, arrays, ordered=True)

    def prefill_mla(self, q_nope, q_pe, w_uk, w_uv, cache, tables, lengths, *, scale, layer, **options):
        """As in `OneDevice`; what is recorded is the absorbed queries."""
        absorbed = jnp.einsum("bqhn,hnr->bqhr", q_nope, w_uk, precision="highest")
        self._record(self.calls, (absorbed, q_pe), [(cache, layer, tables, None, None)], scale)
        return super().prefill_mla(
            q_nope, q_pe, w_uk, w_uv, cache, tables, lengths, scale=scale, layer=layer, **options
        )

    def decode_mla(self, q_latent, q_pe, cache, tables, lengths, *, scale, layer, **options):
        """As in `OneDevice`."""
        self._record(self.calls, (q_latent, q_pe), [(cache, layer, tables, None, None)], scale)
        return super().decode_mla(q_latent, q_pe, cache, tables, lengths, scale=scale, layer=layer, **options)

    def decode_mla_sparse(
        self, q_latent, q_pe, cache, slots, *, scale, layer, counts=None, extra=None, sinks=None, **options
    ):
        """As in `OneDevice`."""
        parts = [(cache, layer, None, slots, counts)]
        if extra is not None:
            parts.append((extra.cache, extra.layer, None, extra.slots, extra.counts))
        self._record(self.calls, (q_latent, q_pe), parts, scale, sinks=sinks)
        options |= {"counts": counts, "extra": extra, "sinks": sinks}
        return super().decode_mla_sparse(q_latent, q_pe, cache, slots, scale=scale, layer=layer, **options)

    def decode_kv(self, q, cache, tables, lengths, *, scale, layer, window=None, sinks=None, **options):
        """As in `OneDevice`."""
        self._record(self.calls, (q,), [(cache, layer, tables, None, None)], scale, window=window, sinks=sinks)
        options |= {"window": window, "sinks": sinks}
        return super().decode_kv(q, cache, tables, lengths, scale=scale, layer=layer, **options)

    def select_slots(self, q, weights, cache, tables, lengths, k, *, layer, **options):
        """As in `OneDevice`."""
        self._record(self.indexed, (q,), [(cache, layer, tables, None, None)], 1.0, weights=weights)
        return super().select_slots(q, weights, cache, tables, lengths, k, layer=layer, **options)


def every_entry(cache: jaxkv.KVCache, layer) -> list[jax.Array]:
    """The arrays of all entries of a layer, in the order of slots."""
    layout = cache.layout
    gathers = {jaxkv.MLAEntry: jaxkv.gather_mla, jaxkv.KVEntry: jaxkv.gather_kv}
    gather = gathers.get(type(layout.entry), jaxkv.gather_indexer_k)
    total = layout.num_blocks * layout.block_size
    table, sums = jnp.arange(layout.num_blocks, dtype=jnp.int32)[None], jnp.asarray([0, total], jnp.int32)
    options = {"total": total, "layer": layer, "dtype": jnp.float32, "implementation": "xla"}
    found = gather(cache, table, sums, **options)
    return [*found] if isinstance(found, tuple) else [found]


def entries(layout, held, table, slots, counts, q_len: int, window: int | None):
    """Arrays [S, H, n_i] of entries, and which of them the query tokens see, bool [Q, S]."""
    held = [np.asarray(x) for x in held]
    held = [x if x.ndim == 3 else x[:, None] for x in held]
    if slots is None:
        positions = np.arange(q_len)
        order = np.asarray(table)[0, positions // layout.block_size] * layout.block_size + positions % layout.block_size
        seen = np.tri(q_len, dtype=bool)
        return [x[order] for x in held], seen if window is None else seen & ~np.tri(q_len, k=-window, dtype=bool)
    slots = np.asarray(slots)[0]
    listed = slots >= 0
    if counts is not None:
        listed &= np.arange(slots.shape[1]) < np.asarray(counts)[0][:, None]
    seen = np.zeros((q_len, len(held[0])), bool)
    rows, columns = np.nonzero(listed)
    seen[rows, slots[rows, columns]] = True
    used = seen.any(axis=0)
    return [x[used] for x in held], seen[:, used]


def attend(call: Call, k, v) -> np.ndarray:
    """Attention in float64 to keys [S, Hkv, D] and values [S, Hkv, Dv]: [Q, H, Dv]."""
    queries = np.concatenate(call.queries, axis=-1).astype(np.float64)
    group = queries.shape[1] // k.shape[1]
    k, v = (np.repeat(x.astype(np.float64), group, axis=1) for x in (k, v))
    scores = np.einsum("qhd,shd->hqs", queries, k) * call.scale
    scores = np.where(call.seen, scores, -np.inf)
    largest = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - largest)
    total = weights.sum(axis=-1, keepdims=True)
    if call.sinks is not None:
        total += np.exp(call.sinks.reshape(-1, 1, 1) - largest)
    return np.einsum("hqs,shv->qhv", weights / total, v)


def index_scores(call: Call, k) -> np.ndarray:
    """The scores of an indexer in float64, 0 of what is not seen: [Q, S]."""
    (queries,), weights = call.queries, call.weights
    products = np.einsum("qhd,sd->qhs", queries.astype(np.float64), k[:, 0].astype(np.float64))
    return np.where(call.seen, np.einsum("qhs,qh->qs", np.maximum(products, 0), weights.astype(np.float64)), 0)


@dataclass(frozen=True)
class Kind:
    """Entries of one kind, in the models that have them."""

    name: str
    entry: type
    attention: type

    def families(self) -> list[str]:
        """The recorded models, of those with weights of their own."""
        found = sorted(path.parent.name for path in MODELS.glob("*/truth.npz") if "sharded" not in path.parent.name)
        configs = {name: jaxkv.models.ModelConfig.read(MODELS / name) for name in found}
        if self.entry is jaxkv.IndexerEntry:
            return [name for name in found if getattr(configs[name].attention, "indexer", None) is not None]
        return [name for name in found if isinstance(configs[name].attention, self.attention)]

    def supports(self, family: str, form: str) -> bool:
        """Whether a format can store the entries of a model, whose sizes must be whole tiles."""
        if self.entry is jaxkv.IndexerEntry:
            return True  # they have 32 values, one tile
        try:
            jaxkv.models.ModelConfig.read(MODELS / family).attention.entry(form)
        except ValueError:
            return False
        return True

    def formats(self) -> list[str]:
        """The formats that a model can have."""
        return [form for form in self.entry.formats if any(self.supports(name, form) for name in self.families())]

    def result(self, call: Call, values) -> np.ndarray:
        """What the models compute from entries, in float64."""
        if self.entry is jaxkv.IndexerEntry:
            return index_scores(call, values[0])
        keys, whole = values[0], np.concatenate(values, axis=-1)
        if self.entry is jaxkv.KVEntry:
            return attend(call, keys, values[1])
        return attend(call, whole, whole if self.attention is CompressedAttention else keys)


KINDS = (
    Kind("`MLAEntry`", jaxkv.MLAEntry, MLA),
    Kind("`MLAEntry` of DeepSeek-V4", jaxkv.MLAEntry, CompressedAttention),
    Kind("`KVEntry`", jaxkv.KVEntry, GQA),
    Kind("`IndexerEntry`", jaxkv.IndexerEntry, MLA),
)


def prefill(model, tokens: np.ndarray) -> np.ndarray:
    """The logits [B, Q, vocab] of tokens [B, Q]."""
    batch, length = tokens.shape
    layout, sizes, first, tables = model.layout(1, BLOCK_SIZE), {"": BLOCK_SIZE}, 0, {}
    if isinstance(layout, jaxkv.PackedLayout):
        sizes = {name: table.block_size for name, table in layout.tables.items()}
    for name, size in sizes.items():
        shape = batch, -(-length // size)
        tables[name] = first + jnp.arange(np.prod(shape), dtype=jnp.int32).reshape(shape)
        first += tables[name].size
    positions = jnp.broadcast_to(jnp.arange(length), (batch, length))
    slots = slots_for(tables[""], positions, block_size=BLOCK_SIZE)
    lengths = jnp.full(batch, length, jnp.int32)
    held = tables if len(tables) > 1 else tables[""]

    @jax.jit
    def run(model, cache):
        _, x = jaxkv.models.forward(model, cache, tokens, lengths, held, slots)
        return jaxkv.models.head(model, x)

    return np.asarray(run(model, model.cache(first, BLOCK_SIZE)))


def recorded(family: str) -> tuple[Recorder, tuple[int, ...]]:
    """The calls of a float32 model, and the sizes of its entries' arrays."""
    recorder = Recorder()
    model = jaxkv.models.load(MODELS / family, dtype="float32", entry_format="f32", parallel=recorder)
    with np.load(MODELS / family / "truth.npz") as truth:
        tokens = truth["prompts"][-1:]
    prefill(model, tokens)
    jax.effects_barrier()
    attention = model.config.attention
    if isinstance(attention, CompressedAttention):  # formats for it store the rotary part apart
        return recorder, (attention.head_dim - attention.rotary_dim, attention.rotary_dim)
    return recorder, model.entry.sizes


def stored(entry, values) -> list[np.ndarray]:
    """Values [S, H, n_i] as they are read from entries."""
    scales = [jnp.float32(1) if scaled else None for scaled in entry.scaled]
    found = entry.decode(entry.encode([jnp.asarray(x) for x in values], scales), jnp.float32, scales)
    return [*map(np.asarray, found)]


def errors(kind: Kind, formats: list[str]) -> dict[str, list[float]]:
    """By format, the relative error of what each layer of each model computes from entries of this kind."""
    found: dict[str, list[float]] = {form: [] for form in formats}
    for family in kind.families():
        recorder, sizes = recorded(family)
        indexed = kind.entry is jaxkv.IndexerEntry
        for call in recorder.indexed if indexed else recorder.calls:
            sizes = (call.values[0].shape[-1],) if indexed else sizes
            whole = np.concatenate(call.values, axis=-1)
            values = np.split(whole, np.cumsum(sizes)[:-1], axis=-1)
            exact = kind.result(call, values)
            for form in filter(partial(kind.supports, family), formats):
                error = kind.result(call, stored(kind.entry(form, *sizes), values)) - exact
                found[form].append(float(np.linalg.norm(error) / np.linalg.norm(exact)))
    return found


@contextmanager
def index_keys(form: str) -> Iterator[None]:
    """All indexers' keys have this format, whatever that of the latents is."""
    beside = jaxkv.IndexerEntry.for_latents
    jaxkv.IndexerEntry.for_latents = classmethod(lambda cls, latents, head_dim: cls(form, head_dim))
    try:
        yield
    finally:
        jaxkv.IndexerEntry.for_latents = beside


def different_tokens(kind: Kind, family: str, form: str) -> tuple[int, int]:
    """How many of the recorded greedy tokens no longer have the largest logit, of how many."""
    if kind.entry is jaxkv.IndexerEntry:
        with index_keys(form):
            return count_different(family, "f32")
    return count_different(family, form)


def count_different(family: str, form: str) -> tuple[int, int]:
    """The same with entries of that format."""
    model = jaxkv.models.load(MODELS / family, dtype="float32", entry_format=form)
    with np.load(MODELS / family / "truth.npz") as truth:
        prompts, lengths, tokens = (truth[name] for name in ("prompts", "prompt_lens", "tokens"))
    steps = tokens.shape[1]
    sequences = np.zeros((len(prompts), prompts.shape[1] + steps), np.int32)
    for row, prompt, length, generated in zip(sequences, prompts, lengths, tokens, strict=True):
        row[: length + steps] = [*prompt[:length], *generated]
    logits = prefill(model, sequences)
    likeliest = [x[length - 1 : length - 1 + steps].argmax(axis=-1) for x, length in zip(logits, lengths, strict=True)]
    return int((np.stack(likeliest) != tokens).sum()), tokens.size


def measure() -> None:
    """Records all formats."""
    rows = []
    for kind in KINDS:
        formats = kind.formats()
        found = errors(kind, formats)
        for form in formats:
            families = [family for family in kind.families() if kind.supports(family, form)]
            counts = [different_tokens(kind, family, form) for family in families]
            entry = kind.entry.typical(form)
            rows.append(
                {
                    "entries": kind.name,
                    "format": form,
                    "bits_per_value": 8 * entry.nbytes / sum(entry.sizes),
                    "error_median": float(np.median(found[form])),
                    "error_largest": max(found[form]),
                    "different": sum(n for n, _ in counts),
                    "tokens": sum(n for _, n in counts),
                }
            )
            print(rows[-1], flush=True)
    about = {
        "date": datetime.now(UTC).date().isoformat(),
        "command": "python notebooks/accuracy/entry_formats.py",
        "device": platform.machine(),
        "versions": {"jax": jax.__version__, "jaxlib": jaxlib.__version__, "jaxkv": jaxkv.__version__},
        "models": {kind.name: kind.families() for kind in KINDS},
    }
    RECORDED.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    measure()
