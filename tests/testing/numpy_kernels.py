"""Paged kernels in NumPy that are right, and subclasses of them that have one fault each."""

from typing import override

import jax.numpy as jnp
import numpy as np

from jaxkv.testing.buffers import to_bytes, to_cache


class Kernels:
    """A write, a gather and an attention for entries of float32 or int8 keys and values, from explicit strides."""

    def step(self, strides, layout, layer, block, head, token):
        """Elements from the first entry to another."""
        return layer * strides.layer + block * strides.block + head * strides.head + token * strides.token

    def value_strides(self, layout):
        """The strides of values that do not follow their keys."""
        return layout.value_strides

    def address(self, layout, name, *place):
        """The byte at which a field of an entry begins."""
        strides, first, fields = layout.strides, layout.offset, layout.entry.fields()
        if layout.value_strides is not None:
            key, value = layout.entry.planes
            fields = key
            if name.startswith("V"):
                strides, first, fields = self.value_strides(layout), layout.value_offset, value
                first += layout.size if layout.value_size else 0
        field = next(field for field in fields if field.name == name)
        return (first + self.step(strides, layout, *place)) * layout.itemsize + field.offset

    def load(self, buffer, layout, name, dtype, count, *place):
        """A field of an entry."""
        begin = self.address(layout, name, *place)
        found = buffer[begin : begin + count * np.dtype(dtype).itemsize]
        return found.copy().view(dtype)

    def entry(self, buffer, layout, *place):
        """The key and the value of an entry."""
        dtype = np.float32 if layout.entry.format == "f32" else np.int8
        sizes = zip(("K", "V"), layout.entry.sizes, strict=True)
        parts = [self.load(buffer, layout, name, dtype, n, *place) for name, n in sizes]
        if dtype == np.float32:
            return parts
        scales = [self.load(buffer, layout, f"{name} scales", np.float32, 1, *place) for name in ("K", "V")]
        return [part * scale for part, scale in zip(parts, scales, strict=True)]

    def skipped(self, slot, layout):
        """Whether a write skips a slot."""
        return not 0 <= slot < layout.num_slots

    def stored(self, part):
        """The bytes that a write stores of a key or a value."""
        return part.view(np.uint8)

    def write(self, cache, k, v, slot_mapping, *, layer):
        """As `write_kv`, of float32."""
        layout, buffer = cache.layout, to_bytes(cache).copy()
        for token, slot in enumerate(np.asarray(slot_mapping).tolist()):
            if self.skipped(slot, layout):
                continue
            block, place = divmod(slot, layout.block_size)
            for head in range(layout.num_heads):
                for name, part in (("K", k), ("V", v)):
                    begin = self.address(layout, name, layer, block, head, place)
                    row = self.stored(np.asarray(part)[token, head])
                    buffer[begin : begin + row.size] = row
        return to_cache(layout, buffer)

    def tokens(self, length, block_size):
        """Which tokens of a request are read."""
        return range(length)

    def entries(self, cache, table, length, layer):
        """The keys and the values of a request, [S, H, n]."""
        layout, buffer, found = cache.layout, to_bytes(cache), []
        for position in self.tokens(length, layout.block_size):
            block, token = int(table[position // layout.block_size]), position % layout.block_size
            found.append([self.entry(buffer, layout, layer, block, head, token) for head in range(layout.num_heads)])
        return [
            np.asarray([[entry[i] for entry in heads] for heads in found], np.float32).reshape(-1, layout.num_heads, n)
            for i, n in enumerate(layout.entry.sizes)
        ]

    def gather(self, cache, block_tables, cu_seq_lens, *, layer, total, dtype):
        """As `gather_kv`."""
        lengths = np.diff(np.asarray(cu_seq_lens)).tolist()
        rows = zip(np.asarray(block_tables), lengths, strict=True)
        parts = zip(*(self.entries(cache, table, length, layer) for table, length in rows), strict=True)
        found = [np.concatenate(part) for part in parts]
        return tuple(np.concatenate([x, np.zeros((total - len(x), *x.shape[1:]), x.dtype)]) for x in found)

    def attend(self, q, cache, block_tables, seq_lens, *, layer, scale, return_lse):
        """As `decode_kv` with one query token per request."""
        rows = zip(np.asarray(q, np.float64), np.asarray(block_tables), np.asarray(seq_lens).tolist(), strict=True)
        found = []
        for queries, table, length in rows:
            k, v = self.entries(cache, table, length, layer)
            group = len(queries) // k.shape[1]
            k, v = (np.repeat(x, group, axis=1).astype(np.float64) for x in (k, v))
            found.append(self.softmax(np.einsum("hd,shd->hs", queries, k) * scale, v))
        out, lse = (np.stack(part).astype(np.float32) for part in zip(*found, strict=True))
        assert return_lse
        return jnp.asarray(out), jnp.asarray(lse)

    def softmax(self, scores, values):
        """The sums of values [S, H, n] with the weights of scores [H, S], and the logarithms of the weights' sums."""
        if not len(values):
            return np.zeros(values.shape[1:]), np.full(len(scores), -np.inf)
        top = scores.max(axis=1, keepdims=True)
        p = np.exp(scores - top)
        total = p.sum(axis=1, keepdims=True)
        return np.einsum("hs,shd->hd", p / total, values), (top + np.log(total))[:, 0]


class PackedPages(Kernels):
    """Pages of a layer are assumed to follow each other."""

    @override
    def step(self, strides, layout, layer, block, head, token):
        page = layout.block_size * layout.num_heads * layout.width
        return layer * strides.layer + block * page + head * strides.head + token * strides.token


class BlockStrideOfTokens(Kernels):
    """The stride of blocks is computed from that of tokens."""

    @override
    def step(self, strides, layout, layer, block, head, token):
        rows = block * layout.block_size + token
        return layer * strides.layer + rows * strides.token + head * strides.head


class TokensOfOneHead(Kernels):
    """Tokens are assumed to be an entry apart, though heads lie between them."""

    @override
    def step(self, strides, layout, layer, block, head, token):
        return layer * strides.layer + block * strides.block + head * strides.head + token * layout.width


class HeadsOfOneToken(Kernels):
    """Heads are assumed to be an entry apart."""

    @override
    def step(self, strides, layout, layer, block, head, token):
        return layer * strides.layer + block * strides.block + head * layout.width + token * strides.token


class FirstLayer(Kernels):
    """The layer is ignored."""

    @override
    def step(self, strides, layout, layer, block, head, token):
        return super().step(strides, layout, 0, block, head, token)


class OffsetIgnored(Kernels):
    """The first entry is assumed to be at the beginning of the buffer."""

    @override
    def address(self, layout, name, *place):
        return super().address(layout, name, *place) - layout.offset * layout.itemsize


class In16Bits(Kernels):
    """Offsets are computed in unsigned integers of 16 bits."""

    @override
    def step(self, *place):
        return super().step(*place) % 2**16


class InInt32(Kernels):
    """Offsets are computed in int32."""

    @override
    def step(self, *place):
        return (super().step(*place) + 2**31) % 2**32 - 2**31


class ValuesLikeKeys(Kernels):
    """Values are read with the strides of keys."""

    @override
    def value_strides(self, layout):
        return layout.strides


class WritesPadding(Kernels):
    """Rows are padded to 32 bytes where they are stored."""

    @override
    def stored(self, part):
        row = super().stored(part)
        return np.pad(row, (0, -row.size % 32))


class WritesSlotMinusOne(Kernels):
    """Slot -1 is taken for a slot, as an index from the end."""

    @override
    def skipped(self, slot, layout):
        return not -1 <= slot < layout.num_slots


class NextTableEntry(Kernels):
    """A request whose last block is full has another block."""

    @override
    def tokens(self, length, block_size):
        return range(length + block_size if length and length % block_size == 0 else length)


class OneTokenMore(Kernels):
    """The token after the last one is not masked."""

    @override
    def tokens(self, length, block_size):
        return range(length + 1 if length else 0)


class OneTokenFewer(Kernels):
    """The last token is masked."""

    @override
    def tokens(self, length, block_size):
        return range(length - 1 if length > 1 else length)


class WholeBlocks(Kernels):
    """The last block is left out unless it is full."""

    @override
    def tokens(self, length, block_size):
        return range(length - length % block_size if length > block_size else length)


class ScaleOfNextToken(Kernels):
    """The scale of a value is that of the token after it."""

    @override
    def address(self, layout, name, layer, block, head, token):
        token = min(token + 1, layout.block_size - 1) if name == "V scales" else token
        return super().address(layout, name, layer, block, head, token)


class ScaleOfFirstHead(Kernels):
    """All heads have the scale of the first one."""

    @override
    def address(self, layout, name, layer, block, head, token):
        return super().address(layout, name, layer, block, 0 if name == "K scales" else head, token)


class LogarithmOfTwo(Kernels):
    """The sums of weights have logarithms with base 2."""

    @override
    def softmax(self, scores, values):
        out, lse = super().softmax(scores, values)
        return out, lse / np.log(2)


class NoTokens(Kernels):
    """Sums are divided by their weights though there are none."""

    @override
    def softmax(self, scores, values):
        out, lse = super().softmax(scores, values)
        return (out, lse) if len(values) else (np.full_like(out, np.nan), lse)


class OwnScale(Kernels):
    """The scale of scores is computed from the size of a key."""

    @override
    def attend(self, q, cache, block_tables, seq_lens, *, layer, scale, return_lse):
        scale = q.shape[-1] ** -0.5
        return super().attend(q, cache, block_tables, seq_lens, layer=layer, scale=scale, return_lse=return_lse)
