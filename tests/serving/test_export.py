"""Blocks that one engine exports and another adopts: the tokens are those of one engine."""

import pickle
from dataclasses import replace

import numpy as np
import pytest

from jaxkv.serving import Engine
from serving.test_windows_recorded import engine as windowed
from serving.toy_engines import BLOCK, PARAMS, check_positions, engine, host_pool, right, serve
from support import toy_model
from support.cases import further
from support.recorded import recorded
from support.toy_model import prompt


@pytest.fixture
def exported():
    """Of a prompt of five blocks and two tokens."""
    served = engine()
    serve(served, prompt(22))
    return served.export(prompt(22))


def sent(exported):
    """As another process receives it."""
    return pickle.loads(pickle.dumps(replace(exported, rows=np.asarray(exported.rows))))


@pytest.mark.usefixtures("toy")
class TestToy:
    @pytest.mark.parametrize("length", [1, 3, 4, 5, 22, 24])
    @pytest.mark.parametrize("through", [lambda exported: exported, sent], ids=["device", "host"])
    def test_all_tokens_are_found_elsewhere(self, length, through):
        first, second = engine(), engine()
        serve(first, prompt(length), count=1)
        exported = first.export(prompt(length))
        assert exported.num_tokens == length
        assert exported.rows.shape[0] == len(exported.keys) == -(-length // BLOCK)
        assert second.adopt(through(exported)) == length
        assert second.pool.num_free == second.pool.num_blocks
        check_positions(second.pool)
        (token,) = right(prompt(length), 1)
        assert serve(second, (*prompt(length), token)) == length

    def test_of_a_running_request(self):
        first, second = engine(), engine()
        request = first.submit(prompt(9), max_tokens=12)
        while len(request.generated) < 4:
            first.step()
        exported = first.export(request.tokens)
        assert exported.num_tokens >= 9 + 3
        list(first.run())
        second.adopt(exported)
        assert serve(second, exported.prompt, count=8) == len(exported.prompt) - 1
        assert request.generated == right(prompt(9), 12)

    def test_what_is_not_cached_is_not_exported(self):
        served = engine()
        nothing = served.export(prompt(9))
        assert (nothing.num_tokens, nothing.keys, nothing.rows.shape[0]) == (0, (), 0)
        assert engine().adopt(nothing) == 0
        serve(served, prompt(9), count=1)
        assert served.export((*prompt(9), *prompt(4, seed=1))).num_tokens == 9
        # Blocks in a pool are not.
        host = host_pool()
        serve(engine(connectors=[host]), prompt(9))
        assert engine(connectors=[host]).export(prompt(9)).num_tokens == 0

    def test_salts(self):
        first, second = engine(), engine()
        request = first.submit(prompt(22), max_tokens=1, cache_salt=("a", b"b"))
        list(first.run())
        assert first.export(prompt(22)).num_tokens == 0
        exported = first.export(prompt(22), cache_salt=("a", "b"))
        assert exported.num_tokens == 22
        second.adopt(exported)
        assert serve(second, prompt(22)) == 0
        again = second.submit((*prompt(22), *request.generated), max_tokens=3, cache_salt=["a", "b"])
        list(second.run())
        assert second.prefix_stats.found == 22
        assert [*request.generated, *again.generated] == right(prompt(22), 4)

    def test_what_is_there_is_not_written_again(self, exported, monkeypatch):
        served = engine()
        serve(served, prompt(22)[:13], count=1)
        free = dict(served.pool._keys)
        assert served.adopt(exported) == 22
        assert free.items() <= served.pool._keys.items()
        assert len(served.pool._keys) == len(free) + 3
        monkeypatch.setattr(served.pool, "allocate", None)
        assert served.adopt(exported) == 22

    def test_too_few_free_blocks(self, exported):
        served = engine(num_blocks=6)
        running = served.submit(prompt(7, seed=2), max_tokens=6)
        served.step()
        held = served.pool.num_blocks - served.pool.num_free
        assert served.adopt(exported) == BLOCK * (6 - held)
        assert served.pool.num_free == 6 - held
        list(served.run())
        assert running.generated == right(running.prompt, 6)
        check_positions(served.pool)

    def test_it_evicts_others_first(self, exported):
        served = engine(num_blocks=6)
        serve(served, prompt(12, seed=2))
        served.adopt(replace(exported, num_tokens=8, keys=exported.keys[:2], rows=exported.rows[:2]))
        assert served.adopt(exported) == 22
        assert serve(served, prompt(22), count=1) == 21

    def test_others_are_refused(self, exported):
        other = Engine(toy_model.ToyModel({**PARAMS, "embedding": PARAMS["embedding"] + 1}), num_blocks=4, block_size=4)
        name = other.keys.model
        with pytest.raises(ValueError, match=f"`exported.model` is '{name}': expected '"):
            engine().adopt(replace(exported, model=name))
        with pytest.raises(ValueError, match=r"`exported.layout` is '\w+': expected '\w+', the fingerprint .*convert"):
            engine(block_size=8).adopt(exported)
        with pytest.raises(TypeError, match="`exported` is a tuple: expected an ExportedBlocks"):
            engine().adopt((exported.keys, exported.rows))

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"num_tokens": 23}, "`exported.num_tokens` is 23: expected 0 to 22, the length of its prompt"),
            ({"num_tokens": -1}, "`exported.num_tokens` is -1"),
            ({"num_tokens": 2.0}, "`exported.num_tokens` is 2.0"),
            ({"num_tokens": 21}, "`exported.keys` are not those of the first 21 tokens of its prompt"),
            ({"prompt": prompt(22, seed=1)}, "`exported.keys` are not those of the first 22 tokens"),
            ({"cache_salt": (b"other",)}, "`exported.keys` are not those"),
            ({"keys": ()}, "`exported.keys` are not those"),
            ({"prompt": (2**31,)}, "`prompt` has token id"),
            ({"rows": np.zeros((5, 3), np.float32)}, r"`exported.rows` is float32\[5, 3\]: expected float32\[6, "),
            ({"rows": None}, "`exported.rows` is None: expected float32"),
        ],
        ids=str,
    )  # fmt: skip
    def test_what_does_not_fit_together_is_refused(self, changes, message, exported):
        served = engine()
        with pytest.raises(ValueError, match=message):
            served.adopt(replace(exported, **changes))
        assert serve(served, prompt(22)) == 0

    def test_after_an_exception_the_engine_continues(self, exported, monkeypatch):
        served = engine()
        request = served.submit(prompt(9), max_tokens=6)
        served.step()

        def raises(cache, *_, **__):
            cache.buffer.delete()
            raise RuntimeError("injected")

        with monkeypatch.context() as broken:
            broken.setattr("jaxkv.serving.engine.write_rows", raises)
            with pytest.raises(RuntimeError, match="injected"):
                served.adopt(exported)
        list(served.run())
        assert request.generated == right(prompt(9), 6)
        assert served.adopt(exported) == 22
        assert served.pool.num_free == served.pool.num_blocks


@pytest.mark.parametrize(
    ("family", "block_size"),
    [
        ("deepseek_v3", 16),
        further("llama", 16),
        further("deepseek_v32", 16),
        further("qwen3_next", 16),  # states at the ends of blocks
        further("gpt_oss", 16),  # two tables
        further("deepseek_v4", 128),
    ],
)
def test_prefill_here_decode_there(family, block_size):
    (tokens, expected), count = recorded(family)[-1], 24
    first, second = windowed(family, block_size), windowed(family, block_size)
    request = first.submit(tokens, max_tokens=1, stop=())
    list(first.run())
    exported = sent(first.export(tokens))
    assert second.adopt(exported) == exported.num_tokens > 0
    again = second.submit(tokens + request.generated, max_tokens=count - 1, stop=())
    list(second.run())
    assert second.prefix_stats.found == exported.num_tokens
    assert request.generated + again.generated == expected[:count]
    assert second.pool.num_free == second.pool.num_blocks
