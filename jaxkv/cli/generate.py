"""Generate text with a checkpoint on this machine: several prompts at once, served from one cache.

Continuations are streamed to standard output; the layout, progress and rates go to standard error.
Nothing is downloaded.

Prompts get the special tokens that tokenizer.json adds, such as one for the beginning of text.
"""

import argparse
import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import jax

import jaxkv
from jaxkv import models, serving
from jaxkv.checks import FLOATS
from jaxkv.terminal.memory import nbytes, require_memory
from jaxkv.terminal.options import add_entry_format, integer, positive, seed
from jaxkv.terminal.progress import progress
from jaxkv.terminal.streams import notice
from jaxkv.text.chat import ChatTemplate
from jaxkv.text.streams import IdStream, StopStrings, TextStream
from jaxkv.text.tokenizer import FILE, Tokenizer

Stream = IdStream | TextStream

MOST_ROWS = 32
"""Requests that run at once; further prompts are queued."""
CHUNK, MOST_CHUNKS = 64, 8
"""Prompt tokens per chunk, and the most chunks per step beside all requests."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options: the checkpoint, the prompts, the sampling and the cache."""
    parser.add_argument("--model", required=True, metavar="DIR", help="folder with config.json and safetensors")
    parser.add_argument("--prompt", dest="prompts", action="append", metavar="TEXT", help="may be given several times")
    text = "prompts are messages of a user, which the chat template of the checkpoint turns into prompts"
    parser.add_argument("--chat", action="store_true", help=text)
    ids = 'a prompt as token ids: "1 2 3"'
    parser.add_argument("--ids", dest="prompts", action="append", type=_ids, metavar="IDS", help=ids)
    parser.add_argument("--max-tokens", type=positive, default=64, help="tokens to generate for each prompt (64)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 always takes the most likely token (0)")
    text = "draw from so many most likely tokens (0: all)"
    parser.add_argument("--top-k", type=integer(0), default=0, metavar="K", help=text)
    text = "draw from the most likely tokens that have this total probability (1)"
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help=text)
    text = "draw from tokens of at least this fraction of the probability of the most likely one (0)"
    parser.add_argument("--min-p", type=float, default=0.0, metavar="P", help=text)
    seeds = "seed of the first prompt (0); each further prompt has the next seed"
    parser.add_argument("--seed", type=seed, default=0, help=seeds)
    text = "end a continuation before this text; may be given several times"
    parser.add_argument("--stop", dest="stops", action="append", default=[], metavar="TEXT", help=text)
    parser.add_argument("--ignore-eos", action="store_true", help="continue after the checkpoint's end-of-text tokens")
    blocks = "blocks in the cache (256), usually of 64 tokens"
    parser.add_argument("--blocks", type=positive, default=256, help=blocks)
    drafts = "draft so many tokens per step, and verify them"
    parser.add_argument("--num-speculative-tokens", type=positive, metavar="K", help=drafts)
    method = (
        "how drafts are made: by the checkpoint's layer of multi-token prediction, or copied from earlier tokens (mtp)"
    )
    parser.add_argument("--speculative-method", choices=("mtp", "ngram"), help=method)
    default = serving.NGram()
    most = f"the most last tokens that ngram searches in earlier ones ({default.prompt_lookup_max})"
    parser.add_argument("--prompt-lookup-max", type=positive, metavar="N", help=most)
    least = f"the least last tokens that ngram must find ({default.prompt_lookup_min})"
    parser.add_argument("--prompt-lookup-min", type=positive, metavar="N", help=least)
    text = "dtype of weights and activations; default: the one that config.json states"
    parser.add_argument("--dtype", choices=FLOATS, help=text)
    add_entry_format(parser)
    text = "find the scales of fp8 entries by running the prompts in this file first, one per line"
    parser.add_argument("--calibrate", type=Path, metavar="FILE", help=text)
    names = "names in order of preference; default: the first that supports a call"
    parser.add_argument("--implementation", nargs="+", choices=jaxkv.implementations(), help=names)


def run(args: argparse.Namespace) -> int:
    """Streams the continuations; returns 1 if one of them ended because its logits are NaN."""
    if not args.prompts:
        raise ValueError("no prompt: give --prompt or --ids")
    if not Path(args.model).exists():
        raise ValueError(f"--model {args.model}: there is no such folder; expected one with a checkpoint")
    encode, stream = _tokenizer(Path(args.model), chat=args.chat)
    if args.stops and not (Path(args.model) / FILE).is_file():
        raise ValueError(f"--stop {args.stops[0]!r}: {args.model} has no {FILE}, so that there is no text")
    if "" in args.stops:
        raise ValueError("--stop '': expected a text that is not empty")
    drafts = _drafts(args)
    calibrating = None if args.calibrate is None else _lines(args, encode)
    prompts = [encode(prompt) for prompt in args.prompts]
    filters = {"top_k": args.top_k, "top_p": args.top_p, "min_p": args.min_p}
    samplings = [models.Sampling(args.temperature, seed=args.seed + n, **filters) for n in range(len(prompts))]
    implementation = tuple(args.implementation) if args.implementation else None
    model = models.load(
        args.model,
        dtype=args.dtype,
        entry_format=args.entry_format,
        implementation=implementation,
        mtp=isinstance(drafts, serving.MTP),
        progress=partial(progress, what="loading"),
    )
    if calibrating is not None:
        model = models.calibrate(model, calibrating)
        notice(f"scales of entries found with {len(calibrating)} prompts of {args.calibrate}")
    if args.blocks < (least := len(model.tables)):
        raise ValueError(
            f"--blocks is {args.blocks}: expected at least {least}, one for each of the model's block tables"
        )
    cache = nbytes(jax.eval_shape(lambda: model.cache(args.blocks)))
    require_memory(f"--blocks {args.blocks}, beside the weights", nbytes(model.params) + cache)
    sizes = {"num_blocks": args.blocks, "max_requests": min(len(prompts), MOST_ROWS)}
    # No more chunks per step than the prompts have: the first steps run the largest program, even if chunks are empty.
    chunks = min(max(sum(math.ceil(len(prompt) / CHUNK) for prompt in prompts), 1), MOST_CHUNKS)
    sizes["max_num_batched_tokens"] = sizes["max_requests"] * (1 + (args.num_speculative_tokens or 0)) + chunks * CHUNK
    engine = serving.Engine(model, chunk=CHUNK, drafts=drafts, **sizes)
    stop = () if args.ignore_eos else None
    requests = []
    for number, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True), 1):
        try:
            requests.append(engine.submit(prompt, max_tokens=args.max_tokens, sampling=sampling, stop=stop))
        except ValueError as error:
            raise ValueError(f"prompt {number}: {error}") from None
    notice(f"{model.config.architecture}, {model.config.num_layers} layers, on {jax.devices()[0].device_kind}")
    notice(f"cache: {model.layout(args.blocks)}")
    notice("compiling")
    engine.warm_up(wait=False)
    start = time.perf_counter()
    for number, request in enumerate(requests, 1):
        if len(requests) > 1:
            print(f"[{number}/{len(requests)}]")
        for piece in _pieces(engine, request, stream(request.prompt), StopStrings(args.stops)):
            print(piece, end="", flush=True)
        print()
    seconds = time.perf_counter() - start
    read, new = sum(map(len, prompts)), sum(len(request.generated) for request in requests)
    notice(f"{read} prompt tokens and {new} new ones in {seconds:.2f} s: {new / seconds:.1f} new tokens/s")
    if drafts is not None:
        found = engine.acceptance
        accepted = f"{found.accepted} of {found.drafted} drafts accepted ({found.rate:.1%})"
        notice(f"{accepted}, {found.tokens_per_step:.2f} new tokens per request and step")
    lost = [number for number, request in enumerate(requests, 1) if request.finish_reason == "nan"]
    for number in lost:
        notice(f"jaxkv generate: the logits of prompt {number} are NaN, so its text ends early")
    return 1 if lost else 0


def _drafts(args: argparse.Namespace) -> serving.MTP | serving.NGram | None:
    """How drafts are made, by the options; None for no drafts."""
    lookup = {name: getattr(args, name) for name in ("prompt_lookup_max", "prompt_lookup_min")}
    lookup = {name: value for name, value in lookup.items() if value is not None}
    if args.num_speculative_tokens is None:
        if args.speculative_method or lookup:
            raise ValueError("there are options of drafts, but no drafts: add --num-speculative-tokens")
        return None
    if args.speculative_method == "ngram":
        return serving.NGram(args.num_speculative_tokens, **lookup)
    if lookup:
        raise ValueError("--prompt-lookup-max and --prompt-lookup-min need --speculative-method ngram")
    return serving.MTP(args.num_speculative_tokens)


def _ids(text: str) -> list[int]:
    words = text.replace(",", " ").split()
    # Ten digits at most: Python does not convert thousands of them.
    if wrong := [word for word in words if not (word.isdecimal() and len(word) <= 10)]:
        raise argparse.ArgumentTypeError(f"{wrong[0]!r} is not a token id")
    return [int(word) for word in words]


def _lines(args: argparse.Namespace, encode: Callable[[str | list[int]], list[int]]) -> list[list[int]]:
    """The prompts of the file `--calibrate`, one per line that is not empty: text, or ids without a tokenizer."""
    if args.entry_format != "fp8":
        raise ValueError(f"--calibrate {args.calibrate}: only fp8 entries have scales; add --entry-format fp8")
    try:
        lines = [line for line in args.calibrate.read_text("utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        problem = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ValueError(f"--calibrate {args.calibrate} cannot be read: {problem}") from None
    if not lines:
        raise ValueError(f"--calibrate {args.calibrate}: the file has no prompts, one per line")
    if (Path(args.model) / FILE).is_file():
        return [encode(line) for line in lines]
    try:
        return [_ids(line) for line in lines]
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"--calibrate {args.calibrate}: {error}, and {args.model} has no {FILE}") from None


def _tokenizer(
    folder: Path, *, chat: bool
) -> tuple[Callable[[str | list[int]], list[int]], Callable[[Sequence[int]], Stream]]:
    """A function from a prompt to token ids, and a function that makes the stream of a prompt's continuation.

    With `chat`, a text is a message of a user.  Without a tokenizer.json, the stream is one of token ids.
    """
    if not (folder / FILE).is_file():

        def only_ids(prompt: str | list[int]) -> list[int]:
            if isinstance(prompt, str):
                raise ValueError(f"--prompt {prompt!r}: {folder} has no tokenizer.json; give the prompt as --ids")
            return prompt

        return only_ids, lambda prompt: IdStream()
    tokenizer, template = Tokenizer(folder), ChatTemplate(folder) if chat else None

    def encode(prompt: str | list[int]) -> list[int]:
        if not isinstance(prompt, str):
            return prompt
        if template is None:
            return tokenizer.encode(prompt)
        # The template's text has the special tokens.
        return tokenizer.encode(template.render([{"role": "user", "content": prompt}]), special_tokens=False)

    return encode, tokenizer.stream


def _pieces(engine: serving.Engine, request: serving.Request, stream: Stream, stops: StopStrings) -> Iterator[str]:
    """Yields the text of a request as it grows, up to a stop string.

    The engine serves the other requests at the same time.
    """
    shown = 0
    while True:
        new = request.generated[shown:]
        for token in new:
            yield stops.push(stream.push(token))
            if stops.found:
                if request.finish_reason is None:
                    engine.cancel(request, finish_reason="stop")
                return
        shown += len(new)
        if request.finish_reason is not None:
            yield stops.push(stream.end()) + stops.end()
            return
        engine.step()
