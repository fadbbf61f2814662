"""Two replicas on Ray Serve, as a program of its own, because Ray starts processes that end with it.

Prints what was found, as JSON.  `python tests/serving/ray_replicas.py default` uses Ray's own router.
"""

import asyncio
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import numpy as np
import ray
from ray import serve

from jaxkv import models, serving
from jaxkv.server import ray_http
from server import checkpoint
from server.checkpoint import FAMILY
from support.jobs import free_port
from support.recorded import FOLDER, recorded

BLOCK, PREFIXES, PREFIX, TIMES, CLIENTS = 8, 20, 64, 12, 16


def make_engine():
    """An engine whose cache has room for half of the prefixes, and for the further tokens of two requests."""
    num_blocks = PREFIXES * PREFIX // BLOCK // 2 + 6
    engine = serving.Engine(
        models.load(FOLDER / FAMILY), num_blocks=num_blocks, block_size=BLOCK, max_requests=2, chunk=32
    )
    engine.warm_up()
    return engine


async def generated(handle, prompt, **options):
    """The tokens and the finish reason of a request."""
    tokens = []
    async for output in handle.options(stream=True).generate.remote(prompt, **options):
        tokens += output.tokens
    return tokens, output.finish_reason


async def all_generated(handle, prompts, **options):
    """The same of many prompts, a few at a time."""
    few = asyncio.Semaphore(CLIENTS)

    async def one(prompt):
        async with few:
            return await generated(handle, prompt, **options)

    return await asyncio.gather(*map(one, prompts))


async def all_stats(handle):
    """The numbers of both replicas."""
    return await handle.broadcast("stats").results_async()


async def completed(url, prompt, **options):
    """The status of a stream over HTTP, and its text or error."""
    body = {"prompt": prompt, "temperature": 0, "stream": True, **options}
    async with (
        httpx.AsyncClient(timeout=120) as client,
        client.stream("POST", f"{url}/v1/completions", json=body) as got,
    ):
        lines = [line.removeprefix("data: ") async for line in got.aiter_lines() if line]
    if got.status_code != 200:
        return got.status_code, json.loads(lines[0])["error"]["message"]
    assert lines.pop() == "[DONE]"
    return got.status_code, "".join(json.loads(line)["choices"][0]["text"] for line in lines)


async def main(handle, url):
    prompts, right = zip(*recorded(FAMILY), strict=True)
    found = {"right": right}
    found["generated"] = await all_generated(handle, prompts, max_tokens=len(right[0]), stop=())

    async with httpx.AsyncClient() as client:
        while (await client.get(f"{url}/health")).status_code != 200:
            await asyncio.sleep(0.1)
    found["texts"] = await asyncio.gather(*(completed(url, prompt, max_tokens=len(right[0])) for prompt in prompts))
    found["refused"] = await completed(url, [97], max_tokens=1)

    try:
        await generated(handle, [])
    except Exception as error:
        found["error"] = str(error)

    outputs = handle.options(stream=True).generate.remote(prompts[0], max_tokens=400, stop=())
    async for _ in outputs:
        outputs.cancel()
        break
    while sum(stats.running for stats in await all_stats(handle)):
        await asyncio.sleep(0.01)

    before = await all_stats(handle)
    rng = np.random.default_rng(0)
    prefixes = rng.integers(3, 97, (PREFIXES, PREFIX)).tolist()
    chosen = rng.permuted(np.repeat(np.arange(PREFIXES), TIMES)).tolist()
    shared = [[*prefixes[n], *rng.integers(3, 97, 7).tolist()] for n in chosen]
    await all_generated(handle, shared, max_tokens=8, stop=())
    after = await all_stats(handle)
    found["tokens"] = [stats.prefix.tokens for stats in after]
    found["found"] = sum(stats.prefix.found for stats in after) - sum(stats.prefix.found for stats in before)
    found["shared"] = PREFIXES * (TIMES - 1) * PREFIX
    found["held"] = [stats.num_blocks - stats.free_blocks for stats in after]
    print(json.dumps(found))


if __name__ == "__main__":
    options = {"request_router_config": serve.config.RequestRouterConfig()} if "default" in sys.argv else {}
    port = free_port()
    ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    with TemporaryDirectory() as folder:
        checkpoint.write(Path(folder))
        app = ray_http.application(make_engine, folder, name="tiny", num_replicas=2, **options)
        serve.run(app)
        asyncio.run(main(serve.get_deployment_handle("Replica", "default"), f"http://127.0.0.1:{port}"))
    serve.shutdown()
