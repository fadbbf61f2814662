"""Text and tokens: tokenizers, chat templates, and the text of tokens as they come."""
