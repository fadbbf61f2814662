"""How the operations are called in the benchmark: a subclass of `Workload` for each family, and a table of them."""

from typing import cast

import jax.numpy as jnp
import numpy as np

import jaxkv
from jaxkv.bench.products import Experts, Linear
from jaxkv.bench.routing import Routing
from jaxkv.bench.workload import Shapes, Workload


class Write(Workload):
    """Stores the tokens of all requests."""

    @property
    def value_shapes(self) -> Shapes:
        """Shapes and dtypes of the parts of new entries, and of the cosines and sines by which keys are rotated."""
        parts = self.entry_shapes(int(self.lengths.sum()))
        return [*parts, (parts[1][0], "float32")] if self.rotated else parts

    def index(self, requests, rng):
        """The slots of all tokens."""
        sums = requests.running_sum
        rows = np.repeat(np.arange(self.requests), requests.lengths)
        return [], [requests.slots(rows, np.arange(sums[-1]) - sums[rows])]

    def arguments(self, cache, values, index, layer):
        """The cache, the parts of new entries, and slots."""
        values, angles = (values[:-1], {"cos_sin": values[-1]}) if self.rotated else (values, {})
        positional, options = super().arguments(cache, values, index, layer)
        return positional, {**options, **angles}

    @property
    def traffic(self) -> int:
        """Bytes of the entries, of their values in bf16, and of cosines and sines."""
        angles = 4 * self.entry.sizes[1] if self.rotated else 0
        return self.entries * (self.entry.nbytes + 2 * sum(self.entry.sizes) + angles)


class Gather(Workload):
    """Reads the tokens of all requests."""

    @property
    def options(self):
        """`total`: the rows of the result."""
        return {"total": int(self.lengths.sum())}

    def index(self, requests, rng):
        """Block tables and the running sum of lengths."""
        return [], [requests.tables, requests.running_sum]

    @property
    def traffic(self) -> int:
        """Bytes of the entries, and of their values in bf16."""
        return self.entries * (self.entry.nbytes + 2 * sum(self.entry.sizes))


class GatherEntries(Gather):
    """Reads the bytes of the tokens of all requests."""

    @property
    def traffic(self) -> int:
        """Bytes of the entries, read and written."""
        return 2 * self.entries * self.entry.nbytes


class DecodeMLA(Workload):
    """Attention to latents: the result has the size of their values."""

    has_queries = True
    planned = True

    @property
    def value_shapes(self) -> Shapes:
        """Shapes and dtypes of the queries, one array for each part of an entry."""
        return [((*self.queries, n), "bfloat16") for n in self.entry.sizes]

    @property
    def options(self):
        """A softmax scale."""
        return {"scale": 192**-0.5}

    @property
    def traffic(self) -> int:
        """Bytes of entries, queries and results."""
        values = sum(self.entry.sizes) + self._value_dim
        return self.entries * self.entry.nbytes + 2 * np.prod(self.queries).item() * values

    @property
    def flops(self) -> int:
        """Flops of both products of attention."""
        return 2 * self.heads * self.keys * (sum(self.entry.sizes) + self._value_dim)

    @property
    def _value_dim(self) -> int:
        return cast(jaxkv.MLAEntry, self.entry).value_dim

    @property
    def keys(self) -> int:
        """The number of pairs of a query token and a token that it sees."""
        return self.q_len * int(self.lengths.sum())


class DecodeKV(DecodeMLA):
    """Attention to keys and values: queries and results together have the size of an entry."""

    @property
    def value_shapes(self) -> Shapes:
        """Shapes and dtypes of the queries."""
        return super().value_shapes[:1]

    @property
    def traffic(self) -> int:
        """Bytes of entries, queries and results."""
        return self.entries * self.entry.nbytes + 2 * np.prod(self.queries).item() * sum(self.entry.sizes)

    @property
    def flops(self) -> int:
        """Flops of both products of attention."""
        return 2 * self.heads * self.keys * sum(self.entry.sizes)


class Sparse(DecodeMLA):
    """Attention to selected slots, and with a window to its slots as well: two lists, of the same cache."""

    planned = False
    usual_format = "fp8_ds_mla"

    def index(self, requests, rng):
        """Slots of distinct positions for each query token, in one list or two."""
        scores = rng.random((self.requests, self.q_len, self.tokens), np.float32)
        positions = scores.argpartition(self._slots, axis=-1)[..., : self._slots]
        slots = requests.slots(np.arange(self.requests)[:, None, None], positions)
        return np.split(slots, [self.window] if self.window else [], axis=-1), []

    def arguments(self, cache, values, index, layer):
        """As for other operations; the second list of slots with its cache."""
        slots, *others = index
        positional, options = super().arguments(cache, values, [slots], layer)
        extra = [jaxkv.ExtraCache(cache, other, layer) for other in others]
        return positional, {**options, **({"extra": extra[0]} if extra else {})}

    @property
    def _slots(self) -> int:
        """The number of slots of each query token."""
        return self.window + self.chosen

    @property
    def entries(self) -> int:
        """The number of selected entries, but at most all of a request: its query tokens select some of them again."""
        return self.requests * min(self.q_len * self._slots, self.tokens)

    @property
    def keys(self) -> int:
        """The number of pairs of a query token and a selected slot."""
        return self.requests * self.q_len * self._slots


class Logits(Workload):
    """Scores of the indexer."""

    has_queries = True
    usual_format = "indexer_fp8"

    @property
    def entry(self):
        """An indexer key."""
        return jaxkv.IndexerEntry(self.format)  # type: ignore[arg-type]

    @property
    def value_shapes(self) -> Shapes:
        """Shapes and dtypes of the queries and their weights."""
        return [((*self.queries, self.entry.sizes[0]), self.query_dtype), (self.queries, "float32")]

    @property
    def options(self):
        """`max_len`: the number of positions of the result."""
        return {"max_len": self.tokens}

    @property
    def traffic(self) -> int:
        """Bytes of entries, queries with their weights, and logits."""
        itemsize = jnp.dtype(self.query_dtype).itemsize
        queries = np.prod(self.queries).item() * (self.entry.sizes[0] * itemsize + 4)
        return self.entries * self.entry.nbytes + queries + 4 * self.requests * self.q_len * self.tokens

    @property
    def flops(self) -> int:
        """Flops of the product of queries and keys."""
        return 2 * self.heads * self.q_len * int(self.lengths.sum()) * self.entry.sizes[0]


class WriteState(Workload):
    """Stores a state of each request: those of a layer with the gated delta rule of Qwen3-Next."""

    usual_format = "state"

    @property
    def entry(self):
        """The states of the convolution and of the recurrence."""
        return jaxkv.StateEntry({"conv": ((8192, 3), "bfloat16"), "recurrent": ((32, 128, 128), "float32")})

    @property
    def value_shapes(self) -> Shapes:
        """Shapes and dtypes of the arrays of the states."""
        return [((self.requests, *shape), dtype) for _, shape, dtype in self.entry.arrays]

    def index(self, requests, rng):
        """The slot of each request: that of its first token."""
        return [], [requests.slots(np.arange(self.requests), np.zeros(self.requests, np.int32))]

    def arguments(self, cache, values, index, layer):
        """The cache, the states by name, and slots."""
        states = [self.entry.named(values)] if values else []
        return (cache, *states, *index), {"layer": layer}

    @property
    def traffic(self) -> int:
        """Bytes of the states, read and written."""
        return 2 * self.requests * self.entry.nbytes


class ReadState(WriteState):
    """Reads a state of each request."""

    @property
    def value_shapes(self) -> Shapes:
        """No arrays."""
        return []


class Plan(Workload):
    """A plan for attention."""

    has_queries = True

    @property
    def options(self):
        """`num_heads` and `q_len` of the attention."""
        return {"num_heads": self.heads, "q_len": self.q_len}

    def index(self, requests, rng):
        """Block tables and lengths, passed as if each layer had its own, or XLA would compute the plan only once."""
        return [requests.tables, requests.lengths], []

    def arguments(self, cache, values, index, layer):
        """The cache, block tables and lengths."""
        return (cache, *index), self.options

    @property
    def traffic(self) -> int:
        """Bytes of block tables and lengths."""
        return 4 * (self.num_blocks + self.requests)


class TopK(Workload):
    """Selects `chosen` of `tokens` positions for each query token."""

    has_queries = True
    cached = False

    @property
    def value_shapes(self) -> Shapes:
        """Shape and dtype of the logits."""
        return [((self.requests, self.q_len, self.tokens), "float32")]

    def index(self, requests, rng):
        """No integer arguments."""
        return [], []

    def arguments(self, cache, values, index, layer):
        """Logits and k."""
        return values, {"k": self.chosen}

    @property
    def traffic(self) -> int:
        """Bytes of logits and positions."""
        return 4 * self.requests * self.q_len * (self.tokens + self.chosen)


class Merge(Workload):
    """Merges `tokens` partial results of each query."""

    has_queries = True
    cached = False

    @property
    def value_shapes(self) -> Shapes:
        """Shapes and dtypes of the partial results and their log-sum-exps."""
        parts = self.tokens, *self.queries
        return [((*parts, self.entry.sizes[0]), "bfloat16"), (parts, "float32")]

    def index(self, requests, rng):
        """No integer arguments."""
        return [], []

    def arguments(self, cache, values, index, layer):
        """Results and log-sum-exps."""
        return values, {}

    @property
    def traffic(self) -> int:
        """Bytes of all partial results and of the result, with their log-sum-exps."""
        return np.prod(self.queries).item() * (self.tokens + 1) * (2 * self.entry.sizes[0] + 4)


class ReadBlocks(Workload):
    """Reads all blocks, of all layers."""

    def index(self, requests, rng):
        """The ids of all blocks."""
        return [requests.blocks], []

    def arguments(self, cache, values, index, layer):
        """Cache, block ids and payloads."""
        return (cache, *index, *values), {}

    @property
    def traffic(self) -> int:
        """Bytes of the blocks, read and written."""
        return 2 * self.entries * self.layers * self.entry.nbytes


class WriteBlocks(ReadBlocks):
    """Overwrites all blocks."""

    @property
    def value_shapes(self) -> Shapes:
        """Shape and dtype of the payloads."""
        return [((self.num_blocks, self.layout.block_nbytes // self.layout.itemsize), str(self.layout.dtype))]


class CopyBlocks(ReadBlocks):
    """Copies half of the blocks to the other half."""

    @property
    def num_blocks(self) -> int:
        """Twice as many: blocks to copy from, and blocks to copy to."""
        return 2 * super().num_blocks

    def index(self, requests, rng):
        """Blocks to read and to overwrite."""
        return np.split(requests.blocks, 2), []


FAMILIES: dict[str, type[Workload]] = {
    "write_mla": Write,
    "write_kv": Write,
    "write_indexer_k": Write,
    "gather_mla": Gather,
    "gather_kv": Gather,
    "gather_indexer_k": Gather,
    "gather_entries": GatherEntries,
    "plan_decode": Plan,
    "decode_mla": DecodeMLA,
    "decode_kv": DecodeKV,
    "decode_mla_sparse": Sparse,
    "indexer_logits": Logits,
    "select_topk": TopK,
    "merge_states": Merge,
    "select_experts": Routing,
    "write_state": WriteState,
    "read_state": ReadState,
    "copy_blocks": CopyBlocks,
    "read_blocks": ReadBlocks,
    "write_blocks": WriteBlocks,
    "grouped_swiglu": Experts,
    "scaled_linear": Linear,
}
"""The family of each declared operation."""


def workload(operation: str, **sizes) -> Workload:
    """Makes a workload of `operation`; `sizes` are the other fields of `Workload`."""
    return FAMILIES[operation](operation=operation, **sizes)
