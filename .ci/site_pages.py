"""Copies the pages of the site to a folder: `site_pages.py FOLDER`.

They are all Markdown files and notebooks of the repository, at their places, and the files that they link to; of hidden
folders, only the latter.  A link to a folder becomes one to its README.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(?<=\]\()(?!https?:|#)([^)#\s]+)")
"""The path of a relative link."""


def main(folder: Path) -> None:
    """Copies all pages."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    tracked = [Path(name) for name in listed.splitlines()]
    for page in tracked:
        if page.suffix not in {".md", ".ipynb"} or page.parts[0].startswith("."):
            continue
        (folder / page).parent.mkdir(parents=True, exist_ok=True)
        if page.suffix == ".ipynb":
            shutil.copy(ROOT / page, folder / page)
            continue
        here = page.parent

        def linked(match: re.Match[str], here: Path = here) -> str:
            path = match[1]
            target = (ROOT / here / path).resolve()
            if (target / "README.md").is_file():
                return f"{path.rstrip('/')}/README.md"
            hidden = target.relative_to(ROOT).parts[0].startswith(".")
            if (hidden or target.suffix != ".md") and target.relative_to(ROOT) in tracked:
                copy = folder / target.relative_to(ROOT)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(target, copy)
            return path

        (folder / page).write_text(LINK.sub(linked, (ROOT / page).read_text()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
