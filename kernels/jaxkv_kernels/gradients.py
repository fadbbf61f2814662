"""Where gradients end: values that have none raise an error when they are differentiated, instead of returning 0.

JAX differentiates conversions to integers, bitcasts and kernels that it does not know without an error, or with one
that names its own internals.
"""

from functools import partial

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

INSTEAD = "or pass the values through `jax.lax.stop_gradient` if their gradients are not needed"


def without_gradients[T](values: T, reason: str) -> T:
    """`values`, a pytree, as it is; differentiating it in either mode raises NotImplementedError with `reason`."""
    return _without_gradients(reason, values)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _without_gradients(reason, values):
    del reason
    return values


@_without_gradients.defjvp
def _refused(reason, primals, tangents):
    del primals, tangents
    raise NotImplementedError(f"{reason}, {INSTEAD}")


def forward_mode_only[T](values: T, reason: str) -> T:
    """`values`, a pytree, as it is; differentiating it in reverse mode raises NotImplementedError with `reason`."""
    return jax.tree.map(lambda x: _forward_mode_only.bind(x, reason=reason), values)


_forward_mode_only = Primitive("forward_mode_only")
_forward_mode_only.def_impl(lambda x, *, reason: x)
_forward_mode_only.def_abstract_eval(lambda x, *, reason: x)
batching.defvectorized(_forward_mode_only)
mlir.register_lowering(_forward_mode_only, lambda ctx, x, *, reason: [x])


def _refused_in_reverse(cotangent, x, *, reason):
    del cotangent, x
    raise NotImplementedError(f"{reason}, {INSTEAD}")


ad.deflinear2(_forward_mode_only, _refused_in_reverse)
