"""What queries in e4m3 cost in accuracy, beside bf16 queries, on the recorded models of the tests.

    python notebooks/accuracy/query_formats.py      # some minutes on a CPU; writes query_formats.json beside it

The calls of attention are those that `entry_formats.py` records.  Each is computed in float64, once with the queries,
keys and values of the models, and once with entries and queries that were rounded: queries to bf16; or to e4m3, with
the largest magnitude of all query tokens of a layer as 448, of all heads or of each, and converted back as
`decode_mla`, `decode_mla_sparse` and `decode_kv` do.
"""

import json
import platform
from collections import defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from entry_formats import KINDS, Call, recorded, stored

import jaxkv
from jaxkv.ops.attention import in_float
from jaxkv_kernels.formats.bits import FP8

RECORDED = Path(__file__).with_suffix(".json")
ENTRIES = "f32", "bf16", "fp8"
QUERIES = "f32", "bf16", "e4m3", "e4m3 per head"
LARGEST = float(jnp.finfo(FP8).max)


def rounded(queries: Sequence[np.ndarray], form: str) -> list[np.ndarray]:
    """Queries [Q, H, n_i] as attention multiplies them that gets them in a format."""
    if form == "f32":
        return [*queries]
    if form == "bf16":
        return [x.astype(jnp.bfloat16).astype(np.float32) for x in queries]
    axes = (0, 2) if form.endswith("per head") else None
    magnitudes = np.abs(np.concatenate(queries, axis=-1)).max(axis=axes)
    scale = np.maximum(magnitudes / np.float32(LARGEST), np.float32(1e-30)).astype(np.float32)
    codes = [jnp.asarray(x / np.broadcast_to(scale, x.shape[1])[:, None]).astype(FP8) for x in queries]
    found, factor = in_float(codes, scale, jnp.float32(1), jnp.bfloat16)
    return [np.asarray(x, np.float32) * float(factor) for x in found]


def errors(kind) -> dict[tuple[str, str], list[float]]:
    """By formats of entries and of queries, the relative error of each layer's attention in each model."""
    found = defaultdict(list)
    for family in kind.families():
        recorder, sizes = recorded(family)
        forms = [form for form in ENTRIES if kind.supports(family, form)]
        for call in recorder.calls:
            whole = np.concatenate(call.values, axis=-1)
            values = np.split(whole, np.cumsum(sizes)[:-1], axis=-1)
            exact = kind.result(call, values)
            for entries in forms:
                held = stored(kind.entry(entries, *sizes), values)
                for queries in QUERIES:
                    changed: Call = call._replace(queries=rounded(call.queries, queries))
                    error = kind.result(changed, held) - exact
                    found[entries, queries].append(float(np.linalg.norm(error) / np.linalg.norm(exact)))
    return found


def measure() -> None:
    """Records all kinds of entries that queries attend to."""
    rows, kinds = [], [kind for kind in KINDS if kind.entry is not jaxkv.IndexerEntry]
    for kind in kinds:
        for (entries, queries), found in errors(kind).items():
            error = {"error_median": float(np.median(found)), "error_largest": max(found)}
            rows.append({"entries": kind.name, "format": entries, "queries": queries, **error})
            print(rows[-1], flush=True)
    about = {
        "date": datetime.now(UTC).date().isoformat(),
        "command": "python notebooks/accuracy/query_formats.py",
        "device": platform.machine(),
        "versions": {"jax": jax.__version__, "jaxlib": jaxlib.__version__, "jaxkv": jaxkv.__version__},
        "models": {kind.name: kind.families() for kind in kinds},
    }
    RECORDED.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    measure()
