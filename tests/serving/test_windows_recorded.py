"""The engine on models with windows: the recorded tokens, cold and from each tier.

Requests of DeepSeek-V4 have four block tables, and those of GPT-OSS two.
"""

import pytest

from jaxkv import models, serving
from jaxkv.offload import DiskPool, HostPool
from support.recorded import model, recorded


def engine(family, block_size, connectors=(), num_blocks=400):
    return serving.Engine(
        model(family), num_blocks=num_blocks, block_size=block_size, max_requests=3, max_len=288, chunk=48,
        max_num_batched_tokens=99, connectors=connectors,
    )  # fmt: skip


def serve(served, family, *numbers, count=64):
    """How many tokens of recorded prompts were found; the first `count` of their continuations must be right."""
    before = served.prefix_stats.found
    pairs = [recorded(family)[number] for number in numbers]
    requests = [served.submit(prompt, max_tokens=count, stop=()) for prompt, _ in pairs]
    list(served.run())
    assert [request.generated for request in requests] == [tokens[:count] for _, tokens in pairs]
    return served.prefix_stats.found - before


@pytest.mark.slow  # compiles two programs of many operations; `test_engine_windows.py` has several tables, too
@pytest.mark.parametrize("family", ["deepseek_v4", "gpt_oss"])
@pytest.mark.parametrize("block_size", [64, 32])
def test_cold_and_from_each_tier_the_tokens_are_the_same(family, block_size, tmp_path):
    layout = model(family).layout(1, block_size)

    def pools():
        return HostPool(layout, 800, disk=DiskPool(tmp_path, layout, model=models.fingerprint(model(family))))

    host = pools()
    first = engine(family, block_size, [host])
    assert serve(first, family, 4, 2, 1) == 0
    assert serve(first, family, 4, count=8) == 192  # whole blocks, and of other tables those of the last window
    assert first.prefix_stats.loaded == 0
    second = engine(family, block_size, [host])
    assert serve(second, family, 4, count=8) == 192
    assert second.prefix_stats.loaded > 0
    assert host.stats.read == 0
    host.flush()
    host = pools()
    third = engine(family, block_size, [host])
    assert serve(third, family, 4, count=8) == 192
    assert host.stats.read > 0
    assert third.pool.num_free == 400
