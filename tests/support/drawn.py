"""The drawn models: tiny checkpoints of drawn configurations, and what Hugging Face's models make of them.

`tests/data/models/drawn` has a file per family, which `record_drawn.py` beside it writes: JSON, compressed, a list of
cases as `Case` describes them.  Weights are not stored.  `write` makes them from a seed and their names, for tests and
for the recorder.
"""

import json
import lzma
import zlib
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

FOLDER = Path(__file__).parents[1] / "data" / "models" / "drawn"
SMALL = 2.0**-8
"""The size of the latents in every third model, so small that the epsilon of their norms decides logits."""


class Case(NamedTuple):
    """One model: its checkpoint, a prompt and the answer."""

    seed: int
    config: dict[str, Any]
    """`config.json`, as `save_pretrained` writes it."""
    generation_config: dict[str, Any]
    """`generation_config.json`, as well."""
    tensors: list[tuple[str, str, list[int]]]
    """The names, dtypes and shapes of weights, as in the file that `save_pretrained` writes."""
    prompt: list[int]
    tokens: list[int]
    """The greedy continuation."""
    logits: list[float]
    """Those that chose the last of `tokens`, to seven digits."""


@cache
def cases(family: str) -> list[Case]:
    """The recorded cases of a family."""
    return [Case(*case) for case in json.loads(lzma.decompress((FOLDER / f"{family}.json.xz").read_bytes()))]


def save(family: str, found: list[Case]) -> None:
    """Writes the file of a family."""
    text = json.dumps(found, separators=(",", ":"))
    (FOLDER / f"{family}.json.xz").write_bytes(lzma.compress(text.encode(), preset=9))


def write(folder: Path, case: Case) -> None:
    """Writes the checkpoint of a case, without tokens and logits."""
    header, start, contents = {}, 0, []
    for name, dtype, shape in case.tensors:
        data = _bytes(values(case, name, shape), dtype)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, start + len(data)]}
        start += len(data)
        contents.append(data)
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    (folder / "model.safetensors").write_bytes(b"".join([len(text).to_bytes(8, "little"), text, *contents]))
    (folder / "config.json").write_text(json.dumps(case.config))
    (folder / "generation_config.json").write_text(json.dumps(case.generation_config))


def values(case: Case, name: str, shape: list[int]) -> np.ndarray:
    """The values of a weight: float64, or int64 for a table of experts.

    They are large enough for attention and routing to have preferences.
    """
    bits = np.random.PCG64([case.seed, zlib.crc32(name.encode())])  # its stream is the same in all versions of NumPy
    uniform = (bits.random_raw(int(np.prod(shape))) >> np.uint64(40)).astype(np.float64).reshape(shape) * 2.0**-24
    if name.endswith("tid2eid"):  # the experts of each token id, which differ
        experts = case.config["n_routed_experts"]
        first = bits.random_raw(shape[0]).astype(np.int64)[:, None] % experts
        return (first + np.arange(shape[1])) % experts
    if name.endswith("A_log"):
        return uniform * 6 - 6  # some heads remember the whole prompt, others few tokens
    if name.endswith("bias"):
        # LongCat's are smaller than the scores of a softmax, so that these also choose experts.
        return (uniform - 0.5) * (0.07 if case.config["model_type"] == "longcat_flash" else 0.8)
    if len(shape) == 1:
        centred = case.config["model_type"] == "qwen3_next" and name.endswith("norm.weight")
        return uniform - 0.5 if centred and "linear_attn" not in name else uniform + 0.5
    small = case.seed % 3 == 0 and name.endswith(("kv_a_proj_with_mqa.weight", "q_a_proj.weight"))
    return (uniform - 0.5) * 6 * shape[-1] ** -0.5 * (SMALL if small else 1)


def _bytes(array: np.ndarray, dtype: str) -> bytes:
    if dtype == "BF16":  # the upper halves of float32
        return (array.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return array.astype({"F32": np.float32, "F16": np.float16, "I64": np.int64}[dtype]).tobytes()
