"""Generate text with a checkpoint on this machine: several prompts at once, from one cache.

The continuations go to standard output, as they come; the layout, the progress and the rates to standard error.
Nothing is downloaded.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import jax

import jaxkv
from jaxkv.cli.progress import progress

if TYPE_CHECKING:
    from jaxkv.serving import Engine, Request

MOST_ROWS = 32
"""Requests that run at once; further prompts wait."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The checkpoint, the prompts, the sampling and the cache."""
    parser.add_argument("--model", required=True, metavar="DIR", help="folder with config.json and safetensors")
    parser.add_argument("--prompt", dest="prompts", action="append", metavar="TEXT", help="may be given several times")
    ids = 'a prompt as token ids: "1 2 3"'
    parser.add_argument("--ids", dest="prompts", action="append", type=_ids, metavar="IDS", help=ids)
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens to generate for each prompt (64)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest token (0)")
    parser.add_argument("--top-p", type=float, default=1.0, help="draw from the likeliest tokens up to this sum (1)")
    parser.add_argument("--seed", type=int, default=0, help="of the first prompt (0); the next has the next seed")
    parser.add_argument("--ignore-eos", action="store_true", help="go on after the checkpoint's end-of-text tokens")
    parser.add_argument("--blocks", type=int, default=256, help="blocks of 64 tokens in the cache (256)")
    parser.add_argument("--entry-format", help="format of the cached latents (fp8_ds_mla, ...); default the weights'")
    best_first = "names, the best first; default the best that takes a call"
    parser.add_argument("--implementation", nargs="+", choices=jaxkv.implementations(), help=best_first)


def run(args: argparse.Namespace) -> int:
    """Streams the continuations; 1 if one of them ended in NaN."""
    try:
        return _run(args)
    except (ValueError, ImportError, OSError, NotImplementedError) as error:
        raise SystemExit(f"jaxkv generate: {error}") from None


def _run(args: argparse.Namespace) -> int:
    # Other commands need neither the models nor safetensors.
    from jaxkv import models, serving

    if not args.prompts:
        raise ValueError("no prompt: give --prompt or --ids")
    encode, decode = _tokenizer(Path(args.model))
    prompts = [encode(prompt) for prompt in args.prompts]
    samplings = [models.Sampling(args.temperature, args.top_p, args.seed + n) for n in range(len(prompts))]
    implementation = tuple(args.implementation) if args.implementation else None
    model = models.load(
        args.model,
        entry_format=args.entry_format,
        implementation=implementation,
        progress=partial(progress, what="loading"),
    )
    engine = serving.Engine(model, num_blocks=args.blocks, max_requests=min(len(prompts), MOST_ROWS))
    stop = () if args.ignore_eos else None
    requests = []
    for number, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True), 1):
        try:
            requests.append(engine.submit(prompt, max_tokens=args.max_tokens, sampling=sampling, stop=stop))
        except ValueError as error:
            raise ValueError(f"prompt {number}: {error}") from None
    _tell(f"{model.config.architecture}, {model.config.num_layers} layers, on {jax.devices()[0].device_kind}")
    _tell(f"cache: {model.layout(args.blocks)}")
    _tell("compiling")
    engine.warm_up()
    start = time.perf_counter()
    for number, request in enumerate(requests, 1):
        if len(requests) > 1:
            print(f"[{number}/{len(requests)}]")
        for piece in _pieces(engine, request, decode):
            print(piece, end="", flush=True)
        print()
    seconds = time.perf_counter() - start
    read, new = sum(map(len, prompts)), sum(len(request.generated) for request in requests)
    _tell(f"{read} prompt tokens and {new} new ones in {seconds:.2f} s: {new / seconds:.1f} new tokens/s")
    lost = [number for number, request in enumerate(requests, 1) if request.finish_reason == "nan"]
    for number in lost:
        _tell(f"jaxkv generate: the logits of prompt {number} are NaN: its text ends before its time")
    return 1 if lost else 0


def _ids(text: str) -> list[int]:
    words = text.replace(",", " ").split()
    if wrong := [word for word in words if not word.isdecimal()]:
        raise argparse.ArgumentTypeError(f"{wrong[0]!r} is no token id")
    return [int(word) for word in words]


def _tokenizer(folder: Path) -> tuple[Callable[[str | list[int]], list[int]], Callable[[Sequence[int]], str]]:
    """From prompts to token ids, and back to text; to the ids in decimals where there is no tokenizer.json."""
    file = folder / "tokenizer.json"
    if not file.is_file():

        def refuse(prompt: str | list[int]) -> list[int]:
            if isinstance(prompt, str):
                raise ValueError(f"--prompt {prompt!r}: {folder} has no tokenizer.json; give the prompt as --ids")
            return prompt

        return refuse, lambda ids: " ".join(map(str, ids))
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ImportError("the checkpoint's tokenizer.json needs tokenizers: pip install 'jaxkv[models]'") from None
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # of no narrower class
        raise ValueError(f"{file} is not a tokenizer that can be read: {error}") from None

    def encode(prompt: str | list[int]) -> list[int]:
        try:
            return tokenizer.encode(prompt).ids if isinstance(prompt, str) else prompt
        except Exception as error:  # of no narrower class
            raise ValueError(f"{file} cannot encode {prompt!r}: {error}") from None

    return encode, tokenizer.decode


def _pieces(engine: "Engine", request: "Request", decode) -> Iterator[str]:
    """The text of a request as it grows, while the engine serves all of them."""
    shown = ""
    while True:
        ended = request.finish_reason is not None
        text = decode(request.generated)
        # A character of several bytes may be cut between two tokens: it is shown once it is whole.
        text = text if ended else text.rstrip("\N{REPLACEMENT CHARACTER}")
        yield text[len(shown) :]
        shown = text
        if ended:
            return
        before = len(request.tokens)
        while len(request.tokens) == before and not request.finish_reason:
            engine.step()


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
