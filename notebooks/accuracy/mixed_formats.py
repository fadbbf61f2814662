"""What values in another format than their keys cost in accuracy, on the recorded models of the tests.

    python notebooks/accuracy/mixed_formats.py      # a minute on a CPU; writes mixed_formats.json beside it

The calls of attention are those of models with grouped-query attention that `entry_formats.py` records, and the errors
are defined as there.
"""

import itertools
import json
import platform
from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path

import jax
import jaxlib
import numpy as np
from entry_formats import KINDS, recorded, stored

import jaxkv

RECORDED = Path(__file__).with_suffix(".json")
FORMATS = "bf16", "fp8", "int8", "nvfp4", "kvfp4", "int4"
(KIND,) = (kind for kind in KINDS if kind.entry is jaxkv.KVEntry)


def errors() -> dict[tuple[str, str], list[float]]:
    """By formats of keys and of values, the relative error of each layer's attention in each model."""
    found = defaultdict(list)
    for family in KIND.families():
        recorder, sizes = recorded(family)
        forms = [form for form in FORMATS if KIND.supports(family, form)]
        for call in recorder.calls:
            exact = KIND.result(call, call.values)
            for keys, values in itertools.product(forms, repeat=2):
                held = stored(jaxkv.KVEntry(keys, *sizes, value_format=values), call.values)
                error = KIND.result(call, held) - exact
                found[keys, values].append(float(np.linalg.norm(error) / np.linalg.norm(exact)))
    return found


def measure() -> None:
    """Records all pairs of formats."""
    rows = []
    for (keys, values), found in errors().items():
        entry = jaxkv.KVEntry(keys, value_format=values)
        rows.append(
            {
                "keys": keys,
                "values": values,
                "bits_per_value": 8 * entry.nbytes / sum(entry.sizes),
                "error_median": float(np.median(found)),
                "error_largest": max(found),
            }
        )
        print(rows[-1], flush=True)
    about = {
        "date": datetime.now(UTC).date().isoformat(),
        "command": "python notebooks/accuracy/mixed_formats.py",
        "device": platform.machine(),
        "versions": {"jax": jax.__version__, "jaxlib": jaxlib.__version__, "jaxkv": jaxkv.__version__},
        "models": KIND.families(),
    }
    RECORDED.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    measure()
