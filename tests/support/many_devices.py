"""Meshes of several devices: 8 simulated ones on CPUs (`conftest.py`), those of the machine on GPUs."""

import jax
import pytest
from jax.sharding import AxisType

on_several_devices = pytest.mark.devices(missing=() if jax.device_count() > 1 else ("needs several devices",))


def mesh_of(count, *, first=0, axis="x", axis_type=AxisType.Explicit):
    """A mesh of `count` devices; a machine that has some but not so many skips the test."""
    if first + count > jax.device_count():
        pytest.skip(f"needs {first + count} devices; here are {jax.device_count()}")
    devices = jax.devices()[first : first + count]
    return jax.make_mesh((count,), (axis,), axis_types=(axis_type,), devices=devices)
