"""`jaxkv serve-bench`: throughput and latencies of the engine at several loads."""

import json
from pathlib import Path

import pytest

from jaxkv.bench import model_steps
from jaxkv.cli import main

MODELS = Path(__file__).parents[1] / "data" / "models"
SIZES = ["--max-requests", "2", "--requests", "8", "--chunk", "16", "--max-chunks", "2"]


def test_each_load_is_served_and_recorded(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(model_steps, "LEAST_SECONDS", 0.01)
    file = tmp_path / "found.json"
    lengths = ["--prompt", "20", "--output", "6", "--loads", "0.5", "4"]
    assert main(["serve-bench", str(MODELS / "youtu"), *SIZES, *lengths, "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "8 requests per load, prompts of 20 (at most " in printed
    found = json.loads(file.read_text())
    alone, saturation = found["alone"], found["saturation"]
    prompt, output = found["requests"]["prompt_tokens"], found["requests"]["output_tokens"]
    allowed = output / (prompt / alone["prefill"] + output / alone["decode"])
    assert found["allowed"] == pytest.approx(allowed)
    assert saturation["fraction"] == pytest.approx(saturation["output_tokens_per_s"] / allowed)
    assert f"saturation: {saturation['output_tokens_per_s']:,.0f} output tokens/s, " in printed
    assert [load["load"] for load in found["loads"]] == [0.5, 4]
    for load in found["loads"]:
        assert load["requests_per_s"] == pytest.approx(load["load"] * saturation["output_tokens_per_s"] / output)
        assert 0 < load["first_token_ms"]["median"] <= load["first_token_ms"]["p99"]
        assert 0 < load["between_tokens_ms"]["median"] <= load["between_tokens_ms"]["p99"]


@pytest.mark.slow  # compiles the programs of an engine
@pytest.mark.parametrize("family", ["kimi_linear", "deepseek_v4"])
def test_models_with_several_tables(family, capsys, monkeypatch):
    monkeypatch.setattr(model_steps, "LEAST_SECONDS", 0.01)
    lengths = ["--prompt", "20", "--output", "6", "--loads", "0.5"]
    assert main(["serve-bench", str(MODELS / family), *SIZES, *lengths]) == 0
    assert "saturation: " in capsys.readouterr().out


def test_requests_that_never_saturate_the_engine_are_rejected(monkeypatch):
    monkeypatch.setattr(model_steps, "LEAST_SECONDS", 0.01)
    # The third request starts when the first two have ended, which is the last time that one waits.
    sizes = ["--max-requests", "2", "--requests", "3", "--chunk", "16", "--max-chunks", "2"]
    with pytest.raises(SystemExit, match="jaxkv serve-bench: no tokens were timed while some of"):
        main(["serve-bench", str(MODELS / "youtu"), *sizes, "--prompt", "8", "--output", "1"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere/config.json"], "`path` is 'nowhere/config.json'"),
        ([str(MODELS / "youtu"), "--requests", "256"], "--requests is 256: expected more than --max-requests 256"),
        ([str(MODELS / "youtu"), "--lengths", "/nowhere"], "/nowhere"),
        ([str(MODELS / "youtu"), "--blocks", "33000000"], "do not fit in memory"),
        ([str(MODELS / "youtu"), *SIZES, "--prompt", "2147483647", "--output", "2147483647"], "slots are int32"),
        ([str(MODELS / "youtu"), *SIZES, "--implementation", "mosaic_gpu"], "mosaic_gpu: "),
    ],
)
def test_misuse_is_reported(arguments, message):
    with pytest.raises(SystemExit, match=f"jaxkv serve-bench: .*{message}"):
        main(["serve-bench", *arguments])
