"""The engine of `jaxkv serve`, without its process."""

import pytest

from jaxkv.serving import Engine, HostLatents
from support.recorded import FOLDER

pytestmark = pytest.mark.ci


def test_latents_in_host_memory(monkeypatch, capsys):
    from jaxkv.server.run import make_engine  # needs packages of the server

    monkeypatch.setattr(Engine, "warm_up", lambda self, wait: None)
    sizes = {"max_requests": 2, "max_len": None, "max_num_batched_tokens": None, "host_latents": HostLatents()}
    engine = make_engine(FOLDER / "deepseek_v32", num_blocks=40, sizes=sizes, options={"dtype": "float32"})
    assert engine.pool.num_blocks == 40
    host = 40 * 64 * 3 * (128 + 8) * 4
    assert f"latents take {host / 1e6:.1f} MB on the host; on the device, " in capsys.readouterr().err
    with pytest.raises(ValueError, match="--blocks is not given: expected a number with --host-latents"):
        make_engine(FOLDER / "deepseek_v32", num_blocks=None, sizes=sizes, options={"dtype": "float32"})
    monkeypatch.setattr("jaxkv.terminal.memory.host_memory", lambda: 1)
    with pytest.raises(ValueError, match=r"40 blocks with latents on the host, beside the weights: .* do not fit"):
        make_engine(FOLDER / "deepseek_v32", num_blocks=40, sizes=sizes, options={"dtype": "float32"})
