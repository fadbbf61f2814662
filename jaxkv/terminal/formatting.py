"""Numbers in messages."""


def counted(number: int, things: str) -> str:
    """`2 tokens`, but `1 token`."""
    return f"{number} {things.removesuffix('s') if number == 1 else things}"


def size(nbytes: int) -> str:
    """`nbytes` in GB, or in MB below one GB."""
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.1f} MB"
