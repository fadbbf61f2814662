"""`jaxkv bench transfer`: its rows, and the processes that it starts."""

import json
import re
from importlib import import_module
from pathlib import Path

import pytest

from jaxkv.bench import transfer as command
from jaxkv.bench.peers import Peer
from jaxkv.bench.timing import Ceilings
from jaxkv.bench.transfer import Row
from jaxkv.cli import main
from support.jobs import job
from support.many_devices import on_several_devices

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "tests" / "data" / "models" / "deepseek_v3"
SMALL = ["bench", "transfer", str(MODEL), "--blocks", "5", "--repeats", "1"]


def test_ratios_are_those_of_rates():
    row = Row.timed("there", 3 * 10**9, 2.0, ("a copy", 2e9))
    assert (row.ms, row.gigabytes_per_s, row.ratio, row.of) == (2000, 1.5, 0.75, "a copy")
    assert str(row).split() == ["there", "2000.000", "ms", "1.50", "GB/s", "0.75", "of", "a", "copy"]
    assert str(Row.timed("there", 10**9, 1.0)).split() == ["there", "1000.000", "ms", "1.00", "GB/s"]


@on_several_devices
@pytest.mark.ci
def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "measure_ceilings", lambda *_, **__: Ceilings(1e9, 1e9, 1e12))
    file = tmp_path / "rows.json"
    assert main([*SMALL, "--pieces", "2", "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    names = [row["name"] for row in found["rows"]]
    assert names[:6] == [
        "read_blocks",
        *(f"{name}, {ways}" for ways in ("one way", "both ways") for name in ("lax.ppermute", "permute_blocks")),
        "transfer_blocks, one way",
    ]
    assert {"HostPool.store: device to host", "RemoteBlocks, JaxTransport: device to device"} < {*names[6:]}
    assert not found["wrong"]
    for row in found["rows"]:
        assert row["bytes"] == 5 * found["block_bytes"]
        assert row["gigabytes_per_s"] == pytest.approx(row["bytes"] / row["ms"] / 1e6)
    assert [row["of"] for row in found["rows"] if row["of"]] == ["the rate of copying", names[1], names[3]]
    printed = capsys.readouterr().out.splitlines()
    assert [re.split(r"  +", line)[0] for line in printed[1:]] == names


@on_several_devices
def test_other_contents_are_reported(monkeypatch, capsys):
    """Blocks that are not sent are not those of the other device."""
    monkeypatch.setattr(command, "_reads", lambda *_: [])
    monkeypatch.setattr(command, "_between_processes", lambda *_: [])
    monkeypatch.setattr(command.parallel, "permute_blocks", lambda cache, *_, **__: cache)
    assert main(SMALL) == 1
    assert capsys.readouterr().out.count("wrong: permute_blocks") == 2


@pytest.mark.ci
def test_two_commands_form_a_job(tmp_path):
    def command(address, number):
        options = ["--coordinator", address, "--processes", "2", "--process", str(number)]
        return ["-m", "jaxkv", *SMALL, *options, "--json", str(tmp_path / "rows.json")]

    with job(command) as processes:
        printed = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert ["permute_blocks, both ways" in text for text in printed] == [True, False]
    assert [row["ratio"] is not None for row in json.loads((tmp_path / "rows.json").read_text())["rows"]] == [0, 1] * 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--process", "1"],
            "--coordinator is missing: expected all of --coordinator, --processes, --process, or none",
        ),
        (["--coordinator", "localhost:1"], "--processes is missing"),
        (["--coordinator", "/no/such:1", "--processes", "2", "--process", "1"], "did not form a job: .*not known"),
        (["--blocks", str(2**23)], "blocks, a cache of twice as many, and rows: .* GB do not fit in memory"),
    ],
)
def test_mistakes(options, message, capsys):
    with pytest.raises(SystemExit, match=f"jaxkv bench transfer: .*{message}"):
        main([*SMALL, *options])
    assert not capsys.readouterr().out


@pytest.mark.parametrize("address", ["many", "host:", ":80", "host:0", "host:65536", "host:" + "9" * 5000])
def test_addresses_have_a_host_and_a_port(address, capsys):
    with pytest.raises(SystemExit):
        main([*SMALL, "--coordinator", address])
    assert "is not HOST:PORT, with a port from 1 to 65535" in capsys.readouterr().err


@pytest.mark.ci
def test_an_object_in_a_process_of_its_own(monkeypatch):
    """A module, whose functions are called there."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    monkeypatch.delenv("XLA_PYTHON_CLIENT_PREALLOCATE", raising=False)
    with Peer(1, import_module, "os") as peer:
        assert peer.call("getenv", "CUDA_VISIBLE_DEVICES") == "7"
        assert peer.begin("getenv", "XLA_PYTHON_CLIENT_PREALLOCATE").result() == "false"
        with pytest.raises(FileNotFoundError, match="nothing"):
            peer.call("listdir", "nothing")
    with Peer(0, int, "many") as peer, pytest.raises(ValueError, match="many"):
        peer.call("bit_length")
