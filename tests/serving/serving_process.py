"""One of two processes that serve a model together, without end; `test_processes.py` starts both, and kills one.

python serving_process.py ADDRESS NUMBER
"""

import sys
from itertools import count
from pathlib import Path

import jax

from jaxkv import models, serving

MODEL = Path(__file__).parents[1] / "data" / "models" / "deepseek_v3"
BEGUN = "has begun"
STEPS = 20
"""Steps after which this is printed."""


def main(address, number):
    options = {"initialization_timeout": 60, "heartbeat_timeout_seconds": 10}
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(address, num_processes=2, process_id=int(number), **options)
    model = models.load(MODEL, parallel=models.TensorParallel(jax.make_mesh((2,), ("x",)), "x"))
    engine = serving.Engine(model, num_blocks=8, block_size=16, max_requests=2, chunk=16)
    if number != "0":
        serving.follow(engine)
        return
    leader = serving.Leader(engine)
    for step in count():
        if not leader.unfinished:
            leader.submit([step % 90, 1, 4, 1, 5], max_tokens=100, stop=())
        leader.step()
        if step == STEPS:
            print(BEGUN, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
