"""What the suites of Mosaic GPU's kernels of `decode_mla` have in common, on every generation of GPUs."""

import jaxkv
from support import suites


class MosaicMLA:
    """A base class of suites, before the suite itself."""

    implementation = "mosaic_gpu"
    latent, rope = 512, 64
    exact = "bf16"

    def entry(self, name=None):
        """Entries that are not quantised in the suite's sizes, others in those of models."""
        plain = (name or self.exact) in ("bf16", "f16", "f32")
        return super().entry(name) if plain else jaxkv.MLAEntry.typical(name)

    def case(self, lengths, heads, tokens=1, *, form="bf16", layout="BLNHC", layer=1, block_size=64, **keywords):
        """Checks one call."""
        entry = self.entry(form)
        scene = suites.scenes.scene(entry, lengths=lengths, block_size=block_size)
        found = suites.layout_of(layout, entry, block_size=block_size)
        q = suites.queries(entry, len(lengths), tokens, heads)
        return self.check(q, scene.cache(found, layer), scene, layer, **keywords)
