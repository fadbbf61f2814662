"""Parts that families share: each file reads keys of `config.json`, and names the weights of that part."""
