"""`jaxkv bench serve`: lengths and arrivals of requests, what is counted, and the engine at several loads."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from jaxkv.bench import requests, serve, step
from jaxkv.bench.requests import Lengths
from jaxkv.bench.serve import Rates, Served
from jaxkv.cli import main
from jaxkv.serving import HostTime
from serving.toy_engines import engine
from support import toy_model

MODELS = Path(__file__).parents[1] / "data" / "models"
SIZES = ["--max-requests", "2", "--requests", "8", "--chunk", "16", "--max-num-batched-tokens", "34"]


def test_drawn_lengths_have_their_means_and_an_end():
    lengths = Lengths.drawn(5000, 512, 256)
    for values, mean in zip(lengths, (512, 256), strict=True):
        assert abs(values.mean() - mean) < 1
        assert values.min() >= 1
        assert values.max() < 1.1 * requests.LONGEST * mean
        assert 0.5 * mean < values.std() < 0.8 * mean
    assert np.abs(np.corrcoef(*lengths)[0, 1]) < 0.05
    assert lengths.longest == (lengths.prompts + lengths.outputs).max()


def test_requests_that_run_have_more_tokens_than_the_mean():
    # Of ten steps, nine are those of the second request, which has 10 + 9 / 2 tokens on average.
    assert Lengths(np.asarray([10, 10]), np.asarray([1, 9])).running == math.floor(0.1 * 10.5 + 0.9 * 14.5)


def test_lengths_are_read_from_a_file(tmp_path):
    file = tmp_path / "lengths"
    file.write_text("5, 7\n11 13\n")
    lengths = Lengths.read(file, 3)
    assert (lengths.prompts.tolist(), lengths.outputs.tolist()) == ([5, 11, 5], [7, 13, 7])
    for text in ("5", "5 6 7", "5 0", "a b", "5 2147483648", "5 " + "9" * 5000):
        file.write_text(f"1 2\n{text}\n")
        with pytest.raises(ValueError, match=f"lengths, line 2: '{text}' is not the prompt and output tokens"):
            Lengths.read(file, 3)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="lengths is not UTF-8"):
        Lengths.read(file, 3)
    file.write_text("")
    with pytest.raises(ValueError, match="lengths is empty: expected a line"):
        Lengths.read(file, 3)


def test_arrivals_are_a_poisson_process():
    between = np.diff(requests.poisson(20000, 4.0))
    assert abs(between.mean() - 0.25) < 0.01
    assert abs(between.std() - 0.25) < 0.01


def test_what_the_rates_allow():
    lengths = Lengths(np.asarray([400, 600]), np.asarray([200, 300]))
    # 500 prompt tokens take 0.05 s, and 250 output tokens take 0.2 s.
    assert Rates(prefill=10000.0, decode=1250.0).allowed(lengths) == pytest.approx(250 / 0.25)


def test_what_is_counted():
    served = Served(np.asarray([0.0, 1.0]), [[0.5, 0.75, 1.5], [3.0]], (0.5, 2.5), HostTime(4, 3.0, 2.0))
    assert served.throughput(*served.saturated) == 2 / 2
    assert served.throughput(1.5, 1.5) == 0
    assert (served.host.step_ms, served.host.busy_ms) == (750, 250)
    assert served.first.tolist() == [0.5, 2.0]
    assert served.between.tolist() == [0.25, 0.75]
    assert requests.percentiles(served.between)["median"] == 500
    assert requests.percentiles(np.asarray([])) == {"median": 0.0, "p99": 0.0}


def test_requests_arrive_and_are_served(monkeypatch):
    toy_model.install(monkeypatch)
    lengths = Lengths(np.asarray([5, 9, 3, 7, 4, 12]), np.asarray([4, 6, 1, 3, 5, 2]))
    served_at_once = serve.serve(engine(), lengths, np.zeros(6))
    assert [len(times) for times in served_at_once.tokens] == lengths.outputs.tolist()
    assert served_at_once.host.steps >= max(lengths.outputs)
    assert 0 < served_at_once.host.busy_ms < served_at_once.host.step_ms
    start, end = served_at_once.saturated
    assert 0 < end < max(times[-1] for times in served_at_once.tokens)
    arrivals = np.asarray([0.0, 0.0, 0.05, 0.1, 0.1, 0.3])
    found = serve.serve(engine(), lengths, arrivals)
    assert [len(times) for times in found.tokens] == lengths.outputs.tolist()
    assert (found.first > 0).all()
    assert (np.concatenate([np.diff(times) for times in found.tokens]) >= 0).all()
    assert start < math.inf


@pytest.mark.ci
def test_each_load_is_served_and_recorded(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(step, "LEAST_SECONDS", 0.01)
    file = tmp_path / "found.json"
    lengths = ["--prompt", "20", "--output", "6", "--loads", "0.5", "4", "--max-time-between-tokens", "1e-5"]
    assert main(["bench", "serve", str(MODELS / "youtu"), *SIZES, *lengths, "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "8 requests per load, prompts of 20 (at most " in printed
    found = json.loads(file.read_text())
    assert found["engine"]["max_time_between_tokens"] == 1e-5
    alone, saturation = found["alone"], found["saturation"]
    prompt, output = found["requests"]["prompt_tokens"], found["requests"]["output_tokens"]
    allowed = output / (prompt / alone["prefill"] + output / alone["decode"])
    assert found["allowed"] == pytest.approx(allowed)
    assert saturation["fraction"] == pytest.approx(saturation["output_tokens_per_s"] / allowed)
    assert f"saturation: {saturation['output_tokens_per_s']:,.0f} output tokens/s, " in printed
    assert f"steps take {saturation['step_ms']:.2f} ms on average; the host is busy for " in printed
    shapes = [(program["chunks"], program["requests"]) for program in found["programs"]]
    assert shapes == [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 2)]
    assert all(program["temporary_bytes"] > 0 for program in found["programs"])
    assert [load["load"] for load in found["loads"]] == [0.5, 4]
    for load in found["loads"]:
        assert 0 < load["host_busy_ms"] < load["step_ms"]
        assert load["requests_per_s"] == pytest.approx(load["load"] * saturation["output_tokens_per_s"] / output)
        assert 0 < load["first_token_ms"]["median"] <= load["first_token_ms"]["p99"]
        assert 0 < load["between_tokens_ms"]["median"] <= load["between_tokens_ms"]["p99"]


@pytest.mark.slow  # compiles the programs of an engine
@pytest.mark.parametrize("family", ["kimi_linear", "deepseek_v4"])
def test_models_with_several_tables(family, capsys, monkeypatch):
    monkeypatch.setattr(step, "LEAST_SECONDS", 0.01)
    lengths = ["--prompt", "20", "--output", "6", "--loads", "0.5"]
    assert main(["bench", "serve", str(MODELS / family), *SIZES, *lengths]) == 0
    assert "saturation: " in capsys.readouterr().out


@pytest.mark.ci
def test_requests_that_never_saturate_the_engine_are_rejected(monkeypatch):
    monkeypatch.setattr(step, "LEAST_SECONDS", 0.01)
    # The third request starts when the first two have ended, which is the last time that one waits.
    sizes = ["--max-requests", "2", "--requests", "3", "--chunk", "16", "--max-num-batched-tokens", "34"]
    with pytest.raises(SystemExit, match="jaxkv bench serve: no tokens were timed while some of"):
        main(["bench", "serve", str(MODELS / "youtu"), *sizes, "--prompt", "8", "--output", "1"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere/config.json"], "`path` is 'nowhere/config.json'"),
        ([str(MODELS / "youtu"), "--requests", "256"], "--requests is 256: expected more than --max-requests 256"),
        ([str(MODELS / "youtu"), "--max-num-batched-tokens", "319"], "expected at least 320, for --max-requests 256"),
        ([str(MODELS / "youtu"), "--lengths", "/nowhere"], "/nowhere"),
        ([str(MODELS / "youtu"), "--blocks", "33000000"], "do not fit in memory"),
        ([str(MODELS / "youtu"), *SIZES, "--prompt", "2147483647", "--output", "2147483647"], "slots are int32"),
        ([str(MODELS / "youtu"), *SIZES, "--implementation", "mosaic_gpu"], "mosaic_gpu: "),
    ],
)
def test_misuse_is_reported(arguments, message):
    with pytest.raises(SystemExit, match=f"jaxkv bench serve: .*{message}"):
        main(["bench", "serve", *arguments])


@pytest.mark.parametrize(("option", "least"), [("--max-time-between-tokens", "1e-06"), ("--loads", "0.001")])
def test_numbers_of_options_are_within_limits(option, least, capsys):
    for wrong in ("0", "nan", "x"):
        with pytest.raises(SystemExit):
            main(["bench", "serve", str(MODELS / "youtu"), option, wrong])
        assert f"argument {option}: {wrong!r} is not a number from {least} to " in capsys.readouterr().err
