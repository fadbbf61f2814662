"""Spoilt checkpoint folders: each ends in a correct model, or in one line that names the file and the key or weight."""

import copy
import json
import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import jaxkv.models
from jaxkv.cli import main
from models.checkpoints import config_keys

RECORDED = Path(__file__).parents[2] / "data" / "models"
ALIKE = {"axk1", "deepseek_v3", "deepseek_v3_yarn", "moonlight"}
"""Families whose configurations have the keys of another's."""
FAMILIES = sorted({path.parent.name for path in RECORDED.glob("*/config.json")} - ALIKE)
INDEX = "model.safetensors.index.json"

WRONG_TYPES = {
    bool: [0, 1, "true", [], {}],
    int: [True, "1", [1], {}, 0.5, -1, float("nan"), float("inf"), 10**400],
    float: [True, "1", [1.0], {}, -1.0, float("nan"), float("inf"), 10**400],
    str: [1, True, [], {}, "nonsense", "\n"],
    list: ["nonsense", 1, True, {}, [], [None], [[]], [{}]],
    dict: ["nonsense", 1, True, [], [{}]],
    type(None): ["nonsense", True, [None], {}, -1, 0.5],
}


def refusal(call, *files):
    """The message of the ValueError that the call raises, of one line, with one of the files."""
    with pytest.raises(ValueError, match=r"^[^\n]+\Z") as error:
        call()
    message = str(error.value)
    assert any(str(file) in message for file in files), (message, files)
    return message


def command_refuses(name, folder, *arguments):
    """The command exits with one line."""
    with pytest.raises(SystemExit, match=rf"^jaxkv {name}: [^\n]+\Z") as error:
        main([*name.split(), *arguments])
    assert str(folder) in error.value.code


def keys_of(values, parent=()):
    """The paths of all keys, of nested objects, too."""
    for key, value in values.items():
        yield (*parent, key)
        if isinstance(value, dict) and key not in config_keys.IGNORED_OBJECTS:
            yield from keys_of(value, (*parent, key))


def holder(values, path):
    """The object that holds the last key of the path."""
    for key in path[:-1]:
        values = values[key]
    return values


class Configuration:
    """A recorded config.json, in a folder to be spoilt."""

    def __init__(self, family, folder):
        self.family, self.folder, self.file = family, folder, folder / "config.json"
        self.values = json.loads((RECORDED / family / "config.json").read_text())
        self.config = jaxkv.models.ModelConfig.from_json(self.values)
        self.ignored = config_keys.IGNORED | config_keys.IGNORED_BESIDE.get(family, set())
        self.used = config_keys.NOT_IGNORED.get(family, set())
        self.absent = {**config_keys.ABSENT, "tie_word_embeddings": False, **config_keys.ABSENT_IN.get(family, {})}
        for key in config_keys.NEEDED_IN.get(family, ()):
            del self.absent[key]
        self.generator = random.Random(0)

    def ignores(self, path):
        """Whether the model does not depend on the key."""
        names = {path[-1], ".".join(path)}
        return bool(names & self.ignored) and not names & self.used

    def read(self):
        return jaxkv.models.ModelConfig.read(self.folder)

    def write(self, values):
        self.file.write_text(json.dumps(values))

    def with_value(self, path, value):
        """The values with another value of one key."""
        values = copy.deepcopy(self.values)
        holder(values, path)[path[-1]] = value
        return values

    def check_refused(self, *names):
        """Reading fails with the file and one of the keys, and so do the commands (a tenth of the cases)."""
        message = refusal(self.read, self.file)
        assert any(name in message for name in names), (message, names)
        if self.generator.random() < 0.1:
            command_refuses("bench step", self.folder, str(self.folder))
            command_refuses("generate", self.folder, "--model", str(self.folder), "--ids", "1")

    def check_absent(self, path):
        """The configuration, written without a key, is rejected or has the default of that key."""
        key = path[-1]
        if self.ignores(path):
            assert self.read() == self.config
        elif key in self.absent and not self.is_needed(path):
            standing_for = self.with_value(path, self.absent[key])
            assert self.read() == jaxkv.models.ModelConfig.from_json(standing_for)
        else:
            self.check_refused(f"`{'.'.join(path)}`", config_keys.OTHER_NAMES.get(key, key))

    def is_needed(self, path):
        """Whether the key has no default here, or the other spelling of it is absent, too."""
        if ".".join(path) in config_keys.NEEDED_PATHS:
            return True
        if path[-1] == "rope_type":  # what other keys of a scaling mean depends on it, known or not
            beside = set(holder(json.loads(self.file.read_text()), path))
            return not beside <= {"rope_theta", "partial_rotary_factor", "rope_type"}
        other = config_keys.OTHER_NAMES.get(path[-1])
        return other is not None and other not in self.values and other not in self.absent


@pytest.fixture(params=FAMILIES)
def configuration(request, tmp_path):
    return Configuration(request.param, tmp_path)


def test_dropped_and_renamed_keys(configuration):
    for path in keys_of(configuration.values):
        for renamed in (False, True):
            values = copy.deepcopy(configuration.values)
            value = holder(values, path).pop(path[-1])
            if renamed:
                holder(values, path)[path[-1] + "_"] = value
            configuration.write(values)
            configuration.check_absent(path)


def test_nulls(configuration):
    for path in keys_of(configuration.values):
        configuration.write(configuration.with_value(path, None))
        key = path[-1]
        if holder(configuration.values, path)[key] is None or configuration.ignores(path):
            assert configuration.read() == configuration.config
        elif key in config_keys.NULLABLE | config_keys.NULLABLE_IN.get(configuration.family, set()):
            configuration.check_absent(path)
        elif key == "q_lora_rank" and configuration.family not in config_keys.Q_LATENT:
            assert configuration.read().attention.q_lora_rank is None  # a configuration of its own, for other weights
        else:
            configuration.check_refused(f"`{'.'.join(path)}`", config_keys.OTHER_NAMES.get(key, key))


def test_values_of_other_types(configuration):
    for path in keys_of(configuration.values):
        value = holder(configuration.values, path)[path[-1]]
        for other in WRONG_TYPES[type(value)]:
            if json.dumps(other) == json.dumps(value):
                continue  # an empty list
            configuration.write(configuration.with_value(path, other))
            if configuration.ignores(path):
                assert configuration.read() == configuration.config
            elif (path[-1], other) == ("beta_slow", 0.5):
                found = configuration.read()  # an integer in the file, and yet any number
                ropes = found.rope, getattr(found.attention, "compressed_rope", found.rope)
                assert 0.5 in [rope.scaling.beta_slow for rope in ropes if rope.scaling]
            else:
                configuration.check_refused(f"`{'.'.join(path)}")


def test_duplicate_keys(configuration):
    for path in keys_of(configuration.values):
        text = json.dumps(configuration.values)
        value = json.dumps(holder(configuration.values, path)[path[-1]])
        pair = f'"{path[-1]}": {value}'
        assert pair in text
        configuration.file.write_text(text.replace(pair, f'"{path[-1]}": null, {pair}', 1))
        configuration.check_refused(path[-1])


def test_truncated_configurations(configuration):
    whole = json.dumps(configuration.values).encode()
    for length in range(0, len(whole), 7):
        configuration.file.write_bytes(whole[:length])
        refusal(configuration.read, configuration.file)


def test_damaged_configurations(configuration):
    generator = random.Random(0)
    whole = json.dumps(configuration.values).encode()
    for _ in range(200):
        damaged = bytearray(whole)
        for _ in range(generator.choice((1, 1, 2, 8))):
            damaged[generator.randrange(len(whole))] = generator.randrange(256)
        configuration.file.write_bytes(damaged)
        try:
            configuration.read()  # one digit for another is a configuration, too
        except ValueError:
            refusal(configuration.read, configuration.file)


@cache
def recorded():
    """The model of two shards, what is in them, and which file has which weight."""
    folder = RECORDED / "deepseek_v3_sharded"
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    files = {name: safetensors.numpy.load_file(folder / name) for name in sorted(set(weight_map.values()))}
    return jaxkv.models.load(folder), files, weight_map


class Shards:
    """A checkpoint of two shards, to be spoilt before it is written."""

    def __init__(self, generator):
        self.model, files, weight_map = recorded()
        self.files, self.weight_map = {name: dict(held) for name, held in files.items()}, dict(weight_map)
        self.generator = generator
        self.name = generator.choice(sorted(weight_map))
        """A weight."""
        self.file = weight_map[self.name]
        (self.other,) = set(files) - {self.file}
        self.weight = self.files[self.file][self.name]

    def write(self, folder):
        for name, held in self.files.items():
            safetensors.numpy.save_file(held, folder / name)
        (folder / INDEX).write_text(json.dumps({"weight_map": self.weight_map}))
        (folder / "config.json").write_bytes((RECORDED / "deepseek_v3_sharded" / "config.json").read_bytes())


@dataclass
class Refused:
    """What the line names: one of the files, and a weight."""

    files: tuple[str, ...]
    weight: str = ""


def drop_from_file(shards):
    del shards.files[shards.file][shards.name]
    return Refused((shards.file,), shards.name)


def drop_from_index(shards):
    del shards.weight_map[shards.name]
    return Refused((INDEX,), shards.name)


def drop_from_both(shards):
    drop_from_file(shards)
    return drop_from_index(shards)


def duplicate_in_the_other_file(shards):
    shards.files[shards.other][shards.name] = np.zeros_like(shards.weight)


def move_to_the_other_file(shards):
    shards.files[shards.other][shards.name] = shards.weight
    shards.weight_map[shards.name] = shards.other
    if shards.generator.random() < 0.5:
        shards.files[shards.file][shards.name] = np.zeros_like(shards.weight)
    else:
        del shards.files[shards.file][shards.name]


def move_in_the_index_alone(shards):
    shards.weight_map[shards.name] = shards.other
    return Refused((shards.other,), shards.name)


def name_no_file(shards):
    wrong = [None, 1, True, [], {}, "", ".", "..", "nowhere.safetensors", "../x", "/etc/passwd", "x" * 300, "\n", "\0"]
    shards.weight_map[shards.name] = shards.generator.choice(wrong)
    return Refused((INDEX,), shards.name)


def rename_in_file(shards):
    drop_from_file(shards)
    shards.files[shards.file][other_name(shards)] = shards.weight
    return Refused((shards.file,))


def rename_in_both(shards):
    name = other_name(shards)
    drop_from_both(shards)
    shards.files[shards.file][name] = shards.weight
    shards.weight_map[name] = shards.file
    return Refused((INDEX,), shards.name)


def other_name(shards):
    last = shards.name.rsplit(".", 1)[0]
    return shards.generator.choice([f"{last}.bias", f"{last}.weight_scale_inv", f"x.{last}", "a\nb", "é", ""])


def add_a_weight(shards):
    name = other_name(shards)
    file = shards.generator.choice([shards.file, shards.other])
    shards.files[file][name] = shards.weight
    if shards.generator.random() < 0.5:
        shards.weight_map[name] = file
    return Refused((file,), repr(name))


def give_another_dtype(shards):
    dtype = shards.generator.choice([np.int8, np.uint8, bool, np.int32, np.float64, ml_dtypes.float8_e4m3fn])
    shards.files[shards.file][shards.name] = shards.weight.astype(dtype)
    return Refused((shards.file,), shards.name)


def give_another_shape(shards):
    shapes = [shards.weight[:-1], shards.weight[None], shards.weight.reshape(-1, 1), shards.weight[:0], shards.weight.T]
    shape = shards.generator.choice([shape for shape in shapes if shape.shape != shards.weight.shape])
    shards.files[shards.file][shards.name] = np.ascontiguousarray(shape)
    return Refused((shards.file,), shards.name)


def put_a_nan(shards):
    weight = shards.files[shards.file][shards.name] = shards.weight.copy()
    weight.reshape(-1)[shards.generator.randrange(weight.size)] = np.nan
    return Refused((shards.file,), shards.name)


SPOILT = [
    drop_from_file,
    drop_from_index,
    drop_from_both,
    duplicate_in_the_other_file,
    move_to_the_other_file,
    move_in_the_index_alone,
    name_no_file,
    rename_in_file,
    rename_in_both,
    add_a_weight,
    give_another_dtype,
    give_another_shape,
    put_a_nan,
]


def check_same(folder):
    model = jaxkv.models.load(folder)
    assert jax.tree.all(jax.tree.map(np.array_equal, model.params, recorded()[0].params))


def check_refused(folder, expected):
    message = refusal(lambda: jaxkv.models.load(folder), *(folder / file for file in expected.files))
    assert expected.weight in message
    command_refuses("generate", folder, "--model", str(folder), "--ids", "1")


@pytest.mark.ci
@pytest.mark.parametrize("spoil", SPOILT)
def test_spoilt_weights(spoil, tmp_path):
    for seed in range(15):
        shards = Shards(random.Random(seed))
        expected = spoil(shards)
        shards.write(tmp_path)
        if expected is None:
            check_same(tmp_path)
        else:
            check_refused(tmp_path, expected)


def test_missing_and_truncated_files(tmp_path):
    shards = Shards(random.Random(0))
    for name in (*shards.files, INDEX, "config.json"):
        shards.write(tmp_path)
        whole = (tmp_path / name).read_bytes()
        for _ in range(15):
            (tmp_path / name).write_bytes(whole[: shards.generator.randrange(len(whole) - 1)])
            check_refused(tmp_path, Refused((name,)))
        (tmp_path / name).unlink()
        check_refused(tmp_path, Refused(("",), name))
        (tmp_path / name).mkdir()
        check_refused(tmp_path, Refused(("",), name))
        (tmp_path / name).rmdir()


def test_damaged_headers_of_shards(tmp_path):
    shards = Shards(random.Random(0))
    shards.write(tmp_path)
    rejected = 0
    for name in shards.files:
        whole = (tmp_path / name).read_bytes()
        header = 8 + int.from_bytes(whole[:8], "little")
        for _ in range(60):
            damaged = bytearray(whole)
            damaged[shards.generator.randrange(header)] ^= 1 << shards.generator.randrange(8)
            (tmp_path / name).write_bytes(damaged)
            try:
                check_same(tmp_path)  # a space for another
            except ValueError:
                check_refused(tmp_path, Refused((*shards.files, INDEX)))
                rejected += 1
        (tmp_path / name).write_bytes(whole)
    assert rejected > 80
