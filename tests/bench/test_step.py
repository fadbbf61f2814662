"""`jaxkv bench step`: the time of a decode step of a whole model."""

import argparse
import json
import shutil
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv.models
from jaxkv.bench import random_models, step
from jaxkv.bench.kernel_times import KernelTimes
from jaxkv.cli import main
from support.cases import further, slow
from support.jobs import job
from support.many_devices import on_several_devices

MODELS = Path(__file__).parents[1] / "data" / "models"


@pytest.fixture(autouse=True)
def brief(monkeypatch):
    monkeypatch.setattr(step, "LEAST_SECONDS", 0.01)


@pytest.mark.parametrize(
    ("family", "form"), [further("deepseek_v2_lite", "fp8"), further("deepseek_v32", "fp8_ds_mla"), ("llama", "fp8")]
)
def test_sizes_and_the_time_of_a_step_are_printed(family, form, capsys):
    assert (
        main(["bench", "step", str(MODELS / family), "--requests", "3", "--tokens", "100", "--entry-format", form]) == 0
    )
    printed = capsys.readouterr().out
    assert f" MB of {form} entries" in printed
    assert "a step of 3 requests x 100 tokens: " in printed


@pytest.mark.parametrize("family", ["deepseek_v2_lite", "llama"])
def test_the_step_attends_to_full_caches(family):
    model = jaxkv.models.random_model(jaxkv.models.ModelConfig.read(MODELS / family))
    cache = step.filled(model, 3 * step.blocks_for(model, 130))
    steps = step.Steps(model, cache, requests=3, tokens=130)
    lengths, tables, slots = steps._index
    assert lengths.tolist() == [130] * 3
    assert sorted(tables.reshape(-1).tolist()) == list(range(9))
    assert slots.tolist() == [[64 * block + 1] for block in tables[:, -1].tolist()]
    assert (cache.buffer != 0).mean() > 0.99


@pytest.mark.slow  # compiles two programs per model; nothing else in a step depends on the tables
@pytest.mark.parametrize("family", ["kimi_linear", "deepseek_v4", "qwen3_next"])
def test_models_with_several_tables(family, capsys):
    """A step reads and writes blocks of its own in each table, and the numbers in them are finite."""
    model = jaxkv.models.random_model(jaxkv.models.ModelConfig.read(MODELS / family))
    count = step.blocks_for(model, 130)
    cache = step.filled(model, 3 * count)
    steps = step.Steps(model, cache, requests=3, tokens=130)
    _, tables, _ = steps._index
    assert set(tables) == set(model.tables)
    assert sorted(i for table in tables.values() for i in table.reshape(-1).tolist() if i >= 0) == list(
        range(3 * count)
    )
    _, logits = jax.jit(jaxkv.models.prefill)(model, steps.cache, steps._tokens, *steps._index)
    assert jnp.isfinite(logits).all()
    assert main(["bench", "step", str(MODELS / family), "--requests", "2", "--tokens", "130"]) == 0
    assert "a step of 2 requests x 130 tokens: " in capsys.readouterr().out


@pytest.mark.parametrize("family", ["llama", "kimi_linear", "deepseek_v4", "qwen3_next"])
def test_blocks_are_counted_as_they_are_listed(family):
    model = random_models.described_model(
        argparse.Namespace(config=MODELS / family, entry_format=None, implementation=None, fp8_weights="expand")
    )
    for table in step._tables(model):
        for tokens in (1, 7, 8, 9, 64, 65, 130, 300):
            for new in {1, min(8, tokens), tokens}:
                assert step._count(table, tokens, new) == len(step._held(table, tokens, new))
    start = time.perf_counter()
    assert step.blocks_for(model, 2**31 - 1) >= 2**31 // 128
    assert time.perf_counter() - start < 1


def test_a_step_of_a_prefill(capsys):
    options = ["--requests", "2", "--tokens", "70", "--new-tokens", "20"]
    assert main(["bench", "step", str(MODELS / "deepseek_v2_lite"), *options]) == 0
    assert "a step of 2 requests x 70 tokens, 20 of them new: " in capsys.readouterr().out


@pytest.mark.ci
@on_several_devices
@pytest.mark.parametrize(
    ("family", "parallel", "options"),
    [
        slow("deepseek_v32", "expert", ["--entry-format", "fp8_ds_mla"]),
        slow("deepseek_v2_lite", "data-expert", []),
        ("llama", "context", ["--new-tokens", "3"]),
    ],
)
def test_a_step_on_several_devices(family, parallel, options, capsys, tmp_path):
    file = tmp_path / "step.json"
    options += ["--requests", "4", "--tokens", "70", "--json", str(file), "--devices", "2"]
    assert main(["bench", "step", str(MODELS / family), "--parallel", parallel, *options]) == 0
    assert f"on 2 x {jax.devices()[0].device_kind}, {parallel} parallel" in capsys.readouterr().out
    recorded = json.loads(file.read_text())
    assert (recorded["devices"], recorded["parallel"]) == (2, parallel)


@pytest.mark.parametrize(
    ("options", "dtype", "e4m3_products"),
    [
        ([], "float32", None),
        (["--fp8-weights", "expand"], "float32", None),
        (["--fp8-weights", "dequantise"], "float8_e4m3fn", False),
        (["--fp8-weights", "e4m3"], "float8_e4m3fn", True),
    ],
)
def test_the_use_of_weights_in_float8(options, dtype, e4m3_products):
    parser = argparse.ArgumentParser()
    random_models.add_arguments(parser)
    args = parser.parse_args([str(MODELS / "deepseek_v3"), *options])
    experts = random_models.described_model(args).params["layers"][-1]["mixture"]["experts"]["down"]
    assert getattr(experts, "e4m3_products", None) == e4m3_products
    assert jax.tree.leaves(experts)[0].dtype == dtype


@pytest.mark.ci
def test_weights_in_float8(capsys):
    options = ["--requests", "1", "--tokens", "8", "--fp8-weights", "dequantise"]
    assert main(["bench", "step", str(MODELS / "deepseek_v3"), *options]) == 0
    assert "weights " in capsys.readouterr().out
    config = jaxkv.models.ModelConfig.read(MODELS / "deepseek_v3")
    model = jaxkv.models.random_model(config, fp8_weights="dequantise")
    experts = model.params["layers"][-1]["mixture"]["experts"]["down"]
    assert experts.values.dtype == "float8_e4m3fn"
    inputs = experts.shape[-1]
    assert np.std(experts.dequantised("float32")) == pytest.approx(inputs**-0.5, rel=0.05)


def test_shares_are_printed_and_recorded(monkeypatch, capsys, tmp_path):
    kernels = (
        ("experts_gate_up_mosaic_gpu_kernel", 4e-3),
        ("nvjet_tst_128x8_64x12_2x1_v_bz_TNT", 2e-3),
        ("decode_mla_mosaic_gpu_kernel", 3e-3),
        ("loop_add_fusion", 1e-3),
    )

    def timed(run, *, repeats):
        jax.block_until_ready(run())
        return KernelTimes(10e-3, kernels, whole=(*kernels, ("nvjet", 2e-3)))

    monkeypatch.setattr(step, "kernels_of", timed)
    monkeypatch.setattr(step.Steps, "seconds", lambda steps: 20e-3)
    file = tmp_path / "step.json"
    options = ["--requests", "1", "--tokens", "1", "--json", str(file)]
    main(["bench", "step", str(MODELS / "deepseek_v3" / "config.json"), *options])
    printed = capsys.readouterr().out
    assert "a step of 1 request x 1 token: " in printed
    expected = (
        "4 kernels per step: experts 4.000 ms (20%), attention 3.000 ms (15%), products 2.000 ms (10%), "
        "others 1.000 ms (5%), gaps 10.000 ms (50%)"
    )
    assert expected in printed
    assert "from its start to its end: experts 4.000 ms (20%), attention 3.000 ms (15%), products 4.000 ms" in printed
    assert "these sum to 12.000 ms; at least one kernel runs for 10.000 ms" in printed
    recorded = json.loads(file.read_text())
    assert recorded["ms"] == 20
    assert recorded["shares_ms"] == pytest.approx(
        {"experts": 4, "attention": 3, "products": 2, "others": 1, "gaps": 10}
    )
    assert recorded["busy_ms"] == pytest.approx(10)
    assert recorded["whole_ms"] == pytest.approx({"experts": 4, "attention": 3, "products": 4, "others": 1})
    assert (recorded["requests"], recorded["tokens"], recorded["new_tokens"]) == (1, 1, 1)


def test_the_configuration_may_have_any_name(tmp_path, capsys):
    file = tmp_path / "deepseek.json"
    shutil.copy(MODELS / "deepseek_v2_lite" / "config.json", file)
    assert main(["bench", "step", str(file), "--requests", "1", "--tokens", "1"]) == 0
    assert capsys.readouterr().out.startswith("DeepseekV2ForCausalLM of 2 layers on ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere/config.json"], "`path` is 'nowhere/config.json'"),
        (["/nowhere"], "`path` is '/nowhere'"),
        ([str(MODELS / "deepseek_v3"), "--tokens", "1", "--implementation", "mosaic_gpu"], "mosaic_gpu: "),
        (
            [str(MODELS / "deepseek_v3"), "--tokens", "1", "--new-tokens", "2"],
            "--new-tokens is 2: expected at most the 1",
        ),
        ([str(MODELS / "llama"), "--devices", "2"], "--devices 2: expected --parallel with it"),
        ([str(MODELS / "llama"), "--parallel", "tensor", "--devices", "99"], "--devices is 99: expected at most the"),
    ],
)
def test_misuse_is_reported(arguments, message):
    with pytest.raises(SystemExit, match=f"jaxkv bench step: .*{message}"):
        main(["bench", "step", *arguments])


@pytest.mark.parametrize(
    ("error", "raised", "message"),
    [
        (
            "RESOURCE_EXHAUSTED: Out of memory",
            SystemExit,
            "jaxkv bench step: does not fit in memory: choose smaller sizes",
        ),
        ("INTERNAL: a fault", jax.errors.JaxRuntimeError, "a fault"),
    ],
)
def test_only_out_of_memory_errors_are_reported_as_such(error, raised, message, monkeypatch, capsys):
    def fail(model, num_blocks):
        raise jax.errors.JaxRuntimeError(error)

    monkeypatch.setattr(step, "filled", fail)
    with pytest.raises(raised, match=message):
        main(["bench", "step", str(MODELS / "deepseek_v3"), "--requests", "2", "--tokens", "1"])
    assert not capsys.readouterr().out


@pytest.mark.ci
def test_commands_form_a_job(tmp_path):
    file = tmp_path / "step.json"

    def command(address, number):
        options = ["--coordinator", address, "--processes", "2", "--process", str(number), "--json", str(file)]
        sizes = ["--requests", "4", "--tokens", "70", "--parallel", "data-expert"]
        return ["-m", "jaxkv", "bench", "step", str(MODELS / "deepseek_v3"), *sizes, *options]

    with job(command) as processes:
        printed = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert ["a step of 4 requests x 70 tokens: " in text for text in printed] == [True, False]
    recorded = json.loads(file.read_text())
    assert (recorded["devices"], recorded["processes"], recorded["parallel"]) == (2, 2, "data-expert")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--processes", "2"], "--coordinator is missing: expected all of --coordinator, --processes, --process"),
        (
            ["--coordinator", "localhost:1", "--processes", "2", "--process", "2"],
            "--process is 2: expected 0 to 1, of --processes",
        ),
    ],
)
def test_commands_that_form_no_job(options, message):
    with pytest.raises(SystemExit, match=f"jaxkv bench step: {message}"):
        main(["bench", "step", str(MODELS / "deepseek_v3"), *options])
