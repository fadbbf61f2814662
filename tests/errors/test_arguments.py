"""Wrong static arguments, caches and entries: each is a ValueError that names the argument and what is expected."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from errors.calls import (
    DISPATCHED,
    OF_ANY_CACHE,
    OF_ONE_CACHE,
    OPERATIONS,
    SIZES,
    block_tables_from_csr,
    cases,
    check,
    decode_kv,
    decode_mla,
    decode_mla_sparse,
    decode_mla_sparse_of_two,
    gather_indexer_k,
    gather_kv,
    gather_mla,
    indexer_logits,
    merge_states,
    positions_to_slots,
    prefill_kv,
    prefill_mla,
    read_kv,
    read_mla,
    select_experts,
    select_topk,
    shared,
    swizzle_scales,
    write_kv,
    write_mla,
)
from jaxkv.ops import OPERATIONS as DECLARED


def test_every_declared_operation_is_called_here():
    declared = {operation.name for operation in DECLARED}
    assert {*DISPATCHED, "plan_decode"} == declared | {
        "select_slots",
        "prefill_kv",
        "prefill_mla",
    }  # plans: test_plan.py


SCALES = [
    (
        "write without kv_scale",
        lambda a: write_mla(a, cache=a.mla_fp8),
        ["`kv_scale`", "None", "'fp8'", "expected a number"],
    ),
    ("decode without kv_scale", lambda a: decode_mla(a, cache=a.mla_fp8), ["`kv_scale`", "None", "'fp8'"]),
    ("sparse without kv_scale", lambda a: decode_mla_sparse(a, cache=a.mla_fp8), ["`kv_scale`", "None", "'fp8'"]),
    ("gather without kv_scale", lambda a: gather_mla(a, cache=a.mla_fp8), ["`kv_scale`", "None", "'fp8'"]),
    ("read without kv_scale", lambda a: read_mla(a, cache=a.mla_fp8), ["`kv_scale`", "None", "'fp8'"]),
    ("read without v_scale", lambda a: read_kv(a, cache=a.kv_fp8, k_scale=1.0), ["`v_scale`", "None", "'fp8'"]),
    ("write without k_scale", lambda a: write_kv(a, cache=a.kv_fp8, v_scale=1.0), ["`k_scale`", "None", "'fp8'"]),
    ("write without v_scale", lambda a: write_kv(a, cache=a.kv_fp8, k_scale=1.0), ["`v_scale`", "None", "'fp8'"]),
    ("decode without v_scale", lambda a: decode_kv(a, cache=a.kv_fp8, k_scale=1.0), ["`v_scale`", "None", "'fp8'"]),
    ("gather without k_scale", lambda a: gather_kv(a, cache=a.kv_fp8, v_scale=1.0), ["`k_scale`", "None", "'fp8'"]),
    ("interleaved without cos_sin", lambda a: write_mla(a, interleaved=True), ["`interleaved`", "`cos_sin`"]),
    ("interleaved keys without cos_sin", lambda a: write_kv(a, interleaved=True), ["`interleaved`", "`cos_sin`"]),
    ("kv_scale for bf16", lambda a: write_mla(a, kv_scale=0.5), ["`kv_scale`", "0.5", "'bf16'", "None"]),
    (
        "array kv_scale for bf16",
        lambda a: decode_mla(a, kv_scale=a.kv_c[0, 0]),
        ["`kv_scale`", "float32[]", "'bf16'", "None"],
    ),
    ("kv_scale of 1 for bf16", lambda a: gather_mla(a, kv_scale=1), ["`kv_scale`", "is 1:", "'bf16'", "None"]),
    ("v_scale for bf16", lambda a: decode_kv(a, v_scale=2.5), ["`v_scale`", "2.5", "'bf16'", "None"]),
    ("kv_scale of 0", lambda a: write_mla(a, cache=a.mla_fp8, kv_scale=0), ["`kv_scale`", "is 0:", "positive"]),
    ("kv_scale of -0.0", lambda a: write_mla(a, cache=a.mla_fp8, kv_scale=-0.0), ["`kv_scale`", "-0.0", "positive"]),
    ("negative kv_scale", lambda a: decode_mla(a, cache=a.mla_fp8, kv_scale=-0.5), ["`kv_scale`", "-0.5", "positive"]),
    (
        "NaN kv_scale",
        lambda a: gather_mla(a, cache=a.mla_fp8, kv_scale=float("nan")),
        ["`kv_scale`", "nan", "positive"],
    ),
    (
        "kv_scale that is 0 on devices",
        lambda a: write_mla(a, cache=a.mla_fp8, kv_scale=1e-40),
        ["`kv_scale`", "1e-40", "positive"],
    ),
    (
        "NumPy kv_scale of 0",
        lambda a: write_mla(a, cache=a.mla_fp8, kv_scale=np.float32(0)),
        ["`kv_scale`", "0.0", "positive"],
    ),
    (
        "a k_scale of 0",
        lambda a: write_kv(a, cache=a.kv_fp8, k_scale=np.asarray([1.0, 0.0], np.float32), v_scale=1.0),
        ["`k_scale`", "[1. 0.]", "positive"],
    ),
    (
        "kv_scale of a string",
        lambda a: write_mla(a, cache=a.mla_fp8, kv_scale="0.5"),
        ["`kv_scale`", "'0.5'", "expected a number"],
    ),
    (
        "kv_scale of a list",
        lambda a: write_mla(a, cache=a.mla_fp8, kv_scale=[0.5]),
        ["`kv_scale`", "[0.5]", "expected a number"],
    ),
    (
        "kv_scale of True",
        lambda a: write_mla(a, cache=a.mla_fp8, kv_scale=True),
        ["`kv_scale`", "True", "expected a number"],
    ),
    (
        "kv_scale per layer",
        lambda a: write_mla(a, cache=a.mla_fp8, kv_scale=jnp.ones(3)),
        ["`kv_scale`", "float32[3]", "scalar"],
    ),
    (
        "complex kv_scale",
        lambda a: write_mla(a, cache=a.mla_fp8, kv_scale=jnp.complex64(1)),
        ["`kv_scale`", "complex64[]", "expected a number"],
    ),
    (
        "k_scale of 3 heads",
        lambda a: write_kv(a, cache=a.kv_fp8, k_scale=jnp.ones(3), v_scale=1.0),
        ["`k_scale`", "(3,)", "scalar", "[H] = [2]"],
    ),
    (
        "v_scale of pairs",
        lambda a: decode_kv(a, cache=a.kv_fp8, k_scale=1.0, v_scale=jnp.ones((2, 1))),
        ["`v_scale`", "(2, 1)", "[H] = [2]"],
    ),
    (
        "k_scale of query heads",
        lambda a: gather_kv(a, cache=a.kv_fp8, k_scale=jnp.ones(6), v_scale=1.0),
        ["`k_scale`", "(6,)", "[H] = [2]"],
    ),
    (
        "k_scale of a list",
        lambda a: write_kv(a, cache=a.kv_fp8, k_scale=[1.0, 1.0], v_scale=1.0),
        ["`k_scale`", "[1.0, 1.0]", "array"],
    ),
    ("q_scale of float32 queries", lambda a: decode_mla(a, q_scale=0.5), ["`q_scale` is 0.5", "float32", "`scale`"]),
    (
        "q_scale of pairs",
        lambda a: decode_kv(a, q=a.q.astype("float8_e4m3fn"), q_scale=jnp.ones((6, 1))),
        ["`q_scale`", "(6, 1)", "scalar, or [Hq] = [6]"],
    ),
    (
        "q_scale of KV heads",
        lambda a: decode_kv(a, q=a.q.astype("float8_e4m3fn"), q_scale=jnp.ones(2)),
        ["`q_scale`", "(2,)", "[Hq] = [6]"],
    ),
    (
        "negative q_scale",
        lambda a: decode_mla_sparse(
            a, **{name: getattr(a, name)[:, None].astype("float8_e4m3fn") for name in ("q_latent", "q_pe")}, q_scale=-1
        ),
        ["`q_scale` is -1", "positive"],
    ),
    (
        "a k_scale of tokens in another order",
        lambda a: decode_kv(a, cache=a.kv_fp8, k_scale=jnp.ones((6, 2, 4)), v_scale=1.0),
        ["`k_scale`", "(6, 2, 4)", "[num_blocks, block_size, H] = [6, 4, 2]"],
    ),
    ("no softmax scale", lambda a: decode_mla(a, scale=None), ["`scale`", "None", "expected a number"]),
    (
        "softmax scale of a prefill that is not static",
        lambda a: prefill_mla(a, scale=jnp.float32(0.1)),
        ["`scale`", "expected a number", "static"],
    ),
    ("infinite softmax scale of a prefill", lambda a: prefill_mla(a, scale=1e39), ["`scale`", "1e+39", "finite"]),
    ("no bytes for a gather", lambda a: prefill_kv(a, gathered_bytes=0), ["`gathered_bytes`", "0", "positive"]),
    ("a window of no token", lambda a: prefill_kv(a, window=0), ["`window`", "0", "positive"]),
    ("traced scale of a prefill_kv", lambda a: prefill_kv(a, scale=jnp.float32(0.1)), ["`scale`", "static"]),
    ("no bytes for expansions", lambda a: prefill_mla(a, expanded_bytes=0), ["`expanded_bytes`", "0", "positive"]),
    ("softmax scale of a string", lambda a: decode_kv(a, scale="auto"), ["`scale`", "'auto'", "expected a number"]),
    ("softmax scale per head", lambda a: decode_mla_sparse(a, scale=jnp.ones(3)), ["`scale`", "float32[3]", "scalar"]),
]


LAYERS = [
    ("past the last", 3, ["is 3:", "3 layers", "0 to 2"]),
    ("negative", -1, ["is -1:", "3 layers", "0 to 2"]),
    ("of NumPy, past the last", np.int64(3), ["is 3:", "3 layers", "0 to 2"]),
    ("beyond int32", 2**32, ["is 4294967296:", "3 layers"]),
    ("bool", True, ["is True:", "expected an int"]),
    ("bool of NumPy", np.True_, ["True", "expected an int"]),
    ("bool array of NumPy", np.asarray(True), ["True", "expected an int"]),
    ("bool array", jnp.asarray(True), ["bool[]", "expected an int"]),
    ("float", 1.0, ["is 1.0:", "expected an int"]),
    ("string", "1", ["is '1':", "expected an int"]),
    ("none", None, ["is None:", "expected an int"]),
    ("list", [0], ["is [0]:", "expected an int"]),
    ("slice", slice(0, 1), ["slice(0, 1", "expected an int"]),
    ("float of NumPy", np.float32(1), ["1.0", "expected an int"]),
    ("float array", jnp.float32(1), ["float32[]", "expected an int", "int32 scalar"]),
    ("array of one", jnp.zeros(1, int), ["int32[1]", "expected an int", "int32 scalar"]),
]


STATICS = [
    ("logit_cap 0", lambda a: decode_mla(a, logit_cap=0), ["`logit_cap`", "is 0:", "positive number", "None"]),
    ("negative logit_cap", lambda a: decode_kv(a, logit_cap=-30.0), ["`logit_cap`", "-30.0", "positive number"]),
    (
        "logit_cap of a string",
        lambda a: decode_mla_sparse(a, logit_cap="30"),
        ["`logit_cap`", "'30'", "positive number"],
    ),
    ("extra of a tuple", lambda a: decode_mla_sparse(a, extra=(a.mla, a.chosen)), ["`extra`", "tuple", "ExtraCache"]),
    ("extra without kv_scale", lambda a: decode_mla_sparse_of_two(a, cache=a.mla_fp8), ["`extra.kv_scale`", "'fp8'"]),
    ("extra layer 9", lambda a: decode_mla_sparse_of_two(a, layer=9), ["`extra.layer`", "9", "0 to"]),
    (
        "extra cache of keys",
        lambda a: decode_mla_sparse_of_two(a, cache=a.kv),
        ["`extra.cache`", "KVEntry"],
    ),
    ("NaN logit_cap", lambda a: decode_mla(a, logit_cap=float("nan")), ["`logit_cap`", "nan", "positive number"]),
    ("array logit_cap", lambda a: decode_mla(a, logit_cap=a.kv_c[0, 0]), ["`logit_cap`", "static"]),
    ("window 0", lambda a: decode_kv(a, window=0), ["`window`", "is 0:", "positive int"]),
    ("negative window", lambda a: decode_kv(a, window=-1), ["`window`", "-1", "positive int"]),
    ("window of a float", lambda a: decode_kv(a, window=128.0), ["`window`", "128.0", "positive int"]),
    ("array window", lambda a: decode_kv(a, window=a.lengths[0]), ["`window`", "positive int", "static"]),
    ("window of one side", lambda a: decode_kv(a, window=(64,)), ["`window`", "is (64,):", "(left, right)"]),
    ("window of three sides", lambda a: decode_mla(a, window=(1, 2, 3)), ["`window`", "(1, 2, 3)", "(left, right)"]),
    ("window of a list", lambda a: decode_kv(a, window=[64, 64]), ["`window`", "[64, 64]", "tuple (left, right)"]),
    ("left limit of -2", lambda a: decode_kv(a, window=(-2, 64)), ["`window`", "(-2, 64)", "0 or more, or -1"]),
    ("right limit of -2", lambda a: decode_mla(a, window=(3, -2), causal=False), ["`window`", "(3, -2)", "or -1"]),
    ("limit of a float", lambda a: decode_kv(a, window=(64.0, 64)), ["`window`", "(64.0, 64)", "ints"]),
    ("limit of True", lambda a: decode_kv(a, window=(True, 64)), ["`window`", "(True, 64)", "ints"]),
    ("limit of None", lambda a: prefill_kv(a, window=(None, 64)), ["`window`", "(None, 64)", "-1 for no limit"]),
    ("window of a prefill in latents", lambda a: prefill_mla(a, window=0), ["`window`", "is 0:", "positive int"]),
    ("logit_cap of a prefill", lambda a: prefill_kv(a, logit_cap=-1.0), ["`logit_cap`", "-1.0", "positive number"]),
    ("causal of a prefill", lambda a: prefill_mla(a, causal=0), ["`causal`", "is 0:", "True or False"]),
    (
        "int window of a prefill without a causal mask",
        lambda a: prefill_kv(a, window=3, causal=False),
        ["`window`", "is 3:", "tuple"],
    ),
    ("window beside a prefix", lambda a: shared(a, window=9), ["`window`", "is 9:", "None", "`prefix_tables`"]),
    ("lengths without a prefix", lambda a: decode_kv(a, prefix_lens=3), ["`prefix_lens`", "without `prefix_tables`"]),
    ("prefix_of without a prefix", lambda a: decode_mla(a, prefix_of=a.ids), ["`prefix_of`", "without"]),
    ("prefix without a length", lambda a: shared(a, prefix_lens=None), ["`prefix_lens` is a NoneType"]),
    ("prefix of a float length", lambda a: shared(a, prefix_lens=9.5), ["`prefix_lens`", "float"]),
    ("array limit", lambda a: decode_kv(a, window=(64, a.lengths[0])), ["`window`", "ints", "static"]),
    (
        "int window without a causal mask",
        lambda a: decode_mla(a, window=3, causal=False),
        ["`window`", "is 3:", "tuple"],
    ),
    (
        "tree without a causal mask",
        lambda a: decode_kv(a, tree_mask=np.ones((2, 1, 1), bool), causal=False),
        ["`causal`", "False", "expected True", "`tree_mask`"],
    ),
    (
        "tree for other tokens",
        lambda a: decode_mla(a, tree_mask=np.ones((2, 4, 4), bool)),
        ["`tree_mask`", "(2, 4, 4)", "[2, 1, 1]"],
    ),
    (
        "tree for other requests",
        lambda a: decode_kv(a, tree_mask=np.ones((3, 1, 1), bool)),
        ["`tree_mask`", "(3, 1, 1)", "B is that of `block_tables`"],
    ),
    ("tree of ints", lambda a: decode_kv(a, tree_mask=np.ones((2, 1, 1), int)), ["`tree_mask`", "int64", "bool"]),
    ("tree of a list", lambda a: decode_kv(a, tree_mask=[[[True]]]), ["`tree_mask`", "[[[True]]]", "array"]),
    ("mask of an array", lambda a: decode_kv(a, mask=a.lengths), ["`mask`", "expected None, or a function"]),
    ("mask without bool", lambda a: decode_kv(a, mask=lambda q, k: q - k), ["`mask`", "int32[2, 3]", "bool"]),
    (
        "mask of another shape",
        lambda a: decode_mla(a, mask=lambda q, k: (q >= k).any(axis=-1)),
        ["`mask`", "bool[2]", "query positions [2, 1]"],
    ),
    (
        "mask that returns nothing",
        lambda a: jaxkv.plan_decode(a.kv, a.tables, a.lengths, num_heads=6, mask=lambda q, k: None),
        ["`mask` returns None", "array of bool"],
    ),
    ("total 0", lambda a: gather_mla(a, total=0), ["`total`", "is 0:", "positive int"]),
    ("total of a float", lambda a: gather_kv(a, total=13.0), ["`total`", "13.0", "positive int"]),
    ("no total", lambda a: gather_indexer_k(a, total=None), ["`total`", "None", "positive int"]),
    ("array total", lambda a: gather_mla(a, total=a.cu_seq_lens[-1]), ["`total`", "positive int", "static"]),
    ("max_len 0", lambda a: indexer_logits(a, max_len=0), ["`max_len`", "is 0:", "positive int"]),
    ("max_len of True", lambda a: indexer_logits(a, max_len=True), ["`max_len`", "True", "positive int"]),
    ("window of True", lambda a: decode_kv(a, window=True), ["`window`", "True", "positive int"]),
    (
        "max_len past int32",
        lambda a: indexer_logits(a, max_len=2**31),
        ["`max_len`", "is 2147483648:", "below 2147483648"],
    ),
    ("total past int32", lambda a: gather_mla(a, total=2**31), ["`total`", "is 2147483648:", "below 2147483648"]),
    ("k past int32", lambda a: select_topk(a, k=2**40), ["`k`", "is 1099511627776:", "below 2147483648"]),
    (
        "block_size past int32",
        lambda a: block_tables_from_csr(a, block_size=2**31),
        ["`block_size`", "is 2147483648:", "below 2147483648"],
    ),
    ("logit_cap past float32", lambda a: decode_mla(a, logit_cap=1e39), ["`logit_cap`", "1e+39", "float32 holds"]),
    ("logit_cap without an inverse", lambda a: decode_mla(a, logit_cap=1e38), ["`logit_cap`", "1e+38", "to 2**126"]),
    ("logit_cap that is 0 on devices", lambda a: decode_kv(a, logit_cap=1e-40), ["`logit_cap`", "1e-40", "2**-126"]),
    ("per_token 0", lambda a: select_experts(a, per_token=0), ["`per_token`", "is 0:", "positive int"]),
    ("more than all experts", lambda a: select_experts(a, per_token=21), ["`per_token`", "is 21:", "at most 20"]),
    ("unknown scoring", lambda a: select_experts(a, scoring="tanh"), ["`scoring`", "'tanh'", "'softmax' or 'sigmoid'"]),
    ("uneven groups", lambda a: select_experts(a, groups=3), ["`groups`", "is 3:", "divisor of the 20 experts"]),
    (
        "more groups per token than groups",
        lambda a: select_experts(a, groups=2, groups_per_token=3),
        ["`groups_per_token`", "is 3:", "at most the 2 `groups`"],
    ),
    (
        "more experts than a token's groups have",
        lambda a: select_experts(a, groups=10, groups_per_token=1),
        ["`per_token`", "is 4:", "at most 2"],
    ),
    (
        "groups of one expert",
        lambda a: select_experts(a, scoring="sigmoid", groups=20, groups_per_token=4),
        ["`groups`", "is 20:", "2 or more"],
    ),
    *(
        (
            f"{name} of {wrong!r} in {run.__name__}",
            lambda a, run=run, name=name, wrong=wrong: run(a, **{name: wrong}),
            [f"`{name}`", "True or"],
        )
        for run, name in (
            (decode_mla, "return_lse"),
            (decode_kv, "return_lse"),
            (decode_mla_sparse, "return_lse"),
            (decode_mla_sparse, "return_max_logits"),
            (prefill_mla, "return_lse"),
            (prefill_kv, "return_lse"),
            (decode_mla_sparse, "batch_invariant"),
            (write_mla, "interleaved"),
            (write_kv, "interleaved"),
            (select_experts, "normalize"),
        )
        for wrong in ("no", 1)
    ),
    (
        "return_lse of a tracer",
        lambda a: jax.jit(lambda x: decode_mla(a, return_lse=x))(True),
        ["`return_lse`", "Tracer", "True or False (it is static)"],
    ),
    ("k 0", lambda a: select_topk(a, k=0), ["`k`", "is 0:", "positive int"]),
    ("k of a float", lambda a: select_topk(a, k=2.0), ["`k`", "2.0", "positive int"]),
    ("block_size 0", lambda a: block_tables_from_csr(a, block_size=0), ["`block_size`", "is 0:", "positive int"]),
]


CACHES = [
    (
        "view of another size",
        lambda a: a.mla.view(jaxkv.CacheLayout(**SIZES, entry=a.mla.layout.entry, block_padding=1)),
        ["`layout`", "870 elements", "864"],
    ),
    (
        "view of another dtype",
        lambda a: a.mla.view(jaxkv.CacheLayout(**SIZES, entry=jaxkv.MLAEntry("f16", latent=8, rope=4))),
        ["`layout`", "float16", "bfloat16"],
    ),
    *(
        (
            f"{what} in {name}",
            lambda a, broken=broken, run=run, stored=stored: run(a, cache=broken(getattr(a, stored))),
            fragments,
        )
        for name, (run, stored, _) in {**OF_ONE_CACHE, **OF_ANY_CACHE}.items()
        for what, broken, fragments in [
            (
                "buffer too short",
                lambda c: jaxkv.KVCache(c.buffer[:-1], c.layout),
                ["`cache.buffer`", "expected its layout's"],
            ),
            ("buffer of rows", lambda c: jaxkv.KVCache(c.buffer.reshape(6, -1), c.layout), ["`cache.buffer`", "[6, "]),
            (
                "buffer of another dtype",
                lambda c: jaxkv.KVCache(c.buffer.astype("float32"), c.layout),
                ["`cache.buffer`", "float32"],
            ),
            ("buffer of a list", lambda c: jaxkv.KVCache([0.0], c.layout), ["`cache.buffer`", "[0.0]"]),
            ("no buffer", lambda c: jaxkv.KVCache(None, c.layout), ["`cache.buffer`", "None"]),
            ("bare buffer", lambda c: c.buffer, ["`cache`", "expected a KVCache"]),
            ("pair for a cache", lambda c: (c.buffer, c.layout), ["`cache` is a tuple", "expected a KVCache"]),
            ("no cache", lambda c: None, ["`cache` is a NoneType", "expected a KVCache"]),
        ]
    ),
    *(
        (
            f"cache of {other} in {name}",
            lambda a, run=run, other=other: run(a, cache=getattr(a, other)),
            ["`cache`", f"a cache of {kind}"],
        )
        for name, (run, stored, kind) in OF_ONE_CACHE.items()
        for other in ("mla", "kv", "indexer")
        if other != stored
    ),
]


IMPLEMENTATIONS = [
    ("unknown", "cuda", ["'cuda'", "unknown", "xla"]),
    ("of another case", "XLA", ["'XLA'", "unknown", "xla"]),
    ("explain, which is no name", "explain", ["'explain'", "unknown", "xla"]),
    ("empty", "", ["''", "unknown", "xla"]),
    ("unknown after a known", ["xla", "cuda"], ["'cuda'", "unknown", "xla"]),
    ("none among names", ["xla", None], ["None", "unknown", "xla"]),
    ("names among names", [["xla"]], ["['xla']", "unknown", "xla"]),
    ("no names", (), ["is ()", "expected None", "xla"]),
    ("number", 3, ["is 3", "expected None", "xla"]),
    ("set", {"xla"}, ["{'xla'}", "expected None", "xla"]),
]

HELPERS = [
    ("q_latent of a list", lambda a: decode_mla(a, q_latent=[[[0.0] * 8] * 3] * 2), ["`q_latent` is a list"]),
    ("q of a list", lambda a: decode_kv(a, q=[[[0.0] * 8] * 6] * 2), ["`q` is a list"]),
    ("logit_cap of True", lambda a: decode_mla(a, logit_cap=True), ["`logit_cap`", "True"]),
    ("outs of lists", lambda a: merge_states(a, outs=[[1.0, 2.0]] * 2), ["`outs`", "[1.0, 2.0]", "array"]),
    ("lses of numbers", lambda a: merge_states(a, lses=[1.0, 2.0]), ["`lses`", "float"]),
    ("outs of a number", lambda a: merge_states(a, outs=1.0), ["`outs`", "float"]),
    (
        "outs of two dtypes",
        lambda a: merge_states(a, outs=[a.outs[0], a.outs[1].astype("bfloat16")], lses=[a.lses[0], a.lses[1]]),
        ["`outs`", "float32[3, 4]", "bfloat16[3, 4]", "one shape and dtype"],
    ),
    ("a weight of one axis", lambda a: jaxkv.TileScaled.of(a.x[0]), ["`weight`", "(8,)", "[..., out, in]"]),
    ("outs of rank 0", lambda a: merge_states(a, outs=a.lses[0, 0], lses=a.lses[0, 0]), ["`outs`", "()"]),
    ("an array of no parts", lambda a: merge_states(a, outs=a.outs[:0], lses=a.lses[:0]), ["`outs`", "(0, 3, 4)", "1"]),
    (
        "zeros of all groups",
        lambda a: jaxkv.KVCache.zeros(
            jaxkv.PackedLayout(groups={"a": jaxkv.Group(1, jaxkv.IndexerEntry())}, num_blocks=2, block_size=4)
        ),
        ["`layout` is a PackedLayout", "packed[name]"],
    ),
    ("view of no layout", lambda a: a.mla.view(None), ["`layout`", "None", "CacheLayout"]),
    ("slots_for of lists", lambda a: jaxkv.slots_for([[0]], [[0]], a.mla), ["`block_tables` is a list"]),
    (
        "slots_for of no columns",
        lambda a: jaxkv.slots_for(a.tables[:, :0], a.tables, a.mla),
        ["`block_tables`", "(2, 0)"],
    ),
    (
        "slots_for of floats",
        lambda a: jaxkv.slots_for(a.tables * 1.0, a.tables, a.mla),
        ["`block_tables`", "float32"],
    ),
    (
        "slots_for of 3 requests",
        lambda a: jaxkv.slots_for(a.tables, jnp.zeros((3, 2), int), a.mla),
        ["`positions`", "(3, 2)"],
    ),
    (
        "slots_for of a block size",
        lambda a: jaxkv.slots_for(a.tables, a.tables, 64),
        ["`cache` is 64", "expected the KVCache", "CacheLayout"],
    ),
    (
        "positions_to_slots of all groups",
        lambda a: positions_to_slots(
            a,
            cache=jaxkv.PackedLayout(groups={"a": jaxkv.Group(1, jaxkv.IndexerEntry())}, num_blocks=2, block_size=4),
        ),
        ["`cache` is PackedLayout(num_blocks=2", "packed[name]"],
    ),
    (
        "ragged_slots of a buffer",
        lambda a: jaxkv.ragged_slots(a.tables, a.cu_seq_lens, a.mla.buffer, total=1),
        ["`cache` is bfloat16[", "expected the KVCache"],
    ),
    (
        "ragged_slots of lists",
        lambda a: jaxkv.ragged_slots([[0]], [0, 1], a.mla, total=1),
        ["`block_tables` is a list"],
    ),
    (
        "ragged_slots of no rows",
        lambda a: jaxkv.ragged_slots(a.tables[:0], a.ids[:1], a.mla, total=1),
        ["`block_tables`", "(0, 3)"],
    ),
    (
        "ragged_slots of B sums",
        lambda a: jaxkv.ragged_slots(a.tables, a.ids, a.mla, total=1),
        ["`cu_seq_lens`", "(2,)", "[3]"],
    ),
    (
        "ragged_slots of total 0.5",
        lambda a: jaxkv.ragged_slots(a.tables, a.cu_seq_lens, a.mla, total=0.5),
        ["`total`", "0.5"],
    ),
    ("page tables of lists", lambda a: block_tables_from_csr(a, indices=[0, 1]), ["`indices` is a list", "array [n]"]),
    (
        "page tables of B sums",
        lambda a: block_tables_from_csr(a, indptr=a.lengths),
        ["`indptr`", "(2,)", "[3]", "one more than `last_page_len`"],
    ),
    ("page tables of floats", lambda a: block_tables_from_csr(a, indptr=a.tables[0] * 1.0), ["`indptr`", "float32"]),
    (
        "page tables of no requests",
        lambda a: block_tables_from_csr(a, indptr=a.ids[:1], last_page_len=a.lengths[:0]),
        ["`last_page_len`", "(0,)", "B at least 1"],
    ),
    ("page tables of rank 2", lambda a: block_tables_from_csr(a, indices=a.tables), ["`indices`", "(2, 3)", "[n]"]),
    ("page tables of block_size 0", lambda a: block_tables_from_csr(a, block_size=0), ["`block_size`", "is 0:"]),
    ("page tables of no columns", lambda a: block_tables_from_csr(a, max_blocks=0), ["`max_blocks`", "is 0:"]),
    (
        "scales of 6 tokens",
        lambda a: swizzle_scales(a, scales=jnp.zeros((2, 3, 6, 4), "uint8")),
        ["`scales`", "6 tokens"],
    ),
    (
        "scales of 2 tiles",
        lambda a: swizzle_scales(a, scales=jnp.zeros((2, 3, 4, 2), "uint8")),
        ["`scales`", "2 scales"],
    ),
    ("scales without heads", lambda a: swizzle_scales(a, scales=jnp.zeros((2, 8, 4), "uint8")), ["[B, H, N, S]"]),
    ("scales of floats", lambda a: swizzle_scales(a, scales=jnp.zeros((2, 3, 8, 4))), ["float32", "float8_e4m3fn"]),
    ("scales of 1 instead of True", lambda a: swizzle_scales(a, inverse=1), ["`inverse` is 1"]),
    (
        "page tables of a traced number of columns",
        lambda a: block_tables_from_csr(a, max_blocks=a.lengths[0]),
        ["`max_blocks`", "static"],
    ),
]


@cases({"scales": SCALES, "statics": STATICS, "caches": CACHES, "helpers": HELPERS})
def test_an_argument(wrong, fragments):
    check(wrong, fragments)


@cases({"implementation": IMPLEMENTATIONS})
@pytest.mark.parametrize("operation", DISPATCHED)
def test_implementations(operation, wrong, fragments):
    check(lambda a: OPERATIONS[operation](a, implementation=wrong), ["`implementation`", *fragments])


@pytest.mark.parametrize(
    ("build", "fragments"),
    [
        (lambda: jaxkv.MLAEntry("int4"), ["MLAEntry", "'int4'", "bf16, f16, f32, fp8, fp8_ds_mla"]),
        (lambda: jaxkv.KVEntry("fp8_ds_mla"), ["KVEntry", "'fp8_ds_mla'", "bf16, f16, f32, fp8"]),
        (lambda: jaxkv.KVEntry("bf16", value_format="fp8_ds_mla"), ["value_format 'fp8_ds_mla'", "bf16, f16"]),
        (lambda: jaxkv.KVEntry("fp8", value_dim=24, value_format="nvfp4"), ["nvfp4", "'V': 24", "multiples of 16"]),
        (lambda: jaxkv.MLAEntry("bf16", latent=0), ["latent=0", "positive int"]),
        (lambda: jaxkv.MLAEntry("bf16", rope=64.0), ["rope=64.0", "an int of at least 0"]),
        (lambda: jaxkv.MLAEntry("bf16", latent=True), ["latent=True", "positive int"]),
        (lambda: jaxkv.KVEntry("bf16", value_dim=False), ["value_dim=False", "positive int"]),
        (lambda: jaxkv.KVEntry("bf16", head_dim=-1), ["head_dim=-1", "positive int"]),
        (lambda: jaxkv.MLAEntry("fp8_ds_mla", latent=100), ["fp8_ds_mla", "multiple of 128", "100"]),
        (lambda: jaxkv.MLAEntry("fp8_ds_mla", rope=63), ["fp8_ds_mla", "even", "63"]),
        (lambda: jaxkv.MLAEntry("fp8_ds_mla", rope=0), ["fp8_ds_mla", "positive", "`rope` 0"]),
        (lambda: jaxkv.MLAEntry("bf16", rope=-1), ["rope=-1", "an int of at least 0"]),
        (lambda: jaxkv.IndexerEntry(head_dim=30), ["indexer_fp8", "multiple of 4", "30"]),
    ],
)
def test_entries(build, fragments):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the fragments are the match)
        build()
    for fragment in fragments:
        assert fragment in str(caught.value)


@cases({"layer": LAYERS})
@pytest.mark.parametrize("operation", OF_ONE_CACHE)
def test_layers(operation, wrong, fragments):
    check(lambda a: OF_ONE_CACHE[operation][0](a, layer=wrong), ["`layer`", *fragments])
