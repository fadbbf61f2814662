"""`Operation`: the declaration of a public operation."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jaxkv.dispatch import captured
from jaxkv.ops.samples import sample_cache
from jaxkv_kernels.calls import Call
from jaxkv_kernels.formats.entries import Entry

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a public function."""


class Sample(NamedTuple):
    """A sample call that shows whether an entry format is supported.  Its arrays are `jax.ShapeDtypeStruct`s."""

    format: str
    """The format of the cache's entries; empty if the operation has no cache argument."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class Operation:
    """A public function that dispatches to kernels.

    Code that covers all operations (`explain`, the support matrix, the fuzzer, the benchmark, the tests) iterates over
    `jaxkv.ops.OPERATIONS`.
    """

    function: Callable[..., Any]
    """The public function: it checks its arguments, and runs the record of its call on the chosen implementation."""
    sample: Callable[..., Arguments]
    """The arguments of a sample call, given a cache (`sample_cache`) if the operation has a cache argument."""
    entries: tuple[type[Entry], ...] = ()
    """The kinds of entries whose caches the operation accepts; empty if it has no cache argument."""
    variants: Mapping[str, Callable[..., Arguments]] = field(default_factory=dict)
    """Samples, as `sample`, of calls that implementations support with other formats; by what distinguishes them."""

    @property
    def name(self) -> str:
        """The name of the function, and of its kernels in each implementation."""
        return self.function.__name__

    def call(self, *args: Any, **kwargs: Any) -> Call[Any]:
        """The checked call that `function(*args, **kwargs)` would run; `implementation` is ignored.

        TypeError if the arguments do not fit the function's signature.
        """
        inspect.signature(self.function).bind(*args, **kwargs)
        return captured(self.function, *args, **kwargs)

    def samples(self, variant: str = "") -> Iterator[Sample]:
        """A sample for each format of each kind of entry, of the usual call or of a variant."""
        sample = self.variants[variant] if variant else self.sample
        if not self.entries:
            yield Sample("", *sample())
        for kind in self.entries:
            for name in kind.formats:
                yield Sample(name, *sample(sample_cache(kind.typical(name))))
