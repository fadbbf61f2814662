"""Recorded measurements are found in a clone, and beside the module in a wheel."""

import json
import runpy
import shutil

import pytest

from jaxkv.bench import recorded


def test_a_wheel_has_them_beside_the_module(tmp_path):
    installed = shutil.copy(recorded.__file__, tmp_path)
    file = tmp_path / "measurements" / "h100" / "a.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"ms": 1.5}))
    assert runpy.run_path(str(installed))["read"]("a.json", "h100") == {"ms": 1.5}


def test_a_missing_file_is_named_with_those_that_exist():
    with pytest.raises(ValueError, match=r"'h200/peers.json': expected one of h100/decode.json, .*h200/by_hand.json"):
        recorded.read("peers.json")
