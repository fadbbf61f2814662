"""Models with states beside keys and values: several batches at once, shared prefixes, moved blocks, rejected uses."""

import json
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import jaxkv
from jaxkv import models
from jaxkv.models import NewTokens
from support import recorded as recordings
from support.many_devices import mesh_of, on_several_devices

FOLDER = recordings.FOLDER / "qwen3_next"
BLOCK, COLUMNS, BLOCKS, CHUNK = 32, 7, 64, 64
STATE = "state"

step = jax.jit(models.step, donate_argnums=1)


@cache
def recorded():
    """The model, and (prompt, the tokens that follow) of requests of 1, 63, 64, 65 and 200 tokens."""
    return models.load(FOLDER, dtype="float32"), recordings.recorded(FOLDER.name)


def filled(model, value=0xFF):
    """A cache whose bytes are `value`: NaN by default."""
    empty = jax.eval_shape(lambda: model.cache(BLOCKS, BLOCK))
    buffer = jnp.full(empty.buffer.size * empty.buffer.dtype.itemsize, value, jnp.uint8).view(empty.buffer.dtype)
    return jaxkv.KVCache(buffer, empty.layout)


class Blocks:
    """Tables of a request: blocks of keys and values, and of states, that nobody else has unless they are shared."""

    def __init__(self, first=0):
        self.kv, self.state = (list(range(start, start + COLUMNS)) for start in (first, first + COLUMNS))


def rows(spans, columns, count=2):
    """A batch with one row per (tokens, start, blocks), with the tokens from `start` on; and rows without a request."""
    spans = [*spans, *[([], 0, Blocks(-2 * COLUMNS))] * (count - len(spans))]
    tokens, slots = np.zeros((count, columns), np.int32), np.full((count, columns), -1, np.int32)
    for row, (ids, start, blocks) in enumerate(spans):
        first = columns - (len(ids) - start)
        tokens[row, first:] = ids[start:]
        positions = np.arange(start, len(ids))
        slots[row, first:] = np.asarray(blocks.kv)[positions // BLOCK] * BLOCK + positions % BLOCK
    lengths = np.asarray([len(ids) for ids, *_ in spans], np.int32)
    tables = {name: np.asarray([getattr(held, name or "kv") for *_, held in spans], np.int32) for name in ("", STATE)}
    return NewTokens(tokens, lengths, tables, slots)


def advance(model, held, chunks=(), decoded=()):
    """A step of two parts, which is one program for all tests: the cache, and the likeliest token after each span."""
    held, logits = step(model, held, rows(chunks, CHUNK), rows(decoded, 1))
    tokens = np.asarray(logits).argmax(axis=-1).tolist()
    return held, [*tokens[: len(chunks)], *tokens[2 : 2 + len(decoded)]]


def generate(model, held, prompt, start, blocks, count=8):
    """The cache, and the next `count` tokens of a request of which `start` tokens are cached."""
    for first in range(start, len(prompt), CHUNK):
        held, made = advance(model, held, [(prompt[: first + CHUNK], first, blocks)])
    while len(made) < count:
        tokens = [*prompt, *made]
        held, (token,) = advance(model, held, decoded=[(tokens, len(tokens) - 1, blocks)])
        made.append(token)
    return held, made


def test_chunks_and_decoded_tokens_at_once():
    """Chunks of two prompts of different lengths, and two requests that decode, in one step of two parts."""
    model, ((short, after_short), (first, after), _, (second, after_second), (long, after_long)) = recorded()
    one, two, three, four = (Blocks(2 * COLUMNS * i) for i in range(4))
    held, made = advance(model, filled(model), [(first, 0, one), (short, 0, four)])
    assert made == [after[0], after_short[0]]
    held, _ = advance(model, held, [(long[:64], 0, two), (second[:40], 0, three)])
    held, _ = advance(model, held, [(long[:128], 64, two)])
    decoded = [([*first, after[0]], len(first), one), ([*short, after_short[0]], len(short), four)]
    held, made = advance(model, held, [(long[:190], 128, two), (second, 40, three)], decoded)
    assert made[1:] == [after_second[0], after[1], after_short[1]]
    decoded = [([*second, after_second[0]], len(second), three), ([*first, *after[:2]], len(first) + 1, one)]
    _, made = advance(model, held, [(long, 190, two)], decoded)
    assert made == [after_long[0], after_second[1], after[2]]


def test_a_prefix_is_shared_by_its_blocks():
    """The state at the end of a block is that of the prefix; a request that shares it writes to blocks of its own."""
    model, (*_, (long, right)) = recorded()
    donor, other = Blocks(), Blocks(2 * COLUMNS)
    held, _ = generate(model, filled(model), long[: 4 * BLOCK], 0, donor, 1)
    other.kv[:4], other.state[3] = donor.kv[:4], donor.state[3]
    held, made = generate(model, held, long, 4 * BLOCK, other)
    assert made == right[:8]
    # The donor's state is as it was.
    held, made = generate(model, held, long, 4 * BLOCK, donor)
    assert made == right[:8]
    # Without it, the same keys and values give other tokens.
    other.state[3] = -1
    _, made = generate(model, held, long, 4 * BLOCK, other)
    assert made != right[:8]


def test_blocks_move_with_states_to_the_host_and_back():
    model, (*_, (long, right)) = recorded()
    request, moved = Blocks(), Blocks(2 * COLUMNS)
    held, _ = generate(model, filled(model), long[:150], 0, request, 1)
    payload = np.asarray(jaxkv.read_blocks(held, jnp.asarray([*request.kv[:5], request.state[4]])))
    held = jaxkv.write_blocks(filled(model, 0x7F), jnp.asarray([*moved.kv[:5], moved.state[4]]), jnp.asarray(payload))
    _, made = generate(model, held, long, 150, moved)
    assert made == right[:8]


def test_rows_without_tokens_leave_every_byte():
    model, ((prompt, _), *_) = recorded()
    held = filled(model, 0x11)
    before = np.asarray(held.buffer).copy()
    held, _ = advance(model, held)
    np.testing.assert_array_equal(np.asarray(held.buffer), before)
    one = Blocks()
    held, _ = advance(model, held, decoded=[(prompt, 0, one)])
    changed = (np.asarray(held.buffer) != before).reshape(BLOCKS, -1).any(axis=1)
    assert np.flatnonzero(changed).tolist() == [one.kv[0], one.state[0]]


def test_states_and_entries_in_bfloat16():
    """Norms keep what is added to 1 in float32; logits are nearly those of the rounded weights in float32."""
    (_, pairs), model = recorded(), models.load(FOLDER, dtype="bfloat16")
    layer = model.params["layers"][1]
    norms = [model.params["norm"], layer["attention_norm"], layer["feed_forward_norm"], layer["attention"]["q_norm"]]
    assert {norm.dtype for norm in norms} == {jnp.dtype("float32")}
    assert model.params["layers"][0]["attention"]["norm"].dtype == jnp.bfloat16
    exact = models.Model(jax.tree.map(lambda weight: weight.astype("float32"), model.params), model.config, "f32")
    batches = rows([(pairs[2][0], 0, Blocks())], CHUNK), rows([], 1)
    found, right = (np.asarray(step(one, filled(one), *batches)[1][0], np.float64) for one in (model, exact))
    error = np.linalg.norm(found - right) / np.linalg.norm(right)
    assert 1e-5 < error < 16 * 2**-8


@pytest.mark.slow
@on_several_devices
@pytest.mark.parametrize("kind", [models.DataParallel, models.DataExpertParallel])
def test_devices_with_requests_of_their_own(kind):
    """Slow, because programs are compiled for two devices; nothing in them depends on states."""
    model, (_, pairs) = models.load(FOLDER, dtype="float32", parallel=kind(mesh_of(2), "x")), recorded()
    spans = [(pairs[n][0], 0, Blocks()) for n in (1, 2)]
    held, made = advance(model, model.cache(BLOCKS, BLOCK), spans)
    assert made == [pairs[n][1][0] for n in (1, 2)]
    spans = [([*pairs[n][0], pairs[n][1][0]], len(pairs[n][0]), Blocks()) for n in (1, 2)]
    assert advance(model, held, (), spans)[1] == [pairs[n][1][1] for n in (1, 2)]


class TestRejected:
    @on_several_devices
    @pytest.mark.parametrize("kind", [models.TensorParallel, models.ExpertParallel, models.ContextParallel])
    def test_division_of_layers(self, kind):
        words = f"`parallel` is a {kind.__name__}, and the model has recurrent layers.*expected a OneDevice"
        with pytest.raises(ValueError, match=words):
            models.load(FOLDER, parallel=kind(mesh_of(2), "x"))

    def call(self, model, tables, cache=None):
        shape, lengths = jax.ShapeDtypeStruct((2, 3), "int32"), jax.ShapeDtypeStruct((2,), "int32")
        cache = cache or jax.eval_shape(lambda: model.cache(4, BLOCK))
        return jax.eval_shape(models.prefill, model, cache, shape, lengths, tables, shape)

    def test_other_tables(self):
        model, table = recorded()[0], jax.ShapeDtypeStruct((2, 3), "int32")
        with pytest.raises(ValueError, match=r"`block_tables` has the tables '': expected the model's, '', 'state'"):
            self.call(model, table)
        with pytest.raises(ValueError, match=r"`block_tables` has the tables '', 'states': expected"):
            self.call(model, {"": table, "states": table})
        with pytest.raises(ValueError, match=r"`block_tables\['state'\]` has shape \(3, 3\)"):
            self.call(model, {"": table, STATE: jax.ShapeDtypeStruct((3, 3), "int32")})
        wider = {"": table, STATE: jax.ShapeDtypeStruct((2, 5), "int32")}
        assert self.call(model, wider)[1].shape == (2, model.config.vocab_size)

    def test_caches_without_states(self):
        model, table = recorded()[0], jax.ShapeDtypeStruct((2, 3), "int32")
        layout = jaxkv.CacheLayout(num_layers=1, num_blocks=4, block_size=BLOCK, num_heads=2, entry=model.entry)
        cache = jaxkv.KVCache(jax.ShapeDtypeStruct((layout.size,), layout.dtype), layout)
        with pytest.raises(ValueError, match="`cache` has no room for states where the model expects them"):
            self.call(model, {"": table, STATE: table}, cache)

    def test_drafts_and_calibration(self):
        model, (ids, table) = recorded()[0], (jnp.zeros((1, 2), jnp.int32), jnp.zeros((1, 3), jnp.int32))
        one, options = jnp.zeros(1), models.SamplingBatch.of([models.Sampling()])
        with pytest.raises(ValueError, match="whose states would remember rejected drafts"):
            models.verify(model, model.cache(4, BLOCK), ids, one, {"": table, STATE: table}, ids, options)
        with pytest.raises(ValueError, match="`num_nextn_predict_layers` is 0"):
            models.load(FOLDER, mtp=True)
        with pytest.raises(ValueError, match="`model` has recurrent layers: calibration supports"):
            models.calibrate(models.load(FOLDER, entry_format="fp8"), [[1, 2]])


def test_scales_of_entries_are_those_of_layers_with_attention(tmp_path):
    weights = safetensors.numpy.load_file(FOLDER / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(json.loads((FOLDER / "config.json").read_text())))
    scales = {"k_scale": np.float32([2, 4]), "v_scale": np.float32([8])}
    for layer, works in ((1, True), (0, False)):
        named = {f"model.layers.{layer}.self_attn.{name}": value for name, value in scales.items()}
        safetensors.numpy.save_file({**weights, **named}, tmp_path / "model.safetensors")
        load = partial(models.load, tmp_path, entry_format="fp8")
        if works:
            found = load().params["entry_scales"]
            assert jax.tree.map(np.ndarray.tolist, jax.device_get(found)) == {"k_scale": [[2, 4]], "v_scale": [[8, 8]]}
        else:
            with pytest.raises(ValueError, match=r"does not have: .*model.layers.0.self_attn.k_scale"):
                load()
