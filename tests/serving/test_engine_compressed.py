"""The engine on DeepSeek-V4, whose requests have four block tables: the recorded tokens, cold and from each tier."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from jaxkv import models, serving
from jaxkv.offload import DiskPool, HostPool

FOLDER = Path(__file__).parents[1] / "data" / "models" / "deepseek_v4"


@cache
def model():
    return models.load(FOLDER)


@cache
def recorded(number):
    """A prompt, and the 64 tokens that follow."""
    with np.load(FOLDER / "truth.npz") as found:
        return found["prompts"][number][: found["prompt_lens"][number]].tolist(), found["tokens"][number].tolist()


def engine(block_size, offload=None, num_blocks=400):
    return serving.Engine(
        model(), num_blocks=num_blocks, block_size=block_size, max_requests=3, max_len=288, chunk=48,
        max_num_batched_tokens=99, offload=offload,
    )  # fmt: skip


def serve(served, *numbers, count=64):
    """How many tokens of recorded prompts were found; the first `count` of their continuations must be right."""
    before = served.prefix_stats.found
    pairs = [recorded(number) for number in numbers]
    requests = [served.submit(prompt, max_tokens=count, stop=()) for prompt, _ in pairs]
    list(served.run())
    assert [request.generated for request in requests] == [tokens[:count] for _, tokens in pairs]
    return served.prefix_stats.found - before


@pytest.mark.slow  # compiles two programs of many operations; `test_engine_states.py` has several tables, too
@pytest.mark.parametrize("block_size", [64, 32])
def test_cold_and_from_each_tier_the_tokens_are_the_same(block_size, tmp_path):
    layout = model().layout(1, block_size)

    def pools():
        return HostPool(layout, 800, disk=DiskPool(tmp_path, layout, model=models.fingerprint(model())))

    host = pools()
    first = engine(block_size, host)
    assert serve(first, 4, 2, 1) == 0
    assert serve(first, 4, count=8) == 192  # whole blocks, and of the other tables the blocks of the last window
    assert first.prefix_stats.loaded == 0
    second = engine(block_size, host)
    assert serve(second, 4, count=8) == 192
    assert second.prefix_stats.loaded > 0
    assert host.stats.read == 0
    host.flush()
    host = pools()
    third = engine(block_size, host)
    assert serve(third, 4, count=8) == 192
    assert host.stats.read > 0
    assert third.pool.num_free == 400
