"""Llama in bfloat16 against the recorded float32 logits, on XLA and, on a Hopper GPU, on the Mosaic GPU kernels.

The bound.  How far one rounding moves the logits depends on the model: roundings of queries and keys shift the scores,
which the softmax amplifies.  So it is measured: the float32 model with its weights rounded to bfloat16 has 9 of the
roundings of a layer (two norms, q, k, v, o, gate, up, down).  The bfloat16 model has these, and some 20 of activations:
of both norms (2 each), q, k and v (3), rotation (2), softmax weights and attention (2), o and both sums (3), gate, up,
SiLU, their product and down (5), and of few others.  All are independent, so that errors add up as the root of their
number: sqrt((9 + 20) / 9) = 1.8 times those of the weights alone.  Sites differ in what they do, so that
the bound is 2 for the root mean square of all positions' errors, and three times as much for the worst position's.
"""

import dataclasses
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas  # noqa: F401 (its warnings at import are not ours)

import jaxkv
import jaxkv.models
from support.available import assume_available
from support.cases import further, slow
from support.hopper import kernel_operands, on_hopper
from support.many_devices import mesh_of, on_several_devices

FOLDER = Path(__file__).parents[1] / "data" / "models" / "llama"
BLOCK_SIZE = 64
TYPICAL, WORST = 2, 6
"""Times the error of the float32 model with weights rounded to bfloat16, in the root mean square."""


@cache
def recorded():
    """Prompts with their continuations, int32 [5, 264], aligned to the end; their lengths; the float32 logits of each.

    Logits are of all tokens but the last, whose logits were not needed: it is left out.
    """
    with np.load(FOLDER / "truth.npz") as truth:
        rows = zip(
            *(truth[name] for name in ("prompts", "prompt_lens", "tokens", "logits", "step_logits")), strict=True
        )
        found = [
            (np.concatenate((prompt[:length], tokens[:-1])), np.concatenate((logits[:length], steps[1:])))
            for prompt, length, tokens, logits, steps in rows
        ]
    return [tokens for tokens, _ in found], [logits for _, logits in found]


@partial(jax.jit, donate_argnums=1)
def prefill(model, cache, *batch):
    """The cache, and logits of all new tokens, [B, Q, vocab]."""
    cache, x = jaxkv.models.forward(model, cache, *batch)
    return cache, jaxkv.models.head(model, x)


def load(dtype, implementation=None, parallel=None):
    return jaxkv.models.load(FOLDER, dtype=dtype, implementation=implementation, parallel=parallel)


def errors(model):
    """The relative error of the logits of each position: all tokens but the last 8 by prefill, those by decode."""
    rows, right = recorded()
    lengths = np.asarray([len(row) for row in rows])
    decoded = 8
    tables = np.random.default_rng(0).permutation(len(rows) * 5).reshape(len(rows), 5).astype(np.int32)
    cache = model.cache(tables.size, BLOCK_SIZE)

    def step(program, cache, first, last):
        """A call with the tokens `first` to `last` of each request, aligned to the end."""
        count = last - first
        positions = last[:, None] - count.max() + np.arange(count.max())
        positions = np.where(positions < first[:, None], -1, positions)
        held = zip(rows, positions, strict=True)
        tokens = np.stack([np.where(at < 0, 0, row[at]) for row, at in held]).astype(np.int32)
        slots = jaxkv.slots_for(jnp.asarray(tables), jnp.asarray(positions), cache)
        cache, logits = program(model, cache, tokens, last.astype(np.int32), tables, slots)
        return cache, np.asarray(logits, np.float64), positions

    found = [np.zeros(logits.shape) for logits in right]
    steps = [(np.zeros_like(lengths), lengths - decoded)]
    steps += [(lengths - n, lengths - n + 1) for n in range(decoded, 0, -1)]
    for first, last in steps:
        cache, logits, positions = step(prefill, cache, first, last)
        for row, at, of_row in zip(found, positions, logits, strict=True):
            row[at[at >= 0]] = of_row[at >= 0]
    assert lengths.max() == 263
    found, right = np.concatenate(found), np.concatenate(right)
    return np.linalg.norm(found - right, axis=-1) / np.linalg.norm(right, axis=-1)


@cache
def error_of_rounded_weights():
    """In the root mean square."""
    exact = load("float32")
    rounded = jax.tree.map(lambda weight: weight.astype("bfloat16").astype("float32"), exact.params)
    assert errors(exact).max() < 1e-4
    return root_mean_square(errors(dataclasses.replace(exact, params=rounded)))


def root_mean_square(x):
    return np.sqrt((x**2).mean())


def check(implementation, parallel=None):
    model = load("bfloat16", implementation, parallel)
    assert model.entry == jaxkv.KVEntry("bf16", head_dim=64)
    found, one = errors(model), error_of_rounded_weights()
    print(f"{implementation}: {root_mean_square(found):.4f}, worst {found.max():.4f}; of rounded weights {one:.4f}")
    assert one < 2.0**-5  # another head, position or mask changes logits by as much as their size
    assert root_mean_square(found) < TYPICAL * one
    assert found.max() < WORST * one


def test_xla():
    check("xla")


@on_hopper
@pytest.mark.parametrize("implementation", ["mosaic_gpu", "xla"])
def test_on_a_gpu(implementation):
    check(implementation)


@on_several_devices
@pytest.mark.parametrize("implementation", [further("xla"), pytest.param("mosaic_gpu", marks=on_hopper)])
@pytest.mark.parametrize(
    "division",
    [
        jaxkv.models.TensorParallel,
        pytest.param(jaxkv.models.ContextParallel, marks=pytest.mark.slow),  # `tests/parallel` has it in float32
    ],
)
def test_on_two_devices(division, implementation):
    """The sums over devices round in another order, so that the bound is that of one device."""
    check(implementation, division(mesh_of(2), "x"))


@pytest.mark.usefixtures("quick_lowering")
@pytest.mark.parametrize("columns", [1, slow(16)])
def test_a_step_lowers_to_the_mosaic_gpu_kernels(columns, monkeypatch):
    """With nothing left to XLA: neither the write nor the attention."""
    assume_available(monkeypatch, "mosaic_gpu")
    model = load("bfloat16", "mosaic_gpu")
    new, requests, tables = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((2, columns), (2,), (2, 5)))
    cache = jax.eval_shape(lambda: model.cache(10, BLOCK_SIZE))
    traced = jax.jit(jaxkv.models.prefill).trace(model, cache, new, requests, tables, new)
    assert len(kernel_operands(traced.lower(lowering_platforms=("cuda",)).as_text())) >= 2
