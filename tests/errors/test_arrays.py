"""Wrong arrays: each is a ValueError that names the argument, what it is and what is expected."""

import jax.numpy as jnp
import numpy as np

import jaxkv
from errors.calls import (
    OF_BATCHES,
    OF_RUNS,
    cases,
    check,
    copy_blocks,
    decode_delta_rule,
    decode_kv,
    decode_mla,
    decode_mla_sparse,
    decode_mla_sparse_of_two,
    gather_indexer_k,
    gather_kv,
    gather_mla,
    grouped_swiglu,
    indexer_logits,
    merge_states,
    positions_to_slots,
    prefill_kv,
    prefill_mla,
    read_blocks,
    read_indexer_k,
    read_kv,
    read_mla,
    scaled_linear,
    select_experts,
    select_topk,
    shared,
    shared_by_some,
    write_blocks,
    write_entries,
    write_indexer_k,
    write_kv,
    write_mla,
    zeros,
)
from jaxkv_kernels.tile_scaled import TileScaled

SHAPES = [
    ("kv_c too wide", lambda a: write_mla(a, kv_c=jnp.ones((5, 9))), ["`kv_c`", "(5, 9)", "[T, R] = [T, 8]", "latent"]),
    ("kv_c with heads", lambda a: write_mla(a, kv_c=a.kv_c[:, None]), ["`kv_c`", "(5, 1, 8)", "[T, R]"]),
    ("k_pe too narrow", lambda a: write_mla(a, k_pe=a.k_pe[:, :3]), ["`k_pe`", "(5, 3)", "[5, 4]", "rope"]),
    ("k_pe too short", lambda a: write_mla(a, k_pe=a.k_pe[:4]), ["`k_pe`", "(4, 4)", "[5, 4]", "that of `kv_c`"]),
    (
        "cos_sin of one angle",
        lambda a: write_mla(a, cos_sin=jnp.ones((5, 2))),
        ["`cos_sin`", "(5, 2)", "[T, P] = [5, 4]"],
    ),
    ("cos_sin of bf16", lambda a: write_mla(a, cos_sin=jnp.ones((5, 4), jnp.bfloat16)), ["`cos_sin`", "float32"]),
    ("cos_sin per head", lambda a: write_kv(a, cos_sin=a.k), ["`cos_sin`", "(5, 2, 8)", "[T, D] = [5, 8]"]),
    ("cos_sin of values", lambda a: write_kv(a, cos_sin=a.k_pe), ["`cos_sin`", "(5, 4)", "[T, D] = [5, 8]"]),
    ("cos_sin of f16", lambda a: write_kv(a, cos_sin=jnp.ones((5, 8), jnp.float16)), ["`cos_sin`", "float32"]),
    (
        "cos_sin of keys without pairs",
        lambda a: write_kv(
            a,
            cache=zeros(jaxkv.KVEntry("bf16", head_dim=3), num_heads=2),
            k=a.k[..., :3],
            v=a.v[..., :3],
            cos_sin=a.k[:, 0, :3],
        ),
        ["`cos_sin`", "3 values per token", "pairs"],
    ),
    (
        "cos_sin without a rotary part",
        lambda a: write_mla(
            a, cache=zeros(jaxkv.MLAEntry("bf16", latent=8, rope=0)), k_pe=a.k_pe[:, :0], cos_sin=a.k_pe[:, :0]
        ),
        ["`cos_sin`", "0 values per token", "pairs"],
    ),
    ("slots too short", lambda a: write_mla(a, slot_mapping=a.slots[:4]), ["`slot_mapping`", "(4,)", "[T] = [5]"]),
    ("slots of rank 2", lambda a: write_mla(a, slot_mapping=a.slots[None]), ["`slot_mapping`", "(1, 5)", "[T] = [5]"]),
    ("one slot", lambda a: write_mla(a, slot_mapping=a.slots[0]), ["`slot_mapping`", "()", "[T] = [5]"]),
    ("k of one head", lambda a: write_kv(a, k=a.k[:, 0]), ["`k`", "(5, 8)", "[T, H, D] = [T, 2, 8]"]),
    ("k of 3 heads", lambda a: write_kv(a, k=jnp.ones((5, 3, 8))), ["`k`", "(5, 3, 8)", "[T, 2, 8]", "cache's heads"]),
    ("v as wide as k", lambda a: write_kv(a, v=a.k), ["`v`", "(5, 2, 8)", "[T, H, Dv] = [5, 2, 4]", "value_dim"]),
    ("heads first", lambda a: write_kv(a, k=a.k.swapaxes(0, 1)), ["`k`", "(2, 5, 8)", "[T, 2, 8]"]),
    ("slots of heads", lambda a: write_kv(a, slot_mapping=a.slots[:, None]), ["`slot_mapping`", "(5, 1)", "[5]"]),
    ("key too wide", lambda a: write_indexer_k(a, k=jnp.ones((5, 17))), ["`k`", "(5, 17)", "[T, D] = [T, 16]"]),
    ("key of heads", lambda a: write_indexer_k(a, k=a.key[:, None]), ["`k`", "(5, 1, 16)", "[T, D]"]),
    ("slots to read of rank 2", lambda a: read_mla(a, slots=a.slots[None]), ["`slots`", "(1, 5)", "[T]"]),
    ("one slot to read", lambda a: read_kv(a, slots=a.slots[0]), ["`slots`", "()", "[T]"]),
    ("entries too wide", lambda a: write_entries(a, entries=jnp.zeros((5, 25), "uint8")), ["(5, 25)", "[T, 24]"]),
    ("entries of heads", lambda a: write_entries(a, entries=jnp.zeros((5, 1, 24), "uint8")), ["`entries`", "[T, W]"]),
    ("entries without heads", lambda a: write_entries(a, cache=a.kv), ["`entries`", "(5, 24)", "[T, H, W]"]),
    ("slots of keys", lambda a: write_indexer_k(a, slot_mapping=a.slots[1:]), ["`slot_mapping`", "(4,)", "[5]"]),
    (
        "q_latent of rank 2",
        lambda a: decode_mla(a, q_latent=a.q_latent[0]),
        ["`q_latent`", "2 axes", "[B, Hq", "[B, Q, Hq"],
    ),
    (
        "q_latent of rank 5",
        lambda a: decode_mla(a, q_latent=a.q_latent[None, None]),
        ["`q_latent`", "5 axes", "[B, Hq"],
    ),
    ("q_latent too wide", lambda a: decode_mla(a, q_latent=jnp.ones((2, 3, 12))), ["`q_latent`", "(2, 3, 12)", "8]"]),
    ("q_pe of other heads", lambda a: decode_mla(a, q_pe=jnp.ones((2, 4, 4))), ["`q_pe`", "(2, 4, 4)", "[2, 3, 4]"]),
    ("q_pe with tokens", lambda a: decode_mla(a, q_pe=a.q_pe[:, None]), ["`q_pe`", "(2, 1, 3, 4)", "[2, 3, 4]"]),
    (
        "q_pe of other tokens",
        lambda a: decode_mla(a, q_latent=a.q_latent[:, None]),
        ["`q_pe`", "(2, 3, 4)", "[2, 1, 3, 4]"],
    ),
    (
        "tables of rank 1",
        lambda a: decode_mla(a, block_tables=a.tables[0]),
        ["`block_tables`", "(3,)", "[B, M] = [2, M]"],
    ),
    (
        "tables of 3",
        lambda a: decode_mla(a, block_tables=jnp.zeros((3, 3), int)),
        ["`block_tables`", "(3, 3)", "[2, M]"],
    ),
    ("lengths of 3", lambda a: decode_mla(a, seq_lens=jnp.ones(3, int)), ["`seq_lens`", "(3,)", "[B] = [2]"]),
    ("q_nope without tokens", lambda a: prefill_mla(a, q_nope=jnp.ones((2, 3, 6))), ["`q_nope`", "(2, 3, 6)", "[B, Q"]),
    ("q_pe of fewer tokens", lambda a: prefill_mla(a, q_pe=jnp.ones((2, 4, 3, 4))), ["`q_pe`", "[2, 5, 3, 4]"]),
    ("w_uk of other heads", lambda a: prefill_mla(a, w_uk=jnp.ones((4, 6, 8))), ["`w_uk`", "(4, 6, 8)", "[3, 6, 8]"]),
    ("w_uk of all latents", lambda a: prefill_mla(a, w_uk=jnp.ones((3, 6, 12))), ["`w_uk`", "[3, 6, 8]", "latent"]),
    ("w_uv transposed", lambda a: prefill_mla(a, w_uv=jnp.ones((3, 8, 7))), ["`w_uv`", "(3, 8, 7)", "[3, V, 8]"]),
    (
        "w_uv of another dtype",
        lambda a: prefill_mla(a, w_uv=jnp.ones((3, 7, 8), jnp.bfloat16)),
        ["`w_uv`", "bfloat16", "float32"],
    ),
    ("q too wide", lambda a: decode_kv(a, q=jnp.ones((2, 6, 9))), ["`q`", "(2, 6, 9)", "[B, Hq, 8]", "head_dim"]),
    ("q of rank 2", lambda a: decode_kv(a, q=a.q[0]), ["`q`", "2 axes", "[B, Hq", "[B, Q, Hq"]),
    ("q of 5 heads", lambda a: decode_kv(a, q=a.q[:, :5]), ["`q`", "5 heads", "multiple", "2 heads"]),
    ("q of 1 head", lambda a: decode_kv(a, q=a.q[:, :1]), ["`q`", "1 heads", "multiple", "2 heads"]),
    (
        "q_latent without tokens",
        lambda a: decode_mla_sparse(a, q_latent=a.q_latent),
        ["`q_latent`", "(2, 3, 8)", "[B, Q, Hq"],
    ),
    ("q_pe without tokens", lambda a: decode_mla_sparse(a, q_pe=a.q_pe), ["`q_pe`", "(2, 3, 4)", "[2, 1, 3, 4]"]),
    (
        "slots of other tokens",
        lambda a: decode_mla_sparse(a, slots=jnp.zeros((2, 2, 5), int)),
        ["`slots`", "(2, 2, 5)", "[2, 1, K]"],
    ),
    ("slots without tokens", lambda a: decode_mla_sparse(a, slots=a.chosen[:, 0]), ["`slots`", "(2, 5)", "[B, Q, K]"]),
    (
        "no slots at all",
        lambda a: decode_mla_sparse(a, slots=a.chosen[:, :, :0]),
        ["`slots`", "(2, 1, 0)", "K at least 1"],
    ),
    ("counts of slots", lambda a: decode_mla_sparse(a, counts=a.chosen), ["`counts`", "(2, 1, 5)", "[B, Q] = [2, 1]"]),
    ("counts of requests", lambda a: decode_mla_sparse(a, counts=a.lengths), ["`counts`", "(2,)", "[B, Q] = [2, 1]"]),
    (
        "extra slots of one request",
        lambda a: decode_mla_sparse_of_two(a, slots=a.chosen[:1]),
        ["`extra.slots`", "(1, 1, 5)", "[B, Q, K'] = [2, 1, K']"],
    ),
    (
        "extra counts of slots",
        lambda a: decode_mla_sparse_of_two(a, counts=a.chosen),
        ["`extra.counts`", "(2, 1, 5)", "[B, Q] = [2, 1]"],
    ),
    (
        "extra entries of another size",
        lambda a: decode_mla_sparse_of_two(a, cache=zeros(jaxkv.MLAEntry("bf16", latent=12, rope=0))),
        ["`extra.cache`", "latent=12", "8 + 4 values"],
    ),
    ("sinks of 4", lambda a: decode_mla_sparse(a, sinks=jnp.ones(4)), ["`sinks`", "(4,)", "[Hq] = [3]", "`q_latent`"]),
    ("q without tokens", lambda a: indexer_logits(a, q=a.q_indexer[:, 0]), ["`q`", "(2, 7, 16)", "[B, Q, Hi, D]"]),
    (
        "q of other width",
        lambda a: indexer_logits(a, q=jnp.ones((2, 1, 7, 8))),
        ["`q`", "(2, 1, 7, 8)", "[B, Q, Hi, 16]"],
    ),
    (
        "weights of other heads",
        lambda a: indexer_logits(a, weights=jnp.ones((2, 1, 8))),
        ["`weights`", "(2, 1, 8)", "[2, 1, 7]"],
    ),
    (
        "running sum too short",
        lambda a: gather_mla(a, cu_seq_lens=a.lengths),
        ["`cu_seq_lens`", "(2,)", "[3]", "`block_tables`"],
    ),
    (
        "running sum of rank 2",
        lambda a: gather_kv(a, cu_seq_lens=a.cu_seq_lens[None]),
        ["`cu_seq_lens`", "(1, 3)", "[3]"],
    ),
    (
        "starts of runs and end",
        lambda a: gather_mla(a, seq_starts=a.cu_seq_lens),
        ["`seq_starts`", "(3,)", "[B] = [2]"],
    ),
    (
        "lengths of two tokens per request",
        lambda a: indexer_logits(a, seq_lens=a.tables[:, :2]),
        ["`seq_lens`", "(2, 2)", "[B, Q] = [2, 1]"],
    ),
    (
        "q with requests and cu_q_lens",
        lambda a: indexer_logits(a, cu_q_lens=a.cu_seq_lens),
        ["`q`", "(2, 1, 7, 16)", "[T, Hi, D]"],
    ),
    (
        "lengths of tokens and cu_q_lens",
        lambda a: indexer_logits(
            a, q=a.q_indexer[:, 0], weights=a.weights[:, 0], seq_lens=a.tables[:, :1], cu_q_lens=a.cu_seq_lens
        ),
        ["`seq_lens`", "(2, 1)", "[B] = [2]"],
    ),
    (
        "no ragged queries of the indexer",
        lambda a: indexer_logits(a, q=a.q_indexer[:0, 0], weights=a.weights[:0, 0], cu_q_lens=a.cu_seq_lens),
        ["`q`", "(0, 7, 16)", "T at least 1"],
    ),
    ("lengths of logits", lambda a: select_topk(a, lengths=a.logits), ["`lengths`", "(2, 20)", "[n1] = [2]"]),
    ("one length", lambda a: select_topk(a, lengths=a.lengths[0]), ["`lengths`", "()", "[n1] = [2]"]),
    ("float lengths of logits", lambda a: select_topk(a, lengths=a.lengths * 1.0), ["`lengths`", "float32", "int32"]),
    ("length of an int", lambda a: select_topk(a, lengths=3), ["`lengths` is a int", "[n1]"]),
    ("no logits", lambda a: select_topk(a, logits=a.logits[0, 0]), ["`logits`", "float32[]", "float32 [..., N]"]),
    (
        "positions of rank 2",
        lambda a: positions_to_slots(a, positions=a.chosen[:, 0]),
        ["`positions`", "(2, 5)", "[B, Q, K]"],
    ),
    (
        "positions of rank 1",
        lambda a: positions_to_slots(a, positions=a.chosen[0, 0]),
        ["`positions`", "(5,)", "[B, Q, K]"],
    ),
    (
        "positions of 3",
        lambda a: positions_to_slots(a, block_tables=jnp.zeros((3, 4), int)),
        ["`positions`", "(2, 1, 5)", "[3, n1, n2]"],
    ),
    ("choices of other tokens", lambda a: grouped_swiglu(a, experts=a.experts[:4]), ["`experts`", "(4, 2)", "`x`"]),
    (
        "fewer shares",
        lambda a: grouped_swiglu(a, weights=a.shares[:, :1]),
        ["`weights`", "(5, 1)", "`experts`"],
    ),
    ("gate of wider tokens", lambda a: grouped_swiglu(a, gate=a.down), ["`gate`", "(3, 8, 4)", "`x`"]),
    (
        "a weight of wider tokens",
        lambda a: scaled_linear(a, weight=TileScaled.of(a.down[0])),
        ["`weight.values`", "(8, 4)", "`x`"],
    ),
    ("down like up", lambda a: grouped_swiglu(a, down=a.gate), ["`down`", "(3, 4, 8)", "E, D, I"]),
    (
        "one matrix in float8",
        lambda a: grouped_swiglu(a, gate=TileScaled.of(a.gate)),
        ["`up` is float32[3, 4, 8]", "expected a TileScaled, as `gate`"],
    ),
    (
        "float8 values of wider tokens",
        lambda a: grouped_swiglu(a, gate=TileScaled.of(a.down), up=TileScaled.of(a.gate), down=TileScaled.of(a.down)),
        ["`gate.values`", "(3, 8, 4)", "`x`"],
    ),
    (
        "scales per matrix",
        lambda a: grouped_swiglu(
            a,
            gate=TileScaled(TileScaled.of(a.gate).values, jnp.ones(3)),
            up=TileScaled.of(a.gate),
            down=TileScaled.of(a.down),
        ),
        ["`gate.scales` is float32[3]", "expected float32[3, 1, 1]", "128 x 128"],
    ),
    (
        "tokens of other channels",
        lambda a: decode_delta_rule(a, x=a.x),
        ["`x`", "(5, 8)", "[T, C] = [T, 10]", "states"],
    ),
    (
        "decays of other heads",
        lambda a: decode_delta_rule(a, decay=a.lses[:, :1]),
        ["`decay`", "(2, 1)", "[T, H, 1] = [5, 2, 1]"],
    ),
    (
        "decays of half of a key",
        lambda a: decode_delta_rule(a, decay=jnp.ones((5, 2, 3))),
        ["`decay`", "(5, 2, 3)", "[T, H, K] = [5, 2, 2]"],
    ),
    ("rates per value", lambda a: decode_delta_rule(a, rate=a.conv), ["`rate`", "(5, 2, 3)", "[T, H] = [5, 2]"]),
    (
        "a convolution of two tokens",
        lambda a: decode_delta_rule(a, conv_weight=jnp.ones((10, 2))),
        ["`conv_weight`", "(10, 2)", "[C, W] = [10, 3]"],
    ),
    ("fewer slots to read", lambda a: decode_delta_rule(a, read_slots=a.ids), ["`read_slots`", "(2,)", "[T] = [5]"]),
    ("fewer slots to write", lambda a: decode_delta_rule(a, write_slots=a.ids), ["`write_slots`", "(2,)", "[T] = [5]"]),
    (
        "states of other names",
        lambda a: decode_delta_rule(a, cache=a.states),
        ["`cache` stores StateEntry({'conv'", "'conv' [W - 1, C]", "'delta' [H, K, V]"],
    ),
    (
        "states of other channels",
        lambda a: decode_delta_rule(
            a, cache=zeros(jaxkv.StateEntry({"conv": ((2, 9), "float32"), "delta": ((2, 2, 3), "float32")}))
        ),
        ["`cache`", "9 channels and 2 heads of 2 x 3", "2 G K + H V = 4 G + 6", "a divisor G of the 2 heads"],
    ),
    ("lses as wide as outs", lambda a: merge_states(a, lses=a.outs), ["`lses`", "(2, 3, 4)", "`outs`", "(2, 3)"]),
    ("lses of other parts", lambda a: merge_states(a, lses=a.lses[:1]), ["`lses`", "(1, 3)", "`outs`", "(2, 3)"]),
    (
        "outs of two shapes",
        lambda a: merge_states(a, outs=[a.outs[0], a.outs[0, :2]]),
        ["`outs`", "float32[3, 4], float32[2, 4]", "one shape"],
    ),
    (
        "lses of two shapes",
        lambda a: merge_states(a, lses=[a.lses[0], a.lses[0, :2]]),
        ["`lses`", "float32[3], float32[2]", "one shape"],
    ),
    ("no parts", lambda a: merge_states(a, outs=[], lses=[]), ["`outs` has no arrays", "one shape"]),
    ("dst too short", lambda a: copy_blocks(a, dst=a.ids[:1]), ["`dst`", "(1,)", "[n] = [2]", "that of `src`"]),
    ("src of pairs", lambda a: copy_blocks(a, src=a.tables), ["`src`", "(2, 3)", "[n]"]),
    ("blocks of pairs", lambda a: read_blocks(a, blocks=a.tables), ["`blocks`", "(2, 3)", "[n]"]),
    (
        "rows of entries",
        lambda a: write_blocks(a, data=jnp.ones((2, 48), "bfloat16")),
        ["`data`", "(2, 48)", "[2, 144]", "payload"],
    ),
    ("too few rows", lambda a: write_blocks(a, blocks=jnp.arange(3)), ["`data`", "(2, 144)", "[3, 144]"]),
]

DTYPES = [
    ("int tokens", lambda a: decode_delta_rule(a, x=jnp.ones((5, 10), int)), ["`x`", "dtype int32", "bfloat16"]),
    (
        "bf16 decays",
        lambda a: decode_delta_rule(a, decay=jnp.ones((5, 2, 1), jnp.bfloat16)),
        ["`decay`", "dtype bfloat16", "expected float32"],
    ),
    ("f16 rates", lambda a: decode_delta_rule(a, rate=jnp.ones((5, 2), jnp.float16)), ["`rate`", "expected float32"]),
    (
        "int kv_c",
        lambda a: write_mla(a, kv_c=a.kv_c.astype(int)),
        ["`kv_c`", "dtype int32", "bfloat16 or float16 or float32"],
    ),
    ("float64 kv_c", lambda a: write_mla(a, kv_c=np.ones((5, 8))), ["`kv_c`", "dtype float64", "float32"]),
    (
        "fp8 k_pe",
        lambda a: write_mla(a, k_pe=a.k_pe.astype("float8_e4m3fn")),
        ["`k_pe`", "dtype float8_e4m3fn", "bfloat16"],
    ),
    (
        "float slots",
        lambda a: write_mla(a, slot_mapping=a.slots.astype(float)),
        ["`slot_mapping`", "dtype float32", "int32"],
    ),
    ("bool slots", lambda a: write_mla(a, slot_mapping=a.slots > 2), ["`slot_mapping`", "dtype bool", "int32"]),
    ("bool v", lambda a: write_kv(a, v=a.v > 0), ["`v`", "dtype bool", "float32"]),
    ("entries as elements", lambda a: write_entries(a, entries=jnp.zeros((5, 24))), ["`entries`", "float32", "uint8"]),
    ("e4m3 latents as bf16", lambda a: write_mla(a, kv_c=a.kv_c.astype("float8_e4m3fn")), ["`kv_c`", "float8_e4m3fn"]),
    (
        "e5m2 keys as e4m3",
        lambda a: write_kv(a, cache=a.kv_fp8, k=a.k.astype("float8_e5m2")),
        ["`k`", "float8_e5m2", "float8_e4m3fn"],
    ),
    (
        "e4m3 keys beside float values",
        lambda a: write_kv(a, cache=a.kv_fp8, k=a.k.astype("float8_e4m3fn")),
        ["`k` has dtype float8_e4m3fn", "`v` has dtype float32", "both"],
    ),
    (
        "e4m3 values with a scale",
        lambda a: write_kv(
            a, cache=a.kv_fp8, k=a.k.astype("float8_e4m3fn"), v=a.v.astype("float8_e4m3fn"), v_scale=0.5
        ),
        ["`v_scale` is 0.5", "None", "float8_e4m3fn"],
    ),
    (
        "e4m3 rotary keys to rotate",
        lambda a: write_mla(
            a,
            cache=a.mla_fp8,
            kv_c=a.kv_c.astype("float8_e4m3fn"),
            k_pe=a.k_pe.astype("float8_e4m3fn"),
            cos_sin=jnp.ones((5, 4)),
        ),
        ["`cos_sin`", "None", "`k_pe`"],
    ),
    ("uint8 key", lambda a: write_indexer_k(a, k=a.key.astype("uint8")), ["`k`", "dtype uint8", "bfloat16"]),
    (
        "q_pe of another dtype",
        lambda a: decode_mla(a, q_pe=a.q_pe.astype("bfloat16")),
        ["`q_pe`", "dtype bfloat16", "float32"],
    ),
    (
        "sparse q_pe of another dtype",
        lambda a: decode_mla_sparse(a, q_pe=a.q_pe[:, None].astype("float16")),
        ["`q_pe`", "dtype float16", "float32"],
    ),
    (
        "int q_latent",
        lambda a: decode_mla(a, q_latent=a.q_latent.astype(int)),
        ["`q_latent`", "dtype int32", "bfloat16"],
    ),
    (
        "q_pe of bf16 beside e4m3",
        lambda a: decode_mla(a, q_latent=a.q_latent.astype("float8_e4m3fn"), q_pe=a.q_pe.astype("bfloat16")),
        ["`q_pe`", "dtype bfloat16", "expected float8_e4m3fn"],
    ),
    (
        "e5m2 q_latent",
        lambda a: decode_mla(a, q_latent=a.q_latent.astype("float8_e5m2")),
        ["`q_latent`", "dtype float8_e5m2", "float8_e4m3fn"],
    ),
    (
        "e5m2 q of attention",
        lambda a: decode_kv(a, q=a.q.astype("float8_e5m2")),
        ["`q`", "dtype float8_e5m2", "float8_e4m3fn"],
    ),
    (
        "e5m2 q",
        lambda a: indexer_logits(a, q=a.q_indexer.astype("float8_e5m2")),
        ["`q`", "dtype float8_e5m2", "float8_e4m3fn"],
    ),
    (
        "fp8 weights",
        lambda a: indexer_logits(a, weights=a.weights.astype("float8_e4m3fn")),
        ["`weights`", "dtype float8_e4m3fn"],
    ),
    (
        "float tables",
        lambda a: decode_mla(a, block_tables=a.tables * 1.0),
        ["`block_tables`", "dtype float32", "int32"],
    ),
    ("float lengths", lambda a: decode_kv(a, seq_lens=a.lengths * 1.0), ["`seq_lens`", "dtype float32", "int32"]),
    ("float lengths of keys", lambda a: indexer_logits(a, seq_lens=a.lengths * 1.0), ["`seq_lens`", "dtype float32"]),
    (
        "float running sum",
        lambda a: gather_mla(a, cu_seq_lens=a.cu_seq_lens * 1.0),
        ["`cu_seq_lens`", "dtype float32", "int32"],
    ),
    ("float starts", lambda a: gather_mla(a, seq_starts=a.lengths * 1.0), ["`seq_starts`", "dtype float32", "int32"]),
    ("float chosen slots", lambda a: decode_mla_sparse(a, slots=a.chosen * 1.0), ["`slots`", "dtype float32", "int32"]),
    ("float counts", lambda a: decode_mla_sparse(a, counts=jnp.ones((2, 1))), ["`counts`", "dtype float32", "int32"]),
    (
        "bf16 sinks",
        lambda a: decode_mla_sparse(a, sinks=jnp.ones(3, "bfloat16")),
        ["`sinks`", "dtype bfloat16", "float32"],
    ),
    (
        "float positions",
        lambda a: positions_to_slots(a, positions=a.chosen * 1.0),
        ["`positions`", "dtype float32", "int32"],
    ),
    (
        "bf16 logits",
        lambda a: select_topk(a, logits=a.logits.astype("bfloat16")),
        ["`logits`", "bfloat16[2, 20]", "float32"],
    ),
    (
        "bf16 logits of experts",
        lambda a: select_experts(a, logits=a.logits.astype("bfloat16")),
        ["`logits`", "bfloat16", "float32"],
    ),
    ("bias of other experts", lambda a: select_experts(a, bias=a.logits[0, :3]), ["`bias`", "(3,)", "`logits`"]),
    (
        "shared experts of another width",
        lambda a: grouped_swiglu(a, shared=(a.gate[0], a.gate[0], a.gate[0])),
        ["`shared[2]`", "(4, 8)", "[8, 4]"],
    ),
    ("one shared matrix", lambda a: grouped_swiglu(a, shared=(a.gate[0],)), ["`shared` is 1 elements", "gate, up and"]),
    (
        "a shared array",
        lambda a: grouped_swiglu(a, shared=a.gate),
        ["`shared` is float32[3, 4, 8]", "gate, up and down"],
    ),
    ("a number for biases", lambda a: grouped_swiglu(a, biases=3), ["`biases` is 3", "gate, up and down"]),
    (
        "no ragged queries",
        lambda a: decode_mla(a, q_latent=a.q_latent[:0], q_pe=a.q_pe[:0], cu_q_lens=jnp.zeros(3, int)),
        ["`q_latent`", "(0, 3, 8)", "T at least 1"],
    ),
    (
        "no ragged queries of a prefill of keys and values",
        lambda a: prefill_kv(a, q=a.q[:0], cu_q_lens=jnp.zeros(3, int)),
        ["`q`", "(0, 6, 8)", "T at least 1"],
    ),
    (
        "ragged queries of a prefill with an axis too many",
        lambda a: prefill_kv(a, cu_q_lens=jnp.zeros(3, int)),
        ["`q`", "(2, 5, 6, 8)", "[T, Hq, D]"],
    ),
    (
        "running sum of a prefill without 0",
        lambda a: prefill_kv(a, q=a.q, cu_q_lens=jnp.zeros(2, int)),
        ["`cu_q_lens`", "(2,)", "[3]"],
    ),
    ("sinks of a prefill", lambda a: prefill_mla(a, sinks=jnp.ones(4)), ["`sinks`", "(4,)", "[3]"]),
    ("prefixes without an owner", lambda a: shared(a, prefix_tables=a.tables), ["`prefix_of` is None", "[B]"]),
    ("a prefix of two lengths", lambda a: shared(a, prefix_lens=a.lengths), ["`prefix_lens`", "(2,)"]),
    ("a prefix without blocks", lambda a: shared(a, prefix_tables=a.tables[0, :0]), ["`prefix_tables`", "at least 1"]),
    ("a prefix of floats", lambda a: shared(a, prefix_tables=a.kv_c[0]), ["`prefix_tables`", "float32", "int32"]),
    ("prefixes of too few lengths", lambda a: shared_by_some(a, prefix_lens=a.lengths[:1]), ["`prefix_lens`", "[2]"]),
    ("prefixes of too many requests", lambda a: shared_by_some(a, prefix_of=a.slots), ["`prefix_of`", "(5,)", "[2]"]),
    (
        "no ragged queries of a prefill",
        lambda a: prefill_mla(a, q_nope=jnp.ones((0, 3, 6)), q_pe=jnp.ones((0, 3, 4)), cu_q_lens=jnp.zeros(3, int)),
        ["`q_nope`", "(0, 3, 6)", "T at least 1"],
    ),
    ("a limit of 0", lambda a: grouped_swiglu(a, limit=0), ["`limit` is 0", "None, or a positive number"]),
    ("a limit without end", lambda a: grouped_swiglu(a, limit=1e39), ["`limit` is 1e+39", "that float32 holds"]),
    ("float experts", lambda a: grouped_swiglu(a, experts=a.shares), ["`experts`", "float32", "int32"]),
    (
        "bf16 shares",
        lambda a: grouped_swiglu(a, weights=a.shares.astype("bfloat16")),
        ["`weights`", "bfloat16", "float32"],
    ),
    ("a float32 weight", lambda a: scaled_linear(a, weight=a.gate[0]), ["`weight` is float32[4, 8]", "a TileScaled"]),
    (
        "e5m2 values",
        lambda a: grouped_swiglu(
            a,
            gate=TileScaled(a.gate.astype("float8_e5m2"), jnp.ones((3, 1, 1))),
            up=TileScaled.of(a.gate),
            down=TileScaled.of(a.down),
        ),
        ["`gate.values`", "float8_e5m2", "float8_e4m3fn"],
    ),
    ("f16 gate", lambda a: grouped_swiglu(a, gate=a.gate.astype("float16")), ["`gate`", "float16", "float32"]),
    ("int outs", lambda a: merge_states(a, outs=a.outs.astype(int)), ["`outs`", "int32[2, 3, 4]", "bfloat16"]),
    ("bf16 lses", lambda a: merge_states(a, lses=a.lses.astype("bfloat16")), ["`lses`", "bfloat16", "float32"]),
    ("float src", lambda a: copy_blocks(a, src=a.ids * 1.0), ["`src`", "dtype float32", "int32"]),
    ("float dst", lambda a: copy_blocks(a, dst=a.ids * 1.0), ["`dst`", "dtype float32", "int32"]),
    ("float blocks", lambda a: read_blocks(a, blocks=a.ids * 1.0), ["`blocks`", "dtype float32", "int32"]),
    ("rows of float32", lambda a: write_blocks(a, data=jnp.ones((2, 144))), ["`data`", "dtype float32", "bfloat16"]),
    (
        "gather to float64",
        lambda a: gather_mla(a, dtype="float64"),
        ["`dtype`", "'float64'", "bfloat16, float16, float32"],
    ),
    ("gather to int8", lambda a: gather_kv(a, dtype="int8"), ["`dtype`", "'int8'", "bfloat16, float16, float32"]),
    (
        "gather to fp8",
        lambda a: gather_mla(a, dtype=jnp.float8_e4m3fn),
        ["`dtype`", "float8_e4m3fn", "bfloat16, float16"],
    ),
    (
        "slots to read of floats",
        lambda a: read_mla(a, slots=a.slots.astype("float32")),
        ["`slots`", "float32", "int32"],
    ),
    ("read to integers", lambda a: read_indexer_k(a, dtype="int8"), ["`dtype`", "'int8'", "bfloat16, float16"]),
    ("gather to nonsense", lambda a: gather_indexer_k(a, dtype="brain"), ["`dtype`", "'brain'", "bfloat16, float16"]),
    ("gather to None", lambda a: gather_mla(a, dtype=None), ["`dtype`", "None", "bfloat16, float16, float32"]),
]

TABLES = [
    *(
        (
            f"{name} with tables of no columns",
            lambda a, run=run: run(a, block_tables=a.tables[:, :0]),
            ["`block_tables`", "(2, 0)", "M at least 1"],
        )
        for name, run in {**OF_BATCHES, **OF_RUNS, "positions_to_slots": positions_to_slots}.items()
    ),
    *(
        (
            f"{name} with tables of no rows",
            lambda a, run=run: run(a, block_tables=a.tables[:0]),
            ["`block_tables`", "(0, 3)"],
        )
        for name, run in {**OF_BATCHES, **OF_RUNS}.items()
    ),
    (
        "batch of no requests",
        lambda a: decode_mla(a, q_latent=a.q_latent[:0]),
        ["`q_latent`", "(0, 3, 8)", "B at least 1"],
    ),
    ("no query tokens", lambda a: decode_kv(a, q=a.q[:, None][:, :0]), ["`q`", "(2, 0, 6, 8)", "Q at least 1"]),
    ("no query heads", lambda a: decode_kv(a, q=a.q[:, :0]), ["`q`", "(2, 0, 8)", "Hq at least 1"]),
]

LISTS = [
    ("kv_c", lambda a: write_mla(a, kv_c=[[0.0] * 8] * 5), ["`kv_c` is a list", "expected an array [T, R]"]),
    ("slot_mapping", lambda a: write_mla(a, slot_mapping=[0, 1, 2, 3, 4]), ["`slot_mapping` is a list", "array [T]"]),
    ("one slot", lambda a: write_mla(a, slot_mapping=3), ["`slot_mapping` is a int", "array [T]"]),
    ("no slots", lambda a: write_mla(a, slot_mapping=None), ["`slot_mapping` is a NoneType", "array [T]"]),
    ("k", lambda a: write_kv(a, k=[]), ["`k` is a list", "array [T, H, D]"]),
    ("v", lambda a: write_kv(a, v=(a.v,)), ["`v` is a tuple", "array [T, H, Dv]"]),
    ("key", lambda a: write_indexer_k(a, k="key"), ["`k` is a str", "array [T, D]"]),
    ("q_pe", lambda a: decode_mla(a, q_pe=[1.0]), ["`q_pe` is a list", "array [B, Hq, P]"]),
    (
        "block_tables",
        lambda a: decode_mla(a, block_tables=[[0, 1, 2]] * 2),
        ["`block_tables` is a list", "array [B, M]"],
    ),
    ("seq_lens", lambda a: decode_kv(a, seq_lens=[9, 4]), ["`seq_lens` is a list", "array [B]"]),
    ("slots", lambda a: decode_mla_sparse(a, slots=[[[0]]] * 2), ["`slots` is a list", "array [B, Q, K]"]),
    ("counts", lambda a: decode_mla_sparse(a, counts=[[1]] * 2), ["`counts` is a list", "array [B, Q]"]),
    ("sinks", lambda a: decode_mla_sparse(a, sinks=[0.0] * 3), ["`sinks` is a list", "array [Hq]"]),
    ("weights", lambda a: indexer_logits(a, weights=[[[1.0] * 7]] * 2), ["`weights` is a list", "array [B, Q, Hi]"]),
    ("cu_seq_lens", lambda a: gather_mla(a, cu_seq_lens=[0, 9, 13]), ["`cu_seq_lens` is a list", "array [B+1]"]),
    ("seq_starts", lambda a: gather_kv(a, seq_starts=[0, 1]), ["`seq_starts` is a list", "array [B]"]),
    ("logits", lambda a: select_topk(a, logits=[1.0, 2.0]), ["`logits` is [1.0, 2.0]", "float32 [..., N]"]),
    ("positions", lambda a: positions_to_slots(a, positions=[[[0]]]), ["`positions` is a list", "array [B, Q, K]"]),
    ("src", lambda a: copy_blocks(a, src=[0, 1]), ["`src` is a list", "array [n]"]),
    ("blocks", lambda a: read_blocks(a, blocks=[0, 1]), ["`blocks` is a list", "array [n]"]),
    ("data", lambda a: write_blocks(a, data=[[0] * 144] * 2), ["`data` is a list", "array [n, E]"]),
]


@cases({"shapes": SHAPES, "dtypes": DTYPES, "empty axes": TABLES, "lists": LISTS})
def test_an_array(wrong, fragments):
    check(wrong, fragments)
