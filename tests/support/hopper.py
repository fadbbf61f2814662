"""Where the Mosaic GPU kernels run, and what programs have them do."""

import math
import re
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import jax
import pytest

from jaxkv_kernels.mosaic_gpu.runtime.device import TCGEN05, WGMMA, unavailable_reasons


def on_gpus(capabilities):
    """Marks tests of kernels for these capabilities (a table of `device.py`)."""
    return pytest.mark.gpu(missing=tuple(unavailable_reasons(capabilities)))


on_hopper, on_blackwell = on_gpus(WGMMA), on_gpus(TCGEN05)


@contextmanager
def quick_lowering():
    """Lowers kernels to the same text in less time.

    Mosaic GPU's layout inference sorts variables by name.  To make a name, JAX 0.11 and 0.12 verify the operation and
    print everything inside it; here, they do neither.
    """
    from jax.experimental.mosaic.gpu import layout_inference

    def name(self):
        text = self.operation.get_asm(skip_regions=True, assume_verified=True)
        kind = layout_inference.VariableType
        letter = {kind.OPERAND: "o", kind.RESULT: "r"}.get(self.type, "a")
        return f"{layout_inference._op_name_regex.match(text).group(0)}:{letter}-{self.index}"

    with mock.patch.object(layout_inference.ValueSite, "__str__", name):
        yield


@contextmanager
def lowering_for(capability: str):
    """Lowers kernels for a GPU of this compute capability, without one."""
    from jax.experimental.mosaic.gpu import utils

    arch = tuple(map(int, capability.split(".")))
    gpu = SimpleNamespace(compute_capability=capability, device_kind="A GPU", core_count=148)
    devices = {name: lambda *_: [gpu] for name in ("devices", "local_devices")}
    with (
        mock.patch.multiple(jax, default_backend=lambda: "gpu", **devices),
        mock.patch.object(utils, "_infer_arch", return_value=arch),
    ):
        yield


def kernel_operands(program: str) -> list[list[str]]:
    """Names of the operands of each kernel in the text of a lowered program."""
    return [operands.split(", ") for operands in re.findall(r"custom_call @mosaic_gpu\w*\(([^)]*)\)", program)]


def large(text, size):
    """The operations whose results have as many elements as the cache."""
    found = re.findall(r"^ *%\S+ = (\S+) .*tensor<((?:\d+x)+)\w+>\)?$", text, re.MULTILINE)
    return {name for name, dims in found if math.prod(int(n) for n in dims.split("x") if n) >= size}


def read_early(jaxpr) -> list[list[tuple[int, ...]]]:
    """Shapes of what each kernel of a traced program touches in memory before it waits for the one in front of it.

    The interpreter does not wait, and so cannot tell.
    """
    found = []
    waits = [_waits(eqn) for eqn in jaxpr.eqns]
    if any(waits):
        early = jaxpr.eqns[: waits.index(True)]
        # Loops and branches are given the references that are used inside.
        avals = [var.aval for eqn in early for var in eqn.invars]
        avals = [aval for aval in avals if "Ref" in type(aval).__name__ and "smem" not in str(aval.memory_space)]
        found.append([aval.shape for aval in avals])
    for eqn, is_wait in zip(jaxpr.eqns, waits, strict=True):
        for inner in [] if is_wait else _inner(eqn):
            found += read_early(inner)
    return found


def _waits(eqn) -> bool:
    """Whether an operation of a kernel is a wait, or a branch that begins with one (of CTAs that have work)."""
    if eqn.primitive.name == "cond":
        return any(inner.eqns and _waits(inner.eqns[0]) for inner in _inner(eqn))
    return eqn.primitive.name == "griddepcontrol_wait"


def _inner(eqn):
    """The programs inside an operation: of a loop, a branch, a kernel."""
    for param in eqn.params.values():
        for part in param if isinstance(param, list | tuple) else [param]:
            part = getattr(part, "jaxpr", part)
            if hasattr(part, "eqns"):
                yield part
