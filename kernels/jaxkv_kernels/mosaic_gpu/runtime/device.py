"""What kernels are built for: a GPU, with its limits, or Pallas's interpreter; and where they can run.

Each table of capabilities lists the compute capabilities for which a group of kernels is compiled, with their names.
The kernels are unavailable on all others.  `jaxkv_kernels.generations` says on which they have been run.
"""

from collections.abc import Mapping

import jax

from jaxkv_kernels import generations
from jaxkv_kernels.generations import GENERATIONS, TESTED

# The values of contexts are parts of the key of jit's caches: a function traced for one is traced again for another.
interpreting = jax.make_user_context(default_value=False)
"""`with interpreting(True):` runs the kernels in the interpreter: slow, on any machine, for tests."""
assumed_multiprocessors = jax.make_user_context(default_value=None)
"""`with assumed_multiprocessors(114):` builds kernels for a GPU with that many multiprocessors, for tests."""
assumed_capability = jax.make_user_context(default_value=None)
"""`with assumed_capability("10.0"):` builds kernels for a GPU of that compute capability, for tests."""

MULTIPROCESSORS = 132
"""Of an H100 SXM and an H200, which programs that are lowered without a GPU are for.  An H100 PCIe has 114."""
SHARED_MEMORY = 232_448
"""The most bytes of shared memory per CTA, on Hopper and on Blackwell."""
REGISTERS = 65_536
"""Of a multiprocessor."""


def multiprocessors() -> int:
    """The number of multiprocessors of the GPU; `MULTIPROCESSORS` where there is none."""
    if assumed_multiprocessors.value is not None:
        return assumed_multiprocessors.value
    return jax.local_devices()[0].core_count if jax.default_backend() == "gpu" else MULTIPROCESSORS


def capability() -> str:
    """The compute capability of the GPU that kernels are built for; `TESTED` where there is none."""
    return assumed_capability.value or generations.capability() or TESTED


def consumer_registers(producer_registers: int, consumers: int = 2) -> int:
    """Registers per lane of each consumer warpgroup beside a producer warpgroup: a multiple of 8.

    At launch, all lanes have equally many, a multiple of 8.  A kernel that requests more than these together hangs.
    """
    warpgroups = consumers + 1
    at_launch = REGISTERS // (128 * warpgroups) // 8 * 8
    return (at_launch * warpgroups - producer_registers) // consumers // 8 * 8


_BLACKWELL = {capability: GENERATIONS[capability] for capability in ("10.0", "10.3")}
"""Blackwell GPUs of data centers.  Those of workstations (12.0) have other limits."""

WGMMA: Mapping[str, str] = {"9.0": "Hopper"}
"""Capabilities for attention, which multiplies with wgmma, an instruction of Hopper only."""

TCGEN05: Mapping[str, str] = _BLACKWELL
"""Capabilities for attention that multiplies with tcgen05, the tensor core instructions of these GPUs."""

DECODE: Mapping[str, str] = {**WGMMA, **TCGEN05}
"""Capabilities for which `decode.py` has a kernel."""

BULK_COPIES: Mapping[str, str] = {"9.0": "Hopper", **_BLACKWELL}
"""Capabilities for copies of entries and blocks, which are bulk copies."""

REDUX: Mapping[str, str] = {"9.0": "Hopper", **_BLACKWELL}
"""Capabilities for selections, which add up counts over a warp by an instruction of Ampere and later."""

CLOCK: Mapping[str, str] = {"9.0": "Hopper", **_BLACKWELL}
"""Capabilities for `stamp`, which reads the global timer."""

ANY = {**WGMMA, **TCGEN05, **BULK_COPIES, **REDUX, **CLOCK}
"""Capabilities on which at least one kernel runs."""


def unavailable_reasons(capabilities: Mapping[str, str]) -> list[str]:
    """Reasons why kernels for these capabilities do not run on this machine; empty if they do, or are interpreted."""
    if interpreting.value:
        assumed = assumed_capability.value
        ok = assumed is None or assumed in capabilities
        return [] if ok else [f"needs compute capability {_listed(capabilities)}; the interpreter assumes {assumed}"]
    if jax.default_backend() != "gpu":
        generations = " or ".join(dict.fromkeys(capabilities.values()))
        return [f"needs an NVIDIA {generations} GPU; the default backend is {jax.default_backend()}"]
    device = jax.devices()[0]
    found = str(getattr(device, "compute_capability", "unknown"))
    if found in capabilities:
        return []
    return [f"needs compute capability {_listed(capabilities)}; {device.device_kind} has {found}"]


def _listed(capabilities: Mapping[str, str]) -> str:
    return " or ".join(f"{capability} ({generation})" for capability, generation in capabilities.items())
