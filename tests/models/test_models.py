"""Language models on the cache, compared with Hugging Face's own: equal tokens, logits within 1e-4."""

import dataclasses
import itertools
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
import jaxkv.models
from jaxkv_kernels.addressing import slots_for
from support.cases import further, slow
from support.recorded import DISTINCT

FOLDER = Path(__file__).parents[1] / "data" / "models"
FAMILIES = [
    "axk1",
    "deepseek_v2",
    "deepseek_v2_lite",
    "deepseek_v3",
    "deepseek_v32",
    "deepseek_v3_sharded",
    "deepseek_v3_yarn",
    "deepseek_v4",
    "glm4_moe_lite",
    "glm5",
    "gpt_oss",
    "kimi",
    "kimi_k25",
    "kimi_linear",
    "llama",
    "longcat_flash",
    "mistral4",
    "moonlight",
    "qwen3",
    "qwen3_moe",
    "qwen3_next",
    "smollm3",
    "youtu",
]
ORDERS = ("LBNHC", "BLNHC")
"""Latents have one head, and so the six orders are two layouts: layer-major and block-major."""
BLOCK_SIZE = 64
STEPS = 64
TOLERANCE = 1e-4  # of logits, relative to the largest of the position

PACKED = {"deepseek_v32", "deepseek_v4", "glm5", "gpt_oss", "kimi_linear", "qwen3_next"}
"""Families with several groups in one buffer, which therefore need a block to be one run of memory."""

HEADS = {"gpt_oss", "llama", "qwen3", "qwen3_moe", "qwen3_next", "smollm3"}
"""Families whose cache has several heads, so that all six orders differ."""

SAME_LAYERS = ("deepseek_v3_sharded", "deepseek_v3_yarn", "kimi", "kimi_k25")
"""Families whose layers are those of `deepseek_v3` with other numbers, rotary embeddings or names of weights."""

IN_CHUNKS = ("llama", "qwen3_moe")
"""Families whose prompts run in chunks by default; the `DISTINCT` ones do so in CI."""

families = pytest.mark.parametrize("family", FAMILIES)
WHOLE_PROMPTS = [
    ("llama", "BHLNC"),
]
IN_CI = [("deepseek_v2_lite", "LBNHC"), ("smollm3", "LHBNC")]
"""The `DISTINCT` families run in chunks, on block-major caches."""
LAYOUTS = [
    (family, order)
    if (family, order) in WHOLE_PROMPTS
    else further(family, order)
    if (family, order) in IN_CI
    else slow(family, order)
    for family in FAMILIES
    for order in (jaxkv.ORDERS if family in HEADS else ORDERS)
    if family not in PACKED or order[0] == "B"
]


def test_all_recordings_are_here():
    assert sorted(path.parent.name for path in FOLDER.glob("*/truth.npz")) == FAMILIES


@pytest.mark.parametrize("order", jaxkv.ORDERS)
def test_every_order_is_one_of_two_layouts(order):
    model, _ = load("deepseek_v3")
    assert model.layout(4, order=order) in [model.layout(4, order=other) for other in ORDERS]


@cache
def load(family):
    """A float32 model and its truth by name."""
    with np.load(FOLDER / family / "truth.npz") as recorded:
        return jaxkv.models.load(FOLDER / family, dtype="float32"), dict(recorded)


@partial(jax.jit, donate_argnums=1)
def prefill(model, cache, *batch):
    """Logits of all new tokens, [B, Q, vocab]; the library's own program gives those of the last."""
    cache, x = jaxkv.models.forward(model, cache, *batch)
    return cache, jaxkv.models.head(model, x)


@partial(jax.jit, donate_argnums=1)
def decode(model, cache, tokens, seq_lens, block_tables, slots):
    """The same of one new token, [B, 1, vocab]."""
    cache, logits = jaxkv.models.decode(model, cache, tokens[:, 0], seq_lens, block_tables, slots[:, 0])
    return cache, logits[:, None]


class Requests:
    """The recorded prompts as requests with blocks of their own, shuffled among NaN, and what the model answers."""

    def __init__(self, family, order="BLNHC", block_size=BLOCK_SIZE):
        self.model, self.truth = load(family)
        prompts, lengths = self.truth["prompts"], self.truth["prompt_lens"]
        self.prompts = [prompt[:length].tolist() for prompt, length in zip(prompts, lengths, strict=True)]
        self.tokens = [[] for _ in prompts]
        self.logits = [[] for _ in prompts]
        self.cached = np.zeros(len(prompts), np.int32)
        self.block_size, layout = block_size, self.model.layout(1, block_size, order)
        sizes = {"": block_size}
        if isinstance(layout, jaxkv.PackedLayout):
            sizes = {name: table.block_size for name, table in layout.tables.items()}
        needed = {name: -(-(lengths + STEPS) // size) for name, size in sizes.items()}
        blocks = np.random.default_rng(0).permutation(sum(counts.sum() for counts in needed.values()) + 2)
        free, self.tables = iter(blocks), {}
        for name, counts in needed.items():
            table = np.full((len(prompts), counts.max() + 1), np.iinfo(np.int32).max, np.int32)
            for row, count in zip(table, counts, strict=True):
                row[:count] = list(itertools.islice(free, count))
            self.tables[name] = table
        empty = self.model.cache(len(blocks), block_size, order)
        self.cache = jaxkv.KVCache(
            jnp.full(empty.buffer.nbytes, 0xFF, jnp.uint8).view(empty.buffer.dtype), empty.layout
        )

    def step(self, program, new, width):
        """One call of `program` with the tokens new[i] of each request, aligned to the end of the width."""
        count = np.asarray([len(ids) for ids in new])
        tokens = np.stack([np.pad(np.asarray(ids, np.int32), (width - len(ids), 0)) for ids in new])
        self.cached += count
        seq_lens = np.where(count, self.cached, 0)
        column = np.arange(width)
        positions = np.where(column >= width - count[:, None], seq_lens[:, None] - width + column, -1)
        tables = self.tables if len(self.tables) > 1 else self.tables[""]
        slots = slots_for(self.tables[""], positions, block_size=self.block_size)
        self.cache, logits = program(self.model, self.cache, tokens, seq_lens, tables, slots)
        for i, row in enumerate(np.asarray(logits)):
            self.logits[i] += list(row[width - count[i] :])
            if count[i] and self.cached[i] >= len(self.prompts[i]):
                self.tokens[i].append(int(row[-1].argmax()))

    def run(self, chunk, joins=(0, 0, 0, 0, 0)):
        """Request i joins at step joins[i], its prompt goes in by chunks, and it leaves with its last token."""
        for step in itertools.count():
            here = [step >= join and len(tokens) < STEPS for join, tokens in zip(joins, self.tokens, strict=True)]
            if step >= max(joins) and not any(here):
                return self
            todo = list(zip(here, self.prompts, self.cached, strict=True))
            new = [prompt[cached : cached + chunk] if joined else [] for joined, prompt, cached in todo]
            if any(new):
                self.step(prefill, new, chunk)
            new = [tokens[-1:] if joined else [] for joined, tokens in zip(here, self.tokens, strict=True)]
            if any(new):
                self.step(decode, new, 1)

    def run_prompts(self):
        """Computes all prompts whole, and the first token after each."""
        self.step(prefill, self.prompts, max(map(len, self.prompts)))
        return self

    def errors(self, i):
        """Errors of the logits of request i, at its positions so far, relative to the largest logit of each."""
        prompt = self.truth["logits"][i, : len(self.prompts[i])]
        logits = np.stack(self.logits[i])
        expected = np.concatenate((prompt, self.truth["step_logits"][i, 1 : len(self.tokens[i])]))
        assert logits.shape == expected.shape
        return np.abs(logits - expected).max(-1) / np.abs(expected).max(-1)

    def check(self, count=STEPS):
        """`count` tokens of each request are the recorded ones, and so are logits at every position."""
        assert self.tokens == self.truth["tokens"][:, :count].tolist()
        for i in range(len(self.prompts)):
            errors = self.errors(i)
            assert errors.max() < TOLERANCE, (i, int(errors.argmax()), errors.max())


@pytest.mark.parametrize(("family", "order"), LAYOUTS)
def test_whole_prompts_and_64_tokens(family, order):
    Requests(family, order).run(chunk=200).check()


@pytest.mark.parametrize("family", [SAME_LAYERS[0], *map(further, SAME_LAYERS[1:])])
def test_whole_prompts(family):
    Requests(family).run_prompts().check(count=1)


@pytest.mark.parametrize(
    "family", [name if name in IN_CHUNKS else further(name) if name in DISTINCT else slow(name) for name in FAMILIES]
)
def test_prompts_in_chunks_and_requests_that_join_and_leave_at_different_steps(family):
    Requests(family).run(chunk=48, joins=(10, 3, 0, 7, 5)).check()


@pytest.mark.slow  # the same code with other sizes
@pytest.mark.parametrize("family", sorted(PACKED - HEADS))
def test_packed_latents_in_blocks_of_another_size(family):
    """Orders do not change the layout of entries of one head in blocks that are one run of memory."""
    Requests(family, block_size=32).run(chunk=200).check()


@pytest.mark.slow
@families
def test_prompts_in_chunks_of_7(family):
    Requests(family).run(chunk=7).check()


@pytest.mark.slow
@families
def test_requests_join_at_very_different_steps(family):
    Requests(family).run(chunk=64, joins=(40, 3, 0, 17, 9)).check()


@pytest.mark.parametrize("family", [name if name in IN_CHUNKS else further(name) for name in FAMILIES])
def test_strict_programs_may_run_every_model(family):
    """A program may disable promotion of ranks and dtypes, and enable x64; models then still run."""
    config = jaxkv.models.ModelConfig.read(FOLDER / family)
    with jax.enable_x64(True), jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        model = jax.eval_shape(partial(jaxkv.models.random_model, config, dtype="bfloat16"))
        cache = jax.eval_shape(lambda: model.cache(4, BLOCK_SIZE))
        new, requests, tables = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((2, 7), (2,), (2, 3)))
        if len(model.tables) > 1:
            tables = dict.fromkeys(model.tables, tables)
        _, logits = jax.eval_shape(jaxkv.models.prefill, model, cache, new, requests, tables, new)
        assert logits.shape == (2, config.vocab_size)
        jax.eval_shape(jaxkv.models.decode, model, cache, requests, requests, tables, requests)


@pytest.mark.ci
def test_the_sparse_path_decides_logits():
    requests = Requests("deepseek_v32")
    config = requests.model.config
    everything = dataclasses.replace(config.indexer, topk=requests.tables[""].shape[1] * BLOCK_SIZE)
    attention = dataclasses.replace(config.attention, indexer=everything)
    requests.model = dataclasses.replace(requests.model, config=dataclasses.replace(config, attention=attention))
    topk = config.indexer.topk
    first, *_, last = map(requests.run_prompts().errors, range(len(requests.prompts)))
    assert len(first) < topk < len(last)
    assert first.max() < TOLERANCE  # so short that there is nothing to select
    assert last[:topk].max() < TOLERANCE < last[topk:].max()
