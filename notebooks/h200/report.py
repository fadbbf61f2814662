"""The README's table of speed, made from the recorded measurements beside this file.

    python notebooks/h200/report.py README.md

rewrites what stands between the marks `<!-- speed -->` and `<!-- /speed -->`.  `decode_mla.json` is what
`jaxkv bench decode_mla --suite peers --implementation mosaic_gpu --json decode_mla.json` wrote, `flash_mla.json` what
`python notebooks/h200/time_flash_mla.py flash_mla.json` wrote on the same machine within the same hour.
"""

import argparse
import json
import re
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
MARKS = re.compile(r"(?<=<!-- speed -->\n).*?(?=<!-- /speed -->)", re.DOTALL)


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


def rows() -> list[Row]:
    """The shapes that both libraries were timed on, in the order of jaxkv's benchmark."""
    ours, theirs = read("decode_mla.json"), read("flash_mla.json")
    times = {row["shape"]: row for row in theirs["rows"]}
    found = []
    for row in ours["rows"]:
        other = times[row["shape"]]
        bytes_ms = row["megabytes"] / ours["ceilings"]["read"] * 1e9
        flops_ms = row["gflop"] / ours["ceilings"]["matmul"] * 1e12
        found.append(
            Row(
                **{key: row[key] for key in ("requests", "heads", "q_len", "tokens", "varlen", "layers")},
                limit=max(bytes_ms, flops_ms),
                jaxkv=(row["ms"], row["sustained_ms"]),
                flash_mla=(other["ms"], other["sustained_ms"]),
            )
        )
    return found


def table() -> str:
    """A Markdown table: packed caches in full, and for cross-layer caches the ratios."""
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


def main():
    """Rewrites the table of the file named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("readme", type=Path)
    readme = parser.parse_args().readme
    text, count = MARKS.subn(lambda _: f"{table()}\n", readme.read_text())
    if count != 1:
        parser.error(f"{readme} holds {count} pairs of marks: expected one `<!-- speed -->` and one `<!-- /speed -->`")
    readme.write_text(text)


if __name__ == "__main__":
    main()
