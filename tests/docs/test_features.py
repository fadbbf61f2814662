"""The table of features: its tests exist, what it calls unsupported is rejected, and READMEs have it as it is."""

import ast
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import jaxkv
from jaxkv import parallel
from support.available import assume_available
from support.features import FEATURES, table

ROOT = Path(__file__).parents[2]
ALL = [feature for features in FEATURES.values() for feature in features]
TESTED = sorted({test for feature in ALL for test in feature.tests})


@cache
def scope(file):
    """The classes, functions and assigned names of a Python file, or of a class, by name."""
    body = ast.parse(file.read_text()).body if isinstance(file, Path) else file.body
    found = {}
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign):
            found |= {target.id: node for target in node.targets if isinstance(target, ast.Name)}
    return found


@cache
def suites():
    """All classes of the suites."""
    files = (ROOT / "tests" / "support" / "suites").rglob("*.py")
    return {name: node for file in files for name, node in scope(file).items() if isinstance(node, ast.ClassDef)}


def has_method(node, name, classes):
    """Whether a class of a test file, which defines `classes`, or a class that it inherits from has the method."""
    if name in scope(node):
        return True
    bases = (base.id if isinstance(base, ast.Name) else base.attr for base in node.bases)
    known = suites() | classes
    return any(has_method(known[base], name, classes) for base in bases if known.get(base) not in (None, node))


@pytest.mark.parametrize("test", TESTED, ids=lambda test: test.rpartition("/")[2])
def test_the_tests_exist(test):
    name, first, *method = test.split("::")
    found = scope(ROOT / name)
    assert first in found, f"{name} has no {first}"
    assert not method or has_method(found[first], *method, found), f"{first} has no {method[0]}"


ENTRY = jaxkv.KVEntry("fp8", 64)


def cache_of(entry=ENTRY, **sizes):
    sizes = {"num_layers": 1, "num_blocks": 4, "block_size": 16, **sizes}
    return jaxkv.KVCache.zeros(jaxkv.CacheLayout(**sizes, entry=entry))


def attend(**options):
    q, tables = jnp.zeros((1, 1, 64), jnp.bfloat16), jnp.zeros((1, 1), jnp.int32)
    scales = {"scale": 1.0, "k_scale": 1.0, "v_scale": 1.0}
    return jaxkv.decode_kv(q, cache_of(), tables, jnp.ones(1, jnp.int32), layer=0, **scales, **options)


def foreign(**strides):
    entry, steps = jaxkv.KVEntry("bf16", 64), {"layer": 0, "head": 0, "block": 4096, "token": 8, **strides}
    sizes = {"num_layers": 1, "num_blocks": 2, "block_size": 16, "size": 8192}
    return jaxkv.CacheLayout.from_strides(**sizes, entry=entry, strides=steps)


REJECTED = {
    "PagedAttention's keys [B, H, D/x, N, x]": (
        lambda: foreign(content=128),
        r"`strides.content` is 128: expected 1, as the content of an entry is contiguous",
    ),
    "results in float8 or FP4": (lambda: attend(out_dtype="float8_e4m3fn"), "unexpected keyword argument 'out_dtype'"),
    "kernels for other AMD GPUs, Intel GPUs and TPUs": (
        lambda: attend(implementation=("mosaic_gpu", "triton")),
        "needs an NVIDIA GPU or gfx942 .AMD MI300. or gfx950 .AMD MI350.; the default backend is tpu",
    ),
    "caches of other processes (NIXL, Mooncake, KV connectors)": (
        lambda: parallel.transfer_blocks(cache_of(), [0], "host:5600", [0]),  # type: ignore[arg-type]
        "`target` is .*: expected a KVCache",
    ),
}
"""A call that needs the feature, and how it is rejected."""


@pytest.mark.parametrize("name", REJECTED)
def test_what_is_unsupported_is_rejected(name, monkeypatch):
    call, message = REJECTED[name]
    if "Hopper's" in name:
        assume_available(monkeypatch, "mosaic_gpu")
    elif "AMD" in name:
        monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    with pytest.raises((ValueError, TypeError, NotImplementedError), match=message):
        call()


def test_every_unsupported_feature_is_tried():
    assert REJECTED.keys() == {feature.name for feature in ALL if not feature.tests}
    assert len({feature.name for feature in ALL}) == len(ALL)


def test_the_readme_has_the_table():
    text = (ROOT / "jaxkv" / "ops" / "README.md").read_text()
    assert text.split("<!-- features -->\n")[1].split("\n<!-- /features -->")[0] == table(), "run .ci/tables.py"
