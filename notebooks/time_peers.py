"""Times what other libraries have of jaxkv's decode operations on this GPU, on shapes of `jaxkv bench ops`.

    python notebooks/time_peers.py peers.json --libraries DIR [--peers flash_mla flash_attention_3 ...]

Needs an NVIDIA Hopper GPU and PyTorch.  The peers:

- `flash_mla`: FlashMLA (https://github.com/deepseek-ai/FlashMLA) built from source, dense (bf16) and sparse (fp8).
- `flash_attention_3`: of vLLM 0.26.0, which uses it for dense MLA on Hopper: rotary parts are its queries and keys,
  latents its values.  Its schedule is made once for all layers, with the better of two bounds on splits.
- `vllm_fp8`: the dense decode of fp8 latents of vLLM 0.33.0, which also rounds queries and probabilities to float8.
- `deep_gemm`: the paged logits of the indexer, of vLLM 0.33.0.

All but the first come as files of vLLM's wheels, in the folder `--libraries`: `_vllm_fa3_C.abi3.so` of 0.26.0, which is
built for PyTorch 2.11, and `_flashmla_extension_C.abi3.so` and `deep_gemm/` of 0.33.0.

Run it on the same machine and in the same hour as `jaxkv bench ops`: GPUs differ by some percent, and so does one
machine from hour to hour.

`ms` (bursts) is the time of a call in a CUDA graph of about 6 ms of such calls after 0.1 s of rest, the median of 15
replays.  `sustained_ms` is the time of a call when such graphs are replayed back to back for a second.  Scheduling
metadata is made once, outside of what is timed, as is jaxkv's plan.  Shapes and lengths are those of jaxkv's benchmark;
the cache has the same order, and its block tables are shuffled as well.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

os.environ["JAX_PLATFORMS"] = "cpu"  # jaxkv is imported for its shapes only: the GPU's memory is PyTorch's

import torch

from jaxkv.bench.suites import MLA_LAYERS, WORKLOADS
from jaxkv.bench.workload import Workload

BURST_SECONDS, REST_SECONDS, BURSTS, SUSTAINED_SECONDS = 0.006, 0.1, 15, 1.0
SCALE = 576**-0.5
SPLITS = 0, 32
"""Bounds on the splits of FlashAttention 3; 0 leaves the choice to it."""
Call = Callable[[], object]


def captured(call: Call, calls: int) -> torch.cuda.CUDAGraph:
    """A CUDA graph of `calls` calls."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    graph.replay()
    return graph


def seconds(graph: torch.cuda.CUDAGraph, replays: int = 1) -> float:
    """Device time of a graph's replays."""
    start, stop = torch.cuda.Event(True), torch.cuda.Event(True)
    torch.cuda.synchronize()
    start.record()
    for _ in range(replays):
        graph.replay()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / 1e3


def timed(call: Call) -> tuple[float, float]:
    """(burst, sustained): seconds of one call."""
    few = captured(call, 8)
    estimate = median(seconds(few) for _ in range(5)) / 8
    calls = max(1, round(BURST_SECONDS / estimate))
    graph = captured(call, calls)
    bursts = []
    for _ in range(BURSTS):
        time.sleep(REST_SECONDS)
        bursts.append(seconds(graph) / calls)
    replays = max(1, round(SUSTAINED_SECONDS / (estimate * calls)))
    return median(bursts), seconds(graph, replays) / (replays * calls)


def ceilings() -> dict[str, float]:
    """bytes/s of reading 4 GiB, flops/s of a bf16 product of 8192 x 8192 x 8192; random data."""
    values = torch.randint(-(2**62), 2**62, (2**29,), device="cuda")
    reading = captured(lambda: torch.sum(values), 1)
    read = values.nbytes / median(seconds(reading) for _ in range(7))
    reading = values = None  # frees them
    a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    product = captured(lambda: a @ b, 1)
    return {"read": read, "matmul": 2 * 8192**3 / median(seconds(product) for _ in range(7))}


def shuffled_table(workload: Workload) -> tuple[torch.Tensor, torch.Tensor]:
    """Lengths int32 [B] and block tables int32 [B, M] of shuffled blocks of 64 tokens."""
    lengths = torch.from_numpy(workload.lengths)
    counts = (lengths + 63) // 64
    table = torch.zeros(workload.requests, int(counts.max()), dtype=torch.int32)
    shuffled = torch.randperm(workload.layout.num_blocks).int().split(counts.tolist())
    for row, blocks in zip(table, shuffled, strict=True):
        row[: len(blocks)] = blocks
    return lengths.cuda(), table.cuda()


def pages_of_one_layer(workload: Workload) -> torch.Tensor:
    """bf16 [blocks, 64, 1, 576], the middle layer of a cache in jaxkv's order."""
    layer = workload.layers // 2
    cache = torch.empty(workload.layout.num_blocks, workload.layers, 64, 576, dtype=torch.bfloat16, device="cuda")
    for first in range(0, workload.layout.num_blocks, 1024):
        cache[first : first + 1024, layer].normal_().mul_(0.1)
    return cache[:, layer].unsqueeze(2)


def queries(workload: Workload, width: int) -> torch.Tensor:
    """bf16 [B, Q, H, width]."""
    shape = workload.requests, workload.q_len, workload.heads, width
    return (torch.randn(*shape, device="cuda") * 0.1).bfloat16()


def flash_mla(workload: Workload) -> Iterator[Call]:
    """A dense call of FlashMLA."""
    import flash_mla

    lengths, table = shuffled_table(workload)
    q, pages, causal = queries(workload, 576), pages_of_one_layer(workload), workload.q_len > 1
    metadata, _ = flash_mla.get_mla_metadata()
    yield lambda: flash_mla.flash_mla_with_kvcache(
        q, pages, table, lengths, 512, metadata, softmax_scale=SCALE, causal=causal
    )


def flash_mla_sparse(workload: Workload) -> Iterator[Call]:
    """A call of FlashMLA on 656-byte entries, each query token attending to random tokens of its request."""
    import flash_mla

    entries, tokens = (workload.requests, workload.tokens), workload.tokens
    cache = torch.empty(*entries, 656, dtype=torch.uint8, device="cuda")
    cache[..., :512] = torch.randn(*entries, 512, device="cuda").to(torch.float8_e4m3fn).view(torch.uint8)
    cache[..., 512:528] = torch.ones(*entries, 4, device="cuda").view(torch.uint8)
    cache[..., 528:] = torch.randn(*entries, 64, device="cuda").bfloat16().view(torch.uint8)
    pages = cache.view(torch.float8_e4m3fn).view(-1, 64, 1, 656)
    chosen = [
        torch.randperm(tokens, device="cuda")[: workload.chosen] + request * tokens
        for request in range(workload.requests)
        for _ in range(workload.q_len)
    ]
    slots = torch.stack(chosen).int().view(workload.requests, workload.q_len, -1)
    q = torch.randn(workload.requests, workload.q_len, workload.heads, 576, device="cuda").bfloat16()
    metadata, _ = flash_mla.get_mla_metadata()
    yield lambda: flash_mla.flash_mla_with_kvcache(
        q, pages, None, None, 512, metadata, softmax_scale=SCALE, is_fp8_kvcache=True, indices=slots
    )


def flash_attention_3(workload: Workload) -> Iterator[Call]:
    """Calls of FlashAttention 3, one per bound on splits."""
    ops = torch.ops._vllm_fa3_C
    requests, q_len, heads = workload.requests, workload.q_len, workload.heads
    lengths, table = shuffled_table(workload)
    longest = int(lengths.max())
    pages = pages_of_one_layer(workload)
    keys, latents = pages[..., 512:], pages[..., :512]
    q, q_latent = (queries(workload, width).view(requests * q_len, heads, width) for width in (64, 512))
    starts = torch.arange(requests + 1, device="cuda", dtype=torch.int32) * q_len
    nothing = (None,) * 4

    def call(splits: int) -> Call:
        metadata = ops.get_scheduler_metadata(
            requests, q_len, longest, heads, 1, 64, 512, torch.bfloat16, lengths, starts, *nothing,
            64, 0, True, -1, -1, False, splits, None, 0,
        )  # fmt: skip
        return lambda: ops.fwd(
            q, keys, latents, None, None, q_latent, None, starts, None, None, None, lengths, q_len, longest, table,
            *nothing, *nothing, SCALE, True, -1, -1, 0.0, True, metadata, splits, None, 0, None, 1, 0, None,
        )  # fmt: skip

    i, length = requests - 1, int(lengths[-1])
    rows = pages[table[i].long(), :, 0].reshape(-1, 576)[:length].float()
    last = torch.cat([q_latent, q], -1)[i * q_len :].float()
    visible = torch.arange(length, device="cuda") <= (length - q_len + torch.arange(q_len, device="cuda"))[:, None]
    scores = (torch.einsum("qhd,nd->qhn", last, rows) * SCALE).masked_fill(~visible[:, None], float("-inf"))
    expected = torch.einsum("qhn,nd->qhd", scores.softmax(-1), rows[:, :512])
    for splits in SPLITS:
        found = call(splits)
        error = (found()[0][i * q_len :].float() - expected).norm() / expected.norm()
        assert error < 1e-2, f"FlashAttention 3 is called wrongly: its error is {error:.1e}"
        yield found


def vllm_fp8(workload: Workload) -> Iterator[Call]:
    """A dense call on fp8 latents."""
    ops = torch.ops._flashmla_extension_C
    lengths, table = shuffled_table(workload)
    q, pages = (array.to(torch.float8_e4m3fn) for array in (queries(workload, 576), pages_of_one_layer(workload)))
    pages, one, causal = pages.contiguous(), torch.ones(1, device="cuda"), workload.q_len > 1
    metadata, splits = ops.get_mla_decoding_metadata_dense_fp8(lengths, workload.q_len * workload.heads, 1)
    yield lambda: ops.fwd_kvcache_mla_fp8(q, pages, 512, lengths, table, SCALE, causal, metadata, splits, one, one)


def deep_gemm(workload: Workload) -> Iterator[Call]:
    """The indexer's logits for queries in float8."""
    import deep_gemm

    blocks, requests, tokens = workload.layout.num_blocks, workload.requests, workload.tokens
    q = torch.randn(requests, workload.q_len, workload.heads, 128, device="cuda").to(torch.float8_e4m3fn)
    weights = torch.randn(requests * workload.q_len, workload.heads, device="cuda")
    pages = torch.empty(blocks, 64, 1, 132, dtype=torch.uint8, device="cuda")
    parts = pages.view(blocks, -1)  # 64 keys of 128 bytes, then their scales
    parts[:, :8192] = torch.randn(blocks, 8192, device="cuda").to(torch.float8_e4m3fn).view(torch.uint8)
    parts[:, 8192:] = torch.ones(blocks, 64, device="cuda").view(torch.uint8)
    _, table = shuffled_table(workload)
    lengths = torch.full((requests, workload.q_len), tokens, dtype=torch.int32, device="cuda")
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    metadata = deep_gemm.get_paged_mqa_logits_metadata(lengths, 64, processors)
    yield lambda: deep_gemm.fp8_fp4_paged_mqa_logits((q, None), pages, weights, lengths, table, metadata, tokens)


MANY_LAYERS = "decode_mla-64x128x1x4096", "decode_mla-64x16x1x4096"
"""Dense calls that are also timed in a cache of many layers."""


def is_dense(workload: Workload) -> bool:
    """Whether this is a dense call in bf16 on plain blocks of one layer, or of many for two of the shapes."""
    many = [f"{name}-{MLA_LAYERS}" for name in MANY_LAYERS]
    plain = workload.operation == "decode_mla" and workload.format == "bf16" and workload.blocks == "plain"
    return plain and (workload.layers == 1 or workload.name in many)


def is_sparse(workload: Workload) -> bool:
    """Whether FlashMLA is timed on this sparse call: it has kernels for 64 and 128 heads."""
    fits = workload.operation == "decode_mla_sparse" and workload.format == "fp8_ds_mla" and workload.blocks == "plain"
    return fits and workload.layers == 1 and workload.heads >= 64


def is_fp8(workload: Workload) -> bool:
    """Whether this is a dense call on fp8 latents of one layer."""
    return workload.operation == "decode_mla" and workload.format == "fp8" and workload.layers == 1


def is_logits(workload: Workload) -> bool:
    """Whether these are logits of the indexer with float8 queries on plain blocks of one layer."""
    own = workload.operation == "indexer_logits" and workload.blocks == "plain" and workload.layers == 1
    return own and workload.query_dtype == "float8_e4m3fn"


PEERS = {
    "flash_mla": ((is_dense, flash_mla), (is_sparse, flash_mla_sparse)),
    "flash_attention_3": ((is_dense, flash_attention_3),),
    "vllm_fp8": ((is_fp8, vllm_fp8),),
    "deep_gemm": ((is_logits, deep_gemm),),
}
"""The calls of each peer, and the shapes that they are timed on."""


def main() -> None:
    """Writes the rows to the file named on the command line, each as soon as it is measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", type=Path)
    parser.add_argument("--libraries", type=Path, required=True, help="the folder with the files of vLLM's wheels")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS), help="default: all")
    parser.add_argument("--flash-mla-commit", required=True, help="the commit of FlashMLA that was built")
    args = parser.parse_args()
    torch.manual_seed(0)
    for peer, library in (("flash_attention_3", "_vllm_fa3_C"), ("vllm_fp8", "_flashmla_extension_C")):
        if peer in args.peers:
            torch.ops.load_library(args.libraries / f"{library}.abi3.so")
    sys.path.append(str(args.libraries))  # deep_gemm
    rows: list[dict] = []
    found = {
        "date": datetime.now(UTC).date().isoformat(),
        "command": " ".join(["python", *sys.argv]),
        "device": torch.cuda.get_device_name(0),
        "versions": {
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "flash_mla": args.flash_mla_commit,
            "vllm": "0.26.0 (FlashAttention 3), 0.33.0",
        },
        "ceilings": ceilings(),
        "rows": rows,
    }
    for peer in args.peers:
        for fits, calls in PEERS[peer]:
            for workload in (workload for workload in WORKLOADS.values() if workload.suite == "peers"):
                if not fits(workload):
                    continue
                burst, sustained = min(timed(call) for call in calls(workload))
                row = {"peer": peer, "shape": workload.name, "ms": burst * 1e3, "sustained_ms": sustained * 1e3}
                print(row, flush=True)
                rows.append(row)
                args.json.write_text(json.dumps(found, indent=1) + "\n")
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
