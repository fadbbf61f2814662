"""`models.step`: chunks of prompts and the next tokens of other requests, processed at once."""

import jax
import numpy as np
import pytest

import jaxkv
from jaxkv import models
from jaxkv.models import NewTokens
from jaxkv.models.batch import Batch, SubBatch
from jaxkv.models.layers.feed_forward import route
from jaxkv.models.layers.linear import float32_linear
from support.cases import further, slow
from support.many_devices import mesh_of, on_several_devices
from support.recorded import FOLDER, recorded

BLOCK, TABLE = 16, 14
TOLERANCE = 1e-4  # of logits, relative to the largest, as in `test_models.py`


def rows(spans, columns):
    """A batch with one row per (tokens, start, first block): the tokens from `start` on, in consecutive blocks."""
    batch = NewTokens(
        np.zeros((len(spans), columns), np.int32),
        np.zeros(len(spans), np.int32),
        np.zeros((len(spans), TABLE), np.int32),
        np.full((len(spans), columns), -1, np.int32),
    )
    for row, (tokens, start, block) in enumerate(spans):
        first = columns - (len(tokens) - start)
        batch.tokens[row, first:] = tokens[start:]
        batch.seq_lens[row] = len(tokens)
        batch.block_tables[row] = np.arange(block, block + TABLE)
        batch.slot_mapping[row, first:] = block * BLOCK + np.arange(start, len(tokens))
    return batch


run = jax.jit(models.step, donate_argnums=1)


def chunks(prompt, size, block):
    """The spans of a prompt's chunks, all in one batch."""
    return [(prompt[: start + size], start, block) for start in range(0, len(prompt), size)]


@pytest.mark.parametrize("family", ["llama", *map(slow, ("deepseek_v2_lite", "deepseek_v32"))])
def test_chunks_and_decoded_tokens_at_once_give_the_logits_of_each_alone(family):
    """One quick family; `tests/serving/test_engine_recorded.py` has the tokens of others."""
    model = models.load(FOLDER / family, dtype="float32")
    (_, _), (first, after_first), _, (second, _), (long, _) = recorded(family)

    # One after the other: two prompts and a decode step, each alone.
    cache = model.cache(3 * TABLE, BLOCK)
    cache, _ = run(model, cache, rows([(first, 0, 0)], 64))
    cache, decoded = run(model, cache, rows([([*first, after_first[0]], len(first), 0)], 1))
    cache, one = run(model, cache, rows([(long, 0, TABLE)], 208))
    _, other = run(model, cache, rows([(second, 0, 2 * TABLE)], 208))

    # All of it at once, the long prompt in four rows.
    cache = model.cache(3 * TABLE, BLOCK)
    cache, _ = run(model, cache, rows([(first, 0, 0)], 64))
    prompts = rows([*chunks(long, 56, TABLE), *chunks(second, 56, 2 * TABLE)], 56)
    assert len(prompts.seq_lens) == 6
    cache, found = run(model, cache, prompts, rows([([*first, after_first[0]], len(first), 0)], 1))
    right = np.concatenate([one, other, decoded])
    worst = np.abs(np.asarray(found)[[3, 5, 6]] - right).max()
    assert worst < TOLERANCE * np.abs(right).max()
    assert [recorded(family)[n][1][k] for n, k in ((4, 0), (3, 0), (1, 1))] == right.argmax(axis=-1).tolist()


@pytest.mark.ci
def test_rows_may_be_expanded_and_attend_to_earlier_rows():
    """Each sub-batch attends in its own way: long chunks by `prefill_mla`, decoded tokens by `decode_mla`."""
    model = models.load(FOLDER / "deepseek_v2_lite", dtype="float32")
    made, of = [], SubBatch.of
    (first, after), (long, _) = recorded("deepseek_v2_lite")[1], recorded("deepseek_v2_lite")[4]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SubBatch, "of", lambda *args: made.append(of(*args)) or made[-1])
        cache, _ = run(model, model.cache(3 * TABLE, BLOCK), rows([(first, 0, 0)], 63))
        last = rows([([*first, after[0]], len(first), 0)], 1)
        _, found = run(model, cache, rows(chunks(long, 100, TABLE), 100), last)
    # The last layer attends to the last token of each row only.
    assert [part.expanded for part in made[-4:]] == [True, False, False, False]
    assert np.asarray(found)[1:].argmax(axis=-1).tolist() == [recorded("deepseek_v2_lite")[4][1][0], after[1]]


@on_several_devices
@pytest.mark.parametrize(
    "parallel", [further(models.DataParallel), *map(slow, (models.TensorParallel, models.ContextParallel))]
)
def test_several_batches_on_several_devices(parallel):
    family, mesh = "youtu", mesh_of(2)
    model = models.load(FOLDER / family, dtype="float32", parallel=parallel(mesh, "x"))
    prompts = [recorded(family)[n] for n in (1, 2)]
    spans = [(prompt, 0, 0 if parallel is models.DataParallel else TABLE * n) for n, (prompt, _) in enumerate(prompts)]
    cache, _ = run(model, model.cache(2 * TABLE, BLOCK), rows(spans, 64))
    decoded = rows(
        [
            ([*prompt, right[0]], len(prompt), block)
            for (prompt, right), (*_, block) in zip(prompts, spans, strict=True)
        ],
        1,
    )
    # The chunks compute the prompts again.
    _, found = run(model, cache, rows(spans, 64), decoded)
    assert np.asarray(found).argmax(axis=-1).tolist() == [right[k] for k in (0, 1) for _, right in prompts]


def test_what_is_wrong_with_batches():
    model = models.load(FOLDER / "llama")
    cache = model.cache(TABLE, BLOCK)
    one = rows([([1, 2], 0, 0)], 2)
    with pytest.raises(ValueError, match=r"`batches` has block tables of \[\] blocks: expected one width"):
        models.step(model, cache)
    narrow = one._replace(block_tables=one.block_tables[:, :3])
    with pytest.raises(ValueError, match=r"`batches` has block tables of \[3, 14\] blocks: expected one width"):
        models.step(model, cache, one, narrow)
    with pytest.raises(ValueError, match="`slot_mapping`"):
        models.step(model, cache, one, one._replace(slot_mapping=one.slot_mapping[:, :1]))
    assert isinstance(cache, jaxkv.KVCache)


@pytest.mark.parametrize("family", ["deepseek_v3", "longcat_flash"])
def test_padding_chooses_no_experts(family):
    model = models.load(FOLDER / family)
    config, mixture = model.config, model.params["layers"][1]["mixture"]
    new = rows([(list(range(5)), 2, 0), ([1], 0, 1)], columns=4)._replace(tokens=None)  # 3 tokens of 4, and 1
    batch = Batch.of(model, model.cache(4, BLOCK), [(new.seq_lens, {"": new.block_tables}, new.slot_mapping)])
    x = jax.random.normal(jax.random.key(0), (8, config.hidden_size))
    chosen, shares = route(config.experts, mixture, x, batch)
    expected, _ = route(config.experts, mixture, x)
    new_tokens = np.asarray([0, 1, 1, 1, 0, 0, 0, 1], bool)
    assert (chosen[~new_tokens] == -1).all()
    np.testing.assert_array_equal(chosen[new_tokens], expected[new_tokens])
    assert shares.shape == chosen.shape


@pytest.mark.parametrize("dtypes", [("bfloat16", "bfloat16"), ("float16", "float16"), ("bfloat16", "float32")])
def test_float32_linear_rounds_nothing(dtypes):
    x = jax.random.normal(jax.random.key(0), (3, 9, 2048), dtypes[0])
    weight = jax.random.normal(jax.random.key(1), (64, 2048), dtypes[1])
    out = float32_linear(x, weight)
    assert out.dtype == "float32"
    right = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    # If an operand or the result were rounded to 16 bits, the errors would be 0.02 at least.
    np.testing.assert_allclose(out, right, rtol=0, atol=1e-3)
