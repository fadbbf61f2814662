"""Tables and sentences made from the recorded measurements.

    python notebooks/h200/report.py README.md notebooks/README.md jaxkv/models/README.md jaxkv/offload/README.md

rewrites what stands between the marks of each, such as `<!-- speed -->` and `<!-- /speed -->`, in the named
files.  `notebooks/README.md` says which command recorded which file.
"""

import argparse
import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from jaxkv.bench.recorded import limit, read, rows, step_name


def speed() -> str:
    """A Markdown table of `decode_mla` beside FlashMLA: packed caches in full, and the ratios of cross-layer caches."""
    every = rows()
    many = {row.shape: row for row in every if row.layers > 1}
    heading = ("requests x heads x query tokens x tokens", "jaxkv ms", "FlashMLA ms", "ratio", "ratio, many layers")
    lines = [f"| {' | '.join(heading)} |", "|---" * len(heading) + "|"]
    for row in every:
        if row.layers > 1:
            continue
        times = [_pair(pair, 4) for pair in (row.jaxkv, row.flash_mla)]
        of_many = _pair(many[row.shape].ratios, 2) if row.shape in many else "-"
        lines.append(f"| {' | '.join([row.shape, *times, _pair(row.ratios, 2), of_many])} |")
    return "\n".join(lines)


PEERS = {
    "flash_mla": "FlashMLA",
    "flash_attention_3": "FlashAttention 3",
    "vllm_fp8": "vLLM, lossy",
    "deep_gemm": "DeepGEMM",
}
"""The names of the peers of `peers.json`."""


@dataclass(frozen=True)
class Beside:
    """A row of jaxkv's benchmark, and the fastest peer on its shape."""

    row: dict
    peer: dict | None
    limit: float
    """The least time in ms, as `limit` returns it."""

    @property
    def ratios(self) -> tuple[float, float]:
        """How many times as fast as the peer jaxkv is: (burst, sustained)."""
        assert self.peer is not None
        burst, sustained = (self.peer[time] / self.row[time] for time in ("ms", "sustained_ms"))
        return burst, sustained

    @property
    def shape(self) -> str:
        """The shape, and how many layers the cache has, if several."""
        row = self.row
        shape = (
            shape_of(row)
            if not row["varlen"]
            else shape_of(row).replace(f"{row['tokens']:,}", f"up to {row['tokens']:,}")
        )
        return shape if row["layers"] == 1 else f"{shape}, {row['layers']} layers"


def beside() -> list[Beside]:
    """jaxkv's operations and their peers, on one H100."""
    ours, theirs = read("decode.json", "h100"), read("peers.json", "h100")
    found = []
    for row in ours["rows"]:
        peers = [peer for peer in theirs["rows"] if peer["shape"] == row["shape"]]
        fastest = min(peers, key=lambda peer: peer["ms"], default=None)
        found.append(Beside(row, fastest, limit(row, ours["ceilings"])))
    return found


def peers() -> str:
    """A Markdown table of jaxkv's operations beside the fastest peer."""
    heading = (
        *("operation", "entries", "requests x heads x query tokens x tokens"),
        *("jaxkv ms", "of the limit", "fastest peer", "its ms", "ratio"),
    )
    lines = [f"| {' | '.join(heading)} |", "|---" * len(heading) + "|"]
    for found in beside():
        row, peer = found.row, found.peer
        compared = ["-", "-", "-"]
        if peer is not None:
            times = _pair((peer["ms"], peer["sustained_ms"]), 4)
            compared = [PEERS[peer["peer"]], times, _pair(found.ratios, 2)]
        own = _pair((row["ms"], row["sustained_ms"]), 4)
        cells = [
            f"`{row['operation']}`",
            entries_of(row),
            found.shape,
            own,
            f"{found.limit / row['ms']:.2f}",
            *compared,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def entries_of(row: dict) -> str:
    """The format of a row's entries; `-` for an operation without a cache."""
    return "-" if row["operation"] == "select_topk" else row["format"]


def dense() -> list[Beside]:
    """The rows of dense attention in bf16 on a cache of one layer."""
    return [
        found
        for found in beside()
        if found.row["operation"] == "decode_mla" and found.row["format"] == "bf16" and found.row["layers"] == 1
    ]


def summary() -> str:
    """How long `decode_mla` takes relative to its peers, over all shapes."""
    times = [1 / ratio for found in dense() for ratio in found.ratios]
    return _paragraph(
        f"On an NVIDIA H100, `decode_mla` in bf16 takes between {min(times):.2f} and {max(times):.2f} times as long as "
        "the faster of FlashMLA and FlashAttention 3, depending on the shape ([Speed](#speed))."
    )


def verdict() -> str:
    """Where a peer is faster."""

    def slower(rows: list[Beside]) -> str:
        found = [
            f"{found.shape} {kind} ({ratio:.2f})"
            for found in rows
            if found.peer is not None
            for kind, ratio in zip(("in bursts", "sustained"), found.ratios, strict=True)
            if round(ratio, 2) < 1
        ]
        return ", ".join(found) or "no shape"

    of = {name: [found for found in beside() if name in found.row["shape"]] for name in ("sparse", "logits")}
    fp8 = [found for found in beside() if found.row["operation"] == "decode_mla" and found.row["format"] == "fp8"]
    return _paragraph(
        f"In bf16, a peer is faster on {slower(dense())}; of sparse attention, on {slower(of['sparse'])}; of the "
        f"indexer's logits, on {slower(of['logits'])}. With `fp8` entries, vLLM's kernel is faster on {slower(fp8)}: "
        "it multiplies queries and probabilities in float8, which jaxkv does not."
    )


def ceilings() -> str:
    """What fraction of the GPU's measured rates `decode_mla` reaches with many requests."""
    found = read("decode_mla.json")["ceilings"]
    many = [row for row in rows() if row.layers == 1 and not row.varlen and row.requests >= 64 and row.tokens >= 4096]

    def fractions(heads: int, sustained: bool) -> str:
        reached = [row.limit / row.jaxkv[sustained] for row in many if row.heads == heads]
        return f"{min(reached):.2f} to {max(reached):.2f}"

    return _paragraph(
        f"In the run of `decode_mla.json`, the GPU's measured ceilings were {found['read'] / 1e12:.2f} TB/s for "
        f"reading and {found['matmul'] / 1e12:.0f} TFLOP/s for bf16 matrix products. In bursts, with 64 or more "
        f"requests of 4,096 tokens or more, `decode_mla` with 128 heads reaches {fractions(128, False)} of the ceiling "
        f"of products, and with 16 heads {fractions(16, False)} of the ceiling of reading. Under a sustained load, it "
        f"reaches {fractions(128, True)} with 128 heads, and {fractions(16, True)} with 16."
    )


def quantised() -> str:
    """A Markdown table of quantised entries: attention, the indexer, and FlashMLA's sparse decode beside ours."""
    ours, theirs = [read(name) for name in ("quantised.json", "quantised_kv.json")], read("flash_mla_sparse.json")
    times = {row["shape"]: row for row in theirs["rows"]}
    heading = (
        *("operation", "entries", "requests x heads x query tokens x tokens"),
        *("ms", "of the limit", "FlashMLA ms", "ratio"),
    )
    lines = [f"| {' | '.join(heading)} |", "|---" * len(heading) + "|"]
    for row, ceilings in ((row, run["ceilings"]) for run in ours for row in run["rows"]):
        shape = shape_of(row)
        pair = row["ms"], row["sustained_ms"]
        fraction = limit(row, ceilings) / row["ms"]
        other = times.get(row["shape"])
        compared = ["-", "-"]
        if other is not None:
            both = other["ms"], other["sustained_ms"]
            compared = [_pair(both, 4), _pair([b / a for a, b in zip(pair, both, strict=True)], 2)]
        cells = [f"`{row['operation']}`", row["format"], shape, _pair(pair, 4), f"{fraction:.2f}", *compared]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def shape_of(row: dict) -> str:
    """Requests x heads x query tokens x tokens, of which a sparse operation attends to some."""
    tokens = f"{row['tokens']:,}"
    if row["operation"] == "decode_mla_sparse":
        window = f"{row['window']} + " if row.get("window") else ""
        tokens = f"{window}{row['chosen']:,} of {tokens}"
    return f"{row['requests']} x {row['heads']} x {row['q_len']} x {tokens}"


def _pair(values, digits: int) -> str:
    return ", ".join(f"{value:.{digits}f}" for value in values)


def models() -> str:
    """A Markdown table of times to first token, blocks in host memory, and V3.2's attention in all layers."""
    found, sparse = (read(f"{name}.json") for name in ("models_and_offload", "sparse_step"))
    hot, later_hot = (read("hot_rows.json", gpu) for gpu in ("h200", "h100"))
    ttft, offload = found["ttft"], found["offload"]
    v32, layer, limits = sparse["step"], sparse["seconds_per_layer"], sparse["limits"]
    serve, h100 = found["serve"]["tokens_per_s"], read("serve_bench.json", "h100")
    ms, large, whole = ttft["ms"], offload["large"], offload["rows"]

    def rates(order: str) -> str:
        parts = [f"{way} {rate:.1f} GB/s ({rate / large[way]:.2f})" for way, rate in whole[order].items()]
        return f"{', '.join(parts)} in {order}"

    lines = [
        (
            f"{ttft['what']}",
            f"{ms['cold']:.0f} ms if the prefix is computed; if it is found: on the device {ms['device']:.1f} ms, "
            f"in host memory {ms['host']:.1f} ms, on disk {ms['disk']:.0f} ms",
        ),
        (
            f"{offload['what']}",
            f"{rates('BLNHC')}; {rates('LBNHC')}; in brackets: as a fraction of the rate of one large array",
        ),
        (
            f"{found['serve']['what']}",
            f"prefill alone {serve['prefill']:,} tokens/s, decode alone {serve['decode']:,}; these allow "
            f"{serve['allowed']:,} output tokens/s, and {serve['saturation']:,} were generated at saturation "
            f"({serve['saturation'] / serve['allowed']:.0%})",
        ),
        (f"the same on an {h100['device']}, {h100['date']}, with random arrivals: `{h100['command']}`", served(h100)),
        (
            "DeepSeek-V3.2's attention in all layers of one packed cache, in a scan, in place: "
            f"`jaxkv bench ops --sparse-step`; {v32['requests']} requests x {v32['tokens']:,} tokens, "
            f"{v32['heads']} heads",
            f"{layer['burst'] * 1e6:.0f} us per layer, sustained {layer['sustained'] * 1e6:.0f} us; "
            f"its bytes and flops take {sum(limits.values()) * 1e6:.0f} us",
        ),
        (
            f"sparse attention in a layer whose entries are in host memory (`HotRows`): `jaxkv bench hot-rows`; "
            f"{hot['requests']} requests x {hot['tokens']:,} tokens, {hot['selected']:,} of them selected, "
            f"{hot['heads']} heads, `{hot['entry']}`",
            fetched(hot),
        ),
        (
            f"the same on an {later_hot['device']}, {later_hot['date']}, since one kernel does all of a fetch",
            fetched(later_hot),
        ),
    ]
    return "\n".join(["| what, and by which command | result |", "|---|---|", *(f"| {a} | {b} |" for a, b in lines)])


def fetched(found: dict) -> str:
    """What `jaxkv bench hot-rows` measured; in brackets, as a multiple of its limit."""
    times = (
        f"{row['us']:.0f} us ({row['us'] / row['limit_us']:.2f}) at {row['hit_rate']:.0%} hits"
        for row in found["hit_rates"]
    )
    return (
        f"{', '.join(times)}; in brackets: relative to the time of the link plus attention in a cache that fits, "
        f"which takes {found['fits_us']:.0f} us"
    )


def served(found: dict) -> str:
    """What `jaxkv bench serve` measured: rates alone and at saturation, and latencies with random arrivals."""
    alone, saturation = found["alone"], found["saturation"]
    parts = [
        f"prefill alone {alone['prefill']:,.0f} tokens/s, decode alone {alone['decode']:,.0f}; these allow "
        f"{found['allowed']:,.0f} output tokens/s, and {saturation['output_tokens_per_s']:,.0f} were generated at "
        f"saturation ({saturation['fraction']:.0%})"
    ]
    for load in found["loads"]:
        first, between = load["first_token_ms"], load["between_tokens_ms"]
        parts.append(
            f"{load['requests_per_s']:.1f} requests/s, {load['load']:.0%} of saturation: first token after "
            f"{first['median']:.0f} ms (99th percentile {first['p99']:.0f}), {between['median']:.1f} ms between tokens "
            f"({between['p99']:.1f})"
        )
    return "; ".join(parts)


def steps() -> str:
    """A Markdown table of steps of a whole model: what each spends on its kinds of kernels."""
    rows = read("model_steps.json")["rows"]
    kinds = list(dict.fromkeys(kind for row in rows for kind in row["shares_ms"]))
    heading = "requests x tokens", "ms", *kinds
    lines = [f"| {' | '.join(heading)} |", "|---" * len(heading) + "|"]
    for row in rows:
        cells = [step_name(row), f"{row['ms']:.2f}"]
        cells += [f"{took:.2f}" if (took := row["shares_ms"].get(kind)) else "-" for kind in kinds]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def concurrent_steps() -> str:
    """A Markdown table of steps whose kernels run side by side: each kernel counts from its start to its end."""
    rows = read("model_steps.json", "h100")["rows"]
    kinds = list(dict.fromkeys(kind for row in rows for kind in row["whole_ms"]))
    heading = "requests x tokens", "ms", "busy", *kinds, "their sum"
    lines = [f"| {' | '.join(heading)} |", "|---" * len(heading) + "|"]
    for row in rows:
        whole = row["whole_ms"]
        times = row["ms"], row["busy_ms"], *(whole[kind] for kind in kinds), sum(whole.values())
        lines.append(f"| {' | '.join([step_name(row), *(f'{time:.2f}' for time in times)])} |")
    return "\n".join(lines)


def hot_rows() -> str:
    """A Markdown table of `jaxkv bench hot-rows` on an H100, and the workload."""
    found = read("hot_rows.json", "h100")
    heading = "tokens in rows already", "fetch and attention, us", "the link's time plus attention, us", "ratio"
    lines = [f"| {' | '.join(heading)} |", "|---" * len(heading) + "|"]
    for row in found["hit_rates"]:
        us, limit_us = row["us"], row["limit_us"]
        lines.append(f"| {row['hit_rate']:.0%} | {us:.0f} | {limit_us:.0f} | {us / limit_us:.2f} |")
    workload = _paragraph(
        f"({found['device']}, {found['date']}: {found['requests']} requests of {found['tokens']:,} tokens, "
        f"{found['selected']:,} selected, {found['heads']} heads, `{found['entry']}` entries, {found['rows']:,} rows "
        f"per request. Attention in a cache that fits takes {found['fits_us']:.0f} us, and one large array is copied "
        f"to the device at {found['load']:.0f} GB/s.)"
    )
    return "\n".join([*lines, "", workload])


def delta_rule() -> str:
    """Decode steps of recurrent layers, beside a copy of their states."""
    found = read("delta_rule.json")
    heads, channels = (
        f"{row['ms']:.3f} ms, which is {1 / row['memory_fraction']:.2f} times a copy of the {row['megabytes']:.0f} MB"
        for row in found["rows"]
    )
    return _paragraph(
        f"For one token of each of {found['rows'][0]['requests']} requests, `jaxkv.decode_delta_rule` takes {heads} "
        f"that a layer of Qwen3-Next's sizes reads and writes; of Kimi Linear's sizes, {channels} ({found['device']}, "
        f"{found['date']}, jax {found['versions']['jax']})."
    )


def several_gpus() -> str:
    """A step of a model on two GPUs, by kinds of kernels."""
    found = read("models_and_offload.json")["several_gpus"]
    kinds = ", ".join(f"{kind} {took:.2f}" for kind, took in found["shares_ms"].items())
    kernels = found["kernels_ms"]
    return _paragraph(
        f"{found['what'][0].upper()}{found['what'][1:]}: {found['ms']:.2f} ms, of which {kinds}. Sums over devices "
        f"take {kernels['sums over devices (psum fusions)']:.2f} ms, and the output matrix "
        f"{kernels['output matrix (nvjet)']:.2f}."
    )


def engines() -> str:
    """A Markdown table of the engine's times beside those of vLLM's."""
    names = "engine_vllm", "engine_cold", "engine_decode", "engine"
    vllm, cold, decode, own = (read(f"{name}.json") for name in names)
    (first,), (their_first,) = own["first_token"], vllm["first_token"]
    (arrivals,), (their_arrivals,) = own["arrivals"], vllm["arrivals"]
    (first_start,), (later,), (their_start,) = cold["start"], own["start"], vllm["start"]
    rates, their_rates = ([row["tokens_per_s"] for row in found["at_once"]] for found in (own, vllm))
    requests, tokens = own["at_once"][0]["requests"], own["at_once"][0]["tokens"]
    steps = {row["requests"]: row["ms"] for row in decode["step"]}

    def ratio(mine: float, theirs: float) -> str:
        return f"{mine / theirs:.2f}"

    def started(start: dict) -> str:
        first, ready = (start["weights_s"] + start[name] for name in ("first_token_s", "ready_s"))
        return f"{first:.0f} ({ready:.0f})"

    lines = [
        *(
            (
                f"{mine['requests']} decoding, {mine['tokens']} tokens each: ms per token (the step alone)",
                f"{theirs['ms']:.2f}",
                f"{mine['ms']:.2f} ({steps[mine['requests']]:.2f})",
                ratio(mine["ms"], theirs["ms"]),
            )
            for mine, theirs in zip(decode["decode"], vllm["decode"], strict=True)
        ),
        (
            f"first token of a prompt of {first['prompt']}, of an idle engine: ms",
            f"{their_first['ms']:.1f}",
            f"{first['ms']:.1f}",
            ratio(first["ms"], their_first["ms"]),
        ),
        (
            f"{requests} requests at once, {tokens:,} tokens in all, twice: tokens/s",
            ", ".join(f"{rate:,.0f}" for rate in their_rates),
            ", ".join(f"{rate:,.0f}" for rate in rates),
            ratio(sum(rates), sum(their_rates)),
        ),
        *(
            (
                f"{arrivals['requests_per_s']:.1f} requests/s at random times: ms {name}, median and 99th percentile",
                *(f"{row[key]['median']:.1f}, {row[key]['p99']:.1f}" for row in (their_arrivals, arrivals)),
                ", ".join(ratio(arrivals[key][part], their_arrivals[key][part]) for part in ("median", "p99")),
            )
            for name, key in (("between tokens", "between_tokens_ms"), ("to the first token", "first_token_ms"))
        ),
        (
            "start, with the making of random weights: s to the first token (to all programs)",
            f"{their_start['first_token_s']:.0f}",
            f"{started(first_start)}; with a compilation cache {started(later)}",
            ratio(first_start["weights_s"] + first_start["first_token_s"], their_start["first_token_s"]),
        ),
    ]
    title = _paragraph(
        f"DeepSeek-V2-Lite's size with random weights, on one {own['device']}, {own['date']}, in one hour; vLLM "
        f"{vllm['versions']['vllm']} and jaxkv with jax {own['versions']['jax']} by `notebooks/time_engines.py`."
    )
    heading = ["| | vLLM | jaxkv | ratio |", "|---|---|---|---|"]
    return "\n".join([title, "", *heading, *(f"| {' | '.join(cells)} |" for cells in lines)])


def server() -> str:
    """A Markdown table of the server, of its engine without it, and of vLLM's server, in a closed loop on one H200."""
    own, vllm = read("server.json"), read("server_vllm.json")
    names = {"engine": "the engine without a server", "http": "`jaxkv serve`", "server": "vLLM's server"}
    lines = [
        "| clients | served by | output tokens/s: all, while all clients are busy | ms to the first token: median, p99 "
        "| ms between parts of an answer: median, p99 |",
        "|---|---|---|---|---|",
    ]
    loads = sorted(own["loads"] + vllm["loads"], key=lambda load: load["clients"])
    for load in loads:
        first, between = (
            f"{load[key]['median']:.1f}, {load[key]['p99']:,.0f}" for key in ("first_token_ms", "between_tokens_ms")
        )
        rates = f"{load['output_tokens_per_s']:,.0f}, {load['saturated']:,.0f}"
        lines.append(f"| {load['clients']} | {names[load['served_by']]} | {rates} | {first} | {between} |")
    title = _paragraph(
        f"DeepSeek-V2-Lite's size with random weights, on one {own['device']}, {own['date']}; jax "
        f"{own['versions']['jax']}, and vLLM {vllm['server']['vllm']} in the same hour. Prompts have 512 tokens and "
        "answers 256 on average, and each client sends its next request when its last one has ended: "
        f"`{own['command']}`."
    )
    return "\n".join([title, "", *lines])


def expanded() -> str:
    """A paragraph: the attention of a decode step with expanded keys and values, and with latents."""
    found = read("expanded.json")
    sizes, long, short = found["sizes"], *(found["seconds"][name] for name in ("expanded", "latents"))
    (slow, slow_sustained), (fast, fast_sustained) = (
        (1e3 * took["median"], 1e3 * took["sustained"]) for took in (long, short)
    )
    return _paragraph(
        f"On one {found['device']} (jax {found['versions']['jax']}, {found['date']}, `{found['command']}`), "
        f"{sizes['requests']} requests of {sizes['tokens']:,} tokens with {sizes['heads']} heads take {slow:.2f} ms "
        f"per layer with expanded keys and values, and {fast:.3f} ms with latents ({slow_sustained:.2f} and "
        f"{fast_sustained:.3f} sustained): latents are {slow_sustained / fast_sustained:.0f} times as fast. Their "
        f"caches have {long['cache_bytes'] / 1e9:.1f} and {short['cache_bytes'] / 1e9:.2f} GB. With expanded keys, XLA "
        f"reads at {long['of_reading']:.0%} of the rate that the GPU reached in the same run."
    )


def chain() -> str:
    """A Markdown table of the kernels of a layer."""
    return _by_hand("chain")


def by_hand() -> str:
    """Markdown tables of the measurements that were copied by hand, each with its device."""
    tables = read("by_hand.json")["tables"]
    return "\n\n".join(
        f"{table['title']}; {table['device']}:\n\n{_by_hand(name)}" for name, table in tables.items() if name != "chain"
    )


def _by_hand(name: str) -> str:
    table = read("by_hand.json")["tables"][name]
    lines = [table["heading"], ["---"] * len(table["heading"]), *table["rows"]]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _paragraph(text: str) -> str:
    return textwrap.fill(_with_subcommands(text), 120, break_on_hyphens=False, break_long_words=False)


SUBCOMMANDS = "step", "ttft", "offload", "parallel", "hot-rows"
"""Of `jaxkv bench`, which were commands of their own when files were recorded; as was `jaxkv serve-bench`."""


def _with_subcommands(text: str) -> str:
    """Recorded commands as they are run today."""
    moved = "|".join(SUBCOMMANDS)
    text = re.sub(rf"\bjaxkv ({moved})\b", r"jaxkv bench \1", text.replace("jaxkv serve-bench", "jaxkv bench serve"))
    return re.sub(rf"\bjaxkv bench(?! (ops|serve|{moved})\b)", "jaxkv bench ops", text)


TABLES: dict[str, Callable[[], str]] = {
    "summary": summary,
    "speed": speed,
    "peers": peers,
    "verdict": verdict,
    "ceilings": ceilings,
    "quantised": quantised,
    "models": models,
    "delta_rule": delta_rule,
    "steps": steps,
    "concurrent_steps": concurrent_steps,
    "chain": chain,
    "several_gpus": several_gpus,
    "engines": engines,
    "server": server,
    "expanded": expanded,
    "hot_rows": hot_rows,
    "by_hand": by_hand,
}
"""The text between each pair of marks."""


def main():
    """Rewrites the marked texts of the files named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("readmes", type=Path, nargs="+")
    for readme in parser.parse_args().readmes:
        text, count = readme.read_text(), 0
        for name, table in TABLES.items():
            marks = re.compile(rf"(?<=<!-- {name} -->\n).*?(?=<!-- /{name} -->)", re.DOTALL)
            text, found = marks.subn(lambda _, table=table: f"{_with_subcommands(table())}\n", text)
            count += found
        if not count:
            parser.error(f"{readme} has no marks: expected a pair such as `<!-- speed -->` and `<!-- /speed -->`")
        readme.write_text(text)


if __name__ == "__main__":
    main()
