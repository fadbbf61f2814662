"""The devices on which the kernels run, and the reasons if they do not run on this machine.

Each table lists the compute capabilities on which a group of kernels has been tested, with their names.  The kernels
are unavailable on all others.
"""

from collections.abc import Mapping

import jax

from jaxkv_kernels.mosaic_gpu.runtime.interpreting import interpreting

WGMMA: Mapping[str, str] = {"9.0": "Hopper"}
"""Capabilities for attention, which multiplies with wgmma, an instruction of Hopper only."""

BULK_COPIES: Mapping[str, str] = {"9.0": "Hopper"}
"""Capabilities for copies of entries and blocks.  Later GPUs also have bulk copies, but only Hopper was tested."""

REDUX: Mapping[str, str] = {"9.0": "Hopper"}
"""Selection adds up counts over a warp by an instruction of Ampere and later; it was tried on Hopper only."""

CLOCK: Mapping[str, str] = {"9.0": "Hopper"}
"""Capabilities for `stamp`.  All generations have the global timer, but only Hopper was tested."""

ANY = {**WGMMA, **BULK_COPIES, **REDUX, **CLOCK}
"""Capabilities on which at least one kernel runs."""


def unavailable_reasons(capabilities: Mapping[str, str]) -> list[str]:
    """Reasons why kernels for these capabilities do not run on this machine; empty if they do, or are interpreted."""
    if interpreting.value:
        return []
    if jax.default_backend() != "gpu":
        generations = " or ".join(dict.fromkeys(capabilities.values()))
        return [f"needs an NVIDIA {generations} GPU; the default backend is {jax.default_backend()}"]
    device = jax.devices()[0]
    found = str(getattr(device, "compute_capability", "unknown"))
    if found in capabilities:
        return []
    needed = " or ".join(f"{capability} ({generation})" for capability, generation in capabilities.items())
    return [f"needs compute capability {needed}; {device.device_kind} has {found}"]
