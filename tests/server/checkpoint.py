"""A recorded tiny model with a tokenizer, of a token per printable character, and a chat template."""

import json
import shutil
import string
from pathlib import Path

from support.recorded import FOLDER

FAMILY = "deepseek_v3"
VOCABULARY = ["<bos>", "<eos>", *string.printable[:93], " ", "\n"]
"""As many as the model has."""
TEMPLATE = """\
{{ bos_token }}{% for message in messages %}
{% if message.role not in ('system', 'user', 'assistant') %}{{ raise_exception('no role ' + message.role) }}{% endif %}
{{ message.role }}: {{ message.content }}
{% endfor %}
{% if add_generation_prompt %}assistant: {% endif %}"""


def text_of(tokens) -> str:
    """The text of tokens, without special ones."""
    return "".join(VOCABULARY[token] for token in tokens if token > 1)


def write(folder: Path) -> Path:
    """Writes the checkpoint to a folder, which it returns."""
    from tokenizers import AddedToken, Tokenizer, decoders, models

    shutil.copytree(FOLDER / FAMILY, folder, dirs_exist_ok=True)
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(VOCABULARY)}, []))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in VOCABULARY[:2]])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<bos>", "eos_token": {"content": "<eos>"}, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
