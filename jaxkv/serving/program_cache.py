"""Programs of the engine, and their executables on disk, which outlive the process."""

import hashlib
import importlib.metadata
import inspect
import logging
import os
import pickle
import tempfile
import threading
from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import jax
from jax.experimental.serialize_executable import deserialize_and_load, serialize
from jax.sharding import NamedSharding
from jax.stages import Compiled, Lowered

import jaxkv
import jaxkv_kernels
from jaxkv.dispatch import BACKENDS

_log = logging.getLogger("jaxkv")
FOLDER = "jaxkv-programs"
"""In the folder of JAX's compilation cache."""
PACKAGES = "jax", "jaxlib", "triton", "jax-triton"
"""The packages that compile."""
HIT = "/jax/compilation_cache/cache_hits"
"""The event that JAX reports, to listeners in the same thread, when its cache has an executable."""
SETTINGS_OF_CACHES = "compilation_cache", "persistent_cache", "cache_expect"
"""Parts of the names of JAX's settings that do not change a program."""


class Compilable(Protocol):
    """What is left to do until a program can run."""

    def compile(self) -> Compiled:
        """The program, compiled."""
        ...


class Program:
    """A function that is compiled for arguments of a few shapes.

    Most of the time until a program with Pallas kernels can run is spent in Python, which lowers the kernels, and only
    the rest in XLA, whose results JAX's compilation cache keeps.  This class therefore keeps executables, which need
    neither, in the same folder: that of the setting `jax_compilation_cache_dir`, if it is a path of a file system.

    An executable is found by a digest of everything that it depends on: the source files of jaxkv, the versions of the
    packages that compile, the GPU and its driver, JAX's settings, and the shapes, dtypes, places and static parts of
    the arguments, such as the configuration of the model.  It does not depend on the weights.

    Executables get the arrays of all arguments one after the other.  With `keeps_first`, those of the first argument,
    such as a model, are found only when it is another object than in the call before.  For a model of 400 arrays in
    nested dicts, this would take a fifth of the host's time of every call.

    As with JAX's own cache, loading an executable runs the code that it holds.  Only those who may run code as the
    user may be able to write to the folder.

    Args:
      function: a function of the module level.
      donate: the names of the arguments that are updated in place.
      keeps_first: whether to keep the arrays of the first argument for the next call.
      compiler_options: options of XLA, given the size; default none.
    """

    def __init__(
        self,
        function: Callable,
        *,
        donate: tuple[str, ...],
        keeps_first: bool = False,
        compiler_options: Callable[[Any], Mapping[str, Any]] | None = None,
    ):
        self._about = function.__module__, function.__qualname__, donate
        self._options = compiler_options or (lambda size: {})
        self._function = function
        self._donate = donate
        self._keeps_first = keeps_first
        self._first: tuple[Any, list[jax.Array], Any] = None, [], None
        """The first argument of the last call, its arrays and its structure."""
        self._jitted = cache(lambda options: jax.jit(function, donate_argnames=donate, compiler_options=dict(options)))
        self._compiled: dict[Hashable, Compiled] = {}

    def __call__(self, size: Hashable, *arguments):
        """Runs the program that was prepared for this size; without one, compiles the function as `jax.jit` does."""
        arrays = self._arrays_of(arguments)
        if (compiled := self._compiled.get(size)) is not None:
            return compiled(*arrays)
        return self._jitted(self._options_of(size))(*arguments)

    def _arrays_of(self, arguments: tuple) -> list[jax.Array]:
        if not self._keeps_first:
            return jax.tree.leaves(arguments)
        first, *others = arguments
        before, arrays, structure = self._first
        if first is not before:
            arrays, found = jax.tree.flatten(first)
            if before is not None and found != structure:
                self._compiled.clear()  # made for another structure or other static parts
            self._first = first, arrays, found
        return [*arrays, *jax.tree.leaves(others)]

    def prepare(self, size: Hashable, *arguments) -> Compilable:
        """Finds or lowers the program for arguments like these, which may be descriptions.

        Once it is compiled, calls with `size` run it.
        """
        options = self._options_of(size)
        file = self._file(options, arguments)
        found = None if file is None else _load(file, arguments)
        return _Prepared(self._compiled, size, found or self._lower(options, arguments), file)

    def _lower(self, options: tuple[tuple[str, Any], ...], arguments: tuple) -> Lowered:
        """The function of the arrays of all arguments, lowered."""
        function, (leaves, structure) = self._function, jax.tree.flatten(arguments)

        def of_arrays(*arrays):
            return function(*jax.tree.unflatten(structure, arrays))

        of_arrays.__name__ = function.__name__  # by which profiles name the program
        donated, first = [], 0
        for name, argument in zip(inspect.signature(function).parameters, arguments, strict=True):
            after = first + len(jax.tree.leaves(argument))
            donated += range(first, after) if name in self._donate else ()
            first = after
        return jax.jit(of_arrays, donate_argnums=donated, compiler_options=dict(options)).lower(*leaves)

    def _options_of(self, size: Hashable) -> tuple[tuple[str, Any], ...]:
        return tuple(sorted(self._options(size).items()))

    def _file(self, options: tuple, arguments: tuple) -> Path | None:
        folder = jax.config.jax_compilation_cache_dir
        if not folder or "://" in folder or not jax.config.jax_enable_compilation_cache:
            return None
        try:
            return Path(folder, FOLDER, _digest((*self._about, options), arguments))
        except (TypeError, pickle.PicklingError):  # static parts without a pickle, such as the device of a replica
            return None


@dataclass
class _Prepared:
    programs: dict[Hashable, Compiled]
    size: Hashable
    found: Compiled | Lowered
    file: Path | None
    """Where the executable is kept."""

    def compile(self) -> Compiled:
        compiled = self.found
        if isinstance(compiled, Lowered):
            before = _hits()
            compiled = compiled.compile()
            # Of an executable that JAX's cache had, XLA's serialisation on CPUs lacks the functions.
            incomplete = jax.default_backend() == "cpu" and _hits() > before
            if self.file is not None and not incomplete:
                _store(self.file, compiled)
        self.programs[self.size] = compiled
        return compiled


_of_thread = threading.local()


def _hits() -> int:
    """How many executables JAX's compilation cache has had for this thread."""
    return getattr(_of_thread, "hits", 0)


def _count(event: str, **_: object) -> None:
    if event == HIT:
        _of_thread.hits = _hits() + 1


jax.monitoring.register_event_listener(_count)


def _digest(about: tuple, arguments: tuple) -> str:
    leaves, structure = jax.tree.flatten(arguments)
    device = jax.devices()[0]
    parts = (
        *(_sources(), _versions(), device.device_kind, device.client.platform_version, jax.device_count()),
        *(item for item in sorted(jax.config.values.items()) if not _is_of_caches(item[0])),
        *(os.environ.get("XLA_FLAGS"), [backend.unavailable_reasons() for backend in BACKENDS]),
        *(about, [(leaf.shape, leaf.dtype, getattr(leaf, "sharding", None)) for leaf in leaves]),
    )
    digest = hashlib.sha256(pickle.dumps(structure))  # with all static parts, of which a text may leave something out
    for part in parts:
        digest.update(f"{part}\n".encode())
    return digest.hexdigest()


def _is_of_caches(setting: str) -> bool:
    return any(part in setting for part in SETTINGS_OF_CACHES)


@cache
def _sources() -> str:
    """A digest of the source files of both packages."""
    digest = hashlib.sha256()
    for package in (jaxkv, jaxkv_kernels):
        root = Path(package.__path__[0])
        for file in sorted(root.rglob("*.py")):
            digest.update(f"{file.relative_to(root)}\n".encode() + file.read_bytes())
    return digest.hexdigest()


@cache
def _versions() -> tuple[str, ...]:
    found = []
    for package in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{package} {importlib.metadata.version(package)}")
    return tuple(found)


def _load(file: Path, arguments: tuple) -> Compiled | None:
    # Sets the variable by which executables with Mosaic GPU kernels find the library that launches these.
    import jax.experimental.pallas.mosaic_gpu

    try:
        executable, results = pickle.loads(file.read_bytes())
        structure = jax.tree.structure((tuple(jax.tree.leaves(arguments)), {}))
        return deserialize_and_load(executable, structure, results, execution_devices=_devices(arguments))
    except FileNotFoundError:
        return None
    except Exception as error:  # a file of any content
        _log.warning("%s was not loaded, so that its program is compiled again: %s", file, error)
        return None


def _devices(arguments: tuple) -> list[jax.Device]:
    """The devices that hold the arguments, in the order of their mesh."""
    shardings = (getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(arguments))
    sharding = next(sharding for sharding in shardings if sharding is not None)
    return [*sharding.mesh.devices.flat] if isinstance(sharding, NamedSharding) else [*sharding.device_set]


def _store(file: Path, compiled: Compiled) -> None:
    try:
        executable, _, results = serialize(compiled)
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent) as unfinished:
            written = Path(unfinished, file.name)
            written.write_bytes(pickle.dumps((executable, results)))
            written.replace(file)  # complete at once, for other processes
    except Exception as error:  # a full disk, or a program that cannot be serialised
        _log.warning("a program was not stored in %s, so that it will be compiled again: %s", file.parent, error)
