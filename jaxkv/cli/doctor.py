"""Report what to install, versions, devices, and which implementations can run here.

Please attach the output of `jaxkv doctor --verbose` to bug reports.
"""

import argparse
import os
import platform
import re
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import jax

import jaxkv
from jaxkv.dispatch import BACKENDS
from jaxkv.ops.operation import Operation, Sample
from jaxkv.support import sample_calls
from jaxkv.terminal.memory import device_memory

PACKAGES = (
    "jax",
    "jaxlib",
    "numpy",
    "jaxkv",
    "jax-triton",
    "triton",
    "jax-cuda12-plugin",
    "jax-cuda13-plugin",
    "jax-rocm7-plugin",
)
VARIABLES = ("JAX_", "XLA_", "CUDA_", "NVIDIA_", "TRITON_", "MOSAIC_", "LD_LIBRARY_PATH")
"""Prefixes of environment variables that affect JAX and its compilers."""


DRIVER = Path("/proc/driver/nvidia/version")
DRIVERS = {13: 580, 12: 525}
"""The oldest major version of NVIDIA's driver for each major version of CUDA that JAX has wheels for, from JAX's
installation guide."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the option `--verbose`."""
    parser.add_argument("--verbose", action="store_true", help="print why implementations reject calls")


def run(args: argparse.Namespace) -> int:
    """Prints the report."""
    print(report(verbose=args.verbose))
    return 0


def report(*, verbose: bool) -> str:
    """The text of the report.  If a probe fails, the report has its error instead, and the other probes still run.

    Args:
      verbose: whether implementations have their reasons for rejecting calls, not only the number of calls.
    """
    sections = {
        "to install": lambda: [to_install()],
        "versions": _versions,
        "conflicts": lambda: conflicts({name: _version(name) for name in PACKAGES}) or ["none known"],
        "environment": _environment,
        "devices": _devices,
        "implementations": lambda: _implementations(verbose=verbose),
    }
    return "\n\n".join(
        "\n".join([name, *(f"  {line}" for line in _guarded(probe))]) for name, probe in sections.items()
    )


def to_install() -> str:
    """The command that installs what this machine lacks for its fastest implementations, with the reason.

    It says so if nothing is missing.
    """
    if jax.default_backend() == "gpu":
        if _version("jax-triton"):
            return "nothing: the packages for this machine's GPU are installed"
        return "pip install 'jaxkv[triton]': GPUs run the calls that mosaic_gpu does not support on triton"
    driver = DRIVER.read_text() if DRIVER.exists() else ""
    number = re.search(r" (\d+)\.\d+", driver)
    if number is None:
        return "nothing: there is no driver of an NVIDIA GPU, and xla runs on any device"
    supported = [cuda for cuda, oldest in DRIVERS.items() if int(number[1]) >= oldest]
    found = f"NVIDIA's driver {number[1]} is installed, but JAX's default backend is {jax.default_backend()}"
    if not supported:
        return f"NVIDIA's driver {DRIVERS[13]} or later, then 'jaxkv[cuda13]': driver {number[1]} is too old for JAX"
    if _version(f"jax-cuda{supported[0]}-plugin"):
        return f"nothing, but check JAX_PLATFORMS and CUDA_VISIBLE_DEVICES: {found}"
    return f"pip install 'jaxkv[cuda{supported[0]},triton]': {found}"


def conflicts(versions: Mapping[str, str | None]) -> list[str]:
    """Messages about versions that are known not to work together.  None is a package that is not installed."""
    found = []
    jax_triton, triton = (_release(versions.get(name)) for name in ("jax-triton", "triton"))
    if jax_triton and triton and jax_triton >= (0, 4) and triton < (3, 7):
        found.append(
            f"jax-triton {versions['jax-triton']} does not compile with triton {versions['triton']}: "
            "install 'triton>=3.7', or 'jax-triton<0.4'"
        )
    plugins = {name: found for name, found in versions.items() if name.endswith("plugin") and found}
    if len(plugins) > 1:
        found.append(f"{' and '.join(plugins)} are both installed: keep only the one for your GPU")
    for name, plugin in plugins.items():
        if _release(plugin) != _release(versions.get("jaxlib")):
            found.append(f"{name} {plugin} does not match jaxlib {versions.get('jaxlib')}: install both together")
    return found


def _release(text: str | None) -> tuple[int, ...] | None:
    """The first two numbers of a version."""
    return tuple(int(part) for part in text.split(".")[:2]) if text else None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _guarded(probe: Callable[[], list[str]]) -> list[str]:
    try:
        return probe()
    except Exception as error:  # the report must work on machines on which things fail
        return [f"unknown ({type(error).__name__}: {' '.join(str(error).split())})"]


def _versions() -> list[str]:
    found = {"python": platform.python_version(), "platform": platform.platform()}
    found |= {name: _version(name) or "not installed" for name in PACKAGES}
    return [f"{name:18} {value}" for name, value in found.items()]


def _environment() -> list[str]:
    found = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)]
    return found or [f"no variable that begins with {', '.join(VARIABLES)}"]


def _devices() -> list[str]:
    lines = [f"default backend {jax.default_backend()}: {' '.join(jax.devices()[0].client.platform_version.split())}"]
    if DRIVER.exists():
        lines += _guarded(lambda: [" ".join(DRIVER.read_text().splitlines()[0].split())])
    return lines + [_device_line(device) for device in jax.local_devices()]


def _device_line(device: jax.Device) -> str:
    memory = _guarded(lambda: [f"{device_memory(device) / 1e9:.1f} GB for arrays"])
    capability = getattr(device, "compute_capability", None)
    known = [device.device_kind, *memory, *([f"compute capability {capability}"] if capability else [])]
    return f"{device.platform}:{device.id} is {', '.join(known)}"


def _implementations(*, verbose: bool) -> list[str]:
    """For each implementation, how many sample calls it supports; if `verbose`, which, and its reasons against others.

    Reasons against all calls are always listed.
    """
    samples = list(sample_calls())
    backends = {backend.name: backend for backend in BACKENDS}
    kernels = {name: backend.kernels() for name, backend in backends.items()}
    lines = []
    for name, devices in jaxkv.implementations().items():
        supported, rejected = [], {}
        own = [(operation, sample) for operation, sample in samples if kernels[name].support(operation.name)]
        for operation, sample in own:
            reasons = _guarded(partial(_reasons, operation, sample, name))
            call = f"{operation.name} {sample.format}".rstrip()
            supported += [] if reasons else [call]
            for reason in reasons:
                rejected.setdefault(reason, []).append(call)
        usable = f"usable, supports {len(supported)}" if supported else "not usable, supports none"
        lines.append(f"{name} ({devices}): {usable} of {len(samples)} sample calls")
        untried = filter(None, (backends[name].untried_reason(operation.name) for operation, _ in own))
        lines += [f"  only where it is named: {reason}" for reason in dict.fromkeys(untried) if supported]
        everything = {reason for reason, calls in rejected.items() if len(calls) == len(own)}
        lines += [f"  rejects all: {reason}" for reason in rejected if reason in everything]
        if not verbose:
            continue
        lines += [f"  supports {', '.join(supported)}"] if supported and rejected else []
        lines += [
            f"  rejects {', '.join(calls)}: {reason}" for reason, calls in rejected.items() if reason not in everything
        ]
        without = dict.fromkeys(operation.name for operation, _ in samples if not kernels[name].support(operation.name))
        lines += [f"  has no kernel for {', '.join(without)}"] if without else []
    return lines if verbose else [*lines, "--verbose lists the calls that an implementation rejects, and why"]


def _reasons(operation: Operation, sample: Sample, name: str) -> list[str]:
    return list(jaxkv.explain(operation.function, *sample.args, **sample.kwargs).reasons[name])
