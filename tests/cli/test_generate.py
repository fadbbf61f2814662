"""`jaxkv generate` on a recorded checkpoint, as a user runs it."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE, WordLevel

import jaxkv.models
from jaxkv.cli import main

FOLDER = Path(__file__).parents[1] / "data" / "models" / "deepseek_v3"
TRUTH = np.load(FOLDER / "truth.npz")


def words(ids):
    return " ".join(map(str, ids))


def recorded(request, count):
    """A prompt and its first tokens, as the command takes and prints them."""
    prompt = TRUTH["prompts"][request, : TRUTH["prompt_lens"][request]]
    return words(prompt), words(TRUTH["tokens"][request, :count])


def generate(*arguments, model=FOLDER):
    return main(["generate", "--model", str(model), "--blocks", "8", *arguments])


@pytest.fixture
def with_tokenizer(tmp_path):
    """The checkpoint, and a tokenizer of one UTF-8 byte a token for the first 95, and two halves of a character."""
    vocabulary = {f"<0x{n + 32:02X}>": n for n in range(95)} | {"<0xC3>": 95, "<0xA9>": 96}
    tokenizer = Tokenizer(BPE(vocabulary, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    folder = tmp_path / "checkpoint"
    shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns("truth.npz"))
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder, tokenizer


def test_the_recorded_tokens_are_printed(capsys):
    (prompt, tokens), (other, others) = recorded(1, 64), recorded(0, 64)
    assert generate("--ids", prompt, "--ids", other) == 0
    printed = capsys.readouterr()
    assert printed.out == f"[1/2]\n{tokens}\n[2/2]\n{others}\n"
    assert "DeepseekV3ForCausalLM" in printed.err
    assert "cache: BLNHC, float32, 816.0 KiB (835,584 bytes)" in printed.err
    assert "64 prompt tokens and 128 new ones in " in printed.err
    assert " new tokens/s" in printed.err


def test_text_goes_in_and_comes_out(with_tokenizer, capsys):
    folder, tokenizer = with_tokenizer
    ids = TRUTH["prompts"][1, : TRUTH["prompt_lens"][1]].tolist()
    assert generate("--ids", words(ids), "--max-tokens", "16", model=folder) == 0
    assert capsys.readouterr().out == tokenizer.decode(TRUTH["tokens"][1, :16].tolist()) + "\n"
    text = "Hello!"
    assert generate("--prompt", text, "--max-tokens", "4", model=folder) == 0
    from_text = capsys.readouterr().out
    assert generate("--ids", words(tokenizer.encode(text).ids), "--max-tokens", "4", model=folder) == 0
    assert capsys.readouterr().out == from_text


def refusal(*arguments, model):
    """The one line with which the command refuses."""
    with pytest.raises(SystemExit, match=r"^jaxkv generate: [^\n]+\Z") as error:
        generate(*arguments, model=model)
    return error.value.code


@pytest.mark.parametrize("text", [b"", b"{}", b"[]", b"null", b"\xff", b'{"model": {"type": "BPE"}}'])
def test_a_tokenizer_that_cannot_be_read_is_told(with_tokenizer, text):
    folder, _ = with_tokenizer
    (folder / "tokenizer.json").write_bytes(text)
    assert f"{folder / 'tokenizer.json'} is not a tokenizer" in refusal("--ids", "1", model=folder)


def test_a_prompt_that_the_tokenizer_cannot_encode_is_told(with_tokenizer):
    folder, _ = with_tokenizer
    Tokenizer(WordLevel({"a": 0}, unk_token="[UNK]")).save(str(folder / "tokenizer.json"))
    assert f"{folder / 'tokenizer.json'} cannot encode 'b'" in refusal("--prompt", "b", model=folder)


def test_the_checkpoints_stop_token_ends_the_text(tmp_path, capsys):
    prompt, tokens = recorded(2, 64)
    folder = tmp_path / "checkpoint"
    shutil.copytree(FOLDER, folder)
    config = json.loads((folder / "config.json").read_text())
    config["eos_token_id"] = int(TRUTH["tokens"][2, 5])
    (folder / "config.json").write_text(json.dumps(config))
    assert generate("--ids", prompt, model=folder) == 0
    first = TRUTH["tokens"][2].tolist().index(config["eos_token_id"])
    assert capsys.readouterr().out == recorded(2, first + 1)[1] + "\n"
    assert generate("--ids", prompt, "--ignore-eos", model=folder) == 0
    assert capsys.readouterr().out == tokens + "\n"


def test_drawn_tokens_are_those_of_the_seed(capsys):
    def drawn(*arguments):
        assert generate("--ids", "1 2 3", "--max-tokens", "12", "--temperature", "1.5", *arguments) == 0
        return capsys.readouterr().out

    first = drawn("--seed", "1", "--top-p", "0.9")
    assert first == drawn("--seed", "1", "--top-p", "0.9")
    assert first != drawn("--seed", "2", "--top-p", "0.9")
    assert drawn("--top-p", "1e-6") == drawn("--temperature", "0")


def test_logits_that_are_nan_are_told(monkeypatch, capsys):
    model = jaxkv.models.load(FOLDER)
    broken = replace(model, params=jax.tree.map(lambda weight: weight * jnp.nan, model.params))
    monkeypatch.setattr(jaxkv.models, "load", lambda *args, **kwargs: broken)
    assert generate("--ids", "1 2 3") == 1
    printed = capsys.readouterr()
    assert printed.out == "\n"
    assert "jaxkv generate: the logits of prompt 1 are NaN" in printed.err


def test_another_entry_format_is_told(capsys):
    assert generate("--ids", "1 2 3", "--max-tokens", "2", "--entry-format", "bf16", "--implementation", "xla") == 0
    assert "MLAEntry(format='bf16', latent=128, rope=8)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), "no prompt: give --prompt or --ids"),
        (("--prompt", "Hi"), "--prompt 'Hi': .* has no tokenizer.json; give the prompt as --ids"),
        (("--ids", "1", "--ids", "1 97"), "prompt 2: `prompt` holds 97: expected one or more token ids from 0 to 96"),
        (("--ids", "1", "--max-tokens", "600"), "600 entries: a request's table holds 512 and the cache 512"),
        (("--ids", "1", "--temperature", "-1"), "`temperature` is -1.0"),
        (("--ids", "1", "--top-p", "0"), "`top_p` is 0.0"),
        (("--ids", "1", "--entry-format", "int3"), "format 'int3': expected one of bf16, f16, f32, fp8, fp8_ds_mla"),
        (("--ids", "1", "--implementation", "mosaic_gpu"), "mosaic_gpu"),
        (("--ids", "1", "--blocks", "0"), "`num_blocks` is 0"),
    ],
)
def test_mistakes_are_told_in_a_line(arguments, told):
    with pytest.raises(SystemExit, match=f"^jaxkv generate: .*{told}"):
        generate(*arguments)


def test_a_folder_without_a_checkpoint_is_told(tmp_path):
    with pytest.raises(SystemExit, match=r"expected a folder with a config.json"):
        generate("--ids", "1", model=tmp_path)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--ids", "1 two"), "argument --ids: 'two' is no token id"),
        (("--ids", "1", "--implementation", "xla", "foo"), "argument --implementation: invalid choice: 'foo'"),
    ],
)
def test_options_are_refused_before_anything_is_done(arguments, told, capsys):
    with pytest.raises(SystemExit):
        generate(*arguments, model="nowhere")
    assert told in capsys.readouterr().err
