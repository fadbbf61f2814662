"""Triton kernels for AMD GPUs: compiled, lowered by jax-triton, and their e4m3, which has no instructions there."""

import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxkv
from jaxkv.support import sample_calls
from jaxkv_kernels.calls import PlanDecode, PrefillCall, ReadCall
from jaxkv_kernels.generations import AMD
from jaxkv_kernels.triton.codecs import from_e4m3, halves, has_e4m3, to_e4m3
from jaxkv_kernels.triton.kernels import Triton
from jaxkv_kernels.triton.language import tl, triton
from jaxkv_kernels.triton.launch import launch
from support import kernels, scenes
from support.cases import further, slow
from support.triton.builds import AMD_SHARED, builds, without_a_gpu
from support.triton.runs import compiles, interpreted, lowers

FORMATS = {"gfx942": "bf16", "gfx950": "fp8"}
"""The format that is compiled by default."""


def claimed():
    """Each sample call of every operation that is offered on AMD GPUs, on each of them.

    By default, a format of numbers is compiled for one and a format of bytes for the other, or one of both by each
    kernel of attention, which takes longer.  Further cases are the other formats for one GPU, in turn.
    """
    turns = 0
    for operation, (form, args, kwargs) in sample_calls():
        call = operation.call(*args, **kwargs)
        # Plans are plain JAX, whose result is for kernels; prefills and reads launch the kernels of gathers.
        if isinstance(call, PlanDecode | PrefillCall | ReadCall) or Triton().unsupported_reasons(call):
            continue
        turns += 1
        for number, architecture in enumerate(AMD):
            if architecture not in Triton.support(operation.name).machines.generations:
                continue
            default = form == FORMATS[architecture] and (operation.name, form) not in LONG
            case = slow if (turns + number) % len(AMD) else further
            values = (operation.function, args, kwargs), architecture
            made = pytest.param(*values) if default else case(*values)
            yield pytest.param(*made.values, marks=made.marks, id=f"{operation.name} {form}-{architecture}")


LONG = ("decode_mla", "fp8"), ("decode_kv", "bf16")


def check(built, architecture):
    """It is within the limits of the GPU, and converts no float8 by instructions: those of gfx942 are for e4m3fnuz."""
    assert built.shared <= AMD_SHARED[architecture] * 1024, built.name
    assert built.stack == 0, f"{built.name} spills {built.stack} bytes per thread, with {built.registers} registers"
    assert not re.findall(r"v_cvt_\w*(?:fp8|bf8)\w*", built.assembly)


@compiles
@pytest.mark.parametrize(("sample", "architecture"), [*claimed()])
def test_compiles_within_the_gpus_limits(sample, architecture):
    function, args, kwargs = sample
    for built in builds(architecture, function, *args, **kwargs):
        check(built, architecture)


def array(dtype, *shape):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def cache_of(entry, heads=1):
    layout = jaxkv.CacheLayout(num_layers=61, num_blocks=4096, block_size=64, num_heads=heads, entry=entry)
    return jaxkv.KVCache(array(layout.dtype, layout.size), layout)


REQUESTS = array("int32", 64, 64), array("int32", 64)


@compiles
@pytest.mark.parametrize(
    ("form", "heads", "architecture"),
    [
        further("bf16", 128, "gfx942"),
        further("fp8_ds_mla", 128, "gfx950"),
        *(slow(form, 128, "gfx942") for form in ("fp8_ds_mla", "fp8", "f32", "fp8_v4", "fp8_v41", "fp4_v41")),
        *(slow(form, 128, "gfx950") for form in ("bf16", "fp8", "f32", "fp8_v4", "fp8_v41", "fp4_v41")),
    ],
)
def test_latents_compile_at_the_sizes_of_models(form, heads, architecture):
    entry = jaxkv.MLAEntry.typical(form)
    q = [array("float32" if form == "f32" else "bfloat16", 64, 1, heads, size) for size in entry.sizes]
    options = {"layer": 0, "scale": 1.0, **({"kv_scale": 1.0} if form == "fp8" else {})}
    for built in builds(architecture, jaxkv.decode_mla, *q, cache_of(entry), *REQUESTS, **options):
        check(built, architecture)


@compiles
@pytest.mark.parametrize(
    ("form", "size", "sharing", "tokens", "architecture"),
    [
        further("bf16", 128, 40, 2, "gfx942"),
        *(slow(form, 512, 8, 4, name) for form in ("bf16", "f32", "fp8", "int8", "nvfp4") for name in AMD),
        *(slow(form, 256, 4, 3, name) for form in ("bf16", "f32", "fp8", "int8", "nvfp4") for name in AMD),
    ],
)
def test_pairs_compile_at_the_sizes_of_models(form, size, sharing, tokens, architecture):
    entry = jaxkv.KVEntry(form, size, size)
    q = array("float32" if form == "f32" else "bfloat16", 64, tokens, 8 * sharing, size)
    scales = dict.fromkeys(("k_scale", "v_scale"), 1.0) if entry.codec.scaled else {}
    for built in builds(architecture, jaxkv.decode_kv, q, cache_of(entry, 8), *REQUESTS, layer=0, scale=1.0, **scales):
        check(built, architecture)


@compiles
@pytest.mark.parametrize("architecture", AMD)
def test_quotients_of_e4m3_are_rounded_once(architecture):
    """By the sequence of instructions that ends in this one; an approximation would multiply by an inverse."""
    entry = jaxkv.KVEntry("fp8", 128, 128)
    new = [array("bfloat16", 64, 8, size) for size in entry.sizes]
    arguments = cache_of(entry, 8), *new, array("int32", 64)
    (built,) = builds(architecture, jaxkv.write_kv, *arguments, layer=0, k_scale=1.0, v_scale=1.0)
    assert "v_div_fixup_f32" in built.assembly
    assert re.search(r"\.amdhsa_float_denorm_mode_32 3$", built.assembly, re.MULTILINE)  # denormal numbers are kept


@lowers
@pytest.mark.parametrize("architecture", AMD)
def test_lowers_in_place_through_jax_triton(architecture):
    layout = jaxkv.CacheLayout(num_layers=61, num_blocks=4096, block_size=64, entry=jaxkv.MLAEntry("bf16"))
    names = "buffer", "kv_c", "k_pe", "slot_mapping", "layer"
    options = {"entry": layout.entry, "pages": layout.pages, "kv_scale": None, "cos_sin": None, "interleaved": False}
    call = kernels.called(Triton(), "write_mla", names, **options)
    new = [array("bfloat16", 700, size) for size in layout.entry.sizes]
    with without_a_gpu(architecture):
        arrays = scenes.shapes_of(layout).buffer, *new, array("int32", 700), array("int32")
        traced = jax.jit(call, donate_argnums=0).trace(*arrays)
        text = traced.lower(lowering_platforms=("rocm",)).as_text()
    (launch,) = re.findall("custom_call @triton_kernel_call.*", text)
    assert "output_operand_alias" in launch


@triton.jit
def _decode(bytes, pairs, values, low, high):
    at = tl.arange(0, 256)
    tl.store(values + at, from_e4m3(tl.load(bytes + at), False))
    first, second = halves(tl.load(pairs + at), tl.float16, False)
    tl.store(low + at, first)
    tl.store(high + at, second)


@triton.jit
def _encode(values, bytes):
    at = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    tl.store(bytes + at, to_e4m3(tl.load(values + at), False))


@interpreted
@pytest.mark.usefixtures("interpreting")
class TestE4M3:
    """Conversions by integer arithmetic, as on AMD GPUs, are those of `ml_dtypes`."""

    def test_amd_gpus_get_these_conversions(self, monkeypatch):
        monkeypatch.setattr("jaxkv_kernels.triton.codecs.capability", lambda: "gfx942")
        assert not has_e4m3()

    def test_every_byte_is_decoded(self):
        byte = np.arange(256, dtype=np.uint8)
        right = byte.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        pairs = (byte.astype(np.uint16) | (byte[::-1].astype(np.uint16) << 8)).view(np.int16)
        results = [jax.ShapeDtypeStruct((256,), dtype) for dtype in ("float32", "float16", "float16")]
        values, low, high = launch(_decode, (jnp.asarray(byte), jnp.asarray(pairs)), results, grid=(1,))
        for found, expected in ((values, right), (low, right), (high, right[::-1])):
            np.testing.assert_array_equal(np.asarray(found, np.float32), expected)
            known = ~np.isnan(expected)
            np.testing.assert_array_equal(np.signbit(found)[known], np.signbit(expected)[known])

    def test_every_bfloat16_is_encoded(self):
        values = (np.arange(2**16, dtype=np.uint32) << 16).view(np.float32)
        result = jax.ShapeDtypeStruct(values.shape, "uint8")
        found = np.asarray(launch(_encode, (jnp.asarray(values),), (result,), grid=(values.size // 1024,))[0])
        known = ~np.isnan(values)
        right = np.clip(values[known], -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        np.testing.assert_array_equal(found[known], right)
        assert ((found[~known] & 0x7F) == 0x7F).all()
