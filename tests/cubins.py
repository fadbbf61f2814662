"""Compiles Mosaic GPU kernels on a machine without a GPU, and compares their registers and spills.

    .ci/cubins [--update] [--all] [NAME ...]     runs this script with each version of JAX that CI tests

All are compiled for an H200, and those that are not for Hopper alone also for a B200 and a B300.
`tests/data/cubins` has a table for each of these GPUs and versions: of every kernel that the calls below run, the
registers and the bytes of spill stores and spill loads that ptxas reports, which are its budget, and a hash of the text
that it was lowered to.  Compiling all of them takes minutes.  A kernel whose text has the recorded hash therefore has
the recorded figures, and is not compiled, except in the few calls of `ALWAYS`.  All others are compiled.  The exit code
is 1 if a kernel has no row, if its text has changed, or if its figures are not those of its row.

`--update` writes the table instead.  `NAME` selects the calls whose names contain it, and prints the figures of all
their kernels.  `--all` compiles the kernels of all calls of the benchmark, prints their figures, and fails if one of
them spills more than every kernel of that name in the table.
"""

import argparse
import hashlib
import json
import logging
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, astuple, dataclass
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from jaxkv.bench.inputs import Shared, Varying, arguments, shuffled_requests
from jaxkv.bench.suites import MLA_LAYERS, WORKLOADS
from jaxkv.bench.workload import Workload, workload
from jaxkv_kernels.mosaic_gpu import cudnn
from jaxkv_kernels.mosaic_gpu.runtime.stamp import stamp
from support.hopper import quick_lowering

DATA = Path(__file__).resolve().parent / "data" / "cubins"
TARGETS = {"h200": "9.0", "b200": "10.0", "b300": "10.3"}
"""The GPUs to compile for, with their compute capabilities.  A file in `DATA` is XLA's description of each."""
target = ContextVar("target", default="h200")
"""The GPU to compile for now."""
COMPILER = "nvidia-cuda-nvcc"
"""The package that has ptxas."""

_row = partial(workload, suite="", layers=1)
_moves = partial(workload, suite="", layers=MLA_LAYERS, requests=8, tokens=1024)

CHOSEN: tuple[Workload, ...] = (
    *(
        WORKLOADS[name]
        for name in (
            "decode_mla-128x128x1x4096-61",
            "decode_mla-128x64x1x4096-61",
            "decode_mla-64x128x1x4096-61",  # two CTAs share keys
            "decode_mla-128x128x1x4096-1-fp8",
            "decode_mla-128x128x1x4096-1-fp8_ds_mla",
            "decode_mla-128x16x1x8192-1",
            "decode_mla-64x16x1x4096-1",  # two CTAs share keys
            "decode_mla-128x16x1x8192-1-fp8",
            "decode_mla-128x16x1x8192-1-fp8_ds_mla",
            "decode_mla_sparse-128x128x1x8192-1",
            "decode_mla_sparse-64x64x1x8192-1",
            "decode_mla_sparse-128x128x1x8192-1-fp8_v4",
            "decode_mla_sparse-64x128x1x32768-1-fp8_v4-w128",
            "decode_mla_sparse-128x128x1x8192-1-nvfp4_ds_mla",
            "decode_mla_sparse-128x128x1x8192-1-mxfp4_ds_mla",
            "decode_kv-64x64x1x4096-1",
            "decode_kv-64x64x1x8192-1-fp8",
            "decode_kv-64x64x1x8192-1-int8",
            "decode_kv-64x64x1x8192-1-nvfp4",
            "prefill_mla-1x128x512x8192-1",
            "indexer_logits-64x64x1x32768-1",
            "indexer_logits-64x64x1x32768-1-e4m3",
            "indexer_logits-64x64x2x32768-1-e4m3",
            "indexer_logits-64x64x1x32768-1-bf16",
            "select_topk-64x1x1x32768-1",
            "select_topk-128x1x1x8192-1",
            "plan_decode-128x128x1x8192-1",
            "merge_states-128x128x1x8-1",
            "write_state-64x1-4",
            "read_state-64x1-4",
            "grouped_swiglu-1x64-1",
            "grouped_swiglu-32x64-1",
            "grouped_swiglu-512x64-1",
            "grouped_swiglu-32x64-1-fp8",
            "grouped_swiglu-8192x64-1-fp8",
            "scaled_linear-32x16384-1",
            "select_experts-32x256-1",
            "copy_blocks-1x4096-61",
            "read_blocks-1x4096-61",
            "write_blocks-1x4096-61",
            "write_kv-8x1024-61",
            "gather_kv-8x1024-61",
            "write_indexer_k-8x1024-61",
            "gather_indexer_k-8x1024-61",
            "write_entries-8x1024-61-fp8_ds_mla",
            "gather_entries-8x1024-61-fp8_ds_mla",
            "write_mla-8x1024-61-rotated",
        )
    ),
    _row(operation="decode_mla_sparse", format="bf16", requests=128, heads=128, tokens=8192, chosen=2048),
    *(
        _moves(operation=f"{verb}_mla", format=form)
        for verb in ("write", "gather")
        for form in ("bf16", "fp8", "fp8_ds_mla")
    ),
    *(
        _moves(operation=f"{verb}_kv", format=form, kv_heads=8)
        for verb in ("write", "gather")
        for form in ("int8", "nvfp4")
    ),
)
"""The calls of the table: each schedule of attention, and each kernel of the other operations."""

ALWAYS = (
    "decode_mla-128x128x1x4096-61",
    "decode_kv-64x64x1x8192-1-int8",
    "plan_decode-128x128x1x8192-1",
    "select_topk-128x1x1x8192-1",
    "write_mla-8x1024-61-fp8_ds_mla",
)
"""Calls whose kernels are always compiled, so that the compiler itself is tried."""


class Call(NamedTuple):
    """A function of arrays that runs kernels."""

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    """Shapes and dtypes."""


class Lowered(NamedTuple):
    """A kernel of a call."""

    name: str
    """The name of the call, and that of the kernel."""
    text: str
    """A hash of what Pallas makes of the kernel, which knows nothing of paths and lines."""
    program: Any
    """A program that runs only this kernel; None if it was not lowered further."""


@dataclass(frozen=True)
class Figures:
    """What ptxas reports on a kernel."""

    registers: int
    spill_stores: int
    spill_loads: int

    def __str__(self):
        return f"{self.registers} registers, spill stores of {self.spill_stores} bytes, loads of {self.spill_loads}"

    def exceeds(self, budget: "Figures") -> bool:
        """Whether one of them is greater."""
        return any(figure > limit for figure, limit in zip(astuple(self), astuple(budget), strict=True))


class Row(NamedTuple):
    """A row of a table."""

    figures: Figures
    text: str
    """As in `Lowered`."""


Table = Mapping[str, Row]
"""Rows by the names of kernels (`Lowered.name`)."""


def call_of(made: Workload) -> Call:
    """The call that the benchmark times; its plan is an argument."""
    rng = np.random.default_rng(0)
    requests = shuffled_requests(made, rng)
    chosen, index = jax.eval_shape(lambda: tuple(map(tuple, made.index(requests, rng))))
    values = tuple(jax.ShapeDtypeStruct(*each) for each in made.value_shapes)
    cache = jax.eval_shape(lambda: jaxkv.KVCache.zeros(made.layout))
    plan = None
    if made.planned:
        planner = partial(jaxkv.plan_decode, num_heads=made.heads, q_len=made.q_len, implementation="mosaic_gpu")
        with available():
            plan = jax.eval_shape(planner, cache, *index)

    def call(cache, values, chosen, index, plan, layer):
        args, options = arguments(made, cache, Varying(values, chosen, layer), Shared(index, plan), layer)
        return getattr(jaxkv, made.operation)(*args, **options, implementation="mosaic_gpu")

    return Call(made.name, call, (cache, values, chosen, index, plan, jax.ShapeDtypeStruct((), jnp.int32)))


def calls(workloads: Iterable[Workload]) -> dict[str, Callable[[], Call]]:
    """What makes the call of each of these workloads, and that of the kernel that no operation runs, by name."""
    clock = Call("stamp", stamp, (jax.ShapeDtypeStruct((1,), jnp.float32),))
    return {**{made.name: partial(call_of, made) for made in workloads}, clock.name: lambda: clock}


@contextmanager
def available():
    """The GPU to compile for counts as the device of this machine, and cuDNN as installed."""
    from jax.experimental.mosaic.gpu import utils

    arch = tuple(map(int, TARGETS[target.get()].split(".")))
    with (
        mock.patch.multiple(jax, default_backend=lambda: "gpu", devices=lambda: [gpu()], local_devices=lambda: [gpu()]),
        mock.patch.object(utils, "_infer_arch", return_value=arch),
        mock.patch.multiple(
            cudnn._library(),
            check_cudnn_version=lambda: cudnn.LEAST_VERSION,
            check_compute_capability=lambda capability: True,
        ),
    ):
        yield


def lowered(call: Call, *, compiling: bool = False) -> list[Lowered]:
    """The kernels of a call.  If they are to be compiled, they are lowered further, which takes three times as long."""
    from jax._src.interpreters import mlir
    from jax.experimental.mosaic.gpu import core

    found: list[Lowered] = []
    counts: Counter[str] = Counter()
    lower, emit = core.lower_mgpu_module, core._mosaic_gpu_lowering_rule

    def read(module, launch, semantics, **options):
        text = module.operation.get_asm(enable_debug_info=False)
        name = f"{call.name} {module.operation.attributes['sym_name'].value}"
        counts[name] += 1
        if counts[name] > 1:
            name += f" {counts[name]}"
        found.append(Lowered(name, hashlib.sha256(f"{semantics} {options} {text}".encode()).hexdigest()[:16], None))
        if compiling:
            lower(module, launch, semantics, **options)

    def rule(ctx, *operands, **options):
        if not compiling:
            types, _ = mlir.ir_tree_registry.flatten(
                [mlir.aval_to_ir_type(ctx.module_context, out) for out in ctx.avals_out]
            )
            return mlir.custom_call("kernel", result_types=types, operands=operands).results
        results = emit(ctx, *operands, **options)
        found[-1] = found[-1]._replace(program=alone(results[0].owner))
        return results

    patched = mock.patch.multiple(core, lower_mgpu_module=read, _mosaic_gpu_lowering_rule=rule)
    with available(), quick_lowering(), patched:
        # A function of its own: JAX keeps what it has lowered.
        jax.jit(lambda *arrays: call.function(*arrays)).trace(*call.arguments).lower(lowering_platforms=("cuda",))
    return found


def alone(operation) -> Any:
    """A program with nothing but this operation, whose operands are its arguments."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import func

    with operation.context, ir.Location.unknown():
        module = ir.Module.create()
        with ir.InsertionPoint(module.body):
            main = func.FuncOp("main", ([x.type for x in operation.operands], [x.type for x in operation.results]))
            with ir.InsertionPoint(main.add_entry_block()):
                copy = operation.clone()
                for number, argument in enumerate(main.arguments):
                    copy.operands[number] = argument
                func.ReturnOp(copy.results)
    return module


def gpu() -> Any:
    """The GPU to compile for."""
    return _described(target.get())


@cache
def _described(name: str) -> Any:
    from jax.experimental import topologies

    os.environ["PATH"] = f"{distribution(COMPILER).locate_file('nvidia/cu13/bin')}{os.pathsep}{os.environ['PATH']}"
    os.environ["MOSAIC_GPU_DUMP_PTXAS"] = "1"
    shape = "1x1x1"
    config = (DATA / f"{name}.txtpb").read_text()
    described = topologies.get_topology_desc(shape, platform="cuda", topology=shape, target_config=config)
    return described.devices[0]


def compiled(kernel: Lowered) -> Figures:
    """Compiles a kernel, and reads what ptxas prints."""
    from jax._src.lib import xla_client

    device, options = gpu(), xla_client.CompileOptions()
    sys.stdout.flush()
    with tempfile.TemporaryFile("w+") as output:
        standard = os.dup(1)
        os.dup2(output.fileno(), 1)
        try:
            device.client.compile(kernel.program, xla_client.DeviceList((device,)), options)
        finally:
            os.dup2(standard, 1)
            os.close(standard)
        output.seek(0)
        return figures_of(kernel.name, output.read())


def figures_of(name: str, printed: str) -> Figures:
    """The figures in what ptxas prints for one kernel."""
    spilled = re.findall(r"stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", printed)
    registers = re.findall(r"Used (\d+) registers", printed)
    if len(spilled) != 1 or len(registers) != 1:
        sys.exit(f"{name}: expected the registers and spills of one kernel, but ptxas printed:\n{printed}")
    return Figures(int(registers[0]), *map(int, spilled[0]))


def rows_of(call: Call, known: dict[str, Figures]) -> dict[str, Row]:
    """The rows of a call's kernels.  Those whose text is not `known` are compiled, and added to it."""
    kernels = lowered(call)
    if any(kernel.text not in known for kernel in kernels):
        for kernel in lowered(call, compiling=True):
            if kernel.text not in known:
                known[kernel.text] = compiled(kernel)
    return {kernel.name: Row(known[kernel.text], kernel.text) for kernel in kernels}


def differences(found: Table, table: Table) -> Iterator[str]:
    """What is wrong with the rows of a table, or with the kernels."""
    for name, row in found.items():
        if name not in table:
            yield f"{name} has no row: it has {row.figures}"
        elif row.figures.exceeds(table[name].figures):
            yield f"{name} exceeds its budget: it has {row.figures}; its budget is {table[name].figures}"
        elif row.figures != table[name].figures:
            yield f"{name} is below its budget: it has {row.figures}; its budget is {table[name].figures}"
        elif row.text != table[name].text:
            yield f"{name} has another text than recorded, with the same figures: {row.figures}"
    yield from (f"{name} has a row, but no call runs it" for name in table if name not in found)


def excesses(found: Table, table: Table) -> Iterator[str]:
    """Kernels that spill more than each kernel of their name in the table."""
    for name, row in found.items():
        alike = [other.figures for key, other in table.items() if key.split()[1:2] == name.split()[1:2]]
        stores, loads = (
            max((getattr(each, spill) for each in alike), default=0) for spill in ("spill_stores", "spill_loads")
        )
        if row.figures.spill_stores > stores or row.figures.spill_loads > loads:
            yield f"{name} has {row.figures}; in the table, such kernels have at most {stores} and {loads} bytes"


def versions() -> dict[str, str]:
    """Of what makes a cubin of a text.  SystemExit if it is not installed."""
    try:
        return {"jax": distribution("jax-cuda13-plugin").version, COMPILER: distribution(COMPILER).version}
    except PackageNotFoundError as error:
        sys.exit(f"tests/cubins.py: {error.name} is not installed here; .ci/cubins installs it and runs this script")


def read_table(path: Path) -> tuple[dict[str, str], Table]:
    """The versions that a table was written with, and its rows."""
    if not path.exists():
        return {}, {}
    table = json.loads(path.read_text())
    rows = {name: Row(text=row.pop("text"), figures=Figures(**row)) for name, row in table["kernels"].items()}
    return table["versions"], rows


def write_table(path: Path, made_with: Mapping[str, str], table: Table) -> None:
    """Writes a table, with a line per kernel."""
    rows = (
        f"{json.dumps(name)}: {json.dumps({**asdict(row.figures), 'text': row.text})}"
        for name, row in sorted(table.items())
    )
    path.write_text(f'{{"versions": {json.dumps(made_with)}, "kernels": {{\n' + ",\n".join(rows) + "\n}}\n")


def main() -> int:
    """Compares or writes the table of a GPU and this version of JAX; 1 if a kernel is not as its row says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="calls whose names contain it")
    # One per process: the compiler remembers the first.
    parser.add_argument("--gpu", choices=TARGETS, default="h200", help="the GPU to compile for (h200)")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--update", action="store_true", help="write the table")
    mode.add_argument("--all", action="store_true", help="all calls of the benchmark")
    options = parser.parse_args()
    target.set(options.gpu)
    logging.getLogger("jaxkv").setLevel(logging.ERROR)  # that kernels have not been run on these GPUs is known here
    start, now = time.monotonic(), versions()
    path = DATA / f"{options.gpu}-jax-{'.'.join(now['jax'].split('.')[:2])}.json"
    made_with, table = read_table(path)
    recorded = {row.text: row.figures for row in table.values()} if made_with == now else {}

    found: dict[str, Row] = {}
    known: dict[str, Figures] = {}
    makers = calls(WORKLOADS.values() if options.all else CHOSEN)
    for name in sorted(makers, key=lambda name: name not in ALWAYS):
        if options.names and not any(part in name for part in options.names):
            continue
        if name not in ALWAYS:
            known = {**recorded, **known}
        try:
            rows = rows_of(makers[name](), known)
        except NotImplementedError as error:
            if target.get() == "h200":
                print(error)
            continue
        if options.names or options.all:
            print("\n".join(f"{name}: {row.figures}" for name, row in rows.items()), flush=True)
        found |= rows
    others = {name: row for name, row in table.items() if options.names and name not in found}
    table = {name: row for name, row in table.items() if name not in others}

    wrong = list(excesses(found, table) if options.all else differences(found, table))
    if made_with != now:
        wrong.append(f"{path.name} was made with {made_with or 'nothing'}, and this is {now}")
    took = f"{time.monotonic() - start:.0f} s"
    print("\n".join([*wrong, f"jax {now['jax']}: {len(found)} kernels for {options.gpu} in {took}"]))
    if options.update:
        write_table(path, now, {**others, **found})
    elif wrong:
        print(f"If this is intended, run `.ci/cubins --update`, and commit {path.name} once you have looked at it.")
    return int(bool(wrong) and not options.update)


if __name__ == "__main__":
    sys.exit(main())
