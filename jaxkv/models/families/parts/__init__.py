"""Parts that families share.  Each file reads the keys of `config.json` for one part, and names the part's weights."""
