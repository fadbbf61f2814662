"""Rewrites the tables that follow from the code: those between marks such as `<!-- matrix -->` and `<!-- /matrix -->`.

    python3 -m uv run python .ci/tables.py

Tables of recorded timings are written by `notebooks/h200/report.py`.
"""

import argparse
import json
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
)
ACCURACY = ROOT / "notebooks" / "accuracy" / "entry_formats.json"
QUERIES = ACCURACY.with_name("query_formats.json")
MIXED = ACCURACY.with_name("mixed_formats.json")


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


TABLES = {
    "matrix": support_matrix,
    "generations": generation_table,
    "formats": format_table,
    "accuracy": accuracy_table,
    "queries": query_table,
    "mixed": mixed_table,
    "features": features.table,
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
