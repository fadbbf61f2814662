"""Runs a server: the engine's process, the HTTP connections, and how both end."""

import asyncio
import contextlib
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, override

import jax
import uvicorn
import uvloop

from jaxkv import models
from jaxkv.server.app import Limits, Server
from jaxkv.server.client import EngineEnded
from jaxkv.server.engine_process import EngineProcess
from jaxkv.serving import Engine, HostLatents
from jaxkv.terminal.formatting import counted, size
from jaxkv.terminal.memory import device_memory, nbytes, require_memory
from jaxkv.terminal.progress import progress
from jaxkv.terminal.streams import notice
from jaxkv.text.chat import ChatTemplate
from jaxkv.text.tokenizer import Tokenizer

MEMORY_FRACTION = 0.9
"""The fraction of a GPU's memory that weights and cache take, if the number of blocks is not given."""
BLOCKS_ON_CPUS = 256
CLOSING_SECONDS = 5
"""How long connections may take to close in the end."""


def make_engine(folder: Path, *, num_blocks: int | None, sizes: dict[str, Any], options: dict[str, Any]) -> Engine:
    """An engine that is ready for its first requests, while other programs are still compiled.

    Args:
      folder: of the checkpoint.
      num_blocks: blocks of the cache; None for as many as a GPU's memory holds.
      sizes: other sizes of the engine.
      options: of `jaxkv.models.load`.
    """
    latents: HostLatents | None = sizes.get("host_latents")
    if latents is not None and num_blocks is None:
        raise ValueError(
            "--blocks is not given: expected a number with --host-latents, because the memory of the host has no "
            "default for it"
        )
    model = models.load(folder, **options, progress=partial(progress, what="loading"))
    if latents is not None and num_blocks is not None:
        return _with_host_latents(model, latents, num_blocks, sizes)
    one, two = (nbytes(jax.eval_shape(lambda n=n: model.cache(n))) for n in (1, 2))
    weights, device = nbytes(model.params), jax.devices()[0]
    if num_blocks is None:
        room = MEMORY_FRACTION * device_memory(device) - weights
        num_blocks = BLOCKS_ON_CPUS if device.platform == "cpu" else max(int(room) // (two - one), 1)
    require_memory(f"{num_blocks} blocks, beside the weights", weights + one + (num_blocks - 1) * (two - one))
    return _warm(Engine(model, num_blocks=num_blocks, **sizes))


def _with_host_latents(model: models.Model, latents: HostLatents, num_blocks: int, sizes: dict[str, Any]) -> Engine:
    """The engine of `make_engine`, with latents in host memory."""
    longest = min(num_blocks * model.usual_block_size, model.config.max_position_embeddings)
    sizes = {**sizes, "max_len": sizes["max_len"] or longest}
    memory = latents.memory(model, num_blocks=num_blocks, max_requests=sizes["max_requests"], max_len=sizes["max_len"])
    what = f"{num_blocks} blocks with latents on the host, beside the weights"
    require_memory(what, nbytes(model.params) + memory.device, on_host=memory.host)
    engine = Engine(model, num_blocks=num_blocks, **sizes)
    notice(
        f"latents take {size(memory.host)} on the host; on the device, {size(memory.requests)} as rows of "
        f"{counted(engine.max_requests, 'requests')} and {size(memory.staged)} for prompts, beside {size(memory.keys)} "
        "of the indexer's keys"
    )
    return _warm(engine)


def _warm(engine: Engine) -> Engine:
    """Compiles the largest programs, and the others in the background."""
    where = jax.devices()[0].device_kind
    notice(f"{engine.pool.num_blocks} blocks of {engine.block_size} tokens on {where}; compiling")
    engine.warm_up(wait=False)
    return engine


def run(
    make_engine: Callable[[], Engine], folder: Path, *, name: str, host: str, port: int, limits: Limits, drain: float
) -> int:
    """Serves until SIGTERM or SIGINT; returns 0, or 1 if the engine has ended by itself.

    Args:
      make_engine: makes the engine, in its process; it is pickled.
      folder: of the checkpoint, whose tokenizer and chat template are read.
      name: that clients use for the model.
      host: the address to listen on.
      port: the port; 0 for a free one, which is printed.
      limits: what is accepted.
      drain: seconds in which requests may end after the signal.

    Raises:
      ValueError: the engine cannot be made, or the tokenizer or the chat template cannot be read.
      OSError: the address cannot be used.
    """
    served = partial(Server, name=name, tokenizer=Tokenizer(folder), chat=ChatTemplate.find(folder), limits=limits)
    with (
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as listening,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        return runner.run(_run(make_engine, served, listening, drain))


async def _run(
    make_engine: Callable[[], Engine],
    served: Callable[[EngineProcess], Server],
    listening: socket.socket,
    drain: float,
) -> int:
    engine, signalled = EngineProcess(make_engine), asyncio.Event()
    server = served(engine)
    # Without its own log of requests, which may hold prompts.
    config = uvicorn.Config(
        server.app,
        http="httptools",
        log_level="error",
        access_log=False,
        lifespan="on",
        timeout_graceful_shutdown=CLOSING_SECONDS,
    )
    http = _HTTP(config, signalled)
    serving = asyncio.create_task(http.serve(sockets=[listening]))
    host, port = listening.getsockname()[:2]
    notice(f"listening on http://{f'[{host}]' if ':' in host else host}:{port}; /health says when the engine is ready")
    ended, stopped = asyncio.create_task(engine.ended()), asyncio.create_task(signalled.wait())
    starting = asyncio.create_task(engine.started())
    starting.add_done_callback(lambda task: task.cancelled() or task.exception() or notice("ready"))
    await asyncio.wait((ended, stopped), return_when=asyncio.FIRST_COMPLETED)
    failed = ended.done()
    if not failed:
        notice(f"ending: requests that run have {drain:g} s")
        await server.drain(drain)
    http.should_exit = True
    await serving
    await engine.close()
    stopped.cancel()
    starting.cancel()
    if failed:
        with contextlib.suppress(EngineEnded):
            await starting  # raises why it could not be made
        notice("jaxkv serve: the engine has ended")
    return int(failed)


class _HTTP(uvicorn.Server):
    """Passes on the first signal, instead of closing the connections; a second one closes them."""

    def __init__(self, config: uvicorn.Config, signalled: asyncio.Event):
        super().__init__(config)
        self._signalled, self._loop = signalled, asyncio.get_running_loop()

    @override
    def handle_exit(self, sig, frame):
        if self._signalled.is_set():
            self.should_exit = self.force_exit = True
            raise SystemExit(128 + sig)
        self._loop.call_soon_threadsafe(self._signalled.set)
