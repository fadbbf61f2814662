"""Rewrites the tables that follow from the code: those between marks such as `<!-- matrix -->` and `<!-- /matrix -->`.

    python3 -m uv run python .ci/tables.py

Tables of recorded timings are written by `notebooks/h200/report.py`.
"""

import argparse
import json
import math
import re
import sys
from pathlib import Path

from jaxkv.support import format_table, generation_table, support_matrix

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "tests"))
from support import features  # noqa: E402

READMES = (
    ROOT / "kernels" / "jaxkv_kernels" / "formats" / "README.md",
    ROOT / "jaxkv" / "ops" / "README.md",
    ROOT / "notebooks" / "trained" / "README.md",
)
ACCURACY = ROOT / "notebooks" / "accuracy" / "entry_formats.json"
QUERIES = ACCURACY.with_name("query_formats.json")
MIXED = ACCURACY.with_name("mixed_formats.json")
LOSSES = ROOT / "notebooks" / "trained" / "losses.json"


def accuracy_table() -> str:
    """A Markdown table of what `notebooks/accuracy/entry_formats.py` measured."""
    lines = [
        "| entries | format | bits per value | error, median | largest | tokens that differ |",
        "|---|---|---|---|---|---|",
    ]
    for row in json.loads(ACCURACY.read_text())["rows"]:
        lines.append(
            f"| {row['entries']} | `{row['format']}` | {row['bits_per_value']:.2f} | {row['error_median']:.1e} | "
            f"{row['error_largest']:.1e} | {row['different']:,} of {row['tokens']:,} |"
        )
    return "\n".join(lines)


def query_table() -> str:
    """A Markdown table of what `notebooks/accuracy/query_formats.py` measured: a column per format of queries."""
    rows = json.loads(QUERIES.read_text())["rows"]
    forms = list(dict.fromkeys(row["queries"] for row in rows))
    names = " | ".join(f"queries in {form}" for form in forms)
    lines = [f"| entries | format | {names} |", "|---" * (2 + len(forms)) + "|"]
    for entries, format in dict.fromkeys((row["entries"], row["format"]) for row in rows):
        own = {row["queries"]: row for row in rows if (row["entries"], row["format"]) == (entries, format)}
        cells = [f"{own[form]['error_median']:.1e}, {own[form]['error_largest']:.1e}" for form in forms]
        lines.append(f"| {entries} | `{format}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def mixed_table() -> str:
    """A Markdown table of what `notebooks/accuracy/mixed_formats.py` measured: a column per format of values."""
    rows = {(row["keys"], row["values"]): row for row in json.loads(MIXED.read_text())["rows"]}
    keys, values = (list(dict.fromkeys(names)) for names in zip(*rows, strict=True))
    lines = [f"| | {' | '.join(f'values in `{form}`' for form in values)} |", "|---" * (1 + len(values)) + "|"]
    for form in keys:
        own = [rows[form, other] for other in values]
        cells = (f"{row['error_median']:.1e}, {row['error_largest']:.1e}" for row in own)
        lines.append(f"| keys in `{form}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def losses_table() -> str:
    """A Markdown table of the trained model's loss (`notebooks/trained/evaluate.py`) beside that of bigrams."""
    found = json.loads(LOSSES.read_text())
    texts = {"held_out": "held-out windows", "sample": "windows of four held-out files of the standard library"}
    lines = ["| text | bigrams | the model in bfloat16 |", "|---|---|---|"]
    for key, name in texts.items():
        row = found[key]
        lines.append(f"| {row['windows']} {name} | {row['bigrams']:.3f} | {row['bf16']:.3f} |")
    return "\n".join(lines)


def _difference(row: dict) -> str:
    """A difference of losses with its standard error, to the first digit of this error, but four digits at least."""
    digits = max(4, math.ceil(-math.log10(row["standard_error"])))
    return f"{row['difference']:+.{digits}f} ± {row['standard_error']:.{digits}f}"


def loss_by_format_table() -> str:
    """A Markdown table of the trained model's loss with each format of entries."""
    lines = ["| format | bits per value | loss | difference from `f32` |", "|---|---|---|---|"]
    for row in json.loads(LOSSES.read_text())["formats"]["rows"]:
        cell = "-" if row["format"] == "f32" else _difference(row)
        lines.append(f"| `{row['format']}` | {row['bits_per_value']:.2f} | {row['loss']:.4f} | {cell} |")
    return "\n".join(lines)


def sparse_losses_table() -> str:
    """A Markdown table of what sparse attention costs the trained model: a column per choice of tokens."""
    rows = {(row["tokens"], row["chosen"]): row for row in json.loads(LOSSES.read_text())["sparse"]["rows"]}
    numbers, choices = (list(dict.fromkeys(names)) for names in zip(*rows, strict=True))
    lines = ["| tokens | " + " | ".join(f"the {chosen} ones" for chosen in choices) + " |", "|---|---|---|"]
    for number in numbers:
        cells = " | ".join(_difference(rows[number, chosen]) for chosen in choices)
        lines.append(f"| {number} | {cells} |")
    return "\n".join(lines)


def moves_table() -> str:
    """A Markdown table of the trained model's loss after cached blocks: a column per format of entries."""
    rows = {(row["way"], row["format"]): row for row in json.loads(LOSSES.read_text())["moves"]["rows"]}
    ways, forms = (list(dict.fromkeys(names)) for names in zip(*rows, strict=True))
    lines = ["| blocks | " + " | ".join(f"`{form}`" for form in forms) + " |", "|---" * (1 + len(forms)) + "|"]
    for way in ways:
        own = [rows[way, form] for form in forms]
        cells = (f"{row['loss']:.6f}, {'equal' if row['equal'] else 'different'}" for row in own)
        lines.append(f"| {way} | {' | '.join(cells)} |")
    return "\n".join(lines)


TABLES = {
    "matrix": support_matrix,
    "generations": generation_table,
    "formats": format_table,
    "accuracy": accuracy_table,
    "queries": query_table,
    "mixed": mixed_table,
    "features": features.table,
    "losses": losses_table,
    "loss_by_format": loss_by_format_table,
    "sparse_losses": sparse_losses_table,
    "moves": moves_table,
}


def main() -> None:
    """Rewrites the tables in the files named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("readmes", type=Path, nargs="*", default=READMES)
    for readme in parser.parse_args().readmes:
        text = readme.read_text()
        for name, table in TABLES.items():
            between = re.compile(rf"(?<=<!-- {name} -->\n).*?(?=<!-- /{name} -->)", re.DOTALL)
            text = between.sub(lambda _, table=table: f"{table()}\n", text)
        readme.write_text(text)


if __name__ == "__main__":
    main()
