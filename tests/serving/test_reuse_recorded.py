"""Prefixes that come back from a tier, on recorded checkpoints: the tokens are Hugging Face's."""

import subprocess
import sys
from pathlib import Path

import pytest

from jaxkv import models, serving
from jaxkv.offload import DiskPool, HostPool
from support.cases import further, slow
from support.recorded import model, recorded

BLOCK = 16


def serve(family, engine):
    """How many of the prompt's tokens were found; its continuation must be right."""
    prompt, tokens = recorded(family)[-1]
    before = engine.prefix_stats.found
    request = engine.submit(prompt, max_tokens=len(tokens), stop=())
    for _ in engine.run():
        pass
    assert request.generated == tokens
    return engine.prefix_stats.found - before


def engine(family, connectors=(), order="BLNHC"):
    return serving.Engine(
        model(family), num_blocks=20, block_size=BLOCK, max_requests=2, chunk=64, max_num_batched_tokens=130,
        order=order, connectors=connectors,
    )  # fmt: skip


def host_pool(family, disk=None, order="BLNHC"):
    return HostPool(model(family).layout(1, BLOCK, order), 20, disk=disk)


def disk_pool(family, folder, order="BLNHC"):
    return DiskPool(folder, model(family).layout(1, BLOCK, order), model=models.fingerprint(model(family)))


@pytest.mark.parametrize(
    ("family", "order"),
    [
        # Latents and the indexer's keys are stored: of 200 tokens each query sees 64.
        further("deepseek_v32", "BLNHC"),
        ("llama", "BLNHC"),
        slow("smollm3", "BHLNC"),  # keys and values, as those of llama
        # The same code with other sizes.
        slow("smollm3", "BLNHC"),
        *(slow("mistral4", order) for order in ("BLNHC", "LBNHC")),
        slow("smollm3", "LBNHC"),
    ],
)
def test_cold_and_from_each_tier_the_tokens_are_the_same(family, order, tmp_path):
    host = host_pool(family, disk_pool(family, tmp_path, order), order)
    first = engine(family, [host], order)
    assert serve(family, first) == 0
    assert serve(family, first) == 199  # the last block, which generated tokens filled, begins with the last 8
    assert first.prefix_stats.loaded == 0
    second = engine(family, [host], order)
    assert serve(family, second) == second.prefix_stats.loaded == 192
    assert host.stats.read == 0
    host.flush()
    host = host_pool(family, disk_pool(family, tmp_path, order), order)
    third = engine(family, [host], order)
    assert serve(family, third) == third.prefix_stats.loaded == 192
    assert host.stats.read == 12


IN_A_PROCESS = """
import sys
sys.path.insert(0, {tests!r})
import serving.test_reuse_recorded as here
host = here.host_pool({family!r}, here.disk_pool({family!r}, {folder!r}))
assert here.serve({family!r}, here.engine({family!r}, [host])) == 0
host.flush()
"""


@pytest.mark.slow  # `test_readme.py` has another process find a prefix on disk as well
def test_a_prefix_outlives_its_process_on_disk(tmp_path):
    family = "deepseek_v3"
    code = IN_A_PROCESS.format(tests=str(Path(__file__).parents[1]), folder=str(tmp_path), family=family)
    subprocess.run([sys.executable, "-c", code], check=True)
    host = host_pool(family, disk_pool(family, tmp_path))
    assert serve(family, engine(family, [host])) == 192
    assert host.stats.read == 12
    assert serve(family, engine(family, [host])) == 192
    assert host.stats.read == 12
