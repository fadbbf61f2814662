"""A server with OpenAI's HTTP interface: `jaxkv serve`."""
