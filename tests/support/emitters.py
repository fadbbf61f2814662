"""Programs that the older emitters of XLA, which `conftest.py` chooses, do not serve."""

DEFAULT_EMITTERS = {"xla_backend_extra_options": ""}
"""`compiler_options` of such programs.

To write a single block, the older emitters pass over the whole buffer; of bf16, they convert it to float32 and back,
which quiets signalling NaNs.
"""
