"""`jaxkv bench offload`: what it prints, and that the blocks it times are really moved."""

import json

import numpy as np
import pytest

from jaxkv import offload
from jaxkv.bench import offload as command
from jaxkv.cli import main

SMALL = ["--layers", "2", "--blocks", "16", "--requests", "2", "--tokens", "100", "--heads", "2", "--repeats", "1"]


@pytest.fixture(autouse=True)
def brief(monkeypatch):
    monkeypatch.setattr(command, "STEPS", 2)


def test_rates_and_steps_are_printed(capsys, tmp_path):
    file = tmp_path / "numbers.json"
    assert main(["bench", "offload", *SMALL, "--json", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    starts = (
        "cpu, jax ",
        "one large array: ",
        "BLNHC: store ",
        "LBNHC: store ",
        "LBNHC, one copy per layer: store ",
        "decode",
    )
    assert [line.startswith(start) for line, start in zip(lines, starts, strict=True)] == [True] * 6
    assert "16 blocks of 0.15 MB" in lines[0]
    assert all(line.count(" of one large array)") == 2 for line in lines[2:5])
    found = json.loads(file.read_text())
    assert found["block_bytes"] == 2 * 64 * 576 * 2
    rates = [row[way] for row in (found["large"], *found["rows"].values()) for way in ("store", "load")]
    assert len(rates) == 8
    assert min(*rates, *found["steps"].values()) > 0


def test_all_blocks_are_stored_and_loaded(monkeypatch):
    counts = []
    load = offload.HostPool.load

    def counted(pool, cache, blocks, keys):
        before = np.asarray(cache.buffer).copy()
        cache = load(pool, cache, blocks, keys)
        assert np.array_equal(np.asarray(cache.buffer).view(np.uint8), before.view(np.uint8))
        assert np.count_nonzero(before) > 0.99 * before.size
        counts.append(len(set(blocks)))
        return cache

    monkeypatch.setattr(offload.HostPool, "load", counted)
    main(["bench", "offload", *SMALL])
    assert counts == [16] * 4  # two orders, the first time and once more


def test_the_large_array_is_timed_once_its_memory_is_warm(monkeypatch):
    seconds = command._seconds
    took = iter([1.0] * 2 * command.WARM_UP + [0.5] * 2 * 3)  # stores and loads, in turn
    monkeypatch.setattr(command, "_seconds", lambda call: (next(took), seconds(call)[1]))
    assert command.large_rates(10**6, repeats=3) == {"store": 2e-3, "load": 2e-3}
    assert not list(took)


@pytest.mark.parametrize("wrong", ["0", "-3", "many"])
def test_sizes_are_positive(wrong, capsys):
    with pytest.raises(SystemExit):
        main(["bench", "offload", "--blocks", wrong])
    assert f"'{wrong}' is not an integer from 1 to " in capsys.readouterr().err
