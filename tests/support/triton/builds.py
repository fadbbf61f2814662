"""What Triton makes of the kernels of a call for a GPU that need not be there: compiled, or lowered by jax-triton."""

import itertools
import re
import subprocess
from contextlib import contextmanager
from dataclasses import dataclass
from tempfile import NamedTemporaryFile, TemporaryDirectory
from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp
import pytest

from jaxkv.support import call_of
from jaxkv_kernels.generations import AMD
from jaxkv_kernels.triton.kernels import Triton

SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99}
"""KiB of shared memory that a program may have, by compute capability."""
AMD_SHARED = {"gfx942": 64, "gfx950": 160}
"""The same for AMD GPUs, by architecture."""


def on_generations(names, cases, count):
    """Parametrises `names` and `capability`: each case with `count` of them by default, in turn; others are slow."""
    return pytest.mark.parametrize(
        (*names.split(", "), "capability"),
        [
            pytest.param(*case, capability, marks=marks)
            for turn, case in enumerate(cases)
            for capability, marks in in_turn(turn, count)
        ],
    )


def in_turn(turn, count):
    """(capability, marks) of every generation: all but `count`, which begin with another one in each turn, are slow."""
    for number, capability in enumerate(SHARED):
        yield capability, () if (number - turn) % len(SHARED) < count else pytest.mark.slow


POINTERS = {
    "bfloat16": "*bf16",
    "float16": "*fp16",
    "float32": "*fp32",
    "int32": "*i32",
    "uint32": "*u32",
    "uint8": "*u8",
    "float8_e4m3fn": "*fp8e4nv",
}

building = jax.make_user_context(default_value=0)
"""The number of the build: what is traced for one must not serve another, which would then launch nothing."""
BUILDS = itertools.count(1)


@dataclass(frozen=True)
class Built:
    """A compiled kernel."""

    name: str
    shared: int
    """Bytes."""
    registers: int
    """A thread."""
    stack: int
    """Bytes a thread: registers that were spilled, or arrays that found no registers."""
    assembly: str
    """PTX, or that of the AMD GPU."""


def builds(capability, operation, *args, **kwargs):
    """The kernels that `operation(*args, **kwargs)` launches, compiled for `capability`; arrays may be shapes.

    Args:
      capability: compute capability times ten, or the architecture of an AMD GPU.
      operation: a function of jaxkv.
      *args: as in the call.
      **kwargs: as in the call.
    """
    return builds_of(capability, call_of(operation, *args, **kwargs))


def builds_of(capability, call):
    """The same for a record of a call."""
    reasons = Triton().unsupported_reasons(call)
    assert not reasons, reasons
    built = []

    def compile(kernel, operands, results, updated, grid, warps, stages, constants):
        built.append(_compile(capability, kernel, (*operands, *updated, *results), warps, stages, constants))
        return tuple(jnp.zeros(x.shape, x.dtype) for x in (*updated, *results))

    with (
        building(next(BUILDS)),
        mock.patch("jaxkv_kernels.triton.launch._through_jax_triton", compile),
        mock.patch("jaxkv_kernels.triton.launch._capability", return_value=capability),
    ):
        jax.eval_shape(lambda call: call.run_on(Triton()), call)
    assert built, f"{call.operation} launches nothing"
    return built


def _compile(capability, kernel, arrays, warps, stages, constants):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = [parameter.name for parameter in kernel.params]
    pointers = names[: len(arrays)]
    assert {*names[len(arrays) :]} == {*constants}, f"{kernel}: pointers, then constants"
    source = ASTSource(
        kernel,
        signature=dict(zip(pointers, (POINTERS[str(x.dtype)] for x in arrays), strict=True))
        | dict.fromkeys(constants, "constexpr"),
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in range(len(pointers))},
    )
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}
    with TemporaryDirectory() as folder, mock.patch.dict("os.environ", TRITON_CACHE_DIR=folder):
        target = GPUTarget("hip", capability, 64) if capability in AMD else GPUTarget("cuda", capability, 32)
        made = triton.compile(source, target=target, options=options)
    assembly = made.asm["amdgcn" if capability in AMD else "ptx"]
    resources = _amd_resources(assembly) if capability in AMD else _resources(made.asm["cubin"])
    return Built(kernel.__name__, made.metadata.shared, *resources, assembly)


def _amd_resources(assembly):
    """Registers, and bytes of scratch memory, of a thread."""
    names = "vgpr_count", "private_segment_fixed_size"
    (registers,), (stack,) = (re.findall(rf"^ *\.{name}: *(\d+)$", assembly, re.MULTILINE) for name in names)
    return int(registers), int(stack)


def _resources(cubin):
    """Registers, and bytes of stack, of a thread."""
    import triton

    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", printed)
    assert found, printed
    return int(found[1]), int(found[2])


@contextmanager
def without_a_gpu(capability=90):
    """jax-triton lowers for a GPU on any machine: stand-ins for what jaxlib brings with its GPU plugin."""
    import jaxlib.gpu_triton

    made = lambda *args, **kwargs: SimpleNamespace(to_proto=lambda *args: b"")  # noqa: E731
    names = (
        *("TritonKernel", "TritonKernelCall", "TritonAutotunedKernelCall"),
        *("create_array_parameter", "create_scalar_parameter", "create_tma_descriptor_parameter"),
    )
    stubs = dict.fromkeys(names, made) | {
        "get_compute_capability": lambda device: capability,
        "get_arch_details": lambda device: f"{capability}:sramecc+:xnack-",
        "get_serialized_metadata": lambda proto: b"",
    }
    with (
        mock.patch.multiple(jaxlib.gpu_triton, create=True, **stubs),
        mock.patch("jaxkv_kernels.triton.launch._capability", return_value=capability),
    ):
        yield
