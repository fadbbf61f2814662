"""Generations of GPUs, and what is known about kernels on each: whether they have run there, or only compile.

Kernels are developed on Hopper GPUs, where their tests run.  For other generations, the tests compile them by the real
compilers, and interpret them on CPUs.  That is not the same as running them: they are used only where a call names
their implementation.  Kernels for AMD GPUs are compiled only: they are interpreted with the tile sizes of NVIDIA GPUs.

`jaxkv verify --report FILE` writes what has run on a GPU, and whether it was right.  With such a file in the folder
`reports` beside this one, the operations that it found right are ordinary choices on GPUs of that generation.
"""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Literal

import jax

GENERATIONS: Mapping[str, str] = {
    "8.0": "Ampere",
    "8.6": "Ampere",
    "8.9": "Ada",
    "9.0": "Hopper",
    "10.0": "Blackwell",
    "10.3": "Blackwell",
    "12.0": "Blackwell",
}
"""The names of the generations for which kernels are compiled, by compute capability."""

AMD: Mapping[str, str] = {"gfx942": "AMD MI300", "gfx950": "AMD MI350"}
"""The same for AMD GPUs: by architecture, which is what JAX returns as their compute capability."""

TESTED = "9.0"
"""The compute capability of the GPUs on which the tests run."""

REPORTS = Path(__file__).with_name("reports")

Mark = Literal["run", "compiled and interpreted", "compiled", "unsupported"]
"""What is known about a kernel on a generation."""


def capability() -> str | None:
    """The compute capability of this machine's first GPU, or the architecture of AMD's; None if there is no GPU."""
    return getattr(jax.devices()[0], "compute_capability", None) if jax.default_backend() == "gpu" else None


def mark(implementation: str, operation: str, generations: Mapping[str, str], found: str) -> Mark:
    """What is known about the kernel of an operation on GPUs of a compute capability.

    Args:
      implementation: its name.
      operation: the name of the operation.
      generations: those for which the kernel is compiled, by compute capability.
      found: the compute capability.
    """
    if found not in generations:
        return "unsupported"
    if _was_run(implementation, operation, found):
        return "run"
    return "compiled" if found in AMD else "compiled and interpreted"


def untried_reason(implementation: str, operation: str) -> str | None:
    """Why a call should not choose this implementation on this machine without naming it; None if it may."""
    found = capability()
    if found is None or _was_run(implementation, operation, found):
        return None
    device = jax.devices()[0].device_kind
    machine = found if found in AMD else f"compute capability {found}"
    return f"its kernel has not been run on {machine} ({device}): `jaxkv verify --report` does"


def _was_run(implementation: str, operation: str, found: str) -> bool:
    return found == TESTED or (implementation, operation, found) in _reported()


@cache
def _reported() -> frozenset[tuple[str, str, str]]:
    """Implementations, operations and compute capabilities that the reports found right."""
    found = set()
    for file in sorted(REPORTS.glob("*.json")):
        report = json.loads(file.read_text())
        about = report["implementation"], report["compute_capability"]
        found |= {(about[0], name, about[1]) for name, outcome in report["operations"].items() if outcome["right"]}
    return frozenset(found)
