"""`jaxkv bench parallel` on several devices."""

import json
import re

import jax
import pytest

from jaxkv.bench import parallel as command
from jaxkv.bench.timing import Ceilings
from jaxkv.cli import main
from support.many_devices import on_several_devices

pytestmark = on_several_devices


@pytest.mark.ci
@pytest.mark.parametrize("divided", ["context", "tensor"])
def test_the_command(divided, tmp_path, monkeypatch, capsys):
    """Both devices have what they should, and give what one gives."""
    monkeypatch.setattr(command, "measure_ceilings", lambda *_, **__: Ceilings(1e9, 1e9, 1e12))
    file = tmp_path / "rows.json"
    sizes = "--requests 2 --tokens 150 --heads 8 --query-tokens 3 1 --layers 3 --repeats 1 --devices 2 1 --format fp8"
    assert main(["bench", "parallel", divided, *sizes.split(), "--json", str(file)]) == 0
    printed, recorded = capsys.readouterr().out, json.loads(file.read_text())
    rows = [(1, 1), (2, 1), (1, 3), (2, 3)]  # devices and query tokens
    assert [tuple(map(int, row)) for row in re.findall(r"^ +(\d) +(\d) ", printed, re.MULTILINE)] == rows
    lines = r"^(\d) query tokens?: 2 devices take \d+\.\d{3} times as long as 1; results differ by (\S+) "
    (one, error), (three, other_error) = re.findall(lines, printed, re.MULTILINE)
    assert (one, three) == ("1", "3")
    assert max(float(error), float(other_error)) < 1e-2
    assert [(row["devices"], row["query_tokens"]) for row in recorded["rows"]] == rows
    for row in recorded["rows"]:
        share = 1 / row["devices"] if divided == "context" else 1
        moved = row["gigabytes_per_s"] * row["attention_ms"] * 1e6
        computed = row["tflop_per_s"] * row["attention_ms"] * 1e9
        assert moved == pytest.approx(2 * 150 * 576 * share)
        assert computed == pytest.approx(2 * 2 * 150 * 8 * 1088 * row["query_tokens"] / row["devices"])
        assert (row["collective_ms"] is None) == (row["devices"] == 1)


@pytest.mark.ci
def test_values_may_be_wider_than_latents(monkeypatch, capsys):
    """Attention to V4's entries also sums their rotary parts."""
    monkeypatch.setattr(command, "measure_ceilings", lambda *_, **__: Ceilings(1e9, 1e9, 1e12))
    sizes = "--requests 1 --tokens 70 --heads 2 --layers 2 --repeats 1 --devices 2 1 --format fp8_v4"
    assert main(["bench", "parallel", "context", *sizes.split()]) == 0
    assert float(capsys.readouterr().out.split("results differ by ")[1].split()[0]) < 1e-2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("context --tokens 5 --query-tokens 1 6", "--query-tokens has 6: expected at most --tokens, 5"),
        ("context --devices 99", f"--devices has 99: expected 1 to {jax.device_count()}"),
        pytest.param(
            *("tensor --devices 3", "--devices has 3: expected divisors of the 128 heads"),
            marks=pytest.mark.skipif(jax.device_count() < 3, reason="needs 3 devices"),
        ),
        ("context --layers 100000000", "the cache on . devices, and .* 128 heads: .* GB do not fit in memory"),
        pytest.param(
            *("context --implementation mosaic_gpu", "mosaic_gpu: "),
            marks=pytest.mark.skipif(jax.default_backend() != "cpu", reason="GPUs may support it"),
        ),
    ],
)
def test_the_command_rejects_misuse_and_prints_no_table(arguments, words, capsys):
    with pytest.raises(SystemExit, match=f"jaxkv bench parallel: .*{words}"):
        main(["bench", "parallel", *arguments.split()])
    assert not capsys.readouterr().out
