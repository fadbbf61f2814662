"""Triton kernels on any machine that has Triton: each compiled for every GPU generation; jax-triton's lowering."""

import os
import re
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import pytest

import jaxkv
from jaxkv.dispatch import call_of
from jaxkv.support import sample_calls
from jaxkv_kernels import triton as kernels
from triton_builds import SHARED, builds, without_a_gpu

INTERPRETS = "TRITON_INTERPRET" in os.environ
compiles = pytest.mark.skipif(
    find_spec("triton") is None or INTERPRETS,
    reason="Triton makes its kernels for the interpreter" if INTERPRETS else "Triton is not installed",
)


def taken():
    """(operation and format, sample call) of what the kernels take."""
    for operation, form, (function, args, kwargs) in sample_calls():
        call = call_of(function, *args, **kwargs)
        if operation == "plan_decode":  # plain JAX, whose result is for kernels
            continue
        if operation in kernels.OPERATIONS and not kernels.refuses(operation, call.arrays, call.options):
            yield pytest.param((function, args, kwargs), id=f"{operation} {form}".rstrip())


@compiles
@pytest.mark.parametrize("capability", SHARED)
@pytest.mark.parametrize("sample", [*taken()])
def test_compiles_within_the_gpus_limits(sample, capability):
    function, args, kwargs = sample
    for built in builds(capability, function, *args, **kwargs):
        assert built.shared <= SHARED[capability] * 1024, built.name
        assert built.stack == 0, f"{built.name} spills {built.stack} bytes a thread, with {built.registers} registers"


@compiles
@pytest.mark.skipif(find_spec("jax_triton") is None, reason="jax-triton is not installed")
def test_lowers_in_place_through_jax_triton():
    from jaxkv_kernels.triton.trial_kernel import incremented

    with without_a_gpu():
        lowered = jax.jit(incremented, donate_argnums=0).trace(jax.ShapeDtypeStruct((16,), jnp.int32))
        text = lowered.lower(lowering_platforms=("cuda",)).as_text()
    assert len(re.findall(r"custom_call @triton_kernel_call", text)) == 1
    assert "output_operand_alias" in text
    assert "tf.aliasing_output" in text


def test_explain_tells_why_there_are_no_kernels_here():
    if not kernels.unavailable():
        pytest.skip("they run on this GPU")
    sizes = dict(num_layers=1, num_blocks=4, block_size=16, entry=jaxkv.MLAEntry("bf16"))
    layout = jaxkv.CacheLayout(**sizes)
    cache = jaxkv.KVCache(jax.ShapeDtypeStruct((layout.size,), layout.dtype), layout)
    new = [jax.ShapeDtypeStruct((5, n), jnp.bfloat16) for n in layout.entry.sizes]
    found = jaxkv.explain(jaxkv.write_mla, cache, *new, jax.ShapeDtypeStruct((5,), jnp.int32), layer=0)
    assert found.reasons["triton"][0].startswith("needs ")
