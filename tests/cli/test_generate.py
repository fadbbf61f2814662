"""`jaxkv generate` on a recorded checkpoint, as a user runs it."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE, Unigram, WordLevel, WordPiece

import jaxkv.models
from jaxkv import serving
from jaxkv.cli import generate as command
from jaxkv.cli import main
from jaxkv.serving.engine import Engine
from jaxkv.serving.request import Request
from jaxkv.text import tokenizer as tokenizers
from jaxkv.text.streams import INCOMPLETE, StopStrings, TextStream
from models.checkpoints.mtp import with_mtp

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


@pytest.mark.slow  # tests/models/test_speculative.py covers drafts; here it is their printing
def test_drafts_leave_the_tokens_as_they_are_and_acceptance_is_printed(tmp_path, capsys):
    folder, _ = with_mtp(tmp_path)
    prompt, tokens = recorded(1, 16)
    assert generate("--ids", prompt, "--num-speculative-tokens", "1", "--max-tokens", "16", model=folder) == 0
    printed = capsys.readouterr()
    assert printed.out == f"{tokens}\n"
    assert re.search(r"\d+ of \d+ drafts accepted \([\d.]+%\), [\d.]+ new tokens per request and step", printed.err)


@pytest.mark.ci
def test_drafts_of_ngrams_need_no_mtp_layer(capsys):
    prompt, tokens = recorded(1, 16)
    method = ["--speculative-method", "ngram", "--prompt-lookup-min", "1"]
    assert generate("--ids", prompt, "--num-speculative-tokens", "2", *method, "--max-tokens", "16") == 0
    printed = capsys.readouterr()
    assert printed.out == f"{tokens}\n"
    assert re.search(r"\d+ of [1-9]\d* drafts accepted ", printed.err)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--speculative-method", "ngram"], "no drafts: add --num-speculative-tokens"),
        (["--prompt-lookup-max", "3"], "no drafts: add --num-speculative-tokens"),
        (["--num-speculative-tokens", "1", "--prompt-lookup-min", "1"], "need --speculative-method ngram"),
        (
            ["--num-speculative-tokens", "1", "--speculative-method", "ngram", "--prompt-lookup-min", "5"],
            "`prompt_lookup_min` is 5: expected at most `prompt_lookup_max`, 4",
        ),
    ],
)
def test_options_of_drafts_that_are_rejected(options, message):
    with pytest.raises(SystemExit, match=f"^jaxkv generate: .*{message}"):
        generate("--ids", "1", *options)


def test_a_checkpoint_without_an_mtp_layer_is_reported():
    with pytest.raises(SystemExit, match=r"^jaxkv generate: `mtp` is True, and `num_nextn_pre[^\n]*\Z"):
        generate("--ids", "1", "--num-speculative-tokens", "1")


@pytest.mark.ci
def test_a_model_with_keys_and_values(capsys):
    folder = FOLDER.with_name("llama")
    with np.load(folder / "truth.npz") as truth:
        prompt, tokens = truth["prompts"][1, : truth["prompt_lens"][1]], truth["tokens"][1]
    assert generate("--ids", words(prompt), model=folder) == 0
    printed = capsys.readouterr()
    assert printed.out == f"{words(tokens)}\n"
    assert "LlamaForCausalLM" in printed.err
    assert "KVEntry(format='f32', head_dim=64, value_dim=64)" in printed.err


def of_words():
    """As SentencePiece's tokenizers: every token is a word and the space before it, and a text begins without one."""
    tokenizer = Tokenizer(WordLevel({f"▁w{n}": n for n in range(97)}, unk_token="▁w0"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("▁[^▁]*"), "isolated")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return tokenizer


@pytest.mark.ci
def test_text_goes_in_and_comes_out(with_tokenizer, capsys):
    """The whole prompt, and nothing else; the continuation goes on where it ends, with a space."""
    folder, _ = with_tokenizer
    tokenizer = of_words()
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=64, pad_id=0, pad_token="▁w0")
    tokenizer.save(str(folder / "tokenizer.json"))
    prompt, tokens = (ids.split() for ids in recorded(1, 16))
    assert generate("--prompt", " ".join(f"w{n}" for n in prompt), "--max-tokens", "16", model=folder) == 0
    printed = capsys.readouterr()
    assert f"{len(prompt)} prompt tokens and 16 new ones" in printed.err
    assert printed.out == "".join(f" w{n}" for n in tokens) + "\n"
    stop = f"{tokens[4]} w{tokens[5]}"
    assert generate("--prompt", " ".join(f"w{n}" for n in prompt), "--stop", stop, model=folder) == 0
    printed = capsys.readouterr()
    text = "".join(f" w{n}" for n in tokens)
    assert printed.out == text[: text.index(stop)] + "\n"
    assert f"{len(prompt)} prompt tokens and 6 new ones" in printed.err
    assert (
        refusal("--prompt", "w1", "--stop", "", model=folder)
        == "jaxkv generate: --stop '': expected a text that is not empty"
    )


@pytest.mark.parametrize("configured", [True, False])
def test_the_post_processor_alone_adds_special_tokens(configured, tmp_path):
    """As in transformers 5, which drops `add_bos_token` and `add_eos_token` where there is a tokenizer.json."""
    about = {"add_bos_token": configured, "add_eos_token": configured, "bos_token": "▁w1", "eos_token": "▁w2"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(about))
    tokenizer = of_words()
    for template, expected in (("$A", [5, 6]), ("▁w1 $A", [1, 5, 6]), ("▁w1 $A ▁w2", [1, 5, 6, 2])):
        special = [("▁w1", 1), ("▁w2", 2)]
        tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        encode = tokenizers.Tokenizer(tmp_path).encode
        assert encode("w5 w6") == expected


def refusal(*arguments, model):
    """The one line with which the command reports a mistake."""
    with pytest.raises(SystemExit, match=r"^jaxkv generate: [^\n]+\Z") as error:
        generate(*arguments, model=model)
    return error.value.code


@pytest.mark.parametrize("text", [b"", b"{}", b"[]", b"null", b"\xff", b'{"model": {"type": "BPE"}}'])
def test_a_tokenizer_that_cannot_be_read_is_reported(with_tokenizer, text):
    folder, _ = with_tokenizer
    (folder / "tokenizer.json").write_bytes(text)
    assert f"{folder / 'tokenizer.json'} cannot be read by" in refusal("--ids", "1", model=folder)


def test_a_prompt_that_the_tokenizer_cannot_encode_is_reported(with_tokenizer):
    folder, _ = with_tokenizer
    Tokenizer(WordLevel({"a": 0}, unk_token="[UNK]")).save(str(folder / "tokenizer.json"))
    assert f"{folder / 'tokenizer.json'} cannot encode 'b'" in refusal("--prompt", "b", model=folder)
    # How Python passes on bytes of the command line that are not UTF-8.
    assert "cannot encode 'caf\\udce9'" in refusal("--prompt", "caf\udce9", model=folder)


PANICS = {
    "read": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": None}},
    "encode": {
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "X", "type_id": 0}}],
            "pair": [],
            "special_tokens": {},
        }
    },
}
"""Tokenizers on which the library panics, which raises no `Exception`."""


def change_tokenizer(folder, **changes):
    file = folder / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return file


@pytest.mark.parametrize("when", PANICS)
def test_panics_of_the_library_are_reported(when, with_tokenizer):
    folder, _ = with_tokenizer
    file = change_tokenizer(folder, **PANICS[when])
    problem = {"read": "cannot be read by the installed tokenizers library: ", "encode": "cannot encode 'ab': "}[when]
    assert refusal("--prompt", "ab", model=folder).startswith(f"jaxkv generate: {file} {problem}")


def test_tokens_on_which_the_decoder_panics_are_reported():
    tokenizer = Tokenizer(WordLevel({"a": 0}, unk_token="a"))
    tokenizer.decoder = decoders.Strip("a", 0, 9)
    with pytest.raises(ValueError, match=r"the tokenizer cannot decode tokens 0: index out of bounds"):
        TextStream(tokenizer).push(0)


def test_a_truncation_that_cannot_be_applied_is_not(with_tokenizer):
    folder, tokenizer = with_tokenizer
    stored = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 4}
    change_tokenizer(folder, truncation=stored)
    assert tokenizers.Tokenizer(folder).encode("abcdefgh") == tokenizer.encode("abcdefgh").ids


def byte_fallback():
    """As Llama 2's: characters outside the vocabulary are tokens of their bytes."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {piece: 256 + n for n, piece in enumerate("▁aelo")}
    tokenizer = Tokenizer(BPE(vocabulary, [], byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    strip = decoders.Strip(" ", 1, 0)
    replace = decoders.Replace("▁", " ")
    tokenizer.decoder = decoders.Sequence([replace, decoders.ByteFallback(), decoders.Fuse(), strip])
    return tokenizer


def byte_level():
    """As GPT-2's and DeepSeek's: every token is some bytes."""
    tokenizer = Tokenizer(BPE({piece: n for n, piece in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return tokenizer


def metaspace():
    """As T5's: a word begins with a mark, which is a space everywhere but at the beginning."""
    pieces = ["<unk>", "▁", "▁Hello", "▁世", *"Helo,wrdé日本🙂界!"]
    tokenizer = Tokenizer(Unigram([(piece, -float(n)) for n, piece in enumerate(pieces)], 0))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return tokenizer


def word_piece():
    """As BERT's: pieces that go on with a word are marked, and no space stands before punctuation."""
    pieces = ["[UNK]", *"Helw日本é世🙂,!", "##lo", "##l", "##e", "##or", "##ld", "##é", "##日", "##界"]
    tokenizer = Tokenizer(WordPiece({piece: n for n, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    return tokenizer


class Script:
    """An engine whose model generates given tokens, and the request that is served."""

    def __init__(self, ids):
        self._ids = iter(ids)
        self.request = Request((1,), len(ids), jaxkv.models.Sampling(), frozenset())

    def step(self):
        self.request.append(next(self._ids))

    def cancel(self, request, *, finish_reason):
        request.finish(finish_reason)


def streamed(tokenizer, ids, prompt=()):
    """The pieces of text, as the command prints them."""
    engine = Script(ids)
    return list(command._pieces(engine, engine.request, TextStream(tokenizer, prompt), StopStrings([])))


@pytest.mark.parametrize("kind", [byte_fallback, byte_level, metaspace, word_piece])
@pytest.mark.parametrize("text", ["日本", "Hello world, Hello 世界! 日本 é 🙂", "e", "  Hello  "])
def test_every_character_is_printed_once_when_it_is_whole(kind, text):
    tokenizer = kind()
    ids = tokenizer.encode(text).ids
    pieces = streamed(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces)
    assert max(map(len, pieces)) <= len(" Hello")  # nothing waits for the end


def test_bytes_that_are_no_characters_neither_stop_nor_repeat_the_text():
    tokenizer = byte_fallback()
    day, a, bad = "日".encode(), tokenizer.token_to_id("a"), "\N{REPLACEMENT CHARACTER}"
    assert streamed(tokenizer, [*day, 0xFF, a, *day]) == ["", "", "日", "", f"{bad}a", "", "", "日", ""]
    assert streamed(tokenizer, [a, *day[:2]]) == ["a", "", "", 2 * bad]


@pytest.mark.parametrize("kind", [byte_fallback, byte_level, metaspace, word_piece, of_words])
def test_a_continuation_goes_on_where_the_prompt_ends(kind):
    tokenizer = kind()
    ids = tokenizer.encode("w1 w2 w3" if kind is of_words else "Hello world, Hello 世界! 日本 é 🙂  Hello").ids
    for split in range(len(ids)):
        before = tokenizer.decode(ids[:split]).rstrip(INCOMPLETE)  # without the first bytes of a character
        assert before + "".join(streamed(tokenizer, ids[split:], ids[:split])) == tokenizer.decode(ids)


def test_special_tokens_at_the_end_of_a_prompt_leave_the_space():
    tokenizer = of_words()
    tokenizer.add_special_tokens([AddedToken("<assistant>", special=True)])
    special = tokenizer.token_to_id("<assistant>")
    assert streamed(tokenizer, [3, special, 4], [1, 2, special, special]) == [" w3", "", " w4", ""]
    assert streamed(tokenizer, [3, 4], [special]) == ["w3", " w4", ""]


@pytest.mark.parametrize("kind", [byte_fallback, byte_level])
def test_random_tokens_are_streamed_as_they_are_decoded_at_once(kind):
    tokenizer, rng = kind(), np.random.default_rng(0)
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True)])
    for _ in range(500):
        ids = rng.choice([*"日é🙂a".encode(), *range(200, tokenizer.get_vocab_size())], rng.integers(1, 12)).tolist()
        text, at_once = "".join(streamed(tokenizer, ids)), tokenizer.decode(ids)
        # Byte-fallback replaces the whole of a run of bytes, also what was whole before: that is out already.
        assert text == at_once or (kind is byte_fallback and "\N{REPLACEMENT CHARACTER}" in at_once)
        if INCOMPLETE not in at_once:
            split = int(rng.integers(len(ids)))
            before = tokenizer.decode(ids[:split]).rstrip(INCOMPLETE)
            assert before + "".join(streamed(tokenizer, ids[split:], ids[:split])) == at_once


def passed_on(stops, pieces):
    """The text that is before any stop string, and whether one was found."""
    stream = StopStrings(stops)
    text = [stream.push(piece) for piece in pieces]
    return "".join([*text, stream.end()]), stream.found


def test_a_stop_string_ends_the_text_however_it_is_divided():
    """The first that is complete, found character by character."""
    rng = np.random.default_rng(0)

    def draw(least, most):
        return "".join(rng.choice(["a", "b", "c"], rng.integers(least, most)))

    found = 0
    for _ in range(2000):
        text, stops = draw(0, 12), [draw(1, 5) for _ in range(rng.integers(0, 4))]
        ends = [end for end in range(len(text) + 1) if text[:end].endswith(tuple(stops))]
        right = text
        if ends:
            right = text[: min(ends[0] - len(stop) for stop in stops if text[: ends[0]].endswith(stop))]
        cuts = np.sort(rng.integers(0, len(text) + 1, 3))
        pieces = ["".join(piece) for piece in np.split(np.asarray([*text], dtype="U1"), cuts)]
        assert passed_on(stops, pieces) == (right, bool(ends)), (stops, pieces)
        found += bool(ends)
    assert 500 < found < 1900


def test_only_what_may_begin_a_stop_string_is_held():
    stops = StopStrings(["\n\n", "END"])
    assert [stops.push(piece) for piece in ("a", "\n", "b", "EN", "E", "ND x", "y")] == [
        "a",
        "",
        "\nb",
        "",
        "EN",
        "",
        "",
    ]
    assert (stops.found, stops.end()) == (True, "")


@pytest.mark.parametrize(
    ("stop", "text", "tokens"), [("lo w", "Hel", 7), ("world", "Hello ", 11), ("x", "Hello world", 11)]
)
def test_a_stop_string_ends_the_request(stop, text, tokens):
    tokenizer = byte_level()
    engine = Script(tokenizer.encode("Hello world").ids)
    pieces = command._pieces(engine, engine.request, TextStream(tokenizer), StopStrings([stop]))
    assert "".join(pieces) == text
    assert len(engine.request.generated) == tokens
    assert engine.request.finish_reason == ("stop" if tokens < 11 else "length")


def test_special_tokens_are_not_printed():
    tokenizer = byte_level()
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True)])
    ids = tokenizer.encode("日").ids
    eos = tokenizer.token_to_id("<eos>")
    assert streamed(tokenizer, [*ids, eos]) == ["", "", "日", "", ""]


@pytest.mark.ci
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


@pytest.mark.ci  # the engine's tests draw tokens, too
def test_drawn_tokens_are_those_of_the_seed(capsys):
    def drawn(*arguments):
        assert generate("--ids", "1 2 3", "--max-tokens", "12", "--temperature", "1.5", *arguments) == 0
        return capsys.readouterr().out

    first = drawn("--seed", "1", "--top-p", "0.9")
    assert first == drawn("--seed", "1", "--top-p", "0.9")
    assert first != drawn("--seed", "2", "--top-p", "0.9")
    for one in (("--top-p", "1e-6"), ("--top-k", "1"), ("--min-p", "1")):
        assert drawn(*one) == drawn("--temperature", "0")


def test_logits_that_are_nan_are_reported(monkeypatch, capsys):
    model = jaxkv.models.load(FOLDER)
    broken = replace(model, params=jax.tree.map(lambda weight: weight * jnp.nan, model.params))
    monkeypatch.setattr(jaxkv.models, "load", lambda *args, **kwargs: broken)
    assert generate("--ids", "1 2 3") == 1
    printed = capsys.readouterr()
    assert printed.out == "\n"
    assert "jaxkv generate: the logits of prompt 1 are NaN" in printed.err


@pytest.mark.ci
def test_another_entry_format_is_printed(capsys):
    assert generate("--ids", "1 2 3", "--max-tokens", "2", "--entry-format", "bf16", "--implementation", "xla") == 0
    assert "MLAEntry(format='bf16', latent=128, rope=8)" in capsys.readouterr().err


@pytest.mark.ci
def test_scales_are_found_with_the_prompts_of_a_file(tmp_path, monkeypatch, capsys):
    served, file = [], tmp_path / "prompts.txt"
    monkeypatch.setattr(serving, "Engine", lambda model, **options: served.append(model) or Engine(model, **options))
    file.write_text("1 2 3\n\n4,5\n")
    fp8 = "--ids", "1 2 3", "--max-tokens", "2", "--entry-format", "fp8"
    assert generate(*fp8, "--calibrate", str(file)) == 0
    assert "scales of entries found with 2 prompts of" in capsys.readouterr().err
    model = jaxkv.models.load(FOLDER, entry_format="fp8")
    right = jaxkv.models.calibrate(model, [[1, 2, 3], [4, 5]]).params["entry_scales"]["kv_scale"]
    assert served[0].params["entry_scales"]["kv_scale"].tolist() == right.tolist()
    wrong = "is not a token id, and .* no tokenizer.json"
    for text, message in (
        ("", "the file has no prompts"),
        ("1 x", f"'x' {wrong}"),
        ("9" * 5000, f"'9{{5000}}' {wrong}"),
    ):
        file.write_text(text)
        with pytest.raises(SystemExit, match=f"^jaxkv generate: --calibrate .*: {message}"):
            generate(*fp8, "--calibrate", str(file))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "no prompt: give --prompt or --ids"),
        (("--ids", "1", "--calibrate", "x"), "--calibrate x: only fp8 entries have scales; add --entry-format fp8"),
        (("--ids", "1", "--calibrate", "x", "--entry-format", "fp8"), "--calibrate x cannot be read: No such file"),
        (("--prompt", "Hi"), "--prompt 'Hi': .* has no tokenizer.json; give the prompt as --ids"),
        (("--ids", "1", "--ids", "1 97"), "prompt 2: `prompt` has token id 97: expected one or more token ids from 0"),
        (("--ids", "1", "--max-tokens", "600"), "600 entries: a request's table holds 512 and the cache 512"),
        (("--ids", "1", "--temperature", "-1"), "`temperature` is -1.0"),
        (("--ids", "1", "--top-p", "0"), "`top_p` is 0.0"),
        (("--ids", "1", "--min-p", "2"), "`min_p` is 2.0"),
        (("--ids", "1", "--stop", "x"), "--stop 'x': .* has no tokenizer.json, so that there is no text"),
        (("--ids", "1", "--implementation", "mosaic_gpu"), "mosaic_gpu"),
        (("--ids", "1", "--seed", "4294967295", "--ids", "2"), "`seed` is 4294967296"),
    ],
)
def test_mistakes_are_reported_in_one_line(arguments, message):
    with pytest.raises(SystemExit, match=f"^jaxkv generate: .*{message}"):
        generate(*arguments)


def test_a_folder_that_does_not_exist_is_reported(tmp_path):
    with pytest.raises(SystemExit, match=r"^jaxkv generate: --model .*: there is no such folder"):
        generate("--prompt", "Hi", model=tmp_path / "missing")


def test_a_folder_without_a_checkpoint_is_reported(tmp_path):
    with pytest.raises(SystemExit, match=r"expected a folder with a config.json"):
        generate("--ids", "1", model=tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--ids", "1 two"), "argument --ids: 'two' is not a token id"),
        (("--ids", "9" * 5000), f"argument --ids: '{'9' * 5000}' is not a token id"),
        (("--ids", "1", "--entry-format", "int3"), "argument --entry-format: invalid choice: 'int3'"),
        (("--ids", "1", "--top-k", "-1"), "argument --top-k: '-1' is not an integer from 0 to 2147483647"),
        (("--ids", "1", "--blocks", "0"), "argument --blocks: '0' is not an integer from 1 to 2147483647"),
        (("--ids", "1", "--implementation", "xla", "foo"), "argument --implementation: invalid choice: 'foo'"),
    ],
)
def test_invalid_options_are_rejected_before_anything_runs(arguments, message, capsys):
    with pytest.raises(SystemExit):
        generate(*arguments, model="nowhere")
    assert message in capsys.readouterr().err


def test_too_few_blocks_for_the_tables_of_a_model_are_reported():
    with pytest.raises(
        SystemExit, match="--blocks is 3: expected at least 4, one for each of the model's block tables"
    ):
        generate("--ids", "1", "--blocks", "3", model=FOLDER.with_name("deepseek_v4"))
