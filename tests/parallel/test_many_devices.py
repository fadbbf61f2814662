"""`jaxkv.parallel` on several devices, and the same on one."""

import re
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas  # noqa: F401 (its warnings at import are not ours)
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxkv
from jaxkv import parallel
from jaxkv.parallel import context
from jaxkv.testing.buffers import get_entries, set_entries, to_bytes
from parallel.batches import (
    BLOCK,
    ENTRIES,
    GQA,
    KV_HEADS,
    LAYER,
    LENGTHS,
    MLA,
    SCALE,
    batch,
    decode,
    divided,
    layout_of,
    over,
    poisoned,
    run,
    write,
)
from support import scenes
from support.available import assume_available
from support.cases import further, slow
from support.compare import assert_close, assert_same_bits
from support.many_devices import mesh_of, on_several_devices

pytestmark = on_several_devices


def written_and_read(cache, new, positions, q, tables, lengths):
    """One device's step."""
    cache = write(cache, new, jaxkv.slots_for(tables, positions, cache))
    return cache, decode(q, cache, tables, lengths)


def arguments(inputs):
    return inputs.new, inputs.positions, inputs.q, inputs.tables, inputs.lengths


@cache
def on_one_device(entry, tokens=1):
    cache, found = jax.jit(written_and_read)(poisoned(layout_of(entry)), *arguments(batch(entry, tokens)))
    return cache, *found


def roundings_of(out):
    """Partial results and their sum round to the queries' dtype; float32 also rounds the scores."""
    return 64 if out.dtype == jnp.float32 else 4


def assert_equal_within_roundings(found, right):
    (out, lse), (right_out, right_lse) = found, right
    assert out.dtype == right_out.dtype
    assert_close(out, right_out.astype(jnp.float32), roundings=roundings_of(out), magnitude=1, what="out")
    assert_close(lse, right_lse, roundings=64, magnitude=4, what="lse")


def check_shares(entry, mesh, cache, specs, results):
    """Every device's cache and results are those of its share on one device, bit for bit; and the whole's in value.

    XLA sums products of another number of requests or heads in another order, so that bits are those of equal shapes.
    """
    after, found = run(written_and_read, mesh, specs, (specs[0], results), cache, *arguments(batch(entry)))
    alone, outs = jax.jit(written_and_read), []
    for device, held in enumerate(after.buffer.addressable_shards):
        shares = [
            share(arg, spec, device, mesh.size) for arg, spec in zip(arguments(batch(entry)), specs[1:], strict=True)
        ]
        right_cache, right = alone(poisoned(cache.layout), *shares)
        assert_same_bits(held.data, right_cache.buffer, f"cache of device {device}")
        outs.append(right)
    for one, parts in zip(found, zip(*outs, strict=True), strict=True):
        assert_same_bits(one, np.concatenate(parts, axis=tuple(results).index("x")))
    assert_equal_within_roundings(found, on_one_device(entry)[1:])


def share(arg, spec, device, devices):
    """What `spec` gives a device."""
    if not spec:
        return arg
    return jax.tree.map(lambda x: np.split(np.asarray(x), devices, axis=tuple(spec).index("x"))[device], arg)


@pytest.mark.parametrize(("name", "devices"), [("bf16", 8), ("gqa", 2)])
def test_data_parallel(name, devices):
    """Requests are sharded, and every device has a cache of its own."""
    entry, mesh = ENTRIES[name], mesh_of(devices)
    check_shares(entry, mesh, poisoned(layout_of(entry), mesh), (P("x"),) * 6, P("x"))


@pytest.mark.parametrize(("name", "devices"), [("f32", 8), ("fp8_ds_mla", 2)])
def test_tensor_parallel_latents(name, devices):
    """Query heads are sharded, latents replicated."""
    entry, heads = ENTRIES[name], P(None, None, "x")
    specs = P(), P(), P(), heads, P(), P()
    check_shares(entry, mesh_of(devices), poisoned(layout_of(entry)), specs, heads)


def test_tensor_parallel_kv_heads():
    """KV heads are sharded with the query heads that read them."""
    devices, heads = 4, P(None, None, "x")
    mesh = mesh_of(devices)
    specs = P("x"), heads, P(), heads, P(), P()
    check_shares(GQA, mesh, poisoned(layout_of(GQA, KV_HEADS // devices), mesh), specs, heads)


def shared(axis, plans, options, cache, new, positions, q, tables, lengths):
    """A device's step with the tokens of each request interleaved."""
    shard = jax.lax.axis_index(axis)
    cache = write(cache, new, context.local_slots(tables, positions, layout=cache.layout, shard=shard))
    keywords = dict(axis=axis, **options)
    if plans:
        heads, tokens = q[0].shape[2], q[0].shape[1]
        keywords["plan"] = context.plan_decode(cache, tables, lengths, num_heads=heads, q_len=tokens, **keywords)
    return cache, decode(q, cache, tables, lengths, package=context, **keywords)


def on_shards(entry, devices, interleave, tokens=1, plans=False, **options):
    mesh = mesh_of(devices)
    cache, specs = poisoned(divided(entry, devices, interleave), mesh), (P("x"), *[P()] * 5)
    step = partial(shared, "x", plans, options)
    return run(step, mesh, specs, (P("x"), P()), cache, *arguments(batch(entry, tokens)))


def assert_shards_hold_their_tokens_alone(after, whole, devices, interleave):
    """Every shard has its tokens of the cache `whole`, one after the other, and NaN elsewhere."""
    layout, tables = whole.layout, np.asarray(batch(whole.layout.entry).tables)
    entries = get_entries(layout, to_bytes(whole), LAYER)
    for shard, found in enumerate(np.asarray(after.buffer).reshape(devices, -1)):
        expected = scenes.garbage(layout, None)
        mine = get_entries(layout, expected, LAYER)
        for blocks, length in zip(tables, LENGTHS, strict=True):
            owned = [i for i in range(length) if i // interleave % devices == shard]
            for local, i in enumerate(owned):
                mine[blocks[local // BLOCK], :, local % BLOCK] = entries[blocks[i // BLOCK], :, i % BLOCK]
        set_entries(layout, expected, LAYER, mine)
        assert_same_bits(found.view(np.uint8), expected, f"shard {shard}")


@pytest.mark.parametrize(
    ("name", "devices", "interleave"),
    [
        *(("f32", 2, 1), ("f32", 3, BLOCK), further("f32", 8, 16)),
        *(further("bf16", 2, BLOCK), ("bf16", 8, 1)),
        *(("fp8_ds_mla", 2, 16), further("fp8_ds_mla", 3, 1)),
        *(("gqa", 3, 16), further("gqa", 8, BLOCK)),
    ],
)
def test_context_parallel(name, devices, interleave):
    """Tokens of a request are interleaved."""
    entry = ENTRIES[name]
    after, found = on_shards(entry, devices, interleave)
    whole, *right = on_one_device(entry)
    assert_equal_within_roundings(found, right)
    assert_shards_hold_their_tokens_alone(after, whole, devices, interleave)


@pytest.mark.parametrize(("name", "devices", "interleave", "tokens"), [("f32", 3, 1, 4), ("gqa", 8, 16, 2)])
def test_several_query_tokens_are_causal(name, devices, interleave, tokens):
    """Also of requests that are shorter than that."""
    _, found = on_shards(ENTRIES[name], devices, interleave, tokens, plans=True)
    assert_equal_within_roundings(found, on_one_device(ENTRIES[name], tokens)[1:])


@pytest.mark.parametrize(
    ("name", "devices", "interleave", "tokens"),
    [
        ("f32", 2, 1, 2),
        ("gqa", 3, 16, 5),
        ("int8", 2, 1, 4),  # groups of two query tokens
        *(further("f32", 4, 16, 3), further("f32", 3, 1, 5), further("f32", 2, 16, 4), further("bf16", 4, 1, 4)),
        *(further("fp8_ds_mla", 2, 1, 3), further("gqa", 4, 1, 2), further("gqa", 2, 3, 17)),
    ],
)
def test_query_tokens_of_requests_of_every_length(name, devices, interleave, tokens):
    """New tokens that begin anywhere in a block, and requests with fewer tokens, on some devices or on all.

    Requests of 0 to 45 tokens, which have one table; with sinks and a logit cap.
    """
    entry = jaxkv.KVEntry("int8", head_dim=16) if name == "int8" else ENTRIES[name]
    lengths = jnp.arange(LENGTHS[-1] + 1, dtype=jnp.int32)
    tables = jnp.tile(batch(entry).tables[-1], (lengths.size, 1))
    rng, heads = np.random.default_rng(1), 8 * KV_HEADS
    sizes = [x.shape[-1] for x in batch(entry).q]
    q = [jnp.asarray(rng.standard_normal((lengths.size, tokens, heads, n)), batch(entry).q[0].dtype) for n in sizes]

    options = dict(sinks=jnp.linspace(-2.0, 3.0, heads), logit_cap=2.0)

    def step(plans, cache, *arguments):
        q, *index = arguments
        plan = context.plan_decode(cache, *index, axis="x", num_heads=heads, q_len=tokens) if plans else None
        return decode(q, cache, *index, package=context, axis="x", plan=plan, **options)

    mesh, specs = mesh_of(devices), (P("x"), P(), P(), P())
    shards = on_shards(entry, devices, interleave)[0]
    found, planned = (
        run(partial(step, plans), mesh, specs, P(), shards, q, tables, lengths) for plans in (False, True)
    )
    assert_equal_within_roundings(found, decode(q, on_one_device(entry)[0], tables, lengths, **options))
    for one, other in zip(found, planned, strict=True):
        assert_same_bits(one, other)


@pytest.mark.parametrize(
    ("name", "devices", "interleave", "tokens", "window"),
    [
        ("f32", 2, 1, 3, 8),  # a device owns 4 of the window's tokens
        further("f32", 3, 5, 2, 7),  # or 0 to 5
        ("gqa", 8, 1, 4, 3),  # or none or one
        slow("gqa", 2, 16, 2, 20),
        ("gqa", 3, 1, 1, 1),
        further("bf16", 2, 1, 2, 10**6),
    ],
)
def test_windows_of_several_query_tokens(name, devices, interleave, tokens, window):
    entry = ENTRIES[name]
    found = [on_shards(entry, devices, interleave, tokens, plans, window=window)[1] for plans in (False, True)]
    for one, other in zip(*found, strict=True):
        assert_same_bits(one, other)
    cache, inputs = on_one_device(entry, tokens)[0], batch(entry, tokens)
    right = decode(inputs.q, cache, inputs.tables, inputs.lengths, window=window)
    assert_equal_within_roundings(found[0], right)


@pytest.mark.parametrize("name", ["f32", "gqa"])
def test_lengths_past_the_tables_are_clamped_to_them(name):
    """As if requests had as many tokens as the tables of all devices have room for, a last round that is not full too.

    Several query tokens, with a plan; negative lengths are 0.
    """
    entry, mesh, tokens = ENTRIES[name], mesh_of(3), 4
    q, tables = batch(entry, tokens).q, batch(entry).tables[:, :2]
    room = 3 * 15 + 1  # 16 tokens in a table are 3 times 5, and 1 of shard 0
    rng, count = np.random.default_rng(0), len(LENGTHS)
    layout = divided(entry, 3, 5)
    random = jnp.asarray(rng.standard_normal(3 * layout.size), entry.dtype)
    cache = jaxkv.KVCache(jax.device_put(random, poisoned(layout, mesh).buffer.sharding), layout)

    def step(cache, q, tables, lengths):
        plan = context.plan_decode(cache, tables, lengths, num_heads=q[0].shape[2], q_len=tokens, axis="x")
        return decode(q, cache, tables, lengths, package=context, plan=plan, axis="x")

    found, right = (
        run(step, mesh, (P("x"), P(), P(), P()), P(), cache, q, tables, jnp.asarray(lengths * (count // 4), jnp.int32))
        for lengths in ([room + 1, 2**31 - 1, -1, -(2**31)], [room, room, 0, 0])
    )
    for one, other in zip(found, right, strict=True):
        assert_same_bits(one, other)
    assert np.isfinite(right[1][:2]).all()


@pytest.mark.parametrize("name", ["f32", "gqa"])
def test_sinks_count_once(name):
    entry, mesh = ENTRIES[name], mesh_of(3)
    q, sinks = batch(entry).q, jnp.linspace(-2.0, 3.0, 2 * KV_HEADS)
    tables, lengths = batch(entry).tables[:, :2], jnp.arange(len(LENGTHS), dtype=jnp.int32) * 5
    layout = divided(entry, 3, 5)
    random = jnp.asarray(np.random.default_rng(0).standard_normal(3 * layout.size), entry.dtype)
    cache = jaxkv.KVCache(jax.device_put(random, poisoned(layout, mesh).buffer.sharding), layout)

    def step(sinks, cache, q, tables, lengths):
        return decode(q, cache, tables, lengths, package=context, axis="x", sinks=sinks)

    specs = (P("x"), P(), P(), P())
    out, lse = run(partial(step, None), mesh, specs, P(), cache, q, tables, lengths)
    found = run(partial(step, sinks), mesh, specs, P(), cache, q, tables, lengths)
    keys = np.exp(np.asarray(lse, np.float64))
    share = keys / (keys + np.exp(np.asarray(sinks, np.float64)))
    assert_equal_within_roundings(found, (jnp.asarray(np.asarray(out, np.float64) * share[..., None], out.dtype), lse))


@pytest.mark.ci
def test_queries_in_e4m3_have_a_scale():
    entry, mesh = ENTRIES["f32"], mesh_of(2)
    q, tables = [x.astype("float8_e4m3fn") for x in batch(entry).q], batch(entry).tables[:, :2]
    lengths, layout = jnp.arange(len(LENGTHS), dtype=jnp.int32) * 4, divided(entry, 2, 5)
    random = jnp.asarray(np.random.default_rng(0).standard_normal(2 * layout.size), entry.dtype)
    cache = jaxkv.KVCache(jax.device_put(random, poisoned(layout, mesh).buffer.sharding), layout)

    def step(q_scale, cache, q, tables, lengths):
        return decode(q, cache, tables, lengths, package=context, axis="x", q_scale=q_scale)

    specs = P("x"), P(), P(), P()
    found = run(partial(step, 0.5), mesh, specs, P(), cache, q, tables, lengths)
    right = run(partial(step, None), mesh, specs, P(), cache, [x.astype("float32") / 2 for x in q], tables, lengths)
    assert_equal_within_roundings(found, right)


def test_checked_lengths_are_those_of_all_devices():
    # With explicit axes `checkify` fails: it sorts what the devices have found, over all of them.
    mesh = mesh_of(3, axis_type=AxisType.Auto)
    q, tables = batch(MLA[0]).q, batch(MLA[0]).tables[:, :2]

    @jaxkv.checked
    @partial(jax.shard_map, mesh=mesh, in_specs=P(), out_specs=P())
    def check(lengths):
        cache = jaxkv.KVCache.zeros(divided(MLA[0], 3, 5))
        return decode(q, cache, tables, lengths, package=context, axis="x")

    lengths = jnp.asarray([46, 0, 0, 46, 0, 0, 0, 0], jnp.int32)
    check(lengths)
    with pytest.raises(ValueError, match=r"`seq_lens`\[3\] is 47: the tables of 3 devices hold 46 tokens"):
        check(lengths.at[3].set(47))


@pytest.mark.parametrize(("requests", "tokens"), [("a", "b"), (None, ("a", "b"))])
def test_several_axes(requests, tokens):
    """Requests over one axis and their tokens over another, or tokens over both."""
    mesh_of(8)
    entry, mesh, both = ENTRIES["f32"], jax.make_mesh((2, 4), ("a", "b")), P(("a", "b"))
    layout = divided(entry, 4 if requests else 8)
    cache, rows = parallel.zeros(layout, mesh, ("a", "b")), P(requests)
    specs, step = (both, *[rows] * 5), partial(shared, tokens, False, {})
    _, found = run(step, mesh, specs, (both, rows), cache, *arguments(batch(entry)))
    assert_equal_within_roundings(found, on_one_device(entry)[1:])


def test_every_device_updates_its_cache_in_place():
    """In a scan over layers, with a plan for all of them."""
    entry, mesh, inputs = ENTRIES["bf16"], mesh_of(2), batch(ENTRIES["bf16"])
    tokens, specs = [x[:, 0] for x in inputs.new], (P("x"), *[P()] * 4)

    def step(cache, tokens, q, tables, lengths):
        me = dict(layout=cache.layout, shard=jax.lax.axis_index("x"))
        slots = context.local_slots(tables, lengths[:, None] - 1, **me)[:, 0]
        plan = context.plan_decode(cache, tables, lengths, num_heads=2 * KV_HEADS, axis="x")

        def layer_step(cache, layer):
            cache = jaxkv.write_mla(cache, *tokens, slots, layer=layer)
            out = context.decode_mla(*q, cache, tables, lengths, layer=layer, scale=SCALE, plan=plan, axis="x")
            return cache, out

        return jax.lax.scan(layer_step, cache, jnp.arange(cache.layout.num_layers))

    sizes = dict(num_layers=8, num_blocks=4096, block_size=BLOCK, shards=jaxkv.TokenShards(2))
    cache = parallel.zeros(jaxkv.CacheLayout(**sizes, entry=entry), mesh, "x")
    sharded = over(mesh, step, specs, (P("x"), P()))
    compiled = jax.jit(sharded, donate_argnums=0).lower(cache, tokens, *arguments(inputs)[2:]).compile()
    memory, size = compiled.memory_analysis(), cache.layout.nbytes
    assert memory.alias_size_in_bytes == size
    assert memory.temp_size_in_bytes < size / 10


def test_gradients_pass_the_merge():
    """The collectives give the merge's own gradients."""
    rng = np.random.default_rng(0)
    outs = jnp.asarray(rng.standard_normal((8, 3, 4)), jnp.float32)
    lses = jnp.asarray(rng.standard_normal((8, 3)), jnp.float32).at[2].set(-jnp.inf)

    def one(out, lse):
        return context.merge_states(out[0], lse[0], axis="x")

    def total(merge, outs, lses):
        out, lse = merge(outs, lses)
        return (out * jnp.arange(12.0).reshape(3, 4)).sum() + lse.sum()

    mesh = mesh_of(8)
    over_devices = jax.shard_map(one, mesh=mesh, in_specs=P("x"), out_specs=P())
    with jax.set_mesh(mesh):
        parts = jax.device_put((outs, lses), P("x"))
        found = jax.jit(jax.grad(partial(total, over_devices), (0, 1)))(*parts)
    right = jax.grad(partial(total, jaxkv.merge_states), (0, 1))(outs, lses)
    for one_found, one_right in zip(found, right, strict=True):
        assert_close(one_found, one_right, roundings=16)


@pytest.mark.parametrize("check_vma", [True, further(False)])
def test_gradients_of_attention_pass_shard_map(check_vma):
    """Of requests on several devices, which share a cache: each device adds its part."""
    layout = jaxkv.CacheLayout(num_layers=1, num_blocks=4, block_size=4, entry=jaxkv.KVEntry("f32", 8))
    rng, mesh = np.random.default_rng(0), jax.sharding.Mesh(mesh_of(2).devices, ("x",))
    q, buffer = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((2, 2, 8), layout.size))
    tables, lengths = jnp.asarray([[1, 3], [1, 0]]), jnp.asarray([7, 6])

    def attend(q, buffer, tables, lengths):
        cache = jaxkv.KVCache(buffer, layout)
        return jaxkv.decode_kv(q, cache, tables, lengths, layer=0, scale=SCALE, implementation="xla")

    specs = (P("x"), P(), P("x"), P("x"))
    sharded = jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=P("x"), check_vma=check_vma)

    def total(attend, q, buffer):
        return (attend(q, buffer, tables, lengths) ** 2).sum()

    found = jax.jit(jax.grad(partial(total, sharded), (0, 1)))(q, buffer)
    for one, right in zip(found, jax.grad(partial(total, attend), (0, 1))(q, buffer), strict=True):
        assert_close(one, right, roundings=64)


def test_the_readme_runs():
    mesh_of(8)
    readme = (Path(__file__).parents[2] / "jaxkv" / "parallel" / "README.md").read_text()
    code = re.search(r"```python\n(.*?)```", readme, re.DOTALL)
    assert code
    scope = {}
    exec(code[1], scope)
    layout = jaxkv.CacheLayout(num_layers=1, num_blocks=16, block_size=64, entry=scope["entry"])
    rope, inputs = jnp.ones((1000, 64)), (jnp.arange(16)[None], jnp.asarray([1000]))
    cache = jaxkv.write_mla(jaxkv.KVCache.zeros(layout), scope["latents"], rope, jnp.arange(1000), layer=0)
    q = scope["queries"], jnp.ones((1, 16, 64), jnp.bfloat16)
    right = jaxkv.decode_mla(*q, cache, *inputs, layer=0, scale=192**-0.5)
    assert_close(scope["out"], right.astype(jnp.float32), magnitude=1)


@pytest.mark.ci
@pytest.mark.parametrize(("tokens", "invariant"), [(2, False), (512, True)])
@pytest.mark.usefixtures("quick_lowering")
def test_the_hopper_kernels_lower(tokens, invariant, monkeypatch):
    """Under `shard_map`, whose checks of what varies over the mesh they do not pass."""
    assume_available(monkeypatch, "mosaic_gpu")
    entry, mesh = jaxkv.MLAEntry("bf16", latent=512, rope=64), mesh_of(4)
    shards = jaxkv.TokenShards(4, 64)
    layout = jaxkv.CacheLayout(num_layers=2, num_blocks=16, block_size=64, entry=entry, shards=shards)

    def array(spec, dtype, *shape):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    def step(cache, q_latent, q_pe, tables, lengths):
        keywords = dict(axis="x", implementation="mosaic_gpu")
        plan = context.plan_decode(
            cache, tables, lengths, num_heads=64, q_len=tokens, batch_invariant=invariant, **keywords
        )
        return context.decode_mla(q_latent, q_pe, cache, tables, lengths, layer=1, scale=SCALE, plan=plan, **keywords)

    specs = P("x"), P(), P(), P(), P()
    sharded = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
    traced = jax.jit(sharded).trace(
        jaxkv.KVCache(array(P("x"), "bfloat16", 4 * layout.size), layout),
        *(array(P(), "bfloat16", 8, tokens, 64, n) for n in entry.sizes),
        array(P(), "int32", 8, 4),
        array(P(), "int32", 8),
    )
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()
