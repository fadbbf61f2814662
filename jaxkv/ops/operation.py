"""`Operation`: the declaration of a public operation."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from jaxkv.dispatch.backends import Call
from jaxkv.ops.samples import sample_cache
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
    """The public function: `bind`, then the kernel of the chosen backend, then the result as users see it."""
    bind: Callable[..., Call]
    """Checks the arguments and returns the call for the kernels.

    It runs nothing.  Its parameters have the same names as those of `function`, except that `implementation` and
    options that only affect the result's form, such as `return_lse`, are left out.
    """
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

    def call(self, *args, **kwargs) -> Call:
        """The checked call that `function(*args, **kwargs)` would run; `implementation` is ignored."""
        given = self._signature.bind(*args, **kwargs)
        given.apply_defaults()
        return self.bind(**{name: given.arguments[name] for name in self._bound})

    def samples(self, variant: str = "") -> Iterator[Sample]:
        """A sample for each format of each kind of entry, of the usual call or of a variant."""
        sample = self.variants[variant] if variant else self.sample
        if not self.entries:
            yield Sample("", *sample())
        for kind in self.entries:
            for name in kind.formats:
                yield Sample(name, *sample(sample_cache(kind.typical(name))))

    @cached_property
    def _signature(self):
        return inspect.signature(self.function)

    @cached_property
    def _bound(self):
        return tuple(inspect.signature(self.bind).parameters)
