"""The text of the trained model: sources of CPython, NumPy and JAX as installed, and a tokenizer made from them.

The text is not part of the repository.  Licences: CPython's standard library, PSF-2.0; NumPy, BSD-3-Clause; JAX,
Apache-2.0.  One file in twenty is held out, chosen by a hash of its name, so that a file of another version of these
packages stays on its side.
"""

import hashlib
import sysconfig
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY = 2048
END = "<|endoftext|>"
"""Between files.  Its id is 0."""
LEFT_OUT = {"idlelib", "lib2to3", "site-packages", "encodings", "pydoc_data"}
"""Folders of other packages, of old code, and of tables."""
SAMPLE = "cpython/bdb.py", "cpython/configparser.py", "cpython/difflib.py", "cpython/logging/handlers.py"
"""Some files that are held out, which every Python has."""


def files() -> Iterator[tuple[str, Path]]:
    """The files, by name: that of the package, and the path in it."""
    roots = {"cpython": Path(sysconfig.get_path("stdlib"))}
    for package in ("numpy", "jax"):
        spec = find_spec(package)
        assert spec is not None
        assert spec.origin is not None
        roots[package] = Path(spec.origin).parent
    for package, root in roots.items():
        for path in sorted(root.rglob("*.py")):
            if not LEFT_OUT.intersection(path.relative_to(root).parts):
                yield f"{package}/{path.relative_to(root)}", path


def is_held_out(name: str) -> bool:
    """Whether the file with this name is held out."""
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % 20 == 0


def texts(*, held_out: bool) -> Iterator[str]:
    """The texts of the files that are held out, or of the others."""
    for name, path in files():
        if is_held_out(name) == held_out:
            yield path.read_text(encoding="utf-8", errors="replace")


def sample(tokenizer: Tokenizer, length: int, number: int) -> np.ndarray:
    """Windows of the files in `SAMPLE`, [number, length + 1]."""
    found = [path.read_text(encoding="utf-8") for name, path in files() if name in SAMPLE]
    return windows(tokens(tokenizer, found), length, number)


def make_tokenizer() -> Tokenizer:
    """A byte-pair tokenizer of the text that is not held out."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=[END], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts(held_out=False), trainer)
    return tokenizer


def tokens(tokenizer: Tokenizer, documents: Iterable[str]) -> np.ndarray:
    """The tokens of the documents one after the other, each ended by `END`, uint16 [N]."""
    encoded = tokenizer.encode_batch_fast(list(documents))
    return np.concatenate([np.asarray([*document.ids, 0], np.uint16) for document in encoded])


def windows(stream: np.ndarray, length: int, number: int) -> np.ndarray:
    """So many windows of `length` + 1 tokens, spread evenly over the stream, [number, length + 1]."""
    most = (len(stream) - 1) // length
    if number > most:
        raise ValueError(f"{len(stream)} tokens have {most} windows of {length}: expected at least {number}")
    starts = np.arange(number) * most // number * length
    return stream[starts[:, None] + np.arange(length + 1)].astype(np.int32)


def bigram_loss(train: np.ndarray, held_out: np.ndarray) -> float:
    """The loss of a bigram model per token of `held_out` [B, T + 1], in nats, with the best of some interpolations.

    p(b | a) = (count(a, b) + s p(b)) / (count(a) + s), p(b) = (count(b) + 1) / (N + V), with the s that suits the
    held-out text best, so that the baseline is as good as such a model can be.
    """
    pairs = np.bincount(train[:-1].astype(np.int64) * VOCABULARY + train[1:], minlength=VOCABULARY**2)
    pairs = pairs.reshape(VOCABULARY, VOCABULARY)
    single = (pairs.sum(0) + 1) / (pairs.sum() + VOCABULARY)
    before, after = held_out[:, :-1].ravel(), held_out[:, 1:].ravel()
    losses = []
    for strength in (1, 3, 10, 30, 100, 300):
        p = (pairs[before, after] + strength * single[after]) / (pairs.sum(1)[before] + strength)
        losses.append(-np.log(p).mean())
    return float(min(losses))
