"""What other libraries' caches and attention do, and what jaxkv has of it: the test that runs each feature.

`.ci/tables.py` writes the table of `jaxkv/ops/README.md` from it, and `tests/docs/test_features.py` checks it.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Feature:
    """A row of the table."""

    name: str
    how: str
    """By which argument, function or format; of an unsupported feature, why it is not supported."""
    tests: tuple[str, ...] = ()
    """Node ids of tests that run it; none if it is not supported."""


XLA = "tests/ops/test_xla.py::"
MOSAIC = "tests/kernels/mosaic_gpu/"
TRITON = "tests/kernels/triton/"

FEATURES = {
    "Layouts": (
        Feature(
            "keys and values with strides of their own, in any order",
            "`from_strides(value_offset=, value_strides=)`",
            ("tests/layout/test_published_shapes.py::test_keys_and_values",),
        ),
        Feature(
            "values before their keys, planes of unequal width, quantised planes: fp8, int8, nvfp4",
            "`from_strides(value_offset=, value_strides=)`",
            (
                XLA + "TestWrites::test_keys_and_values_that_lie_apart",
                XLA + "TestGathers::test_keys_and_values_that_lie_apart",
                XLA + "TestDecodeKV::test_keys_and_values_that_lie_apart",
                MOSAIC + "test_kv.py::TestInterpreted::test_quantised_keys_and_values_that_lie_apart",
            ),
        ),
        Feature(
            "values in another format than their keys, such as keys in bf16 with values in fp8",
            "`KVEntry(value_format=)`, on `xla` and `triton`",
            (
                XLA + "TestWrites::test_stores_the_encoders_bytes_and_touches_nothing_else",
                XLA + "TestGathers::test_equals_the_packed_cache_and_the_oracle",
                XLA + "TestDecodeKV::test_equals_the_packed_cache_and_the_oracle",
                TRITON + "test_decode.py::TestInterpretedDecodeKV::test_equals_the_packed_cache_and_the_oracle",
            ),
        ),
        Feature(
            "keys and values as two arrays",
            "`from_strides(value_size=)`",
            (
                "tests/ops/test_two_arrays.py::test_reads_equal_those_of_a_packed_cache",
                "tests/ops/test_two_arrays.py::test_writes_touch_nothing_else_and_update_both_arrays_in_place",
                MOSAIC + "test_kv.py::TestInterpreted::test_keys_and_values_that_lie_apart",
                TRITON + "test_decode.py::TestInterpretedDecodeKV::test_keys_and_values_that_lie_apart",
            ),
        ),
        Feature(
            "vLLM's cross-layer blocks, NHD and HND",
            "`from_strides`; the default order is cross-layer",
            (
                "tests/layout/test_published_shapes.py::test_keys_and_values",
                "tests/ops/test_published_calls.py::TestXLA::test_attention",
            ),
        ),
        Feature(
            "caches in the memory of tensors of other libraries, by DLPack",
            "`KVCache.from_dlpack`",
            ("tests/layout/test_dlpack.py::test_memory_of_numpy_is_shared",),
        ),
        Feature(
            "PagedAttention's keys [B, H, D/x, N, x]",
            "the content of an entry is contiguous: its stride must be 1",
        ),
        Feature(
            "payloads of blocks of one size as blocks of another: 16, 32, 48, 64, 128 tokens",
            "`convert_blocks`",
            ("tests/ops/test_conversion.py::test_every_size_to_another_and_back",),
        ),
        Feature(
            "blocks of another size in host memory and on disk than on the device",
            "`offload.HostPool(cache_layout=)`",
            (
                "tests/offload/test_offload_sizes.py::test_blocks_of_another_size",
                "tests/offload/test_offload_sizes.py::test_caches_of_two_sizes_share_a_folder",
            ),
        ),
        Feature(
            "payloads of caches that divide heads or tokens over devices, as those of others",
            "`jaxkv.parallel.convert_blocks`",
            ("tests/parallel/test_conversion.py::test_every_division_to_another_and_back",),
        ),
    ),
    "Attention": (
        Feature(
            "sliding windows of both sides: (64, 64), (127, -1), (-1, 127)",
            "`window=(left, right)`, with `causal` or without",
            (
                XLA + "TestKVCombinations::test_options",
                XLA + "TestMLACombinations::test_options",
                TRITON + "test_decode.py::TestInterpretedKVWindowsOfBothSides::test_without_a_causal_mask",
                TRITON + "test_decode.py::TestInterpretedMLAWindowsOfBothSides::test_without_a_causal_mask",
                MOSAIC + "test_kv.py::TestInterpreted::test_a_window_of_both_sides",
                MOSAIC + "test_decode_mla.py::TestInterpreted::test_a_window_of_both_sides",
            ),
        ),
        Feature(
            "windows of ragged query tokens",
            "`window` with `cu_q_lens`",
            (
                XLA + "TestKVWindowsOfBothSides::test_ragged_query_tokens",
                MOSAIC + "test_kv.py::TestInterpreted::test_ragged_query_tokens_in_a_window",
            ),
        ),
        Feature(
            "mask functions, as FlexAttention has",
            "`mask`",
            (XLA + "TestKVMasks::test_combinations", XLA + "TestMLAMasks::test_combinations"),
        ),
        Feature(
            "tree masks of speculative decoding",
            "`tree_mask`",
            (XLA + "TestKVTreeMasks::test_combinations", XLA + "TestMLATreeMasks::test_combinations"),
        ),
        Feature(
            "attention sinks, soft caps",
            "`sinks`, `logit_cap`",
            (XLA + "TestKVCombinations::test_options", XLA + "TestMLACombinations::test_options"),
        ),
        Feature(
            "queries in float8 with a scale",
            "`q_scale`",
            (
                XLA + "TestDecodeMLA::test_queries_of_e4m3",
                XLA + "TestDecodeMLASparse::test_queries_of_e4m3",
                XLA + "TestDecodeKV::test_scales_of_e4m3_queries",
            ),
        ),
        Feature(
            "scales of keys and values per token and head",
            "`k_scale`, `v_scale`",
            (XLA + "TestTokenScales::test_attention",),
        ),
        Feature(
            "cascade attention to a shared prefix",
            "`prefix_tables`",
            (
                XLA + "TestKVSharedPrefixes::test_is_attention_to_all_tokens",
                XLA + "TestMLASharedPrefixes::test_is_attention_to_all_tokens",
            ),
        ),
        Feature(
            "prefill of ragged batches, with windows, sinks, caps, or without a causal mask",
            "`prefill_mla`, `prefill_kv`",
            (
                "tests/ops/test_prefill_options.py::test_ragged",
                "tests/ops/test_prefill_options.py::test_aligned",
            ),
        ),
        Feature(
            "the largest logit of sparse attention, as FlashMLA returns it",
            "`return_max_logits`",
            (XLA + "TestMaxLogits::test_equal_those_of_the_oracle",),
        ),
        Feature(
            "LSE to base 2, and FlashInfer's CSR page tables",
            "a factor of log(2); `block_tables_from_csr`",
            (
                "tests/docs/test_readme.py::test_results_of_flashinfer_and_jaxkv_are_merged",
                "tests/ops/test_page_tables.py::test_the_example_of_flashinfers_documentation",
            ),
        ),
        Feature(
            "layers that attend to another layer's entries",
            "`update_kv_cache=False` of `ragged_paged_attention`",
            ("tests/ops/test_ragged.py::test_layers_that_share_entries_store_none",),
        ),
        Feature("results in float8 or FP4", "results have the dtype of the queries, or bfloat16"),
        Feature(
            "the whole signature of tpu-inference's calls",
            "`ragged_paged_attention`, `mla_ragged_paged_attention`; options for TPUs have no effect",
            ("tests/ops/test_ragged.py::test_options_for_tpus_are_ignored",),
        ),
    ),
    "Writes and reads": (
        Feature("rotation of keys in writes", "`cos_sin`", (XLA + "TestWrites::test_keys_of_halves_on_every_layout",)),
        Feature(
            "values that are already in float8 or in the entry's format",
            "`write_kv`, `write_mla`, `write_entries`",
            (
                XLA + "TestWrites::test_quantised_values_are_stored_as_they_are",
                XLA + "TestWrites::test_stores_the_bytes",
            ),
        ),
        Feature(
            "reads at slots, dequantised (SGLang's `dequantize_k_cache_paged`)",
            "`read_mla`, `read_kv`, `read_indexer_k`",
            (XLA + "TestReads::test_equals_the_packed_cache_and_the_oracle",),
        ),
        Feature(
            "blocks of sliding-window layers are freed as requests grow",
            "`Group(window=)`, in models of GPT-OSS and DeepSeek V4",
            ("tests/serving/test_engine_windows.py::test_blocks_before_the_window_are_released",),
        ),
        Feature(
            "allocation, forks and copy on write inside `jit`",
            "`jaxkv.blocks`",
            ("tests/blocks/test_search.py::test_tokens_and_blocks_in_use",),
        ),
        Feature(
            "host memory as the cache of sparse attention (HiSparse)",
            "`serving.HostLatents` and `offload.HotRows`, on one device",
            (
                "tests/offload/test_hot_rows.py::TestHotRows::test_attention_is_bit_equal_to_a_cache_that_fits",
                "tests/serving/test_host_latents.py::test_requests_come_and_go",
            ),
        ),
    ),
    "Entry formats": (
        Feature(
            "SGLang's FP4 pool",
            "`kvfp4`",
            (
                "tests/kernels/test_formats.py::test_keys_and_values_of_sglangs_fp4_pool",
                "tests/kernels/test_formats.py::test_latents_of_sglangs_fp4_pool",
            ),
        ),
        Feature(
            "int4 with a Hadamard rotation (TurboQuant)",
            "`int4`",
            ("tests/kernels/test_formats.py::test_int4_rounds_rotated_values_to_15_steps",),
        ),
        Feature(
            "indexer keys with a scale per 32 values",
            "`indexer_mxfp8`, `indexer_mxfp4`",
            ("tests/kernels/test_formats.py::test_indexer_keys_with_four_different_scales_are_read",),
        ),
        Feature(
            "all formats of latents and states on Triton",
            "`triton`",
            (
                TRITON + "test_operations.py::test_compiles_within_the_gpus_limits",
                TRITON + "test_copies.py::TestInterpretedStates::test_every_layout",
            ),
        ),
        Feature(
            "quantised heads of 64 values (GPT-OSS) on Hopper's own kernels",
            "`fp8` and `int8`; those of `nvfp4` run on `triton`",
            (MOSAIC + "test_kv.py::test_sizes_of_quantised_heads",),
        ),
        Feature(
            "nvfp4 with swizzled scales",
            "`swizzle_scales`, with `Entry.pack` and `write_entries`, converts vLLM's pages",
            ("tests/kernels/test_formats.py::test_nvfp4_pages_whose_scales_are_permuted_across_tokens",),
        ),
    ),
    "Indexer": (
        Feature(
            "ragged query tokens, and a length per query token",
            "`cu_q_lens` and `seq_lens` of `indexer_logits`, `lengths` of `select_topk`",
            (
                XLA + "TestIndexer::test_ragged_query_tokens",
                XLA + "TestIndexer::test_lengths_per_query_token",
                XLA + "TestIndexer::test_select_topk_of_the_first_logits_of_each_row",
            ),
        ),
    ),
    "States": (
        Feature(
            "states of Mamba, convolutions and gated delta rules in the cache",
            "`StateEntry`, `write_state`, `read_state`",
            (XLA + "TestStates::test_every_layout",),
        ),
        Feature(
            "decode steps of Gated DeltaNet and Kimi Delta Attention",
            "`decode_delta_rule`; states are updated in place by `triton`",
            (XLA + "TestDeltaRule::test_sizes",),
        ),
        Feature(
            "prompts in these layers",
            "plain JAX, in models; there are no kernels for GPUs",
            ("tests/models/recurrent/test_delta_rule.py::test_both_forms_equal_float64",),
        ),
    ),
    "Devices": (
        Feature(
            "NVIDIA Ampere and Ada",
            "`triton`; compiled for them in tests",
            (TRITON + "test_operations.py::test_compiles_within_the_gpus_limits",),
        ),
        Feature(
            "kernels of its own for NVIDIA Blackwell",
            "`decode_mla` of bf16, f16, fp8 and fp8_ds_mla entries and `decode_kv` of bf16 and f16 on `mosaic_gpu`, "
            "compiled and interpreted; for others, `triton`",
            (
                MOSAIC + "test_decode_mla_blackwell.py::TestInterpreted::test_equals_the_packed_cache_and_the_oracle",
                MOSAIC
                + "test_decode_mla_blackwell.py::TestInterpreted::"
                + "test_quantised_entries_equal_the_packed_cache_and_the_oracle",
                MOSAIC + "test_kv_blackwell.py::TestInterpreted::test_equals_the_packed_cache_and_the_oracle",
            ),
        ),
        Feature(
            "AMD MI300 and MI350: writes, gathers and dense attention",
            "`triton` if it is named; compiled for them in tests",
            (TRITON + "test_amd.py::test_compiles_within_the_gpus_limits",),
        ),
        Feature("kernels for other AMD GPUs, Intel GPUs and TPUs", "`xla` runs there"),
        Feature(
            "caches of other processes (NIXL, Mooncake, KV connectors)",
            "`transfer_blocks` copies between devices of one process; `read_blocks` returns payloads to send",
        ),
    ),
}
"""Features by topic."""


def table() -> str:
    """The table in Markdown: unsupported features are in italics."""
    lines = ["| feature | by |", "|---|---|"]
    for topic, features in FEATURES.items():
        lines.append(f"| **{topic}** | |")
        for feature in features:
            how = feature.how if feature.tests else f"*unsupported: {feature.how}*"
            lines.append(f"| {feature.name} | {how} |")
    return "\n".join(lines)
