"""Gradients of attention through pages equal those of dense attention in float64, on every layout, by every mask."""

from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import dispatch, masks
from support import dense_gradients, scenes
from support.cases import further
from support.dense_gradients import SCALE, Paged, dense, model_of, seen_slots, slots_of
from support.opaque import Opaque

BLOCK = 4
SIZES = dict(num_layers=2, num_blocks=8, block_size=BLOCK)
MLA, KV = jaxkv.MLAEntry("f32", latent=8, rope=4), jaxkv.KVEntry("f32", head_dim=8, value_dim=4)
SQUARE = jaxkv.KVEntry("f32", head_dim=8)
TABLES, LENGTHS = np.asarray([[3, 1], [3, 6]], np.int32), (7, 6)
"""The requests share a block."""
APART = "two arrays"
TREE = np.stack([np.eye(3, dtype=bool), np.tri(3, dtype=bool)])


def layout_of(entry, name=None):
    """A layout, by default one whose layers lie apart."""
    sizes = {**SIZES, "num_heads": 1 if entry.one_head else 2}
    if name in scenes.APART:
        return scenes.apart(entry, name, **sizes)
    return scenes.layouts(entry, **sizes)[name or "BLNHC"]


def seen_by(counts, *, tables=TABLES, lengths=LENGTHS, **options):
    """`seen_slots` of these requests."""
    return seen_slots(tables, lengths, counts, block_size=BLOCK, slots=SIZES["num_blocks"] * BLOCK, **options)


def queries(entry, *rows, heads=4):
    """One array of queries for each part of keys."""
    rng = np.random.default_rng(5)
    sizes = entry.sizes if entry.one_head else entry.sizes[:1]
    return [rng.standard_normal((*rows, heads, size)).astype(entry.dtype) for size in sizes]


def check(entry, seen, floats, call, *, name=None, roundings=64, **options):
    """Compares the gradients of `call(*floats, cache)` with those of the dense model."""
    paged = Paged.of(layout_of(entry, name), seen.any(axis=0), layer=1)
    dense_gradients.check(call, model_of(entry, seen, **options), floats, paged, roundings=roundings)


def decode(*arrays, layer=1, implementation="xla", tables=TABLES, lengths=LENGTHS, **options):
    """out and lse of arrays of queries, sinks if there are, and a cache."""
    *arrays, cache = arrays
    count = 2 if cache.layout.entry.one_head else 1
    if arrays[count:]:
        options["sinks"] = arrays[count]
    operation = jaxkv.decode_mla if count == 2 else jaxkv.decode_kv
    return operation(
        *arrays[:count], cache, jnp.asarray(tables), jnp.asarray(lengths), layer=layer, scale=SCALE, return_lse=True,
        implementation=implementation, **options,
    )  # fmt: skip


def layouts():
    """Entries of 16-bit numbers, and names of layouts: each kind of layout, most of them further cases."""
    default = {
        jaxkv.MLAEntry("bf16", 8, 8): ("gaps, offset",),
        jaxkv.KVEntry("bf16", 8, 8): ("packed, bfloat16", APART),
    }
    for entry, chosen in default.items():
        apart = () if entry.one_head else scenes.APART
        for name in (*scenes.layout_names(entry), *apart):
            if name != "packed, uint8":  # a buffer of integers has no gradient
                yield pytest.param(entry, name, marks=() if name in chosen else pytest.mark.ci)


@pytest.mark.parametrize(("entry", "name"), [*layouts()])
def test_every_layout(entry, name):
    check(entry, seen_by((3, 3)), queries(entry, 2, 3), decode, name=name, roundings=8)


ALL = {"tree_mask": TREE, "window": (4, 1), "logit_cap": 2.0}


@pytest.mark.parametrize(
    ("entry", "options"),
    [
        (MLA, {"causal": False, "window": (2, 1)}),
        (KV, ALL),
        *(
            further(entry, options)
            for entry in (MLA, KV)
            for options in (
                {},
                {"causal": False},
                {"window": 2},
                {"mask": masks.Prefix(2) | masks.Sliding(1, 0)},
                {"mask": lambda q, k: (q - k) % 2 == 0},
                {"tree_mask": TREE},
                {"logit_cap": 2.0},
            )
        ),
    ],
)
def test_every_mask(entry, options):
    shown = {name: value for name, value in options.items() if name != "logit_cap"}
    given = {name: jnp.asarray(x) if name == "tree_mask" else x for name, x in options.items()}
    sinks = np.linspace(-1, 2, 4, dtype=np.float32)
    cap = {"logit_cap": options.get("logit_cap")}
    check(entry, seen_by((3, 3), **shown), [*queries(entry, 2, 3), sinks], partial(decode, **given), **cap)


@pytest.mark.parametrize(("entry", "window"), [(KV, 3), further(KV, None), further(MLA, 3), further(MLA, None)])
def test_ragged_queries(entry, window):
    seen = np.concatenate([seen_by((1, 4), window=window), np.zeros((1, SIZES["num_blocks"] * BLOCK), bool)])
    sums = jnp.asarray([0, 1, 5])
    check(entry, seen, queries(entry, 6), partial(decode, cu_q_lens=sums, window=window))


@pytest.mark.parametrize("entry", [MLA, further(KV)])
def test_shared_prefixes(entry):
    seen = seen_by((2, 2))
    seen[2:, slots_of([7, 2], 5, BLOCK)] = True  # the prefix of the second request
    prefixes = {"prefix_tables": [[0, 4], [7, 2]], "prefix_lens": [8, 5], "prefix_of": [-1, 1]}
    given = {name: jnp.asarray(x) for name, x in prefixes.items()}
    check(entry, seen, queries(entry, 2, 2), partial(decode, **given))


OUTSIDE = np.asarray([[3, -1], [99, 6]], np.int32)


@pytest.mark.parametrize("entry", [KV, further(MLA)])
def test_blocks_outside_the_cache(entry):
    check(entry, seen_by((1, 1), tables=OUTSIDE), queries(entry, 2), partial(decode, tables=OUTSIDE))


def test_sparse_decodes():
    rng = np.random.default_rng(0)
    slots = np.stack([rng.permutation(20)[:6] for _ in range(6)]).reshape(2, 3, 6).astype(np.int32)
    slots[0, 1, 2:], slots[1, 0] = -1, 99
    counts = np.full((2, 3), 5, np.int32)
    seen = np.zeros((6, SIZES["num_blocks"] * BLOCK), bool)
    for row, some in enumerate(slots.reshape(6, -1)):
        seen[row, [slot for slot in some[:5] if 0 <= slot < seen.shape[1]]] = True

    def call(q_latent, q_pe, sinks, cache):
        return jaxkv.decode_mla_sparse(
            q_latent, q_pe, cache, jnp.asarray(slots), counts=jnp.asarray(counts), sinks=sinks, layer=1, scale=SCALE,
            logit_cap=2.0, return_lse=True, implementation="xla",
        )  # fmt: skip

    check(MLA, seen, [*queries(MLA, 2, 3), np.linspace(-1, 2, 4, dtype=np.float32)], call, logit_cap=2.0)


def prefill_mla(q_nope, q_pe, w_uk, w_uv, cache, *, tables=TABLES, **options):
    return jaxkv.prefill_mla(
        q_nope, q_pe, w_uk, w_uv, cache, jnp.asarray(tables), jnp.asarray(LENGTHS), layer=1, scale=SCALE,
        return_lse=True, implementation="xla", **options,
    )  # fmt: skip


def prefill_kv(q, cache, *, tables=TABLES, **options):
    return jaxkv.prefill_kv(
        q, cache, jnp.asarray(tables), jnp.asarray(LENGTHS), layer=1, scale=SCALE, return_lse=True,
        implementation="xla", **options,
    )  # fmt: skip


def expanded(q_nope, q_pe, w_uk, w_uv, latents, k_pe):
    """Queries, keys and values per head of a `prefill_mla`."""
    k, v = (jnp.einsum("sr,hdr->shd", latents[:, 0], w) for w in (w_uk, w_uv))
    k_pe = jnp.broadcast_to(k_pe, (*k.shape[:2], k_pe.shape[-1]))
    return jnp.concatenate([q_nope, q_pe], axis=-1), jnp.concatenate([k, k_pe], axis=-1), v


PREFILLS = [
    ("mla", {"window": 4, "logit_cap": 2.0}),
    ("kv", {"causal": False}),
    further("mla", {"window": (3, 1), "causal": False}),
    further("kv", {}),
]


@pytest.mark.parametrize(("kind", "options"), PREFILLS)
@pytest.mark.parametrize("ragged", [True, further(False)])
def test_prefills(kind, options, ragged):
    counts, rows, given = ((1, 4), (6,), {"cu_q_lens": jnp.asarray([0, 1, 5])}) if ragged else ((3, 3), (2, 3), {})
    shown = {name: value for name, value in options.items() if name != "logit_cap"}
    if ragged and kind == "mla":
        given["num_decodes"] = 1
    check_prefill(kind, seen_by(counts, **shown), rows, **options, **given)


@pytest.mark.parametrize("kind", ["mla", further("kv")])
def test_prefills_see_blocks_outside_the_cache_as_zeros(kind):
    seen, seen_outside = (
        seen_by((3, 3), tables=np.asarray(tables)) for tables in ([[3, 99], [99, 6]], [[99, 1], [3, 99]])
    )
    check_prefill(kind, seen, (2, 3), zeros=seen_outside, tables=[[3, -1], [99, 6]])


def check_prefill(kind, seen, rows, zeros=None, logit_cap=None, **options):
    """Compares with dense attention.  The queries see as many entries of 0 as `zeros`, bool [T, slots], says."""
    entry, rng = (MLA, KV)[kind == "kv"], np.random.default_rng(1)
    floats = queries(entry, *rows)
    if kind == "mla":
        floats[0] = floats[0][..., :6]
        floats += [rng.standard_normal((4, size, MLA.latent)).astype(np.float32) / 2 for size in (6, 5)]
    used = seen.any(axis=0)
    wide = seen if zeros is None else np.concatenate([seen, zeros], axis=1)
    wide = np.concatenate([wide, np.zeros((np.prod(rows) - len(wide), wide.shape[1]), bool)])

    def model(*arrays):
        *arrays, first, second = arrays
        first, second = (jnp.pad(x, ((0, wide.shape[1] - len(x)), (0, 0), (0, 0))) for x in (first, second))
        q, k, v = expanded(*arrays, first, second) if kind == "mla" else (*arrays, first, second)
        out, lse = dense(q.reshape(-1, *q.shape[-2:]), k, v, wide, logit_cap=logit_cap)
        return out.reshape(*rows, 4, -1), lse.reshape(*rows, 4)

    run = partial(prefill_mla if kind == "mla" else prefill_kv, logit_cap=logit_cap, **options)
    paged = Paged.of(layout_of(entry), used, layer=1)
    dense_gradients.check(run, model, floats, paged, roundings=128)


def random(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


BUFFER = random(layout_of(KV).size, seed=4)


def total(q, buffer, **options):
    """A number that depends on both results of a `decode_kv`."""
    out, lse = decode(q, jaxkv.KVCache(buffer, layout_of(KV)), **options)
    return (out**2).sum() + jnp.sin(lse).sum()


def assert_all_close(found, right):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


def test_transformations():
    q, directions = random(2, 3, 4, 8), (random(2, 3, 4, 8, seed=1), random(*BUFFER.shape, seed=2))
    both = jax.jit(jax.grad(total, (0, 1)))
    right = both(q, BUFFER)
    along = sum((g * d).sum() for g, d in zip(right, directions, strict=True))
    assert_all_close(jax.jit(lambda *x: jax.jvp(total, x, directions)[1])(q, BUFFER), along)
    assert_all_close(jax.linearize(total, q, BUFFER)[1](*directions), along)
    assert_all_close(jax.jit(jax.grad(jax.checkpoint(total), (0, 1)))(q, BUFFER), right)
    assert_all_close(jax.jit(jax.jacfwd(total))(q, BUFFER), right[0])
    # Of a batch, outside and inside of the gradient.
    batch = jnp.stack([q, 2 * q])
    each = jax.jit(jax.vmap(jax.grad(total, (0, 1)), (0, None)))(batch, BUFFER)
    assert_all_close([x[0] for x in each], right)
    summed = jax.jit(jax.grad(lambda q, buffer: jax.vmap(total, (0, None))(q, buffer).sum(), (0, 1)))(batch, BUFFER)
    assert_all_close(summed, (each[0], each[1].sum(axis=0)))


@pytest.mark.ci
def test_second_derivatives():
    """Those of forward over reverse mode, and of reverse over reverse mode."""
    q, directions = random(2, 3, 4, 8), (random(2, 3, 4, 8, seed=1), random(*BUFFER.shape, seed=2))
    both = jax.jit(jax.grad(total, (0, 1)))
    _, found = jax.jit(lambda *x: jax.jvp(jax.grad(total, (0, 1)), x, directions))(q, BUFFER)
    step = 1e-3
    ahead, behind = (both(q + s * directions[0], BUFFER + s * directions[1]) for s in (step, -step))
    for one, a, b in zip(found, ahead, behind, strict=True):
        np.testing.assert_allclose(one, (a - b) / (2 * step), rtol=2e-2, atol=2e-2)

    def product(*x):
        return sum((g * d).sum() for g, d in zip(jax.grad(total, (0, 1))(*x), directions, strict=True))

    assert_all_close(jax.jit(jax.grad(product, (0, 1)))(q, BUFFER), found)


@pytest.mark.ci
def test_a_scan():
    """Layers in a scan have the gradients of layers one after the other."""

    def layers(q, buffer, scanned):
        def layer(q, number):
            return decode(q, jaxkv.KVCache(buffer, layout_of(SQUARE)), layer=number)[0], None

        if scanned:
            return (jax.lax.scan(layer, q, jnp.arange(2))[0] ** 2).sum()
        return (layer(layer(q, 0)[0], 1)[0] ** 2).sum()

    q, buffer = random(2, 3, 4, 8), random(layout_of(SQUARE).size)
    found, right = (jax.jit(jax.grad(partial(layers, scanned=x), (0, 1)))(q, buffer) for x in (True, False))
    assert_all_close(found, right)


@pytest.mark.parametrize("lengths", [pytest.param((7, 6)), further((0, 8))])
def test_other_kernels_have_the_same_gradients(lengths, monkeypatch):
    """Kernels that JAX cannot differentiate, as those for GPUs, which run in place of those of `xla` here."""
    q = random(2, 3, 4, 8)
    run = partial(total, lengths=lengths)
    right = jax.jit(jax.grad(run, (0, 1)))(q, BUFFER)
    monkeypatch.setattr(dispatch, "BACKENDS", (dispatch.Backend("xla", "here", Opaque, list),))
    assert_all_close(jax.jit(jax.grad(run, (0, 1)))(q, BUFFER), right)
    batched = jax.jit(jax.grad(lambda q: jax.vmap(run, (0, None))(q, BUFFER).sum()))(q[None])
    assert_all_close(batched[0], right[0])


@pytest.mark.ci
def test_scores_are_not_stored():
    """In reverse mode, temporary memory does not grow with query tokens x keys."""
    layout = jaxkv.CacheLayout(num_layers=1, num_blocks=128, block_size=64, entry=jaxkv.KVEntry("bf16", 16))
    q = jax.ShapeDtypeStruct((1, 512, 4, 16), jnp.bfloat16)

    def loss(q, buffer):
        out, _ = decode(q, jaxkv.KVCache(buffer, layout), layer=0, tables=np.arange(128)[None], lengths=(8192,))
        return out.astype(jnp.float32).sum()

    derive = jax.jit(jax.grad(loss, (0, 1)))
    memory = derive.lower(q, jax.ShapeDtypeStruct((layout.size,), layout.dtype)).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 512 * 4 * 8192 * 4  # the float32 scores of all keys


@pytest.mark.parametrize("attend", [prefill_kv, further(decode)])
def test_padding_rows_may_hold_nan(attend):
    """Query rows of no request have no influence on the gradients of others."""
    q, sums = random(6, 4, 8), jnp.asarray([0, 1, 5])

    def rows(q, buffer):
        out, lse = attend(q, jaxkv.KVCache(buffer, layout_of(KV)), cu_q_lens=sums)
        return (out[:5] ** 2).sum() + lse[:5].sum()

    derive = jax.jit(jax.grad(rows, (0, 1)))
    assert_all_close(derive(q.at[5].set(jnp.nan), BUFFER), derive(q, BUFFER))


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16"])
def test_quantised_entries_have_gradients_of_queries_alone(dtype):
    entry = jaxkv.KVEntry("fp8", 8, 8)
    layout = jaxkv.CacheLayout(**SIZES, num_heads=2, entry=entry, dtype=dtype)
    scale = {"k_scale": 0.5, "v_scale": 0.25}
    k, v = random(16, 2, 8), random(16, 2, 8, seed=1)
    slots = jnp.asarray([*range(4, 8), *range(12, 16), *range(24, 28), *range(4)])
    cache = jaxkv.write_kv(jaxkv.KVCache.zeros(layout), k, v, slots, layer=1, **scale, implementation="xla")
    exact = jaxkv.CacheLayout(**SIZES, num_heads=2, entry=jaxkv.KVEntry("f32", 8, 8))
    stored = jaxkv.read_kv(cache, slots, layer=1, dtype=jnp.float32, **scale, implementation="xla")
    twin = jaxkv.write_kv(jaxkv.KVCache.zeros(exact), *stored, slots, layer=1, implementation="xla")

    def of_queries(q, cache, **scale):
        out, lse = decode(q, cache, **scale)
        return (out**2).sum() + lse.sum()

    q = random(2, 3, 4, 8)
    found = jax.jit(jax.grad(partial(of_queries, **scale)))(q, cache)
    assert_all_close(found, jax.jit(jax.grad(of_queries))(q, twin))
    if dtype == "bfloat16":
        with pytest.raises(
            NotImplementedError, match=r"'fp8' in a buffer of bfloat16 have no gradients.*stop_gradient"
        ):
            jax.eval_shape(jax.grad(lambda x: of_queries(q, jaxkv.KVCache(x, layout), **scale)), cache.buffer)


def test_a_soft_prompt_is_learnt():
    """Gradient descent on the entries of some tokens in the cache lowers a loss; the entries of others stay."""
    layout = layout_of(KV)
    slots = jnp.asarray(slots_of([3], 4, BLOCK), jnp.int32)  # the block that the requests share
    q, target = random(2, 3, 4, 8), random(2, 3, 4, 4, seed=1)

    def loss(buffer):
        out, _ = decode(q, jaxkv.KVCache(buffer, layout))
        return ((out - target) ** 2).mean()

    def of_prompt(prompt):
        cache = jaxkv.KVCache(BUFFER, layout)
        return loss(jaxkv.write_kv(cache, *prompt, slots, layer=1, implementation="xla").buffer)

    prompt = random(4, 2, 8, seed=2), random(4, 2, 4, seed=3)

    @jax.jit
    def step(prompt):
        value, gradient = jax.value_and_grad(of_prompt)(prompt)
        return value, jax.tree.map(lambda x, g: x - 2 * g, prompt, gradient)

    losses = []
    for _ in range(40):
        value, prompt = step(prompt)
        losses.append(float(value))
    assert losses[-1] < 0.8 * losses[0]
    assert all(after < before + 1e-3 for before, after in pairwise(losses))
