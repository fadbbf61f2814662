"""One of two engines, one of which prefills for the other; `test_two_engines.py` starts both.

    python two_engines.py prefill PORT
    python two_engines.py decode PORT

Each line of the input is a list in JSON, of the token ids of a prompt and of how many tokens to generate.  Each line of
the output is an object that says what came of it.
"""

import json
import sys
from pathlib import Path

from jaxkv import models, offload, serving
from jaxkv.offload import remote

MODEL = Path(__file__).parents[1] / "data" / "models" / "deepseek_v3"
BLOCK = 8


def main(role, port):
    remote.CHUNK_BYTES = 1  # a block per reply, so that a transfer has a middle
    remote.RETRY_SECONDS = 0.1
    address, authkey = ("127.0.0.1", int(port)), b"password"
    model, transport = models.load(MODEL), offload.JaxTransport()
    layout = model.layout(1, BLOCK)
    if role == "prefill":
        pool = offload.HostPool(layout, 256)
        server = offload.BlockServer(pool, address, authkey=authkey, transport=transport)
        blocks = None
    else:
        pool = blocks = offload.RemoteBlocks(layout, [address], authkey=authkey, transport=transport)
    engine = serving.Engine(
        model, num_blocks=64, block_size=BLOCK, max_requests=2, chunk=32, max_num_batched_tokens=98, connectors=[pool]
    )
    say(address=server.address if role == "prefill" else None)
    for line in sys.stdin:
        prompt, count = json.loads(line)
        if blocks is not None:
            say(offered=blocks.wait_for(engine.keys(prompt[:-1], block_size=BLOCK), timeout=5.0))
        loaded, failures = engine.prefix_stats.loaded, engine.tiers.failures
        request = engine.submit(prompt, max_tokens=count, stop=())
        list(engine.run())
        engine.pool.clear()  # so that nothing of it is found the next time
        say(
            tokens=request.generated,
            loaded=engine.prefix_stats.loaded - loaded,
            failures=engine.tiers.failures - failures,
            free=engine.pool.num_free,
        )


def say(**message):
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
