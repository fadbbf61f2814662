"""Tables made from the recorded measurements beside this file.

    python notebooks/h200/report.py README.md notebooks/README.md

rewrites what stands between the marks `<!-- speed -->` and `<!-- /speed -->`, and between `<!-- models -->` and
`<!-- /models -->`, in the named files.  `notebooks/README.md` says which command recorded which file.
"""

import argparse
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Row:
    """Both libraries on one shape; times in ms per call."""

    requests: int
    heads: int
    q_len: int
    tokens: int
    varlen: bool
    """Whether lengths vary, up to `tokens`."""
    layers: int
    """Layers of jaxkv's cache, the middle one of which is attended to: 1, or as many of 61 as fit in memory."""
    limit: float
    """The time that the bytes take at the reading ceiling or the flops at the product ceiling, whichever is longer."""
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


def read(name: str) -> dict:
    """A recorded measurement, by the name of its file."""
    return json.loads((FOLDER / name).read_text())


def comparable(row: dict) -> bool:
    """Whether FlashMLA's dense decode is timed on the workload of this row: bf16 latents in plain blocks."""
    usual = row["operation"], row["format"], row.get("blocks", "plain")
    return usual == ("decode_mla", "bf16", "plain")


def rows() -> list[Row]:
    """The shapes that both libraries were timed on, in the order of jaxkv's benchmark."""
    ours, theirs = read("decode_mla.json"), read("flash_mla.json")
    times = {row["shape"]: row for row in theirs["rows"]}
    found = []
    for row in filter(comparable, ours["rows"]):
        other = times[row["shape"]]
        bytes_ms = row["megabytes"] / ours["ceilings"]["read"] * 1e9
        flops_ms = row["gflop"] / ours["ceilings"]["matmul"] * 1e12
        found.append(
            Row(
                **{key: row[key] for key in ("requests", "heads", "q_len", "tokens", "layers")},
                varlen=bool(row["varlen"]),
                limit=max(bytes_ms, flops_ms),
                jaxkv=(row["ms"], row["sustained_ms"]),
                flash_mla=(other["ms"], other["sustained_ms"]),
            )
        )
    return found


def speed() -> str:
    """A Markdown table of `decode_mla` beside FlashMLA: packed caches in full, and the ratios of cross-layer caches."""
    every = rows()
    many = {row.shape: row for row in every if row.layers > 1}
    heading = ("requests x heads x query tokens x tokens", "jaxkv ms", "FlashMLA ms", "ratio", "ratio, many layers")
    lines = [f"| {' | '.join(heading)} |", "|---" * len(heading) + "|"]
    for row in every:
        if row.layers > 1:
            continue
        pairs = (row.jaxkv, row.flash_mla)
        times = [f"{burst:.4f}, {sustained:.4f}" for burst, sustained in pairs]
        ratios = [f"{burst:.2f}, {sustained:.2f}" for burst, sustained in (row.ratios, many[row.shape].ratios)]
        lines.append(f"| {' | '.join([row.shape, *times, *ratios])} |")
    return "\n".join(lines)


def models() -> str:
    """A Markdown table of whole models and of blocks in host memory."""
    found = read("models_and_offload.json")
    step, ttft, offload = found["model_step"], found["ttft"], found["offload"]
    ms, large, whole = ttft["ms"], offload["large"], offload["rows"]

    def rates(order: str) -> str:
        parts = [f"{way} {rate:.1f} GB/s ({rate / large[way]:.2f})" for way, rate in whole[order].items()]
        return f"{', '.join(parts)} in {order}"

    lines = [
        (
            f"{step['what']}; {step['requests']} requests x {step['tokens']:,} tokens",
            f"{step['step_ms']:.1f} ms; all its kernels take {step['kernels_ms']:.1f} ms, "
            f"those of jaxkv {step['jaxkv_kernels_ms']:.1f} ms",
        ),
        (
            f"{ttft['what']}",
            f"{ms['cold']:.0f} ms if the prefix is computed; if it is found: on the device {ms['device']:.1f} ms, "
            f"in host memory {ms['host']:.1f} ms, on disk {ms['disk']:.0f} ms",
        ),
        (
            f"{offload['what']}",
            f"{rates('BLNHC')}; {rates('LBNHC')}; in brackets: as a fraction of the rate of one large array",
        ),
    ]
    return "\n".join(["| what, and by which command | result |", "|---|---|", *(f"| {a} | {b} |" for a, b in lines)])


TABLES: dict[str, Callable[[], str]] = {"speed": speed, "models": models}
"""The table between each pair of marks."""


def main():
    """Rewrites the tables of the files named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("readmes", type=Path, nargs="+")
    for readme in parser.parse_args().readmes:
        text, count = readme.read_text(), 0
        for name, table in TABLES.items():
            marks = re.compile(rf"(?<=<!-- {name} -->\n).*?(?=<!-- /{name} -->)", re.DOTALL)
            text, found = marks.subn(lambda _, table=table: f"{table()}\n", text)
            count += found
        if not count:
            parser.error(f"{readme} has no marks: expected a pair such as `<!-- speed -->` and `<!-- /speed -->`")
        readme.write_text(text)


if __name__ == "__main__":
    main()
