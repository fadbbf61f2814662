"""What families are made of: each file reads keys of `config.json` and names the weights that they imply."""
