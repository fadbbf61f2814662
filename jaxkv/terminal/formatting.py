"""Numbers in messages."""


def counted(number: int, things: str) -> str:
    """A number with its noun in singular or plural: `1 token`, `2 tokens`."""
    return f"{number} {things.removesuffix('s') if number == 1 else things}"


def size(nbytes: int) -> str:
    """`nbytes` in GB, or in MB below one GB."""
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.1f} MB"
