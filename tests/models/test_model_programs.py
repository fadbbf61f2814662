"""The two programs of a model: the cache is updated in place, and anything but a cache of the model is rejected."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import jaxkv
import jaxkv.models
from jaxkv.models import ContextParallel, DataParallel, TensorParallel
from jaxkv.models.layers.linear import linear
from ops.test_in_place import assert_in_place, described, instructions
from support.cases import each_value

# DeepSeek-V2-Lite but for its width: nothing may be as large as the cache but the cache.
DEEPSEEK_V2_LITE = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 27,
    "first_k_dense_replace": 1,
    "num_attention_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 64,
    "v_head_dim": 16,
    "intermediate_size": 64,
    "moe_intermediate_size": 16,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "topk_method": "greedy",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 163840,
    "rope_theta": 10000,
    "torch_dtype": "bfloat16",
}
DEEPSEEK_V32 = {
    **DEEPSEEK_V2_LITE,
    "architectures": ["DeepseekV32ForCausalLM"],
    "q_lora_rank": 32,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "topk_method": "noaux_tc",
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 64,
}
# Llama 3.1 8B but for its width.
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 64,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
}
# Qwen3-Next but for its width, with a quarter of the heads of its recurrent layers.
QWEN3_NEXT = {
    **LLAMA,
    "architectures": ["Qwen3NextForCausalLM"],
    "full_attention_interval": 2,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_value_head_dim": 128,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "num_experts": 64,
    "num_experts_per_tok": 6,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-6,
    "shared_expert_intermediate_size": 32,
}
# GPT-OSS but for its width, and with fewer experts.
GPT_OSS = {
    **{key: value for key, value in LLAMA.items() if key != "rope_theta"},
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "head_dim": 64,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_local_experts": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0},
    "sliding_window": 128,
}
CASES = [
    *((DEEPSEEK_V2_LITE, form) for form in ("bf16", "fp8_ds_mla")),
    *((DEEPSEEK_V32, form) for form in ("bf16", "fp8_ds_mla")),
    *((LLAMA, form) for form in ("bf16", "fp8")),
    (QWEN3_NEXT, "bf16"),
    (GPT_OSS, "bf16"),
]
BATCH, CHUNK, COLUMNS = 4, 16, 4
BLOCK_SIZE = 64  # models with states have much longer blocks by default, which attention loads whole


def describe(values, **options):
    """The model, without weights."""
    config = jaxkv.models.ModelConfig.from_json(values)
    return jax.eval_shape(lambda: jaxkv.models.random_model(config, **options))


def describe_cache(model, num_blocks):
    return jax.eval_shape(lambda: model.cache(num_blocks, BLOCK_SIZE))


def describe_batch(model, tokens):
    """The arguments of `prefill` or `decode` after the cache, for tokens of that shape."""
    table = described((tokens[0], COLUMNS), "int32")
    tables = table if len(model.tables) == 1 else dict.fromkeys(model.tables, table)
    return [described(tokens, "int32"), described(tokens[:1], "int32"), tables, described(tokens, "int32")]


@each_value(("case", "program"), CASES, ["prefill", "decode"], default=2)
def test_the_cache_is_updated_in_place(case, program):
    values, entry_format = case
    # A few layers suffice: the others are the same, and XLA compiles each.
    model = describe({**values, "num_hidden_layers": 3}, entry_format=entry_format)
    one = describe_cache(model, 1).layout
    cache = describe_cache(model, 2**31 // one.nbytes)
    tokens = (BATCH,) if program == "decode" else (BATCH, CHUNK)
    batch = describe_batch(model, tokens)
    function = getattr(jaxkv.models, program)

    def step(cache, model, *batch):
        return function(model, cache, *batch)

    assert_in_place(step, [cache, model, *batch], donate_argnums=0)


def moved(function, *arguments, sizes) -> set[str]:
    """The operations of the compiled program whose results have as many elements as one of `sizes`."""
    text = jax.jit(function, donate_argnums=0).lower(*arguments).compile().as_text()
    found = {operation for operation, count in instructions(text) if count in sizes}
    assert "parameter" in found, "the weights themselves are not seen: the text of compiled programs has changed"
    return found - {"parameter", "bitcast", "get-tuple-element"}


# Sizes of weights are no sizes of activations.  In float32: on CPUs, XLA converts bf16 weights.
SIZES = {
    "num_hidden_layers": 4,
    "hidden_size": 272,
    "intermediate_size": 272,
    "moe_intermediate_size": 48,
    "qk_nope_head_dim": 20,
    "v_head_dim": 20,
}


WITHOUT_COPIES = {
    "v2": (DEEPSEEK_V2_LITE, 1, 4),
    "v32": (DEEPSEEK_V32, 1, 4),
    "llama": (LLAMA, 1, 4),
    "qwen3_next": (QWEN3_NEXT, 1),  # with one request, XLA has copied the cache to read old states late
}


@pytest.mark.parametrize(
    ("values", "batch"),
    [
        pytest.param(values, batch, id=f"{name}-{batch}", marks=() if batch == 1 else pytest.mark.ci)
        for name, (values, *batches) in WITHOUT_COPIES.items()
        for batch in batches
    ],
)
def test_no_weight_is_copied(values, batch):
    low_rank = {"q_lora_rank": 40} if values is DEEPSEEK_V32 else {}
    model = describe({**values, **SIZES, **low_rank}, dtype="float32")
    cache = describe_cache(model, 4096)
    arguments = describe_batch(model, (batch,))

    def step(cache, model, *arguments):
        return jaxkv.models.decode(model, cache, *arguments)

    # Vectors are small, also those with more axes, and may have as many elements as activations.
    sizes = {weight.size for weight in jax.tree.leaves(model.params) if weight.ndim > 1 and min(weight.shape) > 1}
    assert not moved(step, cache, model, *arguments, sizes=sizes)
    assert_in_place(step, [cache, model, *arguments], donate_argnums=0)


def test_the_test_of_weights_finds_copies():
    def scanned(x, weights):
        return jax.lax.scan(lambda x, weight: (linear(x, weight), None), x, weights)[0]

    x, weights = described((4, 272), "float32"), described((3, 272, 272), "float32")
    assert "dynamic-slice" in moved(scanned, x, weights, sizes={272 * 272})


@pytest.mark.parametrize("values", [DEEPSEEK_V2_LITE, QWEN3_NEXT], ids=["v2", "qwen3_next"])
def test_each_kind_of_layer_is_lowered_once(values):
    model = describe(values)
    arguments = describe_batch(model, (BATCH,))
    text = jax.jit(jaxkv.models.decode).lower(model, describe_cache(model, 4), *arguments).as_text()
    assert text.count("func.func private @block") == 2
    assert text.count("call @block") == values["num_hidden_layers"]


def test_main_and_indexer_entries_lie_in_one_block():
    layout = describe(DEEPSEEK_V32, entry_format="fp8_ds_mla").layout(16)
    assert {group.strides.block for group in layout.values()} == {27 * 64 * (656 + 132)}


@pytest.mark.parametrize(
    ("values", "tokens", "parallel", "called"),
    [
        (DEEPSEEK_V2_LITE, 17, None, "prefill_mla"),
        (DEEPSEEK_V2_LITE, 16, None, "decode_mla"),  # 16 x (2 x 512 - 16 - 16) < 512 x (16 + 16)
        (DEEPSEEK_V2_LITE, 17, "tensor", "prefill_mla"),
        (DEEPSEEK_V2_LITE, 17, "data", "prefill_mla"),
        (DEEPSEEK_V2_LITE, 200, "context", "decode_mla"),
        (DEEPSEEK_V32, 200, None, "decode_mla_sparse"),
        (LLAMA, 200, None, "decode_kv"),
    ],
)
def test_keys_and_values_are_expanded_if_new_tokens_are_many(values, tokens, parallel, called, monkeypatch):
    kinds = {"tensor": TensorParallel, "data": DataParallel, "context": ContextParallel}
    mesh = jax.make_mesh((1,), ("x",), devices=jax.devices()[:1])
    model = describe(values, parallel=kinds[parallel](mesh, "x") if parallel else None)
    names = []

    def record(name):
        method = getattr(type(model.parallel), name)

        def run(self, *args, **options):
            names.append(name)
            return method(self, *args, **options)

        monkeypatch.setattr(type(model.parallel), name, run)

    for name in ("prefill_mla", "decode_mla", "decode_mla_sparse", "decode_kv"):
        record(name)
    batch = [described(shape, "int32") for shape in ((2, tokens), (2,), (2, 8), (2, tokens))]
    jax.eval_shape(jaxkv.models.prefill, model, describe_cache(model, 16), *batch)
    # Of the last layer, a prefill computes the last token alone, which is decoded.
    assert set(names) == ({called, "decode_mla"} if called == "prefill_mla" else {called})


class TestWrongCaches:
    def call(self, model, cache):
        batch = [described(shape, "int32") for shape in ((2,), (2,), (2, 4), (2,))]
        return jax.eval_shape(jaxkv.models.decode, model, cache, *batch)

    def test_of_too_few_layers(self):
        model = describe(DEEPSEEK_V2_LITE)
        layout = jaxkv.CacheLayout(num_layers=26, num_blocks=4, block_size=64, entry=jaxkv.MLAEntry("bf16"))
        with pytest.raises(ValueError, match=r"`cache` has 26 layers: expected the model's 27"):
            self.call(model, jaxkv.KVCache(described((layout.size,)), layout))

    def test_without_room_for_the_indexers_keys(self):
        layout = describe(DEEPSEEK_V2_LITE).layout(4)
        with pytest.raises(ValueError, match=r"`cache` has no room for the indexer's keys"):
            self.call(describe(DEEPSEEK_V32), jaxkv.KVCache(described((layout.size,)), layout))

    def test_of_other_entries(self):
        layout = describe(LLAMA).layout(4)
        latents = jaxkv.CacheLayout(num_layers=32, num_blocks=4, block_size=64, entry=jaxkv.MLAEntry("bf16"))
        with pytest.raises(ValueError, match=r"`cache` has entries MLAEntry.*: expected KVEntry.*'bf16'"):
            self.call(describe(LLAMA), jaxkv.KVCache(described((latents.size,)), latents))
        quantised = describe(LLAMA, entry_format="fp8").layout(4)
        with pytest.raises(ValueError, match=r"`cache` has entries KVEntry.*'fp8'.*: expected KVEntry.*'bf16'"):
            self.call(describe(LLAMA), jaxkv.KVCache(described((quantised.size,), "uint8"), quantised))
        fewer = replace(layout, num_heads=4)
        with pytest.raises(ValueError, match=r"`k` .*8.*the cache's heads"):
            self.call(describe(LLAMA), jaxkv.KVCache(described((fewer.size,)), fewer))

    def test_no_cache(self):
        with pytest.raises(ValueError, match=r"`cache` is a list: expected a KVCache"):
            self.call(describe(DEEPSEEK_V2_LITE), [jnp.zeros(3)])
