"""Which exceptions are mistakes of the user, which a command reports in one line."""

import jax

MISTAKES = (ValueError, ImportError, OSError, NotImplementedError, MemoryError)
"""Exceptions of user errors.  Other exceptions are bugs and keep their traceback."""


def mistake(error: Exception) -> str:
    """What the user can mend, given an exception; empty if it is a bug."""
    if isinstance(error, MISTAKES):
        return str(error) or type(error).__name__
    if isinstance(error, jax.errors.JaxRuntimeError):
        return f"does not fit in memory: choose smaller sizes ({error})" if "Out of memory" in str(error) else ""
    return _without_device()


def _without_device() -> str:
    """Why JAX has no device; empty if it has one.  JAX's own error does not always have a message."""
    try:
        jax.devices()
    except Exception as error:
        platforms = jax.config.jax_platforms
        return f"JAX has no device with JAX_PLATFORMS={platforms!r} (see `jaxkv doctor`): {error!r}"
    return ""
