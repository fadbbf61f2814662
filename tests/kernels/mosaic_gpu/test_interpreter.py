"""What the interpreted tests rely on: a race is seen, whichever kernel of the test it is in."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas  # noqa: F401 (its warnings at import are not ours)

from jaxkv_kernels.mosaic_gpu.runtime.device import interpreting
from support.interpreter import without_races


def copied(x, *, commits):
    """`x` through shared memory; without the commit, the copy may start before the store has landed."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from jaxkv_kernels.mosaic_gpu.runtime.launch import kernel

    def body(x_ref, out_ref, shared):
        shared[...] = x_ref[...]
        if commits:
            plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(shared, out_ref)
        plgpu.wait_smem_to_gmem(0)

    return kernel(body, interpret=True, out_type=x, scratch_types=[plgpu.SMEM(x.shape, x.dtype)])(x)


@pytest.mark.parametrize("bad", [0, 1])
def test_races_are_seen(bad):
    def two_kernels():
        for number in range(2):
            copied(jnp.ones((64, 64)), commits=number != bad)

    with pytest.raises((AssertionError, jax.errors.JaxRuntimeError), match="RACE DETECTED"), without_races():
        two_kernels()


@pytest.mark.usefixtures("interpreted")
def test_kernels_without_races_pass():
    assert interpreting.value
    assert (copied(jnp.ones((64, 64)), commits=True) == 1).all()
