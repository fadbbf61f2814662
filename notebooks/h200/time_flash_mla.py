"""Times FlashMLA's decode on this GPU, on the shapes of `jaxkv bench ops --suite peers`: dense (bf16) or sparse (fp8).

    python notebooks/h200/time_flash_mla.py decode_mla flash_mla.json --commit COMMIT
    python notebooks/h200/time_flash_mla.py decode_mla_sparse flash_mla_sparse.json --commit COMMIT

Needs an NVIDIA Hopper GPU, PyTorch, and FlashMLA (https://github.com/deepseek-ai/FlashMLA) built from source.  Run it
on the same machine and in the same hour as `jaxkv bench ops`: H200s differ by some percent, and so does one machine
from hour to hour.

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
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

os.environ["JAX_PLATFORMS"] = "cpu"  # jaxkv is imported for its shapes only: the GPU's memory is PyTorch's

import flash_mla
import torch
from report import comparable

from jaxkv.bench.suites import WORKLOADS
from jaxkv.bench.workload import Workload

BURST_SECONDS, REST_SECONDS, BURSTS, SUSTAINED_SECONDS = 0.006, 0.1, 15, 1.0
MEMORY_FRACTION = 0.6  # as in `jaxkv bench ops`: where all layers do not fit, fewer are made


def captured(call, calls):
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


def seconds(graph, replays=1):
    """Device time of a graph's replays."""
    start, stop = torch.cuda.Event(True), torch.cuda.Event(True)
    torch.cuda.synchronize()
    start.record()
    for _ in range(replays):
        graph.replay()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / 1e3


def timed(call):
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


def ceilings():
    """bytes/s of reading 4 GiB, flops/s of a bf16 product of 8192 x 8192 x 8192; random data."""
    values = torch.randint(-(2**62), 2**62, (2**29,), device="cuda")
    reading = captured(lambda: torch.sum(values), 1)
    read = values.nbytes / median(seconds(reading) for _ in range(7))
    reading = values = None  # frees them
    a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    product = captured(lambda: a @ b, 1)
    return {"read": read, "matmul": 2 * 8192**3 / median(seconds(product) for _ in range(7))}


def decode_mla(workload: Workload):
    """A call of FlashMLA on a bf16 cache of the workload's layout."""
    layout, layer = workload.layout, workload.layers // 2
    cache = torch.empty(layout.num_blocks, workload.layers, 64, 576, dtype=torch.bfloat16, device="cuda")
    for first in range(0, layout.num_blocks, 1024):
        cache[first : first + 1024, layer].normal_().mul_(0.1)
    lengths = torch.from_numpy(workload.lengths).cuda()
    counts = (lengths.cpu() + 63) // 64
    table = torch.zeros(workload.requests, int(counts.max()), dtype=torch.int32)
    shuffled = torch.randperm(layout.num_blocks).int().split(counts.tolist())
    for row, blocks in zip(table, shuffled, strict=True):
        row[: len(blocks)] = blocks
    table = table.cuda()
    q = (torch.randn(workload.requests, workload.q_len, workload.heads, 576, device="cuda") * 0.1).bfloat16()
    metadata, _ = flash_mla.get_mla_metadata()
    pages = cache[:, layer].unsqueeze(2)

    def call():
        return flash_mla.flash_mla_with_kvcache(
            q, pages, table, lengths, 512, metadata, softmax_scale=576**-0.5, causal=workload.q_len > 1
        )

    return call


def decode_mla_sparse(workload: Workload):
    """A call of FlashMLA on 656-byte entries, each query token attending to random tokens of its request."""
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

    def call():
        return flash_mla.flash_mla_with_kvcache(
            q, pages, None, None, 512, metadata, softmax_scale=576**-0.5, is_fp8_kvcache=True, indices=slots
        )

    return call


CALLS = {"decode_mla": decode_mla, "decode_mla_sparse": decode_mla_sparse}


def main():
    """Writes the rows to the file named on the command line, each as soon as it is measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("operation", choices=CALLS)
    parser.add_argument("json", type=Path)
    parser.add_argument("--commit", required=True, help="the commit of FlashMLA, which its version does not name")
    args = parser.parse_args()
    file = args.json
    torch.manual_seed(0)
    properties = torch.cuda.get_device_properties(0)
    found = {
        "date": datetime.now(UTC).date().isoformat(),
        "command": " ".join(["python", *sys.argv]),
        "device": properties.name,
        "versions": {
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "flash_mla": flash_mla.__version__,
            "commit": args.commit,
        },
        "ceilings": ceilings(),
        "rows": [],
    }
    shapes = (w for w in WORKLOADS.values() if w.suite == "peers" and w.operation == args.operation)
    for workload in filter(lambda w: comparable(asdict(w)), shapes):
        if args.operation == "decode_mla_sparse" and workload.layers > 1:
            continue  # `decode_mla_sparse` above makes packed caches only
        fitted = workload.fitted(int(MEMORY_FRACTION * properties.total_memory))
        burst, sustained = timed(CALLS[args.operation](fitted))
        row = {"shape": workload.name, "layers": fitted.layers, "ms": burst * 1e3, "sustained_ms": sustained * 1e3}
        print(row, flush=True)
        found["rows"].append(row)
        file.write_text(json.dumps(found, indent=1) + "\n")
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
