"""The application on Ray Serve: one deployment with the HTTP routes, and one with the replicas of the engine."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

from ray import serve
from ray.exceptions import RayTaskError, TaskCancelledError
from ray.serve.handle import DeploymentHandle

from jaxkv.server.app import Limits, Server
from jaxkv.server.client import EngineEnded
from jaxkv.serving import Engine, EngineInfo, EngineStats, Output, ray_serve
from jaxkv.text.chat import ChatTemplate
from jaxkv.text.tokenizer import Tokenizer

MOST_CONNECTIONS = 10_000
"""Connections of the HTTP deployment, which answers those beyond `Limits` by itself."""


def application(
    make_engine: Callable[[], Engine],
    folder: str | Path,
    *,
    name: str,
    limits: Limits = Limits(),  # noqa: B008 (it is immutable)
    **options: Any,
) -> serve.Application:
    """An application for `ray.serve.run`, with the routes of `jaxkv serve`.

    Args:
      make_engine: makes an engine and warms it up, in every replica.
      folder: of the checkpoint, whose tokenizer and chat template the HTTP deployment reads.
      name: of the model, as clients have it.
      limits: what is accepted.
      options: of the deployment of replicas, as for `jaxkv.serving.ray_serve.replicas`.
    """
    deployment = serve.deployment(max_ongoing_requests=MOST_CONNECTIONS, ray_actor_options={"num_cpus": 0})
    return deployment(HTTP).bind(ray_serve.replicas(make_engine, **options), Path(folder), name, limits)


@serve.ingress()
class HTTP:
    """Tokenizers, streams of text and HTTP, in a process of their own."""

    def __init__(self, replicas: DeploymentHandle, folder: Path, name: str, limits: Limits):
        tokenizer, chat = Tokenizer(folder), ChatTemplate.find(folder)
        self._server = Server(RayEngine(replicas), name=name, tokenizer=tokenizer, chat=chat, limits=limits)

    def __serve_build_asgi_app__(self):
        return self._server.app


class RayEngine:
    """The replicas, as one engine."""

    def __init__(self, replicas: DeploymentHandle):
        self._replicas = replicas

    async def started(self) -> EngineInfo:
        """That of a replica, with the requests of all."""
        info: EngineInfo = await self._replicas.info.remote()  # waits until a replica runs
        infos: list[EngineInfo] = await self._replicas.broadcast("info").results_async()
        return info._replace(max_requests=sum(info.max_requests for info in infos))

    async def submit(self, prompt: Sequence[int], **options: Any) -> "RayOutputs":
        """Queues a request in the replica that the router chooses; ValueError if the engine rejects it."""
        outputs = RayOutputs(self._replicas.options(stream=True).generate.remote(prompt, **options))
        await anext(outputs)  # the replica has accepted it
        return outputs

    async def stats(self) -> EngineStats:
        """The sums of those of all replicas."""
        return EngineStats.total(await self._replicas.broadcast("stats").results_async())


class RayOutputs:
    """The outputs of a request in a replica."""

    def __init__(self, response: Any):
        self._response, self._ended = response, False
        self._cancelled_by: str | None = None

    def cancel(self, finish_reason: str = "cancelled") -> None:
        """Ends the request, unless it has ended.  The last output comes at once."""
        if not self._ended and self._cancelled_by is None:
            self._cancelled_by = finish_reason
            self._response.cancel()

    def __aiter__(self) -> AsyncIterator[Output]:
        return self

    async def __anext__(self) -> Output:
        if self._ended:
            raise StopAsyncIteration
        try:
            output = await anext(self._response)
        except RayTaskError as error:
            self._ended = True
            if isinstance(error.cause, ValueError | TypeError):
                raise ValueError(str(error.cause)) from None
            raise EngineEnded(str(error.cause)) from None
        except (TaskCancelledError, asyncio.CancelledError):
            if self._cancelled_by is None:
                self.cancel()
                raise
            output = Output([], [], self._cancelled_by)
        self._ended = output.finish_reason is not None
        return output
