"""Which implementations support a call (`explain`), and the support matrix of all operations."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxkv import dispatch
from jaxkv.ops import OPERATIONS
from jaxkv.ops.operation import Operation, Sample
from jaxkv_kernels.calls import Call
from jaxkv_kernels.formats.entries import Entry
from jaxkv_kernels.formats.format import FORMATS
from jaxkv_kernels.generations import AMD, GENERATIONS, Mark, mark


@dataclass(frozen=True)
class Explanation:
    """The result of `explain`: the implementation that would run a call, and why the others would not."""

    operation: str
    reasons: Mapping[str, tuple[str, ...]]
    """The reasons of each implementation, in order of priority; empty for one that can run the call."""
    untried: Mapping[str, str] = field(default_factory=dict)
    """Of those that can run the call, the ones that do so only if they are named, with the reason: their kernels have
    not been run on GPUs of this machine's generation."""

    @property
    def chosen(self) -> str | None:
        """The implementation that would run the call."""
        able = (name for name, reasons in self.reasons.items() if not reasons)
        return next((name for name in able if name not in self.untried), None)

    def __str__(self):
        lines = [f"{self.operation}: {self.chosen or 'nothing'} would run"]
        for name, reasons in self.reasons.items():
            able = f"if it is named; {self.untried[name]}" if name in self.untried else "yes"
            lines += [f"  {name}: {reason}" for reason in reasons or (able,)]
        return "\n".join(lines)


def explain(operation: Callable[..., Any], *args, **kwargs) -> Explanation:
    """Which implementation `operation(*args, **kwargs)` would use, and why the others cannot run the call.

    Nothing is computed, and arrays may be `jax.ShapeDtypeStruct`s.  All implementations are tried, whatever
    `implementation=` is.

    Args:
      operation: a function of jaxkv that has an `implementation` argument, such as `jaxkv.decode_mla`.
      *args: as in the call.
      **kwargs: as in the call.

    Raises:
      TypeError: `operation` is another function, or the arguments do not fit its signature.
      ValueError: the arguments are wrong, as in the call.
    """
    call = call_of(operation, *args, **kwargs)
    reasons = {backend.name: tuple(backend.kernels().reasons(call)) for backend in dispatch.BACKENDS}
    untried = {backend.name: backend.untried_reason(call.operation) for backend in dispatch.BACKENDS}
    by_name_only = {name: reason for name, reason in untried.items() if reason and not reasons[name]}
    return Explanation(call.operation, reasons, by_name_only)


def call_of(operation: Callable[..., Any], *args, **kwargs) -> Call[Any]:
    """The checked call that `operation(*args, **kwargs)` would run."""
    for declared in OPERATIONS:
        if declared.function is operation:
            return declared.call(*args, **kwargs)
    raise TypeError(f"{operation!r} is not an operation of jaxkv that chooses an implementation")


def sample_calls() -> Iterator[tuple[Operation, Sample]]:
    """Sample calls of every operation: one for each format of each kind of entry that it accepts."""
    for operation in OPERATIONS:
        for sample in operation.samples():
            yield operation, sample


def support_matrix() -> str:
    """A Markdown table of the supported entry formats, with a row per operation and a column per implementation.

    The table is the same on every machine.  A column shows what the implementation supports on the devices that it is
    for.
    """
    names = [f"`{backend.name}` ({backend.devices})" for backend in dispatch.BACKENDS]
    lines = [f"| operation | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for operation in OPERATIONS:
        for variant in ("", *operation.variants):
            cells: dict[str, dict[str, None]] = {backend.name: {} for backend in dispatch.BACKENDS}
            for entry_format, args, kwargs in operation.samples(variant):
                call = operation.call(*args, **kwargs)
                for backend in dispatch.BACKENDS:
                    if not backend.kernels().unsupported_reasons(call):
                        cells[backend.name][entry_format or "any"] = None
            row = (", ".join(formats) or "-" for formats in cells.values())
            lines.append(f"| `{operation.name}`{variant and ' ' + variant} | {' | '.join(row)} |")
    return "\n".join(lines)


def generation_table() -> str:
    """A Markdown table of what is known about the kernels of each implementation on each generation of GPUs.

    Operations of an implementation with the same marks share a row.
    """
    gpus = {**GENERATIONS, **AMD}
    names = [f"{name} ({found})" for found, name in gpus.items()]
    lines = [f"| implementation | operations | {' | '.join(names)} |", "|---" * (len(names) + 2) + "|"]
    for backend in dispatch.BACKENDS[:-1]:
        rows: dict[tuple[Mark, ...], list[str]] = {}
        for operation in OPERATIONS:
            support = backend.kernels().support(operation.name)
            if support is not None:
                built = support.machines.generations or {}
                marks = tuple(mark(backend.name, operation.name, built, found) for found in gpus)
                rows.setdefault(marks, []).append(f"`{operation.name}`")
        lines += [f"| `{backend.name}` | {', '.join(names)} | {' | '.join(marks)} |" for marks, names in rows.items()]
    return "\n".join(lines)


PAGE = 64
"""Tokens per page in the byte maps of `format_table`, for formats whose pages are split."""


def format_table() -> str:
    """A Markdown table of the entry formats, made from their byte maps.

    If several kinds of entries have a format, its byte map is that of the first kind, with typical sizes.  The other
    kinds are stored in the same way.
    """
    lines = ["| format | entries | bytes per token and head | byte map |", "|---|---|---|---|"]
    for name, form in FORMATS.items():
        first: type[Entry] = form.kinds[0]
        entry = first.typical(name)
        kinds = ", ".join(f"`{kind.__name__}`" for kind in form.kinds)
        size = f"{entry.nbytes:,} for {' + '.join(map(str, entry.sizes))} values"
        lines.append(f"| `{name}` | {kinds} | {size} | {_byte_map(entry)} |")
    return "\n".join(lines)


def _byte_map(entry: Entry) -> str:
    if not entry.split:
        found = [
            f"[{part.offset}, {part.offset + part.nbytes}) {part.name}, {part.count} {part.dtype}"
            for part in entry.fields()
        ]
        return "; ".join([*found, *["value = stored * scale, which the caller keeps"] * entry.codec.scaled])
    found = []
    for region in entry.regions(PAGE):
        first, step = region[0].offset, region[0].step or 0
        values = " + ".join(f"{part.count} {part.dtype} {part.name}" for part in region)
        found.append(f"[{first}, {first + step * PAGE}) {PAGE} x ({values})")
    padding = entry.page_nbytes(PAGE) - PAGE * entry.nbytes
    found += [f"{padding} bytes of padding"] * (padding > 0)
    return f"of a page of {PAGE} tokens: {'; '.join(found)}"
