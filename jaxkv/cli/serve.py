"""Serve a checkpoint over HTTP, with OpenAI's interface: completions, chats, models, health and metrics.

The server listens on this machine only, unless --host says otherwise.  Prompts and answers are never logged.  SIGTERM
and Ctrl-C end it when the requests that run have ended, or after --drain seconds; a second Ctrl-C ends it at once.
"""

import argparse
import os
from functools import partial
from pathlib import Path

import jaxkv
from jaxkv.checks import FLOATS
from jaxkv.terminal.options import add_entry_format, integer, positive

PATTERNS = ["*.json", "*.safetensors", "*.jinja"]
"""The files of a checkpoint that are needed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options: the checkpoint, the engine's sizes, and what the server accepts."""
    text = "folder with config.json, safetensors and tokenizer.json, or the id of a model on Hugging Face"
    parser.add_argument("model", help=text)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1: this machine only)")
    parser.add_argument("--port", type=integer(0, 65535), default=8000, help="port (8000); 0 takes a free one")
    parser.add_argument("--served-model-name", metavar="NAME", help="the name that clients use (the argument `model`)")
    text = "what clients must send as a bearer token; default: the environment variable JAXKV_API_KEY, or no key"
    parser.add_argument("--api-key", metavar="KEY", help=text)
    text = "requests that run at once (32)"
    parser.add_argument("--max-requests", type=positive, default=32, metavar="N", help=text)
    text = "the most tokens of a request; default: what the model and the cache allow"
    parser.add_argument("--max-len", type=positive, metavar="N", help=text)
    text = "tokens per step, padding included; default: 512 beside all requests"
    parser.add_argument("--max-num-batched-tokens", type=positive, metavar="N", help=text)
    text = "blocks of the cache; default: as many as 90 %% of the GPU's memory hold, or 256 on CPUs"
    parser.add_argument("--blocks", type=positive, metavar="N", help=text)
    text = "keep the latents of sparse attention (DeepSeek V3.2, GLM-5) in host memory; needs --blocks"
    parser.add_argument("--host-latents", action="store_true", help=text)
    text = "prompts that wait while the engine runs as many as it can (1024); further ones get the status 429"
    parser.add_argument("--max-queued", type=integer(0), default=1024, metavar="N", help=text)
    text = "the most bytes of a request (4194304); larger ones get the status 413"
    parser.add_argument("--max-body", type=positive, default=2**22, metavar="BYTES", help=text)
    text = "seconds in which running requests may end after SIGTERM (30)"
    parser.add_argument("--drain", type=integer(0), default=30, metavar="SECONDS", help=text)
    text = "dtype of weights and activations; default: the one that config.json states"
    parser.add_argument("--dtype", choices=FLOATS, help=text)
    add_entry_format(parser)
    names = "names in order of preference; default: the first that supports a call"
    parser.add_argument("--implementation", nargs="+", choices=jaxkv.implementations(), help=names)


def run(args: argparse.Namespace) -> int:
    """Serves until a signal; returns 1 if the engine has ended by itself."""
    try:
        from jaxkv.server.app import Limits
        from jaxkv.server.run import make_engine
        from jaxkv.server.run import run as serve
        from jaxkv.serving import HostLatents
    except ImportError as error:
        raise ImportError(f"needs the package {error.name}: pip install 'jaxkv[serve]'") from None
    sizes = {name: getattr(args, name) for name in ("max_requests", "max_len", "max_num_batched_tokens")}
    sizes["host_latents"] = HostLatents() if args.host_latents else None
    options = {"dtype": args.dtype, "entry_format": args.entry_format}
    options["implementation"] = tuple(args.implementation) if args.implementation else None
    folder = _folder(args.model)
    return serve(
        partial(make_engine, folder, num_blocks=args.blocks, sizes=sizes, options=options),
        folder,
        name=args.served_model_name or args.model,
        host=args.host,
        port=args.port,
        limits=Limits(args.max_body, args.max_queued, args.api_key or os.environ.get("JAXKV_API_KEY") or None),
        drain=args.drain,
    )


def _folder(model: str) -> Path:
    """The folder of a checkpoint, which is downloaded if `model` is an id of Hugging Face and not in its cache."""
    if Path(model).is_dir() or model.count("/") != 1 or model.startswith((".", "/", "~")):
        return Path(model)
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ImportError(f"{model!r} is not a folder, and models of Hugging Face need huggingface_hub") from None
    try:
        return Path(snapshot_download(model, allow_patterns=PATTERNS))
    except Exception as error:  # of the hub, of HTTP, and of the operating system
        reason = str(error).splitlines()[0]
        raise ValueError(f"{model!r} is not a folder, and cannot be downloaded from Hugging Face: {reason}") from None
