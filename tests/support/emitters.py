"""For programs that do not work with the older emitters of XLA, which `conftest.py` selects."""

DEFAULT_EMITTERS = {"xla_backend_extra_options": ""}
"""`compiler_options` of such programs.

To write a single block, the older emitters pass over the whole buffer, and quiet the signalling NaNs of bf16 in it.
"""
