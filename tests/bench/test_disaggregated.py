"""`jaxkv bench disaggregated`: what is counted, and both cases with a tiny model."""

import json
from pathlib import Path

import pytest

from jaxkv.bench.disaggregated import Served
from jaxkv.cli import main

MODEL = Path(__file__).parents[1] / "data" / "models" / "deepseek_v3"
SMALL = ["bench", "disaggregated", str(MODEL), "--requests", "2", "--output", "4", "--chunks", "1"]


def test_what_is_counted():
    first = Served([10.0, 10.0], [[10.5], [11.0]], [[1], [2]])
    rest = Served([10.6, 11.1], [[11.5, 12.0], [12.0, 13.0]], [[3, 4], [5, 6]], loaded=128, failures=1, late=2)
    served = first.then(rest)
    assert served.tokens == [[1, 3, 4], [2, 5, 6]]
    found = served.summary()
    assert (found["seconds"], found["output_tokens_per_s"]) == (3.0, 2.0)
    assert (found["first_token_ms"]["median"], found["between_tokens_ms"]["median"]) == (750, 1000)
    assert (found["loaded_tokens"], found["failures"], found["late"]) == (128, 1, 2)
    one, other = Served([10.0, 0.0], [[10.5], []], [[1], []]), Served([0.0, 9.0], [[], [9.5]], [[], [7]], loaded=64)
    both = one.then(other)
    assert (both.submitted, both.tokens, both.loaded) == ([10.0, 9.0], [[1], [7]], 64)


@pytest.mark.ci
@pytest.mark.parametrize("options", [["--transport", "JAX"], ["--prefillers", "2", "--decoders", "2"]])
def test_the_command(options, tmp_path, capsys):
    file, requests = tmp_path / "found.json", 4 if "--prefillers" in options else 2
    assert main([*SMALL, "--requests", str(requests), *options, "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    assert found["loaded_share"] == 1
    for case in ("both", "prefill_then_decode"):
        assert found[case]["output_tokens_per_s"] == pytest.approx(4 * requests / found[case]["seconds"])
        assert found[case]["failures"] == found[case]["late"] == 0
    assert found["prefill_then_decode"]["loaded_tokens"] == requests * 128
    assert found["tokens"]["equal"] + found["tokens"]["rounded"] == requests
    assert "100.0% of the tokens of prompts were loaded, with 0 failures" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--requests", "3"], "--requests is 3 and --output 4: expected a multiple of the 2 engines"),
        (["--decoders", "3"], "--requests is 2 and --output 4: expected a multiple of the 4 engines"),
        (["--requests", "3", "--decoders", "2", "--transport", "JAX"], "--transport JAX: expected 1 and 1, or"),
        (["--output", "1"], "--requests is 2 and --output 1: .* at least 2 tokens"),
        (["--transport", "NIXL"], "NIXL is not installed: "),
    ],
)
def test_mistakes(options, message, capsys):
    with pytest.raises(SystemExit, match=f"jaxkv bench disaggregated: .*{message}"):
        main([*SMALL, *options])
    assert not capsys.readouterr().out
