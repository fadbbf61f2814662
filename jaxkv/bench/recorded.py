"""Measurements that were recorded on GPUs, for tables and pictures.

`notebooks/README.md` says which command recorded which file.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_IN_WHEEL = Path(__file__).with_name("measurements")
FOLDER = _IN_WHEEL if _IN_WHEEL.is_dir() else Path(__file__).parents[2] / "notebooks"
"""It has a folder of files for each GPU.  In a clone, these are where the commands wrote them."""


def read(name: str, gpu: str = "h200") -> dict[str, Any]:
    """A recorded measurement, by the names of its file and of the folder of its GPU, "h100" or "h200".

    Raises:
      ValueError: there is no such file.
    """
    file = FOLDER / gpu / name
    if not file.is_file():
        known = sorted(f"{path.parent.name}/{path.name}" for path in FOLDER.glob("h[0-9]*/*.json"))
        raise ValueError(f"`gpu`/`name` is {f'{gpu}/{name}'!r}: expected one of {', '.join(known)}")
    return json.loads(file.read_text())


@dataclass(frozen=True)
class Row:
    """jaxkv and FlashMLA on one shape; times in ms per call."""

    requests: int
    heads: int
    q_len: int
    tokens: int
    varlen: bool
    """Whether lengths vary, up to `tokens`."""
    layers: int
    """Layers of jaxkv's cache, the middle one of which is attended to: 1, or as many of 61 as fit in memory."""
    limit: float
    """The least time, as `limit` returns it."""
    jaxkv: tuple[float, float]
    """(burst, sustained)."""
    flash_mla: tuple[float, float]

    @property
    def shape(self) -> str:
        """Requests x heads x query tokens x cached tokens."""
        upto = "up to " if self.varlen else ""
        return f"{self.requests} x {self.heads} x {self.q_len} x {upto}{self.tokens:,}"

    @property
    def ratios(self) -> tuple[float, float]:
        """How many times as fast as FlashMLA jaxkv is: (burst, sustained)."""
        burst, sustained = (theirs / ours for theirs, ours in zip(self.flash_mla, self.jaxkv, strict=True))
        return burst, sustained


FLASH_MLA = {"decode_mla": "bf16", "decode_mla_sparse": "fp8_ds_mla"}
"""The operations that FlashMLA is timed on, and the format of their entries."""


def comparable(row: dict[str, Any]) -> bool:
    """Whether FlashMLA is timed on the workload of this row: such entries, in plain blocks."""
    plain = row.get("blocks", "plain") == "plain"
    return plain and FLASH_MLA.get(row["operation"]) == row["format"]


def limit(row: dict[str, Any], ceilings: dict[str, float]) -> float:
    """The ms that a row's bytes take at the reading ceiling, or its flops at that of products: the longer of both.

    Products of float8 values are twice as fast as those of bf16, for which the ceiling was measured.
    """
    products = ceilings["matmul"] * (2 if row.get("query_dtype", "bfloat16").startswith("float8") else 1)
    return max(row["megabytes"] / ceilings["read"] * 1e9, row["gflop"] / products * 1e12)


def rows() -> list[Row]:
    """The shapes that both libraries were timed on on an H200, in the order of jaxkv's benchmark."""
    ours, theirs = read("decode_mla.json"), read("flash_mla.json")
    times = {row["shape"]: row for row in theirs["rows"]}
    found = []
    for row in filter(comparable, ours["rows"]):
        other = times[row["shape"]]
        found.append(
            Row(
                **{key: row[key] for key in ("requests", "heads", "q_len", "tokens", "layers")},
                varlen=bool(row["varlen"]),
                limit=limit(row, ours["ceilings"]),
                jaxkv=(row["ms"], row["sustained_ms"]),
                flash_mla=(other["ms"], other["sustained_ms"]),
            )
        )
    return found


def step_name(row: dict[str, Any]) -> str:
    """What a row of `model_steps.json` computes."""
    shape = f"{row['requests']} x {row['tokens']:,}"
    new = row["new_tokens"]
    if new == 1:
        return f"{shape}, decoding"
    return f"{shape}, a prefill" if new == row["tokens"] else f"{shape}, {new:,} of them new"
