"""Drafts of the MTP layer: equal to a NumPy oracle; tokens with drafts are those without, and so is their law."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from jaxkv import models, serving
from jaxkv.models.speculative import accept
from models.checkpoints.mtp import FOLDER, LAYER, with_mtp
from models.checkpoints.published import PUBLISHED
from models.sampling_oracle import oracle as remaining
from support.compare import assert_close

BLOCK = 16


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return with_mtp(tmp_path_factory.mktemp("mtp"))


def norm(x, weight):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * weight


def swiglu(x, weights, prefix):
    gate, up, down = (weights[f"{prefix}.{name}_proj.weight"] for name in ("gate", "up", "down"))
    gated = x @ gate.T
    return (gated / (1 + np.exp(-gated)) * (x @ up.T)) @ down.T


def rotated(x, positions):
    """Pairs (x[2i], x[2i + 1]) turned by position / 10000 ** (2i / 8)."""
    turned = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * positions[:, None] * 1e4 ** (-np.arange(0, 8, 2) / 8))
    return np.stack([turned.real, turned.imag], -1).reshape(x.shape)


def attention(x, w):
    count = len(x)
    positions = np.arange(count)
    q = norm(x @ w["q_a_proj"].T, w["q_a_layernorm"]) @ w["q_b_proj"].T
    q = q.reshape(count, 4, 24).transpose(1, 0, 2)
    latent, k_pe = np.split(x @ w["kv_a_proj_with_mqa"].T, [128], axis=-1)
    kv = (norm(latent, w["kv_a_layernorm"]) @ w["kv_b_proj"].T).reshape(count, 4, 28).transpose(1, 0, 2)
    scores = q[..., :16] @ kv[..., :16].swapaxes(1, 2) + rotated(q[..., 16:], positions) @ rotated(k_pe, positions).T
    scores = np.where(np.tri(count, dtype=bool), scores / np.sqrt(24), -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    out = p / p.sum(-1, keepdims=True) @ kv[..., 16:]
    return out.transpose(1, 0, 2).reshape(count, -1) @ w["o_proj"].T


def mixture(x, w):
    """3 of 12 experts by sigmoid scores, from the best 2 of 3 groups; weights sum to 2.5."""
    scores = 1 / (1 + np.exp(-x @ w["mlp.gate.weight"].T))
    out = swiglu(x, w, "mlp.shared_experts")
    for t, (row, biased) in enumerate(zip(scores, scores + w["mlp.gate.e_score_correction_bias"], strict=True)):
        groups = np.argsort([-np.sort(group)[-2:].sum() for group in biased.reshape(3, 4)])[:2]
        allowed = [e for e in range(12) if e // 4 in groups]
        chosen = sorted(allowed, key=lambda e: -biased[e])[:3]
        out[t] += sum(2.5 * row[e] / row[chosen].sum() * swiglu(x[t], w, f"mlp.experts.{e}") for e in chosen)
    return out


def oracle(weights, hidden, tokens):
    """The MTP layer in float64: hidden [n, 48], the tokens after each [n]; y [n, 48] and logits [n, 97]."""
    weights = {name: array.astype(np.float64) for name, array in weights.items()}
    w = {name.removeprefix(LAYER): array for name, array in weights.items() if name.startswith(LAYER)}
    embedded = norm(w["embed_tokens.weight"][tokens], w["enorm.weight"])
    x = np.concatenate([embedded, norm(hidden, w["hnorm.weight"])], -1) @ w["eh_proj.weight"].T
    part = {name.split(".")[1]: array for name, array in w.items() if name.startswith("self_attn.")}
    x = x + attention(norm(x, w["input_layernorm.weight"]), part)
    x = x + mixture(norm(x, w["post_attention_layernorm.weight"]), w)
    y = norm(x, w["shared_head.norm.weight"])
    return y, y @ w["shared_head.head.weight"].T


def test_the_layer_and_its_drafts_equal_the_oracle(checkpoint):
    folder, weights = checkpoint
    model = models.load(folder, mtp=True)
    rng, count, drafts = np.random.default_rng(1), 21, 3
    hidden, tokens = rng.standard_normal((count, 48)), rng.integers(0, 97, count)
    table = jnp.asarray([[2, 0]])

    def slots(first, end):
        positions = np.arange(first, end)
        return jnp.asarray(np.asarray([2, 0])[positions // BLOCK] * BLOCK + positions % BLOCK, jnp.int32)[None]

    def arrays(first, end):
        return jnp.asarray(hidden[None, first:end], jnp.float32), jnp.asarray(tokens[None, first:end], jnp.int32)

    cache, y = models.mtp_forward(model, model.cache(3, BLOCK), *arrays(0, 13), jnp.asarray([13]), table, slots(0, 13))
    right = oracle(weights, hidden, tokens)[0]
    assert_close(y[0], right[:13], roundings=256)
    _, found = models.draft(
        model, cache, *arrays(13, count), jnp.asarray([count]), table, slots(13, count + drafts - 1)
    )
    for i in range(drafts):  # the layer's own output and draft take the place of the model's
        y, logits = oracle(weights, hidden, tokens)
        best = np.sort(logits[-1])[::-1]
        assert best[0] - best[1] > 1e-4
        assert found[0, i] == logits[-1].argmax()
        hidden, tokens = np.concatenate([hidden, y[-1:]]), np.append(tokens, logits[-1].argmax())


@pytest.mark.ci
def test_hidden_states_are_those_after_the_final_norm(checkpoint):
    folder, weights = checkpoint
    model = models.load(folder, mtp=True)
    batch = jnp.asarray([[5, 7, 11]]), jnp.asarray([3]), jnp.asarray([[1]]), jnp.asarray([[16, 17, 18]])
    _, x = models.forward(model, model.cache(2, BLOCK), *batch)
    options = models.SamplingBatch.of([models.Sampling()])
    _, hidden, sampled, _ = models.verify(model, model.cache(2, BLOCK), *batch, options)
    right = norm(np.asarray(x, np.float64), weights["model.norm.weight"])
    assert_close(hidden, right, roundings=64)
    np.testing.assert_array_equal(sampled, (right @ weights["lm_head.weight"].T).argmax(-1))


@pytest.mark.parametrize(
    "sampling",
    [models.Sampling(0.8), models.Sampling(1.3, 0.8), models.Sampling(1.3, top_k=4), models.Sampling(1.3, min_p=0.2)],
    ids=["all", "top_p", "top_k", "min_p"],
)
def test_accepted_and_rejected_drafts_together_have_the_models_distribution(sampling):
    """Chi-square of the tokens of 20,000 seeds, fixed ones, after 1 token and 2 drafts of a vocabulary of 6."""
    count, vocabulary = 20_000, 6
    logits = np.random.default_rng(0).standard_normal((3, vocabulary)).astype(np.float32)
    drafts = logits.argmax(-1)[:2]
    tokens = jnp.tile(jnp.asarray([0, *drafts], jnp.int32), (count, 1))
    options = models.SamplingBatch.of([replace(sampling, seed=seed) for seed in range(count)])
    many = jnp.broadcast_to(logits, (count, *logits.shape))
    sampled, accepted = map(np.asarray, accept(many, tokens, tokens < 0, jnp.full(count, 10, jnp.int32), options))
    reached = np.ones(count, bool)
    for i, row in enumerate(logits):
        right, law = remaining(row, sampling)
        p = np.zeros(vocabulary)
        p[right] = law
        seen = np.bincount(sampled[reached, i], minlength=vocabulary)
        assert not seen[p == 0].any()
        expected = p[p > 0] * reached.sum()
        chi_square = ((seen[p > 0] - expected) ** 2 / expected).sum()
        assert chi_square < 20.5, (i, chi_square)  # exceeded by chance once in 1,000, with 5 degrees of freedom
        assert (accepted[reached] >= i).all()
        if i < 2:
            reached &= sampled[:, i] == drafts[i]
            assert 1_000 < reached.sum() < count
    assert ((accepted == 2) == reached).all()


def test_an_mtp_layer_that_is_not_there_or_differs_is_rejected(checkpoint, tmp_path):
    with pytest.raises(ValueError, match="`mtp` is True, and `num_nextn_predict_layers` is 0: expected"):
        models.load(FOLDER, mtp=True)
    model = models.load(FOLDER)
    with pytest.raises(ValueError, match="no layer of multi-token prediction"):
        serving.Engine(model, num_blocks=4, drafts=serving.MTP())
    for wrong in (0, -1, 1.5):
        with pytest.raises(ValueError, match=f"`num_speculative_tokens` is {wrong}"):
            serving.MTP(wrong)
    folder, weights = with_mtp(tmp_path)
    name = f"{LAYER}embed_tokens.weight"
    safetensors.numpy.save_file({**weights, name: weights[name] + 1}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=f"'{name}' differs from 'model.embed_tokens.weight'"):
        models.load(folder, mtp=True)
    without = {name: array for name, array in weights.items() if "eh_proj" not in name}
    safetensors.numpy.save_file(without, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"lacks weights .*eh_proj"):
        models.load(folder, mtp=True)


@pytest.mark.parametrize("name", ["DeepSeek-V3 and R1", "DeepSeek-V3.2"])
def test_strict_programs_may_draft_and_verify(name):
    """At published sizes, with V3.2's indexer keys in the MTP layer's part of the cache, too."""
    config = models.ModelConfig.from_json(PUBLISHED[name])
    with jax.enable_x64(True), jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        model = jax.eval_shape(partial(models.random_model, config, mtp=True))
        cache = jax.eval_shape(lambda: model.cache(4))
        new, slots, lengths, tables = (jax.ShapeDtypeStruct(n, jnp.int32) for n in ((2, 3), (2, 4), (2,), (2, 2)))
        options = models.SamplingBatch.of([models.Sampling()] * 2)
        cache, hidden, *_ = jax.eval_shape(models.verify, model, cache, new, lengths, tables, new, options)
        _, drafts = jax.eval_shape(models.draft, model, cache, hidden, new, lengths, tables, slots)
    assert drafts.shape == (2, 2)


def test_models_without_mtp_have_no_layer_for_it(checkpoint):
    with_layer, without = (models.load(checkpoint[0], mtp=mtp) for mtp in (True, False))
    assert with_layer.layout(4).num_layers == without.layout(4).num_layers + 1
    assert "mtp" not in without.params
    with pytest.raises(ValueError, match="`cache` has 3 layers: expected the model's 4"):
        with_layer.check_cache(without.cache(4))
