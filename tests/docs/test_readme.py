"""The README's code runs, its tables are the code's, and its commands are the ones that exist."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import override

import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv.cli import BENCHMARKS, COMMANDS, main
from models.checkpoints.mtp import with_mtp
from offload.connector_suite import ConnectorSuite
from support.compare import assert_close
from support.jobs import free_port
from support.recorded import model

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def code_in(folder, start="", page="README.md"):
    """The first Python block of a folder's page that begins with `start`."""
    text = (ROOT / folder / page).read_text()
    return next(code for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if code.startswith(start))


def test_the_model_of_the_readme_continues_its_prompts():
    """Each request gets the tokens that it gets as a prompt with all of its tokens so far, in a cache of its own."""
    printed = []
    scope = {"print": printed.append}
    for code in re.findall(r"```python\n(.*?)```", README, re.DOTALL):
        exec(code, scope)
    for request, prompt in enumerate(([5, 8, 13], [2, 3, 5, 7, 11])):
        tokens, found = list(prompt), [int(new[request]) for new in printed]
        for _ in range(11):
            one = (jnp.asarray(x) for x in ([len(tokens)], [4, 1], [0, len(tokens)], [0, 0, 1]))
            new, _ = scope["step"](scope["weights"], jnp.asarray(tokens), jaxkv.KVCache.zeros(scope["layout"]), *one)
            tokens.append(int(new[0]))
        assert tokens[len(prompt) + 1 :] == found
    too_short = (jnp.asarray(x) for x in ([2], [4, 1], [0, 3], [0, 0, 1]))
    cache = jaxkv.KVCache.zeros(scope["layout"])
    with pytest.raises(ValueError, match=r"`kv_lens`\[0\] is 2: it includes the 3 new tokens"):
        jaxkv.checked(scope["step"])(scope["weights"], jnp.asarray([5, 8, 13]), cache, *too_short)


def test_a_cache_is_sent():
    scope = {}
    exec(code_in("jaxkv/layout", "import jax.numpy"), scope)
    assert scope["cache"].layout == scope["layout"]


def test_the_ten_lines_run():
    scope = {}
    exec(code_in("jaxkv/ops", "import jax.numpy"), scope)
    assert scope["out"].shape == (1, 16, 512)
    assert scope["lse"].shape == (1, 16)


def test_entries_have_gradients():
    exec(code_in("jaxkv/ops", "import jax\nimport jax.numpy as jnp\n\nimport jaxkv\n\nentry"), scope := {})
    for gradient in (scope["of_keys"], scope["of_values"]):
        assert gradient.shape == (16, 2, 64)
    # Equal keys of equal weights: the values alone decide, and each has a 16th of the gradient of the result.
    assert_close(scope["of_values"].astype(jnp.float32), np.full((16, 2, 64), -2 / 16 / 128), dtype="bfloat16")


@pytest.mark.ci
def test_the_whole_model_runs(capsys):
    code = code_in("jaxkv/serving")
    exec(code.replace('"DIR"', repr(str(ROOT / "tests" / "data" / "models" / "deepseek_v3"))), {})
    printed = capsys.readouterr().out.splitlines()
    assert sorted(line.split()[0] for line in printed) == ["0"] * 100 + ["1"] * 100


@pytest.mark.ci
def test_the_engine_serves_an_event_loop(capsys):
    code = code_in("jaxkv/serving", "import asyncio")
    exec(code.replace('"DIR"', repr(str(ROOT / "tests" / "data" / "models" / "deepseek_v3"))), {})
    assert [len(tokens) for tokens in json.loads(capsys.readouterr().out)] == [100, 100]


@pytest.mark.ci
def test_the_engine_finds_prefixes_of_an_earlier_run(tmp_path):
    code = code_in("jaxkv/serving", "from jaxkv import models, offload")
    code = code.replace('"DIR"', repr(str(ROOT / "tests" / "data" / "models" / "deepseek_v3")))
    for found in (0, 128):
        scope = {}
        exec(code.replace('"/tmp/blocks"', repr(str(tmp_path))), scope)
        assert scope["engine"].prefix_stats.found == found


@pytest.mark.ci
def test_an_engine_adopts_the_blocks_of_another(capsys):
    code = code_in("jaxkv/serving", "from jaxkv import models, serving\n\nmodel, prompt")
    exec(code.replace('"DIR"', repr(str(ROOT / "tests" / "data" / "models" / "deepseek_v3"))), scope := {})
    assert len(capsys.readouterr().out.splitlines()) == 100
    assert scope["decode"].prefix_stats.found == 160


@pytest.mark.ci
def test_an_engine_pulls_the_blocks_of_another():
    scope = {"model": model("deepseek_v3"), "prompt": [3, 1, 4, 1, 5, 9, 2, 6] * 20, "PASSWORD": b"password"}
    port = str(free_port())
    for start in ("# The process that prefills", "# The process that decodes"):
        code = re.sub(r"10\.0\.0\.\d", "127.0.0.1", code_in("jaxkv/offload", start)).replace("7000", port)
        code = code.replace("num_blocks=1024", "num_blocks=8, max_requests=1")  # compiles faster
        exec(f"from jaxkv import offload, serving\n{code}", scope)
        list(scope["engine"].run())
        scope["first_token"] = scope["request"].generated[0]
    assert scope["engine"].prefix_stats.loaded == 128
    scope["blocks"].close()
    scope["server"].close()


class TestTheDictionary(ConnectorSuite):
    @override
    def connectors(self, layout, folder):
        exec(code_in("jaxkv/offload", "import numpy as np\n\nfrom jaxkv import offload\n"), scope := {})
        dictionary = scope["Dictionary"](layout)
        return dictionary, dictionary


@pytest.mark.ci
def test_the_engine_drafts(tmp_path):
    code = code_in("jaxkv/serving", "from jaxkv import models, serving\n\nmodel =")
    scope = {}
    exec(code.replace('"DIR"', repr(str(with_mtp(tmp_path)[0]))), scope)
    assert scope["engine"].acceptance.drafted > 100


@pytest.mark.ci
def test_the_engine_has_latents_in_host_memory(capsys):
    code = code_in("jaxkv/serving", 'from jaxkv import models, serving\n\nmodel = models.load("DIR")\nsizes')
    exec(code.replace('"DIR"', repr(str(ROOT / "tests" / "data" / "models" / "deepseek_v32"))), {})
    *tokens, sizes = capsys.readouterr().out.splitlines()
    assert len(tokens) == 100
    assert re.fullmatch(r"0\.1\d GB on the host, 0\.0\d GB on the device", sizes)


def test_prefill_and_decode_run():
    code = code_in("jaxkv/models")
    scope = {}
    exec(code.replace('"DIR"', repr(str(ROOT / "tests" / "data" / "models" / "deepseek_v3"))), scope)
    assert scope["logits"].shape == (1, scope["model"].config.vocab_size)
    assert scope["logits"].argmax() != scope["token"]


def test_a_write_of_the_reader_is_checked():
    code = code_in("jaxkv/testing")
    exec(code, scope := {})
    assert {"LBNHC", "BLNHC padded", "gaps, offset"} <= set(scope["supported"])
    packed = code.replace("block * s.block", "block * layout.block_size * layout.width")
    assert packed != code
    with pytest.raises(
        AssertionError, match=r"^layout 'BLNHC' .*\n.* entries differ\n    layer 0, block 1, head 0, token"
    ):
        exec(packed, {})


def flashinfer_attention(q, k, v, scale):
    """The results o [Hq, D] and s [Hq] of FlashInfer's kernels for q [Hq, D] and keys k [S, H, D]: s has base 2."""
    if not len(k):
        return np.zeros(q.shape), np.full(len(q), -np.inf)
    k, v = (np.repeat(x, len(q) // x.shape[1], axis=1) for x in (k, v))
    x = np.einsum("hd,shd->hs", q, k) * scale * np.log2(np.e)
    m = x.max(axis=1, keepdims=True)
    d = np.exp2(x - m).sum(axis=1, keepdims=True)
    return np.einsum("hs,shd->hd", np.exp2(x - m) / d, v), (m + np.log2(d))[:, 0]


def flashinfer_merge_state(v_a, s_a, v_b, s_b):
    """As its kernel computes it, from logarithms of base 2; 0 and -inf where it computes NaN, without any keys."""
    s_max = np.maximum(s_a, s_b)
    a, b = (np.exp2(s - np.where(s_max == -np.inf, 0, s_max)) for s in (s_a, s_b))
    total = np.where(s_max == -np.inf, 1, a + b)
    merged = (a[..., None] * v_a + b[..., None] * v_b) / total[..., None]
    return merged, s_max + np.log2(total)


def test_results_of_flashinfer_and_jaxkv_are_merged():
    """Of requests with keys in both caches, in one of them, and in none."""
    code = code_in("jaxkv/ops", page="coming_from.md")
    indptr, indices, last_page_len = np.asarray([0, 3, 4, 4, 4]), np.asarray([7, 0, 5, 2]), np.asarray([13, 8, 1, 1])
    own, others, scale = (45, 8, 0, 0), (30, 0, 7, 0), 0.3
    rng = np.random.default_rng(0)
    pages = rng.standard_normal((8, 16, 2, 2, 64)).astype(np.float32)  # blocks, tokens, keys and values, heads
    layout = jaxkv.CacheLayout(
        num_layers=1, num_blocks=8, block_size=16, num_heads=2, entry=jaxkv.KVEntry("f32", head_dim=64)
    )
    cache = jaxkv.KVCache.zeros(layout)
    k, v = (jnp.asarray(pages[:, :, i].reshape(128, 2, 64)) for i in (0, 1))
    cache = jaxkv.write_kv(cache, k, v, jnp.arange(128), layer=0)
    q = rng.standard_normal((4, 4, 64)).astype(np.float32)
    first, second = [], []
    for b in range(4):
        blocks = pages[indices[indptr[b] : indptr[b + 1]]].reshape(-1, 2, 2, 64)[: own[b]]
        first.append(flashinfer_attention(q[b], blocks[:, 0], blocks[:, 1], scale))
        elsewhere = rng.standard_normal((others[b], 2, 2, 64))
        second.append(flashinfer_attention(q[b], elsewhere[:, 0], elsewhere[:, 1], scale))
    (v_a, s_a), (v_b, s_b) = ([np.stack(x) for x in zip(*parts, strict=True)] for parts in (first, second))
    scope = {"indptr": indptr, "indices": indices, "last_page_len": last_page_len, "q": jnp.asarray(q)}
    scope |= {"cache": cache, "scale": scale, "v": jnp.asarray(v_b, jnp.float32), "s": jnp.asarray(s_b, jnp.float32)}
    exec(code, scope)
    right_v, right_s = flashinfer_merge_state(v_a, s_a, v_b, s_b)
    assert scope["seq_lens"].tolist() == list(own)
    assert scope["s"].dtype == np.float32
    assert_close(scope["out"], right_v, roundings=16, magnitude=2)
    assert_close(scope["s"], right_s, roundings=16)
    assert np.isneginf(right_s[3]).all()


def test_blocks_are_offloaded_and_loaded(tmp_path):
    code = code_in("jaxkv/offload")
    scope = {}
    exec(code.replace('"/tmp/blocks"', repr(str(tmp_path))), scope)
    assert scope["found"] == 3
    blocks = scope["cache"].buffer.reshape(64, 27, 64 * 576)
    assert (blocks[20:23, 5] == 1).all()
    assert len(list(tmp_path.glob("*/*.block"))) == 3


CODE_TABLES = {
    "jaxkv/ops/README.md": ("matrix", "generations", "features"),
    "kernels/jaxkv_kernels/formats/README.md": ("formats", "accuracy", "queries", "mixed"),
    "notebooks/trained/README.md": ("losses", "loss_by_format", "sparse_losses", "moves"),
}


@pytest.mark.parametrize("name", CODE_TABLES)
def test_tables_are_those_of_the_code(name, tmp_path):
    assert_rewritten(ROOT / ".ci" / "tables.py", name, CODE_TABLES[name], tmp_path)


TABLES = {
    "README.md": ("summary",),
    "notebooks/README.md": ("peers", "verdict", "speed", "ceilings", "quantised", "models", "by_hand"),
    "jaxkv/models/README.md": ("delta_rule", "steps", "concurrent_steps", "chain", "several_gpus"),
    "jaxkv/offload/README.md": ("hot_rows",),
    "jaxkv/serving/README.md": ("engines",),
    "jaxkv/server/README.md": ("server",),
    "notebooks/clients/latents.md": ("expanded",),
}


@pytest.mark.parametrize("name", TABLES)
def test_tables_are_those_of_the_recorded_measurements(name, tmp_path):
    assert_rewritten(ROOT / "notebooks" / "h200" / "report.py", name, TABLES[name], tmp_path)


def assert_rewritten(script, name, tables, folder):
    """A script that is given a README without these tables writes them as they are."""
    text, copy = (ROOT / name).read_text(), folder / "README.md"
    emptied = text
    for marks in tables:
        emptied, count = re.subn(rf"(<!-- {marks} -->\n).*?(<!-- /{marks} -->)", r"\1\2", emptied, flags=re.DOTALL)
        assert count == 1, marks
    copy.write_text(emptied)
    subprocess.run([sys.executable, script, copy], check=True)
    assert copy.read_text() == text, f"run `python {script.relative_to(ROOT)} {name}`"


def test_the_accuracy_of_every_format_is_recorded():
    recorded = json.loads((ROOT / "notebooks" / "accuracy" / "entry_formats.json").read_text())
    assert {"date", "device", "versions", "command", "models"} <= set(recorded)
    kinds = jaxkv.MLAEntry, jaxkv.KVEntry, jaxkv.IndexerEntry
    rows = {(row["entries"].strip("`").split("`")[0], row["format"]) for row in recorded["rows"]}
    assert rows == {(kind.__name__, form) for kind in kinds for form in kind.formats}


RECORDED = {
    "h200": ("decode_mla", "quantised", "quantised_kv", "sparse_step", "flash_mla", "flash_mla_sparse", "model_steps"),
    "h100": ("decode", "peers"),
}


def test_measurements_name_their_date_device_versions_and_command():
    for gpu, name in ((gpu, name) for gpu, names in RECORDED.items() for name in names):
        found = json.loads((ROOT / "notebooks" / gpu / f"{name}.json").read_text())
        assert {"date", "device", "versions", "command"} <= set(found), name
        assert "ceilings" in found or name == "model_steps"
        if "flash" in name:
            assert found["versions"]["commit"]  # FlashMLA's version does not change from commit to commit


def test_every_command_is_documented(capsys):
    commands = {"": (*COMMANDS, "bench"), "bench": BENCHMARKS}
    for parent, names in commands.items():
        with pytest.raises(SystemExit):
            main([*parent.split(), "--help"])
        usage = capsys.readouterr().out
        for name in names:
            command = " ".join(["jaxkv", *parent.split(), name])
            assert f"`{command}`" in (ROOT / "jaxkv" / "cli" / "README.md").read_text(), command
            assert name in usage


def test_kernels_is_a_source_root_and_no_package():
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_import_costs_little_and_brings_no_triton():
    code = "import jax, sys, time; t = time.time(); import jaxkv; print(time.time() - t); print(*sys.modules)"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    seconds, modules = printed.split("\n")[:2]
    assert not {"triton", "jax_triton", "matplotlib", "torch"} & set(modules.split())
    assert float(seconds) < 5, "importing jaxkv after jax"
