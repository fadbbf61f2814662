"""`jaxkv step`: the time of a decode step of a whole model."""

import shutil
from pathlib import Path

import jax
import pytest

import jaxkv.models
from jaxkv.bench import model_steps
from jaxkv.bench.kernel_times import KernelTimes
from jaxkv.cli import main, step

MODELS = Path(__file__).parents[1] / "data" / "models"


@pytest.fixture(autouse=True)
def brief(monkeypatch):
    monkeypatch.setattr(model_steps, "LEAST_SECONDS", 0.01)


@pytest.mark.parametrize(
    ("family", "form"), [("deepseek_v2_lite", "fp8"), ("deepseek_v32", "fp8_ds_mla"), ("llama", "fp8")]
)
def test_sizes_and_the_time_of_a_step_are_printed(family, form, capsys):
    assert main(["step", str(MODELS / family), "--requests", "3", "--tokens", "100", "--entry-format", form]) == 0
    printed = capsys.readouterr().out
    assert f" MB of {form} entries" in printed
    assert "a step of 3 requests x 100 tokens: " in printed


@pytest.mark.parametrize("family", ["deepseek_v2_lite", "llama"])
def test_the_step_attends_to_full_caches(family):
    model = jaxkv.models.random_model(jaxkv.models.ModelConfig.read(MODELS / family))
    cache = model_steps.filled(model, 9)
    steps = model_steps.Steps(model, cache, requests=3, tokens=130)
    lengths, tables, slots = steps._index
    assert lengths.tolist() == [130] * 3
    assert sorted(tables.reshape(-1).tolist()) == list(range(9))
    assert slots.tolist() == [[64 * block + 1] for block in tables[:, -1].tolist()]
    assert (cache.buffer != 0).mean() > 0.99


def test_the_share_of_the_kernels_is_printed(monkeypatch, capsys):
    names = "gemm_fusion", "_ZN7cutlass", "decode_mla_mosaic_gpu_kernel", "_store_entries"
    kernels = tuple(zip(names, (5e-3, 1e-3, 3e-3, 1e-3), strict=True))

    def timed(run, *, repeats):
        jax.block_until_ready(run())
        return KernelTimes(10e-3, kernels)

    monkeypatch.setattr(step, "kernels_of", timed)
    monkeypatch.setattr(model_steps.Steps, "seconds", lambda steps: 20e-3)
    main(["step", str(MODELS / "deepseek_v3" / "config.json"), "--requests", "1", "--tokens", "1"])
    printed = capsys.readouterr().out
    assert "a step of 1 request x 1 token: " in printed
    assert "10.000 ms (50% of the step); those of jaxkv: 2, 4.000 ms (20%)" in printed


def test_the_configuration_may_have_any_name(tmp_path, capsys):
    file = tmp_path / "deepseek.json"
    shutil.copy(MODELS / "deepseek_v2_lite" / "config.json", file)
    assert main(["step", str(file), "--requests", "1", "--tokens", "1"]) == 0
    assert capsys.readouterr().out.startswith("DeepseekV2ForCausalLM of 2 layers on ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere/config.json"], "`path` is 'nowhere/config.json'"),
        (["/nowhere"], "`path` is '/nowhere'"),
        ([str(MODELS / "deepseek_v3"), "--tokens", "1", "--implementation", "mosaic_gpu"], "mosaic_gpu: "),
    ],
)
def test_misuse_is_reported(arguments, message):
    with pytest.raises(SystemExit, match=f"jaxkv step: .*{message}"):
        main(["step", *arguments])


@pytest.mark.parametrize(
    ("error", "raised", "message"),
    [
        ("RESOURCE_EXHAUSTED: Out of memory", SystemExit, "jaxkv step: does not fit in memory: choose smaller sizes"),
        ("INTERNAL: a fault", jax.errors.JaxRuntimeError, "a fault"),
    ],
)
def test_only_out_of_memory_errors_are_reported_as_such(error, raised, message, monkeypatch, capsys):
    def fail(model, num_blocks):
        raise jax.errors.JaxRuntimeError(error)

    monkeypatch.setattr(model_steps, "filled", fail)
    with pytest.raises(raised, match=message):
        main(["step", str(MODELS / "deepseek_v3"), "--requests", "2", "--tokens", "1"])
    assert not capsys.readouterr().out
