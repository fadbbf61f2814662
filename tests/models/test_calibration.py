"""Scales of fp8 entries: from checkpoints, and from prompts; with large latents, they matter."""

import json
import re
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import jaxkv
from jaxkv import models, serving
from jaxkv_kernels.addressing import slots_for
from models.checkpoints.mtp import with_mtp
from support.cases import further, slow
from support.compare import assert_same_bits
from support.many_devices import mesh_of, on_several_devices
from support.recorded import FOLDER, recorded

FILE = "model.safetensors"
ATTENTION = "model.layers.{}.self_attn."
BLOCK = 64
LARGE = 2000.0
"""Norms of latents, and weights of values, are multiplied by this, so that entries exceed 448."""


def checkpoint(folder, family, change=lambda weights: None, **config):
    """A copy of a recorded checkpoint with other weights and keys of config.json."""
    shutil.copytree(FOLDER / family, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("truth.npz"))
    weights = safetensors.numpy.load_file(folder / FILE)
    change(weights)
    safetensors.numpy.save_file(weights, folder / FILE)
    if config:
        values = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**values, **config}))
    return folder


def enlarge(weights):
    """Makes latents, or values, large; the products that read them become as much smaller."""
    latent = any("kv_b_proj" in name for name in weights)
    larger, smaller = ("kv_a_layernorm", "kv_b_proj") if latent else ("self_attn.v_proj", "self_attn.o_proj")
    for name, weight in weights.items():
        if f"{larger}.weight" in name:
            weights[name] = weight * np.float32(LARGE)
        if f"{smaller}.weight" in name:
            weights[name] = weight / np.float32(LARGE)


def prompts(family):
    return [prompt for prompt, _ in recorded(family)]


def logits(model, prompt):
    """Float64 [length, vocab]."""
    length = len(prompt)
    blocks = -(-length // BLOCK)
    tables = jnp.arange(blocks)[None]
    slots = slots_for(tables, jnp.arange(length)[None], block_size=BLOCK)
    tokens = jnp.asarray([prompt])
    _, x = jax.jit(models.forward)(model, model.cache(blocks), tokens, jnp.asarray([length]), tables, slots)
    return np.asarray(models.head(model, x)[0], np.float64)


def error(model, right, prompt):
    """The median over positions of the relative error of logits."""
    found = logits(model, prompt)
    return np.median(np.linalg.norm(found - right, axis=-1) / np.linalg.norm(right, axis=-1))


@pytest.mark.parametrize(
    "family", [further("youtu"), slow("deepseek_v3"), slow("deepseek_v32"), slow("longcat_flash"), "llama"]
)
def test_calibrated_scales_beat_scale_1_on_a_model_with_large_entries(family, tmp_path):
    folder = checkpoint(tmp_path, family, enlarge)
    short, *_, long = sorted(prompts(family), key=len)
    right = logits(models.load(folder, dtype="float32"), long)
    model = models.load(folder, dtype="float32", entry_format="fp8")
    # Not the prompt that is measured.
    calibrated = models.calibrate(model, [short, *prompts(family)[1:3]])
    usual = models.load(FOLDER / family, dtype="float32", entry_format="fp8")
    usual_error = error(usual, logits(models.load(FOLDER / family, dtype="float32"), long), long)
    saturated, found = error(model, right, long), error(calibrated, right, long)
    print(f"{family}: scale 1 {saturated:.4f}, calibrated {found:.4f}; of the recorded weights {usual_error:.4f}")
    assert found < saturated / 4
    # The entries' precision is all that is left: it is what scale 1 gives the recorded weights.
    assert found < 2 * usual_error


def expected(model, prompt):
    """The largest magnitudes in the unquantised cache of a prompt: [layers] or, of keys and values, [layers, heads]."""
    blocks = -(-len(prompt) // BLOCK)
    tables, index = jnp.arange(blocks)[None], jnp.asarray([0, len(prompt)])
    slots = slots_for(tables, jnp.arange(len(prompt))[None], block_size=BLOCK)
    cache, _ = models.forward(
        model, model.cache(blocks), jnp.asarray([prompt]), jnp.asarray([len(prompt)]), tables, slots
    )
    options = {"total": len(prompt), "dtype": "float32"}
    gather = jaxkv.gather_kv if isinstance(cache.layout.entry, jaxkv.KVEntry) else jaxkv.gather_mla
    parts = [gather(cache, tables, index, layer=layer, **options) for layer in range(cache.layout.num_layers)]
    return [np.stack([np.abs(np.asarray(part)).max((0, -1)) for part in of]) for of in zip(*parts, strict=True)]


@pytest.mark.parametrize("family", [further("youtu"), "llama"])
def test_scales_have_room_for_twice_the_largest_values(family):
    model = models.load(FOLDER / family, dtype="float32", entry_format="fp8")
    prompt = prompts(family)[-1]
    keys, values = expected(models.load(FOLDER / family, dtype="float32"), prompt)
    right = {"k_scale": keys, "v_scale": values} if family == "llama" else {"kv_scale": np.maximum(keys, values)}
    exact = models.calibrate(model, [prompt], powers_of_two=False).params["entry_scales"]
    found = models.calibrate(model, [prompt]).params["entry_scales"]
    assert found.keys() == exact.keys() == right.keys()
    for name, largest in right.items():
        np.testing.assert_allclose(exact[name], 2 * largest / 448, rtol=1e-5)
        assert (np.frexp(found[name])[0] == 0.5).all()  # powers of two
        assert (found[name] >= exact[name]).all()
        assert (found[name] < 2 * exact[name]).all()


def test_calibration_changes_the_scales_only():
    model = models.load(FOLDER / "deepseek_v3", entry_format="fp8")
    calibrated = models.calibrate(model, [[1, 2, 3]])
    assert jax.tree.structure(model) == jax.tree.structure(calibrated)  # no retrace
    for name, weights in model.params.items():
        same = jax.tree.all(jax.tree.map(np.array_equal, weights, calibrated.params[name]))
        assert same == (name != "entry_scales")
    assert models.fingerprint(model) != models.fingerprint(calibrated)
    assert models.fingerprint(calibrated) == models.fingerprint(models.calibrate(model, [[1, 2, 3]]))


@pytest.mark.ci
def test_the_layer_of_multi_token_prediction_has_a_scale(tmp_path):
    folder, weights = with_mtp(tmp_path)
    name = ATTENTION.format(3) + "kv_a_layernorm.weight"
    weights[name] = weights[name] * np.float32(2.0**12)
    safetensors.numpy.save_file(weights, folder / FILE)
    model = models.load(folder, entry_format="fp8", mtp=True)
    assert model.params["entry_scales"]["kv_scale"].tolist() == [1] * 4
    *usual, last = models.calibrate(model, [prompts("deepseek_v3")[-1]]).params["entry_scales"]["kv_scale"].tolist()
    without = models.calibrate(models.load(folder, entry_format="fp8"), [prompts("deepseek_v3")[-1]])
    assert usual == without.params["entry_scales"]["kv_scale"].tolist()
    assert last >= 2**11 * max(usual)


@pytest.mark.slow  # the engine does not know of scales
def test_the_engine_serves_calibrated_models(tmp_path):
    folder = checkpoint(tmp_path, "youtu", enlarge)
    served = models.calibrate(models.load(folder, entry_format="fp8"), prompts("youtu")[:1])
    tokens = []
    for chunk in (16, 64):  # the entries of a prompt are the same however it is divided
        engine = serving.Engine(served, num_blocks=20, block_size=16, max_requests=2, chunk=chunk)
        requests = [engine.submit(prompt, max_tokens=4, stop=()) for prompt in prompts("youtu")[:2]]
        list(engine.run())
        tokens.append([request.generated for request in requests])
    assert tokens[0] == tokens[1]


@pytest.mark.ci
@on_several_devices
@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("llama", "TensorParallel"),
        slow("youtu", "DataParallel"),  # each device does what one does
        slow("llama", "ContextParallel"),
        slow("deepseek_v32", "ExpertParallel"),
    ],
)
def test_scales_are_those_of_one_device(family, kind, tmp_path):
    folder = checkpoint(tmp_path, family, enlarge)
    options = {"dtype": "float32", "entry_format": "fp8"}
    parallel = getattr(models, kind)(mesh_of(2), "x")
    one, many = (models.load(folder, parallel=division, **options) for division in (None, parallel))
    some = prompts(family)[:3]
    one, many = models.calibrate(one, some), models.calibrate(many, some)
    scales = one.params["entry_scales"]
    assert max(scale.max() for scale in scales.values()) > 1
    for name, scale in scales.items():
        assert_same_bits(many.params["entry_scales"][name], scale)
    length = 50
    rows = parallel.divisions_of_rows
    tokens = jnp.tile(jnp.asarray(some[2][:length]), (rows, 1))
    tables, lengths = jnp.zeros((rows, 1), jnp.int32), jnp.full(rows, length)
    slots = jnp.tile(jnp.arange(length), (rows, 1))
    _, found = jax.jit(models.prefill)(many, many.cache(1), tokens, lengths, tables, slots)
    _, right = jax.jit(models.prefill)(one, one.cache(1), tokens[:1], lengths[:1], tables[:1], slots[:1])
    assert np.linalg.norm(found[:1] - right) < 1e-4 * np.linalg.norm(right)


SPELLINGS = {
    "vLLM": ("attn.k_scale", "attn.v_scale"),
    "compressed-tensors": ("k_scale", "v_scale"),
    "old compressed-tensors": ("k_proj.output_scale", "v_proj.output_scale"),
    "Model Optimizer": ("k_proj.k_scale", "v_proj.v_scale"),
    "fused projections": ("qkv_proj.k_scale", "qkv_proj.v_scale"),
    "fused projections of Qwen3": ("qkqkv_proj.k_scale", "qkqkv_proj.v_scale"),
    "Hunyuan": ("k_cache.scale", "v_cache.scale"),
    "another projection's": ("v_proj.k_scale", "k_proj.v_scale"),
    "vLLM's latents": ("mla_attn.mla_attn.k_scale", "mla_attn.mla_attn.v_scale"),
    "both": ("kv_scale",),
}


@pytest.mark.parametrize(
    ("family", "spelling"),
    [("deepseek_v3", "compressed-tensors"), ("deepseek_v3", "both"), *(("llama", spelling) for spelling in SPELLINGS)],
)
def test_scales_of_checkpoints_are_used(family, spelling, tmp_path):
    names = SPELLINGS[spelling]

    def add(weights):
        for layer in (0, 1):
            for i, name in enumerate(names):
                shape = [(), (1,)][layer]
                weights[ATTENTION.format(layer) + name] = np.full(
                    shape, 2.0 ** -(1 + i + 4 * layer), ml_dtypes.bfloat16
                )
            for name in ("q_scale", "q.scale", "prob_output_scale", "q_proj.q_scale"):  # unused
                weights[ATTENTION.format(layer) + name] = np.ones((), np.float16)

    folder = checkpoint(tmp_path, family, add)
    scales = models.load(folder, entry_format="fp8").params["entry_scales"]
    keys = [2.0**-1, 2.0**-5, 1.0]
    values = keys if spelling == "both" else [2.0**-2, 2.0**-6]
    if family == "llama":
        assert scales["k_scale"].tolist() == [[scale] * 2 for scale in keys[:2]]
        assert scales["v_scale"].tolist() == [[scale] * 2 for scale in values[:2]]
    else:
        assert scales["kv_scale"].tolist() == keys  # 1 without a scale
    with pytest.warns(UserWarning, match=r"\A\S+safetensors: \d scales of cached entries, .* 'f32' have none\Z"):
        plain = models.load(folder)
    assert plain.params["entry_scales"] == {}
    assert models.fingerprint(plain) == models.fingerprint(models.load(FOLDER / family))


def test_scales_per_head(tmp_path):
    def add(weights):
        weights[ATTENTION.format(1) + "k_scale"] = np.asarray([[0.5], [0.25]], np.float32)
        weights[ATTENTION.format(1) + "v_scale"] = np.asarray([2.0, 4.0], np.float32)
        weights[ATTENTION.format(1) + "q_scale"] = np.ones(4, np.float32)  # unused

    scheme = {"num_bits": 8, "type": "float", "strategy": "attn_head", "dynamic": False, "symmetric": True}
    only_entries = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": scheme}
    folder = checkpoint(tmp_path, "llama", add, quantization_config=only_entries)
    scales = models.load(folder, entry_format="fp8").params["entry_scales"]
    assert scales["k_scale"].tolist() == [[1, 1], [0.5, 0.25]]
    assert scales["v_scale"].tolist() == [[1, 1], [2, 4]]


KV_SCALES = {"k_scale": np.float32(1), "v_scale": np.float32(1)}


@pytest.mark.parametrize(
    ("family", "scales", "words"),
    [
        ("llama", {"k_scale": np.float32(1)}, ["k_scale", "only scale of its layer", "expected a v_scale"]),
        ("llama", {"v_scale": np.float32(1)}, ["v_scale", "only scale of its layer", "expected a k_scale"]),
        ("deepseek_v3", {"v_scale": np.float32(1)}, ["v_scale", "only scale of its layer", "expected a k_scale"]),
        ("llama", {**KV_SCALES, "k_scale": np.float32(0)}, ["k_scale", "holds 0.0", "positive"]),
        ("deepseek_v3", {"k_scale": np.float32(np.inf)}, ["k_scale", "holds inf", "finite"]),
        ("deepseek_v3", {"k_scale": np.float32(np.nan)}, ["k_scale", "holds nan", "finite"]),
        ("llama", {**KV_SCALES, "k_scale": np.ones(3, np.float32)}, ["shape (3,)", "1 value, or one per head, 2"]),
        ("deepseek_v3", {"k_scale": np.int64(1)}, ["k_scale", "has dtype I64", "BF16, F16, F32"]),
        ("deepseek_v3", {"k_scale": np.ones(4, np.float32)}, ["shape (4,)", "expected 1 value"]),
        ("llama", {**KV_SCALES, "attn.k_scale": np.float32(1)}, ["k_scale", "is the same scale as", "attn.k_scale"]),
        ("llama", {**KV_SCALES, "kv_scale": np.float32(1)}, ["kv_scale", "is the same scale as", "self_attn.k_scale"]),
        ("llama", {**KV_SCALES, "k_zero_point": np.float32(0)}, ["does not have", "k_zero_point"]),
    ],
)
def test_wrong_scales_are_rejected(family, scales, words, tmp_path):
    def add(weights):
        weights |= {ATTENTION.format(0) + name: np.asarray(scale) for name, scale in scales.items()}

    folder = checkpoint(tmp_path, family, add)
    with pytest.raises(ValueError, match=".*".join(map(re.escape, [str(folder / FILE)]))) as error:
        models.load(folder, entry_format="fp8")
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value), error.value


def test_a_scale_that_the_index_does_not_name_is_rejected(tmp_path):
    folder = shutil.copytree(FOLDER / "deepseek_v3_sharded", tmp_path, dirs_exist_ok=True)
    name, shard = ATTENTION.format(0) + "k_scale", folder / "model-00001-of-00002.safetensors"
    weights = safetensors.numpy.load_file(shard)
    safetensors.numpy.save_file({**weights, name: np.ones(1, np.float32)}, shard)
    with pytest.raises(ValueError, match=rf"index\.json: weight '{re.escape(name)}' is not where the index expects it"):
        models.load(folder, entry_format="fp8")


def test_what_cannot_be_calibrated_is_rejected():
    plain, model = (models.load(FOLDER / "deepseek_v3", entry_format=form) for form in (None, "fp8"))
    with pytest.raises(ValueError, match="`model` has entries of format 'f32', which has no scales: expected 'fp8'"):
        models.calibrate(plain, [[1]])
    with pytest.raises(ValueError, match="`prompts` is empty"):
        models.calibrate(model, [])
    with pytest.raises(ValueError, match=r"`prompts\[1\]` is empty: expected one or more token ids from 0 to 96"):
        models.calibrate(model, [[1], []])
    with pytest.raises(ValueError, match=r"`prompts\[0\]` has token id 97"):
        models.calibrate(model, [[97]])
    broken = models.Model(jax.tree.map(lambda weight: weight * jnp.nan, model.params), model.config, "fp8")
    with pytest.raises(ValueError, match="`prompts`: entries of layer 0 are inf or NaN"):
        models.calibrate(broken, [[1]])
