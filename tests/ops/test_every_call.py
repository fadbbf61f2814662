"""Every public function inside JAX's transformations, with axes of length 0, and explained from shapes alone."""

import traceback
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxkv
import jaxkv_kernels
from jaxkv import dispatch
from jaxkv.ops import OPERATIONS
from support import calls
from support.cases import further, slow
from support.many_devices import mesh_of, on_several_devices
from support.opaque import Opaque

every_call = pytest.mark.parametrize("name", calls.ARGUMENTS)
LONG = {"prefill_kv", "prefill_mla", "mla_ragged_paged_attention"}
"""Calls whose parts are calls of other names."""
LONGEST = "ragged_paged_attention"


def _usual(name):
    if "," in name or name == LONGEST:
        return slow(name)
    return further(name) if name in LONG else name


usual_calls = pytest.mark.parametrize("name", [_usual(name) for name in calls.ARGUMENTS])


def test_every_public_function_has_a_call():
    """A new one needs a line of `calls.ARGUMENTS`, and then passes through every test below."""
    assert {name.split(",")[0] for name in calls.ARGUMENTS} == calls.PUBLIC
    assert {operation.name for operation in OPERATIONS} <= calls.PUBLIC


def in_vmap(call, arrays, buffers, axis):
    """A batch of calls on one cache (`axis` None), or each on its own."""
    return jax.vmap(call, in_axes=(0, axis))(arrays, buffers)


def in_scan(call, arrays, buffers, axis):
    """A loop of calls."""
    if axis is None:
        return jax.lax.scan(lambda buffers, arrays: (buffers, call(arrays, buffers)), buffers, arrays)[1]
    return jax.lax.scan(lambda carry, x: (carry, call(*x)), 0, (arrays, buffers))[1]


def in_shard_map(call, arrays, buffers, axis):
    """A call per device."""
    specs = P("x"), P() if axis is None else P("x")

    def on_device(arrays, buffers):
        arrays = [x[0] for x in arrays]
        return jax.tree.map(lambda x: x[None], call(arrays, buffers if axis is None else [x[0] for x in buffers]))

    mesh = mesh_of(2, axis_type=AxisType.Auto)
    return jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=P("x"))(arrays, buffers)


def in_remat(call, arrays, buffers, axis):
    """Calls that a gradient would compute again."""
    parts = ([x[i] for x in arrays] for i in range(2)), ([x[i] if axis == 0 else x for x in buffers] for i in range(2))
    return jax.tree.map(lambda *x: jnp.stack(x), *(jax.checkpoint(call)(*part) for part in zip(*parts, strict=True)))


@cache
def compiled(name):
    return jax.jit(calls.called(name).__call__)


def check(name, transforms, axis):
    """Calls inside of several transforms, the last one innermost, each of 2 calls, return what they return alone."""
    ones = [calls.called(name, seed) for seed in range(2 ** len(transforms))]
    shape = (2,) * len(transforms)

    def stacked(arrays):
        return [np.stack(x).reshape(*shape, *x[0].shape) for x in zip(*arrays, strict=True)]

    arrays, buffers = (stacked(getattr(one, kind) for one in ones) for kind in ("arrays", "buffers"))
    call = ones[0].__call__
    for transform in reversed(transforms):
        call = partial(transform, call, axis=axis)
    found = jax.jit(call)(arrays, ones[0].buffers if axis is None else buffers)
    right = [compiled(name)(one.arrays, ones[0].buffers if axis is None else one.buffers) for one in ones]
    for x, *expected in zip(*(jax.tree.leaves(result) for result in (found, *right)), strict=True):
        expected = np.stack(expected).reshape(x.shape)
        if jnp.issubdtype(x.dtype, jnp.floating):
            np.testing.assert_allclose(np.float32(x), np.float32(expected), rtol=1e-5, atol=1e-5)
        else:
            np.testing.assert_array_equal(x, expected)


@on_several_devices
@usual_calls
def test_nested_transforms(name):
    check(name, [in_shard_map, in_scan, in_remat, in_vmap], axis=None)


@pytest.mark.slow
@on_several_devices
@pytest.mark.parametrize("axis", [None, 0], ids=["one cache", "many caches"])
@every_call
def test_each_transform(name, axis):
    for transform in (in_vmap, in_scan, in_shard_map, in_remat):
        check(name, [transform], axis)


SUPPORTED = {
    "select_topk": "BN",
    "merge_states": "BH",
    "merge_states, of a list": "BH",
    "grouped_swiglu, with all arguments": "TK",  # of which the shared expert is one
}
"""The axes that may have length 0.  Those of other calls are "T", new tokens, and "n", blocks."""
RAGGED = {name for name in calls.ARGUMENTS if "ragged" in name and name not in ("ragged_slots", "ragged_positions")}
"""Calls whose T query tokens are at least one."""
FOLDERS = [Path(package.__file__).parent for package in (jaxkv, jaxkv_kernels)]


@pytest.fixture(autouse=True)
def _whole_tracebacks():
    """Otherwise errors that JAX raises seem to come from the library."""
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "off")
    yield
    jax.config.update("jax_traceback_filtering", before)


def run(one):
    return one(one.arrays, one.buffers)


def assert_of_this_library(error):
    source = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    assert any(source.is_relative_to(folder) for folder in FOLDERS), error


@every_call
def test_axes_of_length_0(name):
    """Results are empty, or a cache that has not changed; axes that must not be empty raise a message that says so."""
    supported = SUPPORTED.get(name, "" if name in RAGGED else "Tn")
    for letter in calls.letters(name):
        if letter not in supported:
            with pytest.raises(ValueError, match="`") as caught:
                run(calls.called(name, **{letter: 0}))
            assert_of_this_library(caught.value)
            continue
        one = calls.called(name, **{letter: 0})
        for x in jax.tree.leaves(run(one)):
            if x.size and one.buffers:
                np.testing.assert_array_equal(x, one.buffers[0])
            elif name.startswith("grouped_swiglu"):
                assert x.size == 0 or np.isfinite(np.asarray(x)).all()  # the shared expert of each token
            elif name == "block_tables_from_csr":
                assert (np.asarray(x) == (-1 if x.ndim == 2 else 0)).all()  # requests without blocks have no tokens
            else:
                assert (np.asarray(x) == -1).all()  # no position can be selected


MAY_BE_0 = "num_decodes", "num_tokens"


@every_call
def test_numbers_of_0(name):
    """Static arguments that count something: all but `num_decodes` and `num_tokens` must be positive."""
    one = calls.called(name)
    for argument, value in one.arguments.items():
        if isinstance(value, int) and not isinstance(value, bool) and argument not in MAY_BE_0:
            with pytest.raises(ValueError, match=f"`{argument}` is 0") as caught:
                one.function(**{**one.arguments, argument: 0})
            assert_of_this_library(caught.value)


def test_kernels_that_jax_cannot_batch_run_one_after_the_other():
    """As on GPUs, whose kernels run in place of those of `xla` here: a batch of calls is a loop over single ones."""
    other = dispatch.Backend("other", "here", Opaque, list)
    one, two = (calls.called("write_mla", seed) for seed in (0, 1))
    write = next(operation for operation in OPERATIONS if operation.function is jaxkv.write_mla)

    def run_other(**given):
        return dispatch.run_kernel(other, write.call(**given))

    def call(arrays, buffers):
        return calls.Called(run_other, one.arguments)(arrays, buffers)

    arrays = [np.stack(x) for x in zip(one.arrays, two.arrays, strict=True)]
    batched = jax.jit(jax.vmap(call, in_axes=(0, None)))
    found = batched(arrays, one.buffers)
    for x, alone in zip(found, (one, two), strict=True):
        np.testing.assert_array_equal(x, alone(alone.arrays, one.buffers).buffer)
    assert "scan" in str(jax.make_jaxpr(batched)(arrays, one.buffers))


@every_call
def test_numpy_arrays_may_be_constants_of_a_compiled_function(name):
    one = calls.called(name)
    jax.eval_shape(lambda: run(one))


def described(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, np.ndarray | jax.Array) else x


@pytest.mark.parametrize(
    "name", [name for name in calls.ARGUMENTS if name.split(",")[0] in {operation.name for operation in OPERATIONS}]
)
def test_explain_takes_shapes_in_place_of_arrays(name):
    one = calls.called(name)
    leaves, tree = jax.tree.flatten(one.arguments)
    for some in (slice(None), slice(None, None, 2), slice(1, None, 2)):
        leaves_described = list(leaves)
        leaves_described[some] = map(described, leaves[some])
        arguments = jax.tree.unflatten(tree, leaves_described)
        assert jaxkv.explain(one.function, **arguments) == jaxkv.explain(one.function, **one.arguments)
