"""Triton kernels on any machine that has Triton: each compiled for every GPU generation; jax-triton's lowering."""

import os
import re
from importlib.util import find_spec
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import jaxkv
from jaxkv.cli import doctor
from jaxkv.dispatch import call_of
from jaxkv.support import sample_calls
from jaxkv_kernels import triton as kernels
from jaxkv_kernels.triton import available
from triton_builds import SHARED, builds, without_a_gpu

INTERPRETS = "TRITON_INTERPRET" in os.environ
compiles = pytest.mark.skipif(
    find_spec("triton") is None or INTERPRETS,
    reason="Triton makes its kernels for the interpreter" if INTERPRETS else "Triton is not installed",
)

lowers = pytest.mark.skipif(
    INTERPRETS or None in (find_spec("triton"), find_spec("jax_triton")),
    reason="Triton makes its kernels for the interpreter" if INTERPRETS else "Triton or jax-triton is not installed",
)


def taken():
    """(operation and format, sample call) of what the kernels take."""
    for operation, form, (function, args, kwargs) in sample_calls():
        call = call_of(function, *args, **kwargs)
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


@lowers
def test_lowers_in_place_through_jax_triton():
    from jaxkv_kernels.triton.trial_kernel import incremented

    with without_a_gpu():
        lowered = jax.jit(incremented, donate_argnums=0).trace(jax.ShapeDtypeStruct((16,), jnp.int32))
        text = lowered.lower(lowering_platforms=("cuda",)).as_text()
    assert len(re.findall(r"custom_call @triton_kernel_call", text)) == 1
    assert "output_operand_alias" in text
    assert "tf.aliasing_output" in text


def reasons():
    """What `explain` says of a write."""
    sizes = dict(num_layers=1, num_blocks=4, block_size=16, entry=jaxkv.MLAEntry("bf16"))
    layout = jaxkv.CacheLayout(**sizes)
    cache = jaxkv.KVCache(jax.ShapeDtypeStruct((layout.size,), layout.dtype), layout)
    new = [jax.ShapeDtypeStruct((5, n), jnp.bfloat16) for n in layout.entry.sizes]
    found = jaxkv.explain(jaxkv.write_mla, cache, *new, jax.ShapeDtypeStruct((5,), jnp.int32), layer=0)
    return found.reasons["triton"]


def test_without_a_gpu_the_reason_is_the_device():
    if jax.default_backend() == "gpu":
        pytest.skip("this is a GPU")
    assert reasons()[0] == "needs an NVIDIA GPU; the default backend is cpu"


def test_an_old_gpu_is_refused(monkeypatch):
    turing = SimpleNamespace(compute_capability="7.5", device_kind="Tesla T4")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [turing])
    assert reasons()[0] == "needs compute capability 8.0 (NVIDIA Ampere) or later; Tesla T4 has 7.5"


@pytest.fixture
def with_a_gpu(monkeypatch):
    """The device is no reason, and jax-triton can lower for it."""
    monkeypatch.setattr(available, "_device", lambda: iter(()))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for forget in (available._misfit.cache_clear, jax.clear_caches):
        forget()
    with without_a_gpu():
        yield
    available._misfit.cache_clear()


@pytest.mark.usefixtures("with_a_gpu")
def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setattr(available, "find_spec", lambda name: None)
    assert reasons() == ("needs triton, which is not installed", "needs jax-triton, which is not installed")


@lowers
@pytest.mark.usefixtures("with_a_gpu")
class TestPackages:
    """Packages that do not go together."""

    def test_those_that_do_are_no_reason(self):
        assert reasons() == ()

    def test_triton_too_old(self, monkeypatch):
        # Where Triton's NVIDIA backend lacks a name that jax-triton asks for, it gets empty classes in its place.
        import jax_triton

        empty = SimpleNamespace(CUDAOptions=object, CUDABackend=object, GPUTarget=object)
        monkeypatch.setattr(jax_triton.triton_lib, "cb", empty)
        assert all(word in reasons()[0] for word in ("cannot build a kernel (TypeError: ", available.WORKING))

    def test_jax_0_12(self, monkeypatch):
        import jax_triton
        from jax._src.interpreters import partial_eval

        def rule(used_outputs, equation):
            raise AssertionError("called with two arguments, as by jax 0.11")

        # From 0.12 on, JAX passes a third argument.
        rules = {jax_triton.triton_lib.triton_kernel_call_p: lambda *args: rule(*args, None)}
        monkeypatch.setattr(partial_eval, "dce_rules", partial_eval.dce_rules | rules)
        assert all(word in reasons()[0] for word in ("cannot build a kernel (TypeError: ", available.WORKING))

    def test_kernels_for_the_interpreter_are_not_for_the_gpu(self, monkeypatch):
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        assert reasons()[0].startswith("TRITON_INTERPRET is set")


def test_doctor_tells_the_reasons():
    for reason in reasons() or ("usable",):
        assert reason in doctor.report()
