"""Prints how calls travel from the public function to the kernel, and whether an editor can follow them.

    python tests/structure/path.py [--operation decode_mla] [--implementation mosaic_gpu] [--definitions pyrefly]

Calls are traced with shapes alone, on any machine: a Hopper GPU is assumed where an implementation looks for one.
Each step of a path is a function of jaxkv or jaxkv_kernels that the one before calls, or passes to JAX.  A path ends
with the implementation's function on `xla`, with the body that Pallas traces on `mosaic_gpu`, and with the launch of a
kernel on `triton`, whose package must be installed.

With `--definitions`, language servers (pyrefly and pyright, which must be installed) are queried for the definition, or
the implementation, of the names in the line of each call.  Where they do not lead to the next step, the other names in
the function are tried, and those in the calls before.
"""

import argparse
import ast
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from language_server import SERVERS, LanguageServer, Step

import jaxkv

jax.config.update("jax_platforms", "cpu")

ROOT = Path(__file__).parents[2]
SOURCES = f"{ROOT}/jaxkv/", f"{ROOT}/kernels/jaxkv_kernels/"
IMPLEMENTATIONS = tuple(jaxkv.implementations())
FORMATS = ("bf16", "fp8_ds_mla")
BATCH, TABLE, HEADS = 4, 12, 128
CUDNN = "jax._src.cudnn.fused_attention_stablehlo"
KERNEL = 3, 0
"""The rank of the end of a path."""
PREFILLED = 512
"""New tokens per request of `prefill_mla`."""


class Hopper:
    """What implementations read of a device."""

    compute_capability = "9.0"
    device_kind = "NVIDIA H100 80GB HBM3"
    platform = "gpu"
    core_count = 132
    process_index = id = 0


def array(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


@dataclass
class Record:
    """What happened while a call was traced."""

    operation: str
    implementation: str
    functions: dict[CodeType, None] = field(default_factory=dict)
    """The functions of the library, in the order of their first calls."""
    path: list[Step] = field(default_factory=list)
    kernel: str = ""
    """What the last step launches, if that is not Python."""
    _rank: tuple[int, int] = (0, 0)

    def __call__(self, frame: FrameType, event: str, _) -> None:
        """For `sys.setprofile`."""
        if event != "call" or not _is_ours(frame.f_code):
            return
        self.functions.setdefault(frame.f_code)
        if self._rank < KERNEL and (rank := self._rank_of(frame)) > self._rank:
            self._rank, self.path = rank, _steps(frame)

    def _rank_of(self, frame: FrameType) -> tuple[int, int]:
        """How close to the kernel a call is: outside the implementation, inside it, its operation, or the kernel."""
        if f"/jaxkv_kernels/{self.implementation}/" not in frame.f_code.co_filename or self._is_part(frame):
            return 0, 0
        if launched := next((x for x in frame.f_locals.values() if type(x).__name__ == "JITFunction"), None):
            code = launched.fn.__code__
            self.kernel = f"{_short(Path(code.co_filename))}:{code.co_firstlineno}: {code.co_name}"
            return KERNEL
        if not _launches(frame.f_code) and _traced_by_pallas(frame):
            return KERNEL
        return (2, len(_steps(frame))) if frame.f_code.co_name == self.operation else (1, 0)

    def _is_part(self, frame: FrameType) -> bool:
        """Whether a call belongs to another operation that this one uses."""
        names = {caller.f_code.co_name for caller in _frames(frame) if _is_ours(caller.f_code)}
        return bool(names & (set(jaxkv.__all__) - {self.operation}))

    @property
    def files(self) -> list[Path]:
        """All files whose functions were called."""
        return list(dict.fromkeys(Path(code.co_filename) for code in self.functions))


@cache
def _is_ours(code: CodeType) -> bool:
    return code.co_filename.startswith(SOURCES) and code.co_name != "<module>"


def _launches(code: CodeType) -> bool:
    """Whether a function belongs to the module that launches all kernels of an implementation."""
    return code.co_filename.endswith("/launch.py")


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _traced_by_pallas(frame: FrameType) -> bool:
    """Whether a function is the body of a kernel."""
    for caller in _frames(frame.f_back):
        if "/jax/_src/pallas/" in caller.f_code.co_filename:
            return True
        if _is_ours(caller.f_code) and not _launches(caller.f_code):
            return False
    return False


def _steps(frame: FrameType) -> list[Step]:
    """The path to the function of `frame`."""
    steps: list[Step] = []
    others: list[str] = []
    for caller in _frames(frame):
        if not _is_ours(caller.f_code):
            others.append(caller.f_globals.get("__name__", "").partition(".")[0])
            continue
        if steps and others:
            steps[0] = replace(steps[0], through=others[-1])
        steps.insert(0, Step(caller.f_code, caller.f_lineno))
        others = []
    return steps


def _short(path: Path) -> str:
    return str(path.relative_to(ROOT)).removeprefix("kernels/")


def decode_mla(cache, q_latent, q_pe, tables, lengths, **options):
    plan = jaxkv.plan_decode(cache, tables, lengths, num_heads=HEADS, implementation=options["implementation"])
    return partial(
        jaxkv.decode_mla, q_latent, q_pe, cache, tables, lengths, layer=1, scale=0.1, plan=plan, **options
    )  # fmt: skip


def decode_mla_sparse(cache, q_latent, q_pe, slots, **options):
    return partial(jaxkv.decode_mla_sparse, q_latent, q_pe, cache, slots, layer=1, scale=0.1, **options)


def write_mla(cache, kv_c, k_pe, slots, **options):
    return partial(jaxkv.write_mla, cache, kv_c, k_pe, slots, layer=1, **options)


def prefill_mla(cache, *arrays, **options):
    *queries_and_weights, tables, lengths = arrays
    return partial(jaxkv.prefill_mla, *queries_and_weights, cache, tables, lengths, layer=1, scale=0.1, **options)


def shapes(operation: Callable[..., Any], dtype: Any) -> list[jax.ShapeDtypeStruct]:
    """The arguments of one of the functions above, apart from its cache."""
    paged = [array("int32", BATCH, TABLE), array("int32", BATCH)]
    queries = [array(dtype, BATCH, 1, HEADS, 512), array(dtype, BATCH, 1, HEADS, 64)]
    if operation is decode_mla:
        return [*queries, *paged]
    if operation is decode_mla_sparse:
        return [*queries, array("int32", BATCH, 1, 2048)]
    if operation is write_mla:
        return [array(dtype, BATCH, 512), array(dtype, BATCH, 64), array("int32", BATCH)]
    prefilled = [array(dtype, BATCH, PREFILLED, HEADS, size) for size in (128, 64)]
    return [*prefilled, *[array(dtype, HEADS, 128, 512)] * 2, *paged]


OPERATIONS = {f.__name__: f for f in (decode_mla, decode_mla_sparse, write_mla, prefill_mla)}
"""Functions of a cache and arrays, by the operation.  They return the call, which is recorded when it is called."""


def trace(operation: str, implementation: str, form: str) -> Record:
    """The record of a call."""
    jax.clear_caches()  # what was traced before would not be called again
    record = Record(operation, implementation)
    entry = jaxkv.MLAEntry(form)
    layout = jaxkv.CacheLayout(num_layers=3, num_blocks=80, block_size=64, entry=entry)

    def recorded(buffer, *arrays):
        call = OPERATIONS[operation](jaxkv.KVCache(buffer, layout), *arrays, implementation=implementation)
        sys.setprofile(record)
        try:
            return call()
        finally:
            sys.setprofile(None)

    arrays = shapes(OPERATIONS[operation], entry.input_dtype)
    with assumed_hopper() if implementation != "xla" else nullcontext():
        jax.make_jaxpr(recorded)(array(layout.dtype, layout.size), *arrays)
    return record


@contextmanager
def assumed_hopper() -> Iterator[None]:
    """The default device seems to be a Hopper GPU, with cuDNN, for which Triton's packages can build kernels."""
    devices = mock.Mock(return_value=[Hopper()])
    found = {"default_backend": mock.Mock(return_value="gpu"), "devices": devices, "local_devices": devices}
    with (
        mock.patch.multiple(jax, **found),
        mock.patch(f"{CUDNN}.check_cudnn_version", return_value=91000),
        mock.patch(f"{CUDNN}.check_compute_capability", return_value=True),
        mock.patch("jaxkv_kernels.triton.available._misfit", return_value=()),
    ):
        yield


def code_lines(path: Path) -> int:
    """Lines of code, without docstrings, comments and blank lines."""
    text = path.read_text()
    strings = [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    documented = {line for node in strings for line in range(node.lineno, (node.end_lineno or 0) + 1)}
    lines = enumerate(text.split("\n"), 1)
    return sum(bool(line.strip()) and line.strip()[0] != "#" and n not in documented for n, line in lines)


def report(record: Record, form: str, servers: Sequence[LanguageServer]) -> bool:
    """Prints a record, and returns whether every step was resolved."""
    files = record.files
    print(f"\n{record.operation} on {record.implementation}, {form}")
    resolved = True
    for number, step in enumerate(record.path):
        found = ""
        if servers and number:
            notes = [server.follows(record.path, number) for server in servers]
            note = next((note for note in notes if not note.startswith("NOT")), notes[0])
            resolved &= not note.startswith("NOT")
            found = f"   <- {note}"
        through = f"  (through {step.through})" if step.through else ""
        print(f"  {number + 1:2} {_short(step.path)}:{step.code.co_firstlineno}: {step.name}{through}{found}")
    if record.kernel:
        print(f"     launches {record.kernel}")
    on_path = list(dict.fromkeys(step.path for step in record.path))
    print(f"  the path: {len(record.path)} functions in {len(on_path)} files")
    lines, code = (sum(count(path) for path in files) for count in (lambda p: p.read_text().count("\n"), code_lines))
    folders = len({path.parent for path in files})
    print(
        f"  all calls: {len(record.functions)} functions in {len(files)} files of {folders} folders, "
        f"with {lines:,} lines ({code:,} of code)"
    )
    return resolved


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operation", action="append", choices=OPERATIONS, help="default: all")
    parser.add_argument("--implementation", action="append", choices=IMPLEMENTATIONS, help="default: all")
    parser.add_argument("--format", action="append", choices=FORMATS, help="default: both")
    parser.add_argument("--definitions", action="append", choices=SERVERS, help="have this server follow each step")
    options = parser.parse_args()
    servers = [LanguageServer(name, ROOT) for name in options.definitions or ()]
    failed = 0
    choices = product(
        options.operation or OPERATIONS, options.implementation or IMPLEMENTATIONS, options.format or FORMATS
    )
    for operation, implementation, form in choices:
        try:
            record = trace(operation, implementation, form)
        except NotImplementedError as error:
            print(f"\n{operation} on {implementation}, {form}: not traced: {error}")
        else:
            failed += not report(record, form, servers)
    for server in servers:
        server.stop()
    return failed


if __name__ == "__main__":
    sys.exit(main())
