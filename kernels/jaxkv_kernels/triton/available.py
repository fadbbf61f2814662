"""Whether the kernels run on this machine, and the reasons if not."""

import os
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import jax
import jax.numpy as jnp

from jaxkv_kernels.generations import AMD, GENERATIONS, capability
from jaxkv_kernels.triton.interpreter import interpreting

OLDEST = 8.0
"""Compute capability of the oldest supported GPUs (Ampere)."""

ANY: Mapping[str, str] = {**GENERATIONS, **AMD}
"""The GPUs on which at least one kernel runs."""

WORKING = "jax-triton 0.4.1 works with triton 3.7 or later, and jax-triton 0.3.1 with triton 3.6"


def unavailable_reasons(generations: Mapping[str, str]) -> list[str]:
    """Reasons why kernels for GPUs of `generations` cannot run on this machine.

    There are none if it has one of AMD's among these, or any of NVIDIA's from Ampere on, and the packages.
    """
    if interpreting.value:
        return [*_missing("triton"), *([] if _interprets() else ["needs TRITON_INTERPRET=1 in the environment"])]
    if reasons := [*_device(generations), *_missing("triton", "jax-triton")]:
        return reasons
    if _interprets():
        return ["TRITON_INTERPRET is set: kernels are made for Triton's interpreter, not for the GPU"]
    return list(_misfit())


def _interprets() -> bool:
    """Whether Triton interprets kernels.  The variable is parsed as Triton does."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")


def _device(generations: Mapping[str, str]) -> Iterator[str]:
    amd = [f"{found} ({name})" for found, name in generations.items() if found in AMD]
    if jax.default_backend() != "gpu":
        yield f"needs {' or '.join(['an NVIDIA GPU', *amd])}; the default backend is {jax.default_backend()}"
        return
    device = jax.devices()[0]
    found = str(getattr(device, "compute_capability", "unknown"))
    if found.startswith("gfx"):
        if found not in generations:
            yield f"needs {' or '.join(['an NVIDIA GPU', *amd])}; {device.device_kind} is {found}"
    elif not found.replace(".", "").isdecimal() or float(found) < OLDEST:
        yield f"needs compute capability {OLDEST} (NVIDIA Ampere) or later; {device.device_kind} has {found}"


def _missing(*packages: str) -> Iterator[str]:
    for name in packages:
        if find_spec(name.replace("-", "_")) is None:
            yield f"needs {name}, which is not installed"


@cache
def _misfit() -> tuple[str, ...]:
    """The reason, if any, why the installed packages cannot build a kernel, found by building a minimal one."""
    x = jax.ShapeDtypeStruct((16,), jnp.int32)
    try:
        from jaxkv_kernels.triton.launch import incremented

        jax.jit(incremented).trace(x).lower(lowering_platforms=("rocm" if capability() in AMD else "cuda",))
    except Exception as error:  # incompatible versions of packages can raise anything
        message = f"{type(error).__name__}: {' '.join(str(error).split())}"
        found = ", ".join(f"{name} {_version(name)}" for name in ("jax-triton", "triton", "jax"))
        return (f"{found} cannot build a kernel ({message[:300]}): {WORKING}",)
    return ()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "of unknown version"
