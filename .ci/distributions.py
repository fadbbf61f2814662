"""Checks what is in the wheel and in the sdist of a folder, and the links in the description that PyPI shows.

    python3 .ci/distributions.py DIST

The sdist has all files of HEAD.  The wheel has the modules of the two packages, the reports of what has run on GPUs,
the recorded measurements, the marks that they have types, and the license: no tests, notebooks, READMEs or caches.
"""

import re
import subprocess
import sys
import tarfile
import tomllib
from email import message_from_bytes
from pathlib import Path
from zipfile import ZipFile

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NAME = f"{PROJECT['name']}-{PROJECT['version']}"
INFORMATION = f"{NAME}.dist-info"
FILES = f"{PROJECT['urls']['Repository']}/blob/v{PROJECT['version']}/"


def compare(archive: str, found: set[str], expected: set[str]) -> list[str]:
    """A line for each file that is only in the archive, or missing there."""
    lines = [f"{archive}: {name} must not be in it" for name in sorted(found - expected)]
    return lines + [f"{archive}: {name} is missing" for name in sorted(expected - found)]


def in_wheel(tracked: set[str]) -> set[str]:
    """The files that the wheel of a repository with these files must have."""
    files = {name.removeprefix("kernels/") for name in tracked if name.startswith(("jaxkv/", "kernels/jaxkv_kernels/"))}
    typed = {"jaxkv/py.typed", "jaxkv_kernels/py.typed"}
    metadata = "METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE"
    needed = {name for name in files if name.endswith(".py") or name.startswith("jaxkv_kernels/reports/")}
    recorded = {name.split("/", 1)[1] for name in tracked if re.fullmatch(r"notebooks/h\d+/.*\.json", name)}
    needed |= {f"jaxkv/bench/measurements/{name}" for name in recorded}
    return needed | typed | {f"{INFORMATION}/{name}" for name in metadata}


def wrong_links(description: str, tracked: set[str]) -> list[str]:
    """The targets of Markdown links that are relative, or lead to no file or folder of this version."""
    places = tracked | {str(folder) for name in tracked for folder in Path(name).parents}
    links = re.findall(r"\]\(([^)\s]*)\)", description)
    own = {link: link.removeprefix(FILES).partition("#")[0] for link in links if link.startswith(FILES)}
    return [link for link in links if not link.startswith("https://") or own.get(link, ".") not in places]


def main() -> None:
    """Prints what is wrong, and exits with 1 if anything is."""
    folder = Path(sys.argv[1])
    listing = ["git", "ls-tree", "-r", "--name-only", "-z", "HEAD"]
    tracked = {*subprocess.check_output(listing, cwd=ROOT, text=True).rstrip("\0").split("\0")}
    with ZipFile(folder / f"{NAME}-py3-none-any.whl") as wheel:
        names = wheel.namelist()
        metadata = message_from_bytes(wheel.read(f"{INFORMATION}/METADATA"))
    with tarfile.open(folder / f"{NAME}.tar.gz") as sdist:
        sources = {member.name.removeprefix(f"{NAME}/") for member in sdist.getmembers()}
    wrong = compare("wheel", {*names}, in_wheel(tracked))
    wrong += compare("sdist", sources, tracked | {"PKG-INFO"})
    wrong += [f"description: {link} leads nowhere" for link in wrong_links(metadata.get_payload(), tracked)]
    print(f"{NAME}: {len(names)} files in the wheel, {len(sources)} in the sdist")
    if wrong:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main()
