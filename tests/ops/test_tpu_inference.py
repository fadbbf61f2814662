"""The ragged calls beside the reference functions of tpu-inference, on caches with the same bytes.

Its package needs vLLM, and so does importing it.  Only the modules of its kernels are imported, below a package that is
empty otherwise: `pip install --no-deps tpu-inference` suffices.
"""

import ast
import importlib
import inspect
import logging
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv.ops.ragged import TPUOptions
from support.compare import assert_close, assert_same_bits

if (spec := find_spec("tpu_inference")) is None:
    pytest.skip("tpu-inference is not installed", allow_module_level=True)

PAGES, PAGE, COLUMNS = 12, 16, 3
LENGTHS, NEW = (17, 41, 30), (1, 5, 30)
"""A decode step, a chunk of a prompt, and a whole prompt; a fourth sequence is not in use."""
SUMS = np.cumsum([0, *NEW])
INDEX = [
    jnp.asarray(x, jnp.int32)
    for x in ([*LENGTHS, 0], np.random.default_rng(0).permutation(PAGES), [*SUMS, SUMS[-1]], [1, 1, len(NEW)])
]
"""kv_lens, page_indices, cu_q_lens, distribution."""


FOLDER = Path(*spec.submodule_search_locations)


@pytest.fixture
def theirs(monkeypatch):
    """Imports a module of its kernels, with stand-ins for modules of the package that need vLLM and PyTorch."""
    contents = {"": {"__path__": [str(FOLDER)]}, ".logger": {"init_logger": logging.getLogger}}
    for name, values in (contents | {".utils": {"get_device_name": None}}).items():
        module = ModuleType(f"tpu_inference{name}")
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    yield lambda name: importlib.import_module(f"tpu_inference.kernels.{name}")
    for name in [name for name in sys.modules if name.startswith("tpu_inference.")]:
        del sys.modules[name]


def random(shape, dtype=jnp.bfloat16):
    return jnp.asarray(np.random.default_rng(sum(shape)).standard_normal(shape), dtype)


def check(found, cache, right, pages):
    assert_same_bits(cache.buffer, pages.reshape(-1))
    assert_close(found, np.asarray(right, np.float64), roundings=8, magnitude=1)


@pytest.mark.parametrize(
    ("variant", "size", "options"),
    [
        ("", 128, {}),
        ("", 128, {"sliding_window": 18, "soft_cap": 5.0}),
        ("", 128, {"use_causal_mask": False}),
        ("_hd64", 64, {"sliding_window": 20, "attention_sink": random((8,), jnp.float32)}),
    ],
)
def test_keys_and_values(theirs, variant, size, options):
    module, kv_heads = theirs(f"ragged_paged_attention.v3.kernel{variant}"), 2
    pages = random(module.get_kv_cache_shape(PAGES, PAGE, kv_heads, size, jnp.bfloat16))
    q, (k, v) = random((SUMS[-1], 8, size)), random((2, SUMS[-1], kv_heads, size))
    options = {"sm_scale": size**-0.5, "mask_value": -1e30, **options}
    reference = getattr(module, f"ref_ragged_paged_attention{variant}")

    layout = jaxkv.CacheLayout(
        num_layers=1, num_blocks=PAGES, block_size=PAGE, num_heads=kv_heads,
        entry=jaxkv.KVEntry("bf16", head_dim=size), order="LBNHC",
    )  # fmt: skip
    cache = jaxkv.KVCache(pages.reshape(-1), layout)
    found = jaxkv.ragged_paged_attention(q, k, v, cache, *INDEX, layer=0, **options)
    check(*found, *reference(q, k, v, pages, *INDEX, **options))


def test_latents(theirs):
    module, latent, rope = theirs("mla.v1.kernel"), 512, 64
    width = latent + 128  # rotary parts are padded to 128 values there, by zeros
    pages = random(module.get_kv_cache_shape(PAGES, PAGE, width, jnp.bfloat16)).at[..., latent + rope :].set(0)
    new = [random((SUMS[-1], *shape)) for shape in ((4, latent), (4, rope), (latent,), (rope,))]

    layout = jaxkv.CacheLayout.from_strides(
        num_layers=1, num_blocks=PAGES, block_size=PAGE, entry=jaxkv.MLAEntry("bf16"),
        strides=jaxkv.Strides(layer=pages.size, block=PAGE * width, head=width, token=width), size=pages.size,
    )  # fmt: skip
    cache = jaxkv.KVCache(pages.reshape(-1), layout)
    found = jaxkv.mla_ragged_paged_attention(*new, cache, *INDEX, layer=0, sm_scale=0.07)
    check(*found, *module.ref_mla_ragged_paged_attention(*new, pages, *INDEX, sm_scale=0.07))  # donates the pages


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("ragged_paged_attention/v3/kernel.py", "ragged_paged_attention"),
        ("ragged_paged_attention/v3/kernel_hd64.py", "ragged_paged_attention_hd64"),
        ("mla/v2/kernel.py", "mla_ragged_paged_attention"),
    ],
)
def test_all_arguments_are_taken(file, name):
    code = ast.parse((FOLDER / "kernels" / file).read_text())
    (function,) = (node for node in code.body if isinstance(node, ast.FunctionDef) and node.name == name)
    arguments = {argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)}
    ours = inspect.signature(getattr(jaxkv, name.removesuffix("_hd64"))).parameters
    assert arguments - ours.keys() - TPUOptions.__annotations__.keys() == set()
