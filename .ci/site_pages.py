"""Copies the pages of the site to a folder: `site_pages.py FOLDER`.

They are all Markdown files and notebooks of the repository, at their places, and the files that they link to; of hidden
folders, only the latter.  A link to a folder becomes one to its README.  Pictures of notebooks become HTML, because the
site would show them without their descriptions.
"""

import base64
import html
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = {".md", ".ipynb"}
LINK = re.compile(r"(?<=\]\()(?!https?:|#)([^)#\s]+)")
"""The path of a relative link."""


def with_descriptions(notebook: str) -> str:
    """The notebook with each picture as an HTML image with the description that its metadata have."""
    found = json.loads(notebook)
    for output in (output for cell in found["cells"] for output in cell.get("outputs", ())):
        for kind in ("image/svg+xml", "image/png"):
            if kind in output.get("data", ()):
                picture, alt = "".join(output["data"][kind]), output["metadata"][kind]["alt"]
                encoded = picture if kind == "image/png" else base64.b64encode(picture.encode()).decode()
                image = f'<img alt="{html.escape(alt)}" src="data:{kind};base64,{encoded}">'
                output["data"], output["metadata"] = {"text/html": image}, {}
                break
    return json.dumps(found)


def main(folder: Path) -> None:
    """Copies all pages."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    tracked = [Path(name) for name in listed.splitlines()]
    for page in tracked:
        if page.suffix not in PAGES or page.parts[0].startswith("."):
            continue
        (folder / page).parent.mkdir(parents=True, exist_ok=True)
        if page.suffix == ".ipynb":
            (folder / page).write_text(with_descriptions((ROOT / page).read_text()))
            continue
        here = page.parent

        def linked(match: re.Match[str], here: Path = here) -> str:
            path = match[1]
            target = (ROOT / here / path).resolve()
            if (target / "README.md").is_file():
                return f"{path.rstrip('/')}/README.md"
            hidden = target.relative_to(ROOT).parts[0].startswith(".")
            if (hidden or target.suffix not in PAGES) and target.relative_to(ROOT) in tracked:
                copy = folder / target.relative_to(ROOT)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(target, copy)
            return path

        (folder / page).write_text(LINK.sub(linked, (ROOT / page).read_text()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
