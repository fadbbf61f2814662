"""`jaxkv bench ttft`: the time to the first token in each case, and whether tokens are equal."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxkv import models
from jaxkv.bench import ttft
from jaxkv.bench.kernel_times import KernelTimes
from jaxkv.cli import main

MODELS = Path(__file__).parents[1] / "data" / "models"
MODEL = MODELS / "deepseek_v2_lite"
SIZES = ["--prefix", "128", "--chunk", "64", "--rounds", "2"]


@pytest.mark.ci
def test_each_case_finds_its_prefix_and_draws_the_same_tokens(tmp_path, capsys):
    arguments = [str(MODEL / "config.json"), *SIZES, "--disk", str(tmp_path / "blocks"), "--order", "LBNHC"]
    assert main(["bench", "ttft", *arguments, "--json", str(tmp_path / "times.json")]) == 0
    printed = capsys.readouterr().out
    assert "a prefix of 128 tokens is 0.1 MB of f32 entries" in printed
    assert "every case found the expected prefix and generated the same 16 tokens" in printed
    found = json.loads((tmp_path / "times.json").read_text())
    assert found["prefix"] == {"tokens": 128, "bytes": 128 * 136 * 2 * 4, "order": "LBNHC", "chunk": 64}
    assert {name: len(times) for name, times in found["ms"].items()} == {"cold": 2, "device": 2, "host": 2, "disk": 2}
    assert len(list((tmp_path / "blocks").rglob("*.block"))) == 3 * 2


@pytest.mark.slow  # compiles the programs of an engine three times
@pytest.mark.parametrize("family", ["kimi_linear", "deepseek_v4"])
def test_models_with_several_tables(family, capsys):
    assert main(["bench", "ttft", str(MODELS / family), "--prefix", "128", "--chunk", "64", "--rounds", "1"]) == 0
    assert "every case found the expected prefix" in capsys.readouterr().out


def test_a_cache_has_the_blocks_of_all_tables():
    """Tables of DeepSeek V4 have blocks of different numbers of tokens."""
    config = models.ModelConfig.read(MODELS / "deepseek_v4")
    model = jax.eval_shape(lambda: models.random_model(config))
    rows = {name: table.block_size for name, table in model.layout(1, 64).tables.items()}
    assert rows == {"": 64, "window": 8, "csa_rows": 4, "hca_rows": 8}
    assert ttft._num_blocks(model, 128) == 3 + 18 + 36 + 18


@pytest.mark.ci
def test_shares_of_the_kernels_of_a_cold_prompt(monkeypatch, capsys, tmp_path):
    def timed(run, *, repeats):
        run()
        return KernelTimes(3e-3, (("experts_down_mosaic_gpu_kernel", 2e-3), ("loop_fusion", 1e-3)))

    def pretend(engine, prompt):
        return ttft.Case(seconds=4e-3, found=128, tokens=[7] * 16)

    monkeypatch.setattr(ttft, "kernels_of", timed)
    monkeypatch.setattr(ttft, "_served", pretend)
    main(["bench", "ttft", str(MODEL), *SIZES, "--json", str(tmp_path / "times.json")])
    assert "cold: experts 2.000 ms (50%), others 1.000 ms (25%), gaps 1.000 ms (25%)" in capsys.readouterr().out
    found = json.loads((tmp_path / "times.json").read_text())["cold_shares_ms"]
    assert found == pytest.approx({"experts": 2, "others": 1, "gaps": 1})


@pytest.mark.parametrize("change", [{"tokens": [0] * 16}, {"found": 64}])
def test_a_wrong_case_is_reported(change, monkeypatch, capsys):
    served = iter(range(100))

    def pretend(engine, prompt):
        number = next(served)
        case = ttft.Case(seconds=1.0, found=0 if number % 4 == 0 else 128, tokens=[7] * 16)
        return case._replace(**change) if number == 6 else case

    monkeypatch.setattr(ttft, "_served", pretend)
    assert main(["bench", "ttft", str(MODEL), *SIZES]) == 1
    printed = capsys.readouterr().out
    assert f"host, round 1: {change.get('found', 128)} tokens found, then {change.get('tokens', [7] * 16)}" in printed
    assert "all found" not in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere/config.json"], "`path` is 'nowhere/config.json': expected a folder with a config.json"),
        (["/nowhere"], "`path` is '/nowhere'"),
        ([str(MODEL), "--prefix", "100"], "--prefix is 100: expected a multiple of 512, .* a smaller --chunk"),
        ([str(MODEL), "--disk", "/dev/null/blocks"], "--disk is '/dev/null/blocks': expected a folder"),
        ([str(MODEL), "--chunk", "96", "--prefix", "96"], "expected a multiple of 192"),
        ([str(MODEL), "--entry-format", "bf16", "--prefix", "2147483136"], "do not fit in memory"),
        ([str(MODELS / "deepseek_v32"), "--order", "LBNHC"], "`order` is 'LBNHC'"),
    ],
)
def test_misuse_is_reported_before_weights_are_made(arguments, message, monkeypatch):
    described = models.random_model

    def without_weights(*args, **options):
        assert isinstance(jnp.zeros(()), jax.core.Tracer), "weights are made"
        return described(*args, **options)

    monkeypatch.setattr(models, "random_model", without_weights)
    with pytest.raises(SystemExit, match=f"jaxkv bench ttft: .*{message}"):
        main(["bench", "ttft", *arguments])


def test_an_implementation_that_cannot_run_here_is_reported():
    with pytest.raises(SystemExit, match=r"jaxkv bench ttft: .*mosaic_gpu: "):
        main(["bench", "ttft", str(MODEL), *SIZES, "--implementation", "mosaic_gpu"])
