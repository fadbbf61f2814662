"""Triton kernels on any machine that has Triton: each compiled for every GPU generation; jax-triton's lowering."""

import dataclasses
import itertools
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv.bench.inputs import shuffled_requests
from jaxkv.bench.workload import workload
from jaxkv.cli import doctor
from jaxkv.support import call_of, sample_calls
from jaxkv.testing import families
from jaxkv.testing.case import Case
from jaxkv_kernels.calls import PlanDecode, PrefillCall, ReadCall
from jaxkv_kernels.hot_rows import HotMap
from jaxkv_kernels.triton import available
from jaxkv_kernels.triton.kernels import Triton
from jaxkv_kernels.triton.tiled import is_tiled
from support import kernels, scenes
from support.available import assume_available
from support.cases import further, slow
from support.triton.builds import SHARED, builds, builds_of, in_turn, on_generations, without_a_gpu
from support.triton.runs import compiles, lowers

DRAWS = 2


def taken():
    """(operation and format, sample call) of what the kernels take, each with every generation.

    Each sample is compiled for some generations by default, in turn, and for the others if it is `slow`: for two,
    or one if its format shares its kernels with others, or if its kernel does not interpret entries.
    Kernels that do not are the same for all formats of the same sizes: each is compiled once.
    """
    seen = set()
    for operation, (form, args, kwargs) in sample_calls():
        call = operation.call(*args, **kwargs)
        # Plans are plain JAX, whose result is for kernels; prefills and reads launch the kernels of gathers.
        if isinstance(call, PlanDecode | PrefillCall | ReadCall) or Triton().unsupported_reasons(call):
            continue
        entries = Triton.support(operation.name).entries
        same = (operation.name, getattr(call, "pages", None), *(str(x) for x in jax.tree.leaves(call)))
        if entries or same not in seen:
            turn = len(seen)
            seen.add((*same, form) if entries else same)
            count = 2 if entries and not is_tiled(call.entry) else 1
            for capability, marks in in_turn(turn, count):
                name = f"{operation.name} {form}".rstrip()
                yield pytest.param(
                    (operation.function, args, kwargs), capability, id=f"{name}-{capability}", marks=marks
                )


@compiles
@pytest.mark.parametrize(("sample", "capability"), [*taken()])
def test_compiles_within_the_gpus_limits(sample, capability):
    function, args, kwargs = sample
    for built in builds(capability, function, *args, **kwargs):
        assert built.shared <= SHARED[capability] * 1024, built.name
        assert built.stack == 0, f"{built.name} spills {built.stack} bytes per thread, with {built.registers} registers"


@compiles
@pytest.mark.parametrize(
    ("name", "form"),
    [
        *itertools.product(
            ["values before keys", "values with strides of their own"], ["bf16", "fp8", "int8", "nvfp4"]
        ),
        ("two arrays", "bf16"),
        further("two arrays with strides of their own", "int8"),
        *(slow("two arrays with strides of their own", form) for form in ["fp8", "nvfp4"]),
    ],
)
def test_keys_and_values_that_lie_apart_compile(name, form):
    entry = jaxkv.KVEntry(form, 128, 64)
    layout = scenes.apart(entry, name, num_heads=8)
    cache, tables = scenes.shapes_of(layout), shape(4, 9)
    scales = dict.fromkeys(("k_scale", "v_scale"), 1.0) if entry.codec.scaled else {}
    q = shape(4, 1, 32, 128, dtype="bfloat16")
    new = [shape(4, 8, n, dtype="bfloat16") for n in entry.sizes]
    calls = [(jaxkv.decode_kv, (q, cache, tables, shape(4)), {"scale": 1.0, **scales})]
    if form in ("bf16", "fp8"):
        calls.append((jaxkv.write_kv, (cache, *new, shape(4)), scales))
        gathered = {"total": 64, "dtype": "bfloat16", **scales}
        calls.append((jaxkv.gather_kv, (cache, tables, shape(5)), gathered))
    for function, args, options in calls:
        for built in builds(90, function, *args, layer=0, **options):
            assert built.shared <= SHARED[90] * 1024, built.name


@compiles
@pytest.mark.parametrize("number", range(DRAWS))
@pytest.mark.parametrize(
    "operation",
    [
        name
        for name in families.OPERATIONS
        if Triton.support(name) and not issubclass(kernels.RECORDS[name], PlanDecode | PrefillCall)
    ],
)
def test_a_random_call_that_is_taken_compiles(operation, number, monkeypatch):
    assume_available(monkeypatch, "triton")
    seed = families.OPERATIONS.index(operation) + (20 + number) * len(families.OPERATIONS)
    case = families.draw_case(seed, "triton")
    assert isinstance(case, Case), f"seed {seed}: {case}"
    draw = case.draw(np.random.default_rng(0))
    values = [jax.ShapeDtypeStruct(*value) for value in case.value_shapes]
    cache = scenes.shapes_of(case.layout)
    args, keywords = case.arguments(cache, values, draw, draw.layer)
    for built in builds(90, case.function, *args, **keywords):
        assert built.shared <= SHARED[90] * 1024, f"seed {seed}: {case}"


def test_parts_too_large_for_a_tile_are_rejected():
    entry = jaxkv.MLAEntry("bf16", latent=2**21)
    layout = jaxkv.CacheLayout(num_layers=1, num_blocks=4, block_size=16, entry=entry)
    cache = jaxkv.KVCache(jax.ShapeDtypeStruct((layout.size,), layout.dtype), layout)
    new = [jax.ShapeDtypeStruct((5, n), jnp.bfloat16) for n in entry.sizes]
    found = jaxkv.explain(jaxkv.write_mla, cache, *new, jax.ShapeDtypeStruct((5,), jnp.int32), layer=0)
    assert found.reasons["triton"][-1].startswith("part of 2097152 values: supports at most 1048576")
    assert found.chosen != "triton"


def test_writes_of_keys_or_values_that_zeros_follow_are_rejected():
    reasons = {}
    for sizes in ((32, 16), (12, 16), (32, 8)):
        entry = jaxkv.KVEntry("bf16", *sizes, value_format="fp8")
        layout = jaxkv.CacheLayout(num_layers=1, num_blocks=4, block_size=16, num_heads=2, entry=entry)
        new = [jax.ShapeDtypeStruct((5, 2, n), jnp.bfloat16) for n in sizes]
        cache = jaxkv.KVCache(jax.ShapeDtypeStruct((layout.size,), layout.dtype), layout)
        arguments = cache, *new, jax.ShapeDtypeStruct((5,), jnp.int32)
        reasons[sizes] = jaxkv.explain(jaxkv.write_kv, *arguments, layer=0, v_scale=1.0).reasons["triton"]
    zeros = [[reason for reason in found if reason.startswith("zeros after keys")] for found in reasons.values()]
    assert list(map(len, zeros)) == [0, 1, 1]


def writes(layout):
    """Operation by name: the kernels' call as a function of (buffer, *arrays), and those arrays."""
    ids, rows = shape(9), shape(9, layout.pages.block_elements, dtype=layout.dtype)
    latents, heads = layout.entry.one_head, () if layout.entry.one_head else (layout.num_heads,)
    name, values = ("write_mla", ("kv_c", "k_pe")) if latents else ("write_kv", ("k", "v"))
    options = dict(kv_scale=None, cos_sin=None, interleaved=False) if latents else dict(k_scale=None, v_scale=None)
    new = [shape(700, *heads, n, dtype="bfloat16") for n in layout.entry.sizes]
    return {
        name: (
            called(name, (*values, "slot_mapping", "layer"), layout, entry=layout.entry, **options),
            [*new, shape(700), shape()],
        ),
        "copy_blocks": (called("copy_blocks", ("src", "dst"), layout), [ids, ids]),
        "write_blocks": (called("write_blocks", ("blocks", "data"), layout), [ids, rows]),
    }


def called(operation, names, layout, **static):
    """The kernel's call as a function of (buffer, *arrays)."""
    return kernels.called(Triton(), operation, ("buffer", *names), pages=layout.pages, **static)


def shape(*dims, dtype="int32"):
    return jax.ShapeDtypeStruct(dims, jnp.dtype(dtype))


@lowers
@pytest.mark.parametrize("form", ["bf16", "fp8_ds_mla"])
@pytest.mark.parametrize("operation", ["write_mla", "copy_blocks", "write_blocks"])
def test_lowers_in_place_through_jax_triton(operation, form):
    layout = jaxkv.CacheLayout(num_layers=61, num_blocks=4096, block_size=64, entry=jaxkv.MLAEntry(form))
    # Pairs that must wait are written by a second kernel.
    check_lowers_in_place(layout, operation, launched=2 if operation == "copy_blocks" else 1)


@lowers
@pytest.mark.parametrize(
    ("operation", "launched"), [("write_kv", 1), further("copy_blocks", 4), further("write_blocks", 2)]
)
def test_two_arrays_lower_in_place_through_jax_triton(operation, launched):
    entry = jaxkv.KVEntry("bf16", head_dim=128)
    layout = scenes.apart(entry, "two arrays", num_heads=8, num_layers=16, num_blocks=4096)
    check_lowers_in_place(layout, operation, launched)


def check_lowers_in_place(layout, operation, launched):
    """The call has so many kernels, which update the cache as it is."""
    call, arrays = writes(layout)[operation]
    buffer = scenes.shapes_of(layout).buffer
    with without_a_gpu():
        traced = jax.jit(call, donate_argnums=0).trace(buffer, *arrays)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    launches = re.findall("custom_call @triton_kernel_call.*", text)
    assert len(launches) == launched
    assert all("output_operand_alias" in launch for launch in launches)
    main = next(line for line in text.splitlines() if "@main" in line)
    for argument, array in enumerate(jax.tree.leaves(buffer)):
        assert "tf.aliasing_output" in re.search(f"%arg{argument}: ([^%]*)", main)[1]
        large = re.findall(rf"^ *%\S+ = (\S+) .*tensor<{array.size}x\w+>\)?$", text, re.MULTILINE)
        assert {*large} <= {"stablehlo.custom_call", "stablehlo.optimization_barrier", "call"}
        assert large


def delta_rule(name):
    """Arguments of `decode_delta_rule` for 64 requests of the model's layers."""
    row = workload(
        suite="", operation="decode_delta_rule", requests=64, tokens=1, layers=4, block_size=1,
        channel_decays=name == "Kimi Linear",
    )  # fmt: skip
    x, weight = (shape(*dims, dtype=dtype) for dims, dtype in row.value_shapes)
    rng = np.random.default_rng(0)
    _, shared = row.index(shuffled_requests(row, rng), rng)
    slots, *gates = (shape(*given.shape, dtype=given.dtype) for given in shared)
    return x, *gates, weight, scenes.shapes_of(row.layout), slots, slots


@compiles
@on_generations("name", [("Qwen3-Next",), ("Kimi Linear",)], 2)
def test_the_delta_rule_of_models_compiles(name, capability):
    for built in builds(capability, jaxkv.decode_delta_rule, *delta_rule(name), layer=0):
        assert built.shared <= SHARED[capability] * 1024, built.name
        assert built.stack == 0, built.name


@lowers
def test_the_delta_rule_lowers_in_place():
    call = call_of(jaxkv.decode_delta_rule, *delta_rule("Qwen3-Next"), layer=0)
    arrays = [field.name for field in dataclasses.fields(call) if field.name not in ("pages", "entry", "layer")]
    given = [getattr(call, name) for name in arrays]

    def run(layer, *given):
        return dataclasses.replace(call, layer=layer, **dict(zip(arrays, given, strict=True))).run_on(Triton())

    with without_a_gpu():
        traced = jax.jit(run, donate_argnums=1 + arrays.index("buffer")).trace(shape(), *given)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    launches = re.findall("custom_call @triton_kernel_call.*", text)
    assert len(launches) == 2
    assert all("output_operand_alias" in launch for launch in launches)
    large = re.findall(rf"^ *%\S+ = (\S+) .*tensor<{call.buffer.size}x\w+>\)?$", text, re.MULTILINE)
    assert {*large} <= {"stablehlo.custom_call", "stablehlo.optimization_barrier", "call"}
    main = next(line for line in text.splitlines() if "@main" in line)
    assert re.search(rf"tensor<{call.buffer.size}x\w+> {{[^}}]*tf.aliasing_output", main)


def hot_rows(form):
    """Arrays and options of `fetch_rows`, whose first two arrays are updated, `load_rows` and `store_rows`."""
    entry = jaxkv.MLAEntry(form)
    here, host = (
        jaxkv.CacheLayout(num_layers=2, num_blocks=count, block_size=64, entry=entry) for count in (16 * 64, 16 * 2048)
    )
    hot, options = HotMap(131072, 4096), dict(pages=here.pages, host_pages=host.pages, entry=entry)
    memory = dict(address=shape(2), writes=shape(1))
    buffer, maps = shape(here.size, dtype=here.dtype), shape(2, 16, hot.width)
    selected = dict(positions=shape(16, 2048), block_tables=shape(16, 2048), layer=shape())
    fetch = {"buffer": buffer, "maps": maps, **memory, **selected}, {**options, "hot": hot, "copied": True}
    places = dict(slots=shape(16), host_slots=shape(16), layer=shape(), host_layer=shape())
    copied = {"buffer": buffer, **memory, **places}, options
    return {"fetch_rows": fetch, "load_rows": copied, "store_rows": copied}


@compiles
@pytest.mark.parametrize("capability", SHARED)
@pytest.mark.parametrize("form", ["fp8_ds_mla", "fp8_v4"])
@pytest.mark.parametrize("operation", ["fetch_rows", "load_rows", "store_rows"])
def test_hot_rows_compile_within_the_gpus_limits(operation, form, capability):
    arrays, options = hot_rows(form)[operation]
    for built in builds_of(capability, kernels.RECORDS[operation](**arrays, **options)):
        assert built.shared <= SHARED[capability] * 1024, built.name
        assert built.stack == 0, f"{built.name} spills {built.stack} bytes per thread, with {built.registers} registers"


@lowers
def test_hot_rows_are_fetched_in_place_by_one_kernel():
    arrays, options = hot_rows("fp8_ds_mla")["fetch_rows"]
    with without_a_gpu():
        jitted = jax.jit(kernels.called(Triton(), "fetch_rows", arrays, **options), donate_argnums=(0, 1))
        text = jitted.trace(*arrays.values()).lower(lowering_platforms=("cuda",)).as_text()
    (launch,) = re.findall("custom_call @triton_kernel_call.*", text)
    assert launch.count("output_operand_alias<") == 3  # the third is the number of arrivals, which begins at 0
    main = next(line for line in text.splitlines() if "@main" in line)
    assert all("tf.aliasing_output" in re.search(f"%arg{i}: ([^%]*)", main)[1] for i in range(2))


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
    needed = "an NVIDIA GPU or gfx942 (AMD MI300) or gfx950 (AMD MI350)"
    assert reasons()[0] == f"needs {needed}; the default backend is cpu"


def test_an_old_gpu_is_rejected(monkeypatch):
    turing = SimpleNamespace(compute_capability="7.5", device_kind="Tesla T4")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [turing])
    assert reasons()[0] == "needs compute capability 8.0 (NVIDIA Ampere) or later; Tesla T4 has 7.5"


@pytest.fixture
def with_a_gpu(monkeypatch):
    """The device is no reason, and jax-triton can lower for it."""
    monkeypatch.setattr(available, "_device", lambda generations: iter(()))
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

    def test_a_version_of_jax_that_passes_other_arguments(self, monkeypatch):
        import jax_triton
        from jax._src.interpreters import partial_eval

        def rule(used_outputs, equation):
            raise AssertionError("called with two arguments")

        rules = {jax_triton.triton_lib.triton_kernel_call_p: lambda *args: rule(*args, None, None)}
        monkeypatch.setattr(partial_eval, "dce_rules", partial_eval.dce_rules | rules)
        assert all(word in reasons()[0] for word in ("cannot build a kernel (TypeError: ", available.WORKING))

    def test_kernels_for_the_interpreter_are_not_for_the_gpu(self, monkeypatch):
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        assert reasons()[0].startswith("TRITON_INTERPRET is set")


def test_doctor_reports_the_reasons():
    for reason in reasons() or ("usable",):
        assert reason in doctor.report(verbose=True)
