import argparse

import jax
import pytest

import jaxkv
from jaxkv.cli import doctor
from jaxkv.ops import OPERATIONS
from jaxkv.support import sample_calls
from jaxkv_kernels.triton.kernels import Triton

FINE = {"jax": "0.11.2", "jaxlib": "0.11.2", "jax-triton": "0.4.1", "triton": "3.9.0", "jax-cuda13-plugin": "0.11.2"}


def test_the_report_is_complete(monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    printed = doctor.report(verbose=True)
    assert printed.startswith("to install\n  ")
    for section in ("versions", "conflicts", "environment", "devices", "implementations"):
        assert f"{section}\n  " in printed
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION=0.5" in printed
    assert jaxkv.__version__ in printed
    assert jax.__version__ in printed
    assert jax.devices()[0].device_kind in printed
    for name, devices in jaxkv.implementations().items():
        assert f"{name} ({devices}): " in printed
    count = len(list(sample_calls()))
    assert f"supports {count} of {count} sample calls" in printed
    assert "unknown (" not in printed


def test_the_command_prints_the_report(capsys):
    parser = argparse.ArgumentParser()
    doctor.add_arguments(parser)
    assert doctor.run(parser.parse_args([])) == 0
    brief = capsys.readouterr().out
    assert "implementations\n  " in brief
    assert doctor.run(parser.parse_args(["--verbose"])) == 0
    verbose = capsys.readouterr().out
    assert "has no kernel for" in verbose
    assert "has no kernel for" not in brief
    for line in brief.splitlines()[:-1]:  # the last one names the option
        assert line in verbose.splitlines()


def test_an_implementation_lists_what_it_rejects(monkeypatch):
    def explain(operation, *args, **kwargs):
        if operation is jaxkv.write_kv:
            raise RuntimeError("no\ndriver")
        reasons = {"xla": () if operation is jaxkv.decode_kv else ("needs a GPU",)}
        return jaxkv.Explanation(operation.__name__, reasons)

    monkeypatch.setattr(jaxkv, "explain", explain)
    monkeypatch.setattr(jaxkv, "implementations", lambda: {"xla": "any device"})
    headline, taken, *rejected = doctor._implementations(verbose=True)
    supported = [f"decode_kv {name}" for name in jaxkv.KVEntry.formats]
    assert headline.startswith(f"xla (any device): usable, supports {len(supported)} of ")
    assert taken == f"  supports {', '.join(supported)}"
    assert any(line.startswith("  rejects write_mla bf16, ") and line.endswith(": needs a GPU") for line in rejected)
    assert any(
        line.endswith(f"write_kv {jaxkv.KVEntry.formats[-1]}: unknown (RuntimeError: no driver)") for line in rejected
    )


def test_a_reason_that_applies_to_all_calls_is_printed_once(monkeypatch):
    def explain(operation, *args, **kwargs):
        return jaxkv.Explanation(operation.__name__, {"triton": ("needs a GPU", "needs triton")})

    monkeypatch.setattr(jaxkv, "explain", explain)
    monkeypatch.setattr(jaxkv, "implementations", lambda: {"triton": "NVIDIA GPUs"})
    headline, *rejected = doctor._implementations(verbose=True)
    assert headline.startswith("triton (NVIDIA GPUs): not usable, supports none of ")
    without = [operation.name for operation in OPERATIONS if Triton.support(operation.name) is None]
    kernels = f"  has no kernel for {', '.join(without)}"
    assert rejected == ["  rejects all: needs a GPU", "  rejects all: needs triton", kernels]


@pytest.mark.parametrize("probe", ["_version", "_environment", "jax.local_devices", "sample_calls"])
def test_a_failing_probe_is_reported_and_the_others_continue(monkeypatch, probe):
    def fail(*args):
        raise RuntimeError(f"{probe} is broken")

    monkeypatch.setattr(f"jaxkv.cli.doctor.{probe}", fail)
    printed = doctor.report(verbose=False)
    assert f"unknown (RuntimeError: {probe} is broken)" in printed
    assert printed.count("\n\n") == 5


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, []),
        ({"jax-triton": None, "triton": None, "jax-cuda13-plugin": None}, []),
        ({"jax": "0.12.0.1", "jax-triton": None, "jaxlib": "0.12.0", "jax-cuda13-plugin": "0.12.0"}, []),
        ({"jax": "0.12.0.1", "jaxlib": "0.12.0.1", "jax-cuda13-plugin": "0.12.0.1"}, []),
        ({"triton": "3.6.0"}, ["does not compile with triton 3.6.0"]),
        ({"triton": "3.6.0", "jax-triton": "0.3.1"}, []),
        ({"jax-cuda12-plugin": "0.11.2"}, ["are both installed"]),
        ({"jax-cuda13-plugin": "0.10.1"}, ["jax-cuda13-plugin 0.10.1 does not match jaxlib 0.11.2"]),
    ],
)
def test_conflicts(changed, expected):
    found = doctor.conflicts({**FINE, **changed})
    assert len(found) == len(expected)
    for line, part in zip(found, expected, strict=True):
        assert part in line


OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build"
OLD = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023"


@pytest.mark.parametrize(
    ("driver", "backend", "packages", "expected"),
    [
        (None, "cpu", {}, "nothing: there is no driver"),
        (OPEN, "cpu", {}, "pip install 'jaxkv[cuda13,triton]': NVIDIA's driver 580 is installed, but"),
        (OLD, "cpu", {}, "pip install 'jaxkv[cuda12,triton]': "),
        (OLD.replace("535", "470"), "cpu", {}, "NVIDIA's driver 580 or later, then 'jaxkv[cuda13]': driver 470"),
        (OPEN, "cpu", {"jax-cuda13-plugin": "0.12.0"}, "nothing, but check JAX_PLATFORMS"),
        (OPEN, "gpu", {}, "pip install 'jaxkv[triton]': "),
        (OPEN, "gpu", {"jax-triton": "0.4.1"}, "nothing: the packages for"),
    ],
)
def test_what_to_install(monkeypatch, tmp_path, driver, backend, packages, expected):
    file = tmp_path / "version"
    if driver:
        file.write_text(f"{driver}\nGCC version:  gcc version 12.2.0\n")
    monkeypatch.setattr(doctor, "DRIVER", file)
    monkeypatch.setattr(doctor, "_version", packages.get)
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    assert doctor.to_install().startswith(expected)
