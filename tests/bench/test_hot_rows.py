"""`jaxkv bench hot-rows`: what it prints, that wrong results are found, and that tokens are hit as often as it says."""

import json
from dataclasses import replace
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import offload
from jaxkv.bench import hot_rows as command
from jaxkv.bench import timing
from jaxkv.cli import main

SMALL = ["--tokens", "384", "--selected", "20", "--rows", "64", "--heads", "2"]


@pytest.fixture(autouse=True)
def brief(monkeypatch):
    monkeypatch.setattr(timing, "CPU_SECONDS", 1e-4)
    monkeypatch.setattr(command, "CHECKED", 2)
    monkeypatch.setattr(command, "HIT_RATES", (0.5, 0.75))


def test_times_are_printed(capsys, tmp_path):
    file = tmp_path / "numbers.json"
    assert main(["bench", "hot-rows", *SMALL, "--json", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    starts = "cpu, jax ", "one large array to the device ", "50% hits: ", "75% hits: ", "2 calls have the same bits"
    assert [line.startswith(start) for line, start in zip(lines, starts, strict=True)] == [True] * 5
    found = json.loads(file.read_text())
    assert [row["bytes"] for row in found["hit_rates"]] == [2 * 10 * 656, 2 * 5 * 656]
    assert all(row["us"] > 0 and row["limit_us"] > found["fits_us"] > 0 for row in found["hit_rates"])


def test_wrong_rows_are_found(capsys, monkeypatch):
    fetch = offload.HotRows.fetch

    def first_one_wrong(hot, *args, **options):
        hot, slots = fetch(hot, *args, **options)
        buffer = hot.cache.buffer.at[jnp.arange(2 * 656 * 64)].set(0)
        return replace(hot, cache=replace(hot.cache, buffer=buffer)), slots

    monkeypatch.setattr(offload.HotRows, "fetch", first_one_wrong)
    assert main(["bench", "hot-rows", *SMALL]) == 1
    assert "DIFFERS" in capsys.readouterr().out


def test_windows_of_positions_share_as_many_as_are_hits(monkeypatch):
    case = object.__new__(command._Case)
    case.args = SimpleNamespace(requests=2, tokens=384, selected=20)
    case.lists = 38
    for hit_rate, shared in ((0.5, 10), (0.75, 15)):
        lists = np.asarray(case._selected(hit_rate))
        assert lists.shape == (38, 2, 1, 20)
        for before, after in zip(lists[:-1, 1, 0], lists[1:, 1, 0], strict=True):
            assert len(set(after)) == 20
            assert len({*before} & {*after}) == shared


def test_sizes_at_which_rows_would_keep_tokens(capsys):
    with pytest.raises(
        SystemExit, match=r"jaxkv bench hot-rows: 38 calls at 75% hits select 190 tokens: expected at least"
    ):
        main(["bench", "hot-rows", *SMALL, "--rows", "192"])
