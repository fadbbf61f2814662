"""The tokens that end a text: those of config.json and of generation_config.json, for every family."""

import json
import warnings

import pytest

from jaxkv.cli import main
from jaxkv.models import ModelConfig
from jaxkv.serving.engine import Engine
from models.checkpoints.folders import RECORDED, configure, copied, rejects
from models.checkpoints.published import PUBLISHED
from support import toy_model

FAMILIES = sorted(path.parent.name for path in RECORDED.glob("*/config.json"))
GENERATION = "generation_config.json"
WITHOUT = "the checkpoint states no stop tokens"


def read(folder, stated=..., generation=...):
    """The stop tokens of a configuration, with `eos_token_id` in either file unless it is `...`."""
    values = json.loads((RECORDED / folder.name / "config.json").read_text())
    values.get("text_config", values).pop("eos_token_id", None)
    if stated is not ...:
        values["eos_token_id"] = stated
    (folder / "config.json").write_text(json.dumps(values))
    (folder / GENERATION).unlink(missing_ok=True)
    if generation is not ...:
        (folder / GENERATION).write_text(json.dumps({"do_sample": True, "eos_token_id": generation}))
    return ModelConfig.read(folder).stop_tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_both_files_count_for_every_family(family, tmp_path):
    folder = tmp_path / family
    folder.mkdir()
    assert read(folder) == read(folder, None) == read(folder, generation=None) == ()
    assert read(folder, 5) == read(folder, [5], None) == read(folder, generation=[5]) == (5,)
    assert read(folder, 5, [7, 5, 6]) == read(folder, [5, 7], [7, 6]) == (5, 7, 6)


def test_the_stop_tokens_of_published_gpt_oss(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["GPT-OSS"]))
    (tmp_path / GENERATION).write_text(json.dumps({"eos_token_id": [200002, 199999, 200012]}))
    assert ModelConfig.read(tmp_path).stop_tokens == (200002, 199999, 200012)
    assert ModelConfig.read(tmp_path / "config.json").stop_tokens == (200002,)


@pytest.mark.parametrize(
    ("whole", "text", "expected"),
    [
        ("absent", 3, (3,)),
        (None, [3, 4], (3, 4)),
        (3, "absent", (3,)),
        (3, None, (3,)),
        ([5, 3], 4, (5, 3)),
        ("absent", "absent", ()),
    ],
)
def test_a_text_model_inside_another(whole, text, expected, tmp_path):
    values = json.loads((RECORDED / "kimi_k25" / "config.json").read_text())
    for held, stop in ((values, whole), (values["text_config"], text)):
        held.pop("eos_token_id", None)
        if stop != "absent":
            held["eos_token_id"] = stop
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert ModelConfig.read(tmp_path).stop_tokens == expected
    (tmp_path / GENERATION).write_text('{"eos_token_id": [96]}')
    assert ModelConfig.read(tmp_path).stop_tokens == (*expected, 96)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["Expecting value"]),
        ("[7]", ["holds [7]", "a JSON object"]),
        ("[" * 100_000, ["recursion"]),
        ('{"eos_token_id": 1, "eos_token_id": 2}', ["'eos_token_id' appears more than once"]),
        ('{"eos_token_id": "</s>"}', ["`eos_token_id` is '</s>'", "from 0 to 96"]),
        ('{"eos_token_id": [1, 97]}', ["`eos_token_id` is [1, 97]", "from 0 to 96"]),
        ('{"eos_token_id": [[1]]}', ["`eos_token_id` is [[1]]", "from 0 to 96"]),
        ('{"eos_token_id": -1}', ["`eos_token_id` is -1", "from 0 to 96"]),
        ('{"eos_token_id": true}', ["`eos_token_id` is True", "from 0 to 96"]),
        ('{"eos_token_id": 1.0}', ["`eos_token_id` is 1.0", "from 0 to 96"]),
    ],
)
def test_a_damaged_generation_config(text, words, tmp_path):
    folder = copied("llama", tmp_path)
    (folder / GENERATION).write_text(text)
    rejects(folder, str(folder / GENERATION), *words)


def test_an_engine_warns_once_if_there_are_none():
    engine = Engine(toy_model.ToyModel(toy_model.random_params()), num_blocks=32, block_size=4, max_requests=2)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("default")
        engine.submit([1], stop=())
        assert not found
        for _ in range(3):
            engine.submit([1])
    assert [str(warning.message)[: len(WITHOUT)] for warning in found] == [WITHOUT]


def test_the_command_says_so_in_one_line(tmp_path, capsys):
    folder = copied("llama", tmp_path)
    wrong = ["generate", "--model", str(folder), "--blocks", "4", "--ids", "1", "--ids", "2", "--ids", "97"]
    for stop, arguments, count in ((None, [], 1), (None, ["--ignore-eos"], 0), (3, [], 0)):
        configure(folder, eos_token_id=stop)
        with warnings.catch_warnings():
            warnings.simplefilter("default")
            # Nothing is compiled, because the last prompt has an id outside the vocabulary.
            with pytest.raises(SystemExit, match="prompt 3: `prompt` has token id 97"):
                main([*wrong, *arguments])
        lines = capsys.readouterr().err.splitlines()
        assert [line.startswith(f"jaxkv: {WITHOUT}") for line in lines].count(True) == count
