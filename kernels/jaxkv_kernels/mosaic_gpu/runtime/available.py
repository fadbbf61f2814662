"""On which devices the kernels run, and the reasons against this one.

A table lists the compute capabilities that a group of kernels has been tried on, each with its name.  What a table does
not list is unavailable.
"""

from collections.abc import Mapping

import jax

from jaxkv_kernels.mosaic_gpu.runtime.interpreting import interpreting

WGMMA: Mapping[str, str] = {"9.0": "Hopper"}
"""Attention multiplies with wgmma, which only Hopper has."""

BULK_COPIES: Mapping[str, str] = {"9.0": "Hopper"}
"""Entries and blocks move by bulk copies, which later generations have, too; the kernels were tried on Hopper only."""

REDUX: Mapping[str, str] = {"9.0": "Hopper"}
"""Selection adds up counts over a warp by an instruction of Ampere and later; it was tried on Hopper only."""

CLOCK: Mapping[str, str] = {"9.0": "Hopper"}
"""`stamp` reads the global timer, which all generations have; it was tried on Hopper only."""


def unavailable_reasons(capabilities: Mapping[str, str]) -> list[str]:
    """Reasons why kernels for these capabilities do not run on this machine; none if they do, or are interpreted."""
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
