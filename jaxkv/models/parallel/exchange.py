"""Exchanges tokens between devices that have tokens of their own and hold different experts.

Both functions compute the same sum over the chosen experts of each token, and never drop a token:

    gathered      every device receives all tokens, computes those that chose its experts, and the sums are scattered
    sent          a token is sent to the devices that hold its experts, once to each, and their results are sent back

With n devices and T tokens on each, a device receives (n - 1) T tokens if they are gathered, and returns as many
results.  `sent` has static shapes, too: buffers for `capacity` tokens per pair of devices, in as many rounds as the
fullest pair needs, which is one if tokens choose experts evenly.  A round moves (n - 1) x capacity tokens.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxkv_kernels.gradients import without_gradients

SLACK = 1.25
"""By how much some devices are chosen more often than the average, for the capacity of `sent`."""
LEAST = 1024
"""If all devices together have fewer tokens, they are gathered, because the time is then that of starting collectives.
An estimate: 1,024 tokens of 7,168 bf16 values are 15 MB, which NVLink moves in some 40 us.  Not measured."""


def capacity(tokens: int, per_token: int, devices: int) -> int | None:
    """The capacity for `sent`, or None if `gathered` is expected to move fewer bytes.

    Args:
      tokens: tokens of each device.
      per_token: experts of each token.
      devices: number of devices.

    A token chooses a given device with the probability 1 - (1 - 1 / devices) ** per_token, if all experts are equally
    likely.  There is room for three standard deviations more than the expected number.  Tokens are sent if a round then
    moves at most half as many as a gather, so that even two rounds do not move more.  With 8 experts per token, that is
    possible from 17 devices on.
    """
    expected = tokens * (1 - (1 - 1 / devices) ** per_token)
    room = math.ceil(SLACK * expected + 3 * math.sqrt(expected))
    return room if tokens * devices >= LEAST and 2 * room <= tokens else None


def gathered(experts: Callable[..., jax.Array], tokens, chosen, shares, *, axis: str) -> jax.Array:
    """The results [T, D] of this device's tokens, by an all-gather and a reduce-scatter.

    Args:
      experts: `experts(tokens, chosen, shares)` computes the sum over the experts that this device holds.
      tokens: [T, D], the tokens of this device.
      chosen: int32 [T, K], ids of experts.
      shares: float32 [T, K], the weights of the experts.
      axis: the mesh axis of the devices.
    """
    tokens, routing = (lax.all_gather(x, axis, tiled=True) for x in (tokens, _packed(chosen, shares)))
    return lax.psum_scatter(experts(tokens, *_unpacked(routing)), axis, tiled=True)


def sent(
    experts: Callable[..., jax.Array], tokens, chosen, shares, *, axis: str, held: int, capacity: int
) -> jax.Array:
    """The results [T, D] of this device's tokens, by two all-to-alls per round.

    Args:
      experts: as in `gathered`.
      tokens: [T, D], the tokens of this device.
      chosen: int32 [T, K], ids of experts; -1 is skipped.
      shares: float32 [T, K], the weights of the experts.
      axis: the mesh axis of the devices.
      held: experts per device.
      capacity: tokens that a round moves from each device to each.
    """
    with jax.numpy_rank_promotion("allow"):  # the user's program may have stricter rules than JAX's default ones
        return _sent(experts, tokens, chosen, shares, axis, held, capacity)


def _sent(experts, tokens, chosen, shares, axis, held, capacity) -> jax.Array:
    devices = lax.axis_size(axis)
    owner = chosen // held
    goes = (owner[..., None] == jnp.arange(devices, dtype=jnp.int32)).any(axis=1)  # [T, n]
    counts = goes.sum(axis=0, dtype=jnp.int32)
    place = jnp.cumsum(goes, axis=0, dtype=jnp.int32) - 1  # [T, n], of a token among those for a device
    senders = jnp.argsort(~goes, axis=0, stable=True).astype(jnp.int32).T  # [n, T], for each device its tokens first
    senders = jnp.pad(senders, ((0, 0), (0, -len(tokens) % capacity)))
    routing, nothing = _packed(chosen, shares), _packed(jnp.full_like(chosen, -1), jnp.zeros_like(shares))
    # A token's result from a device is added once, with the first of its experts there.
    first = ~jnp.tril(owner[:, :, None] == owner[:, None, :], -1).any(axis=-1)
    at = jnp.take_along_axis(place, jnp.maximum(owner, 0), axis=1)  # [T, K]

    def moved(x):
        return lax.all_to_all(x, axis, split_axis=0, concat_axis=0)

    def one_round(i, total):
        rows = lax.dynamic_slice_in_dim(senders, i * capacity, capacity, axis=1)
        live = i * capacity + jnp.arange(capacity, dtype=jnp.int32) < counts[:, None]
        ids, weights = _unpacked(moved(jnp.where(live[..., None], routing[rows], nothing[rows])))
        received = moved(tokens[rows])
        flat = (x.reshape(devices * capacity, -1) for x in (received, ids, weights))
        back = moved(experts(*flat).reshape(received.shape))
        now = at - i * capacity
        arrived = first & (owner >= 0) & (now >= 0) & (now < capacity)
        terms = back[owner, jnp.clip(now, 0, capacity - 1)].astype(jnp.float32)  # [T, K, D]
        return total + jnp.where(arrived[..., None], terms, 0).sum(axis=1)

    # All devices run as many rounds.
    rounds = lax.pmax(-(-counts.max() // capacity), axis)
    total = lax.fori_loop(0, rounds, one_round, jnp.zeros(tokens.shape, jnp.float32))
    return total.astype(tokens.dtype)


def _packed(chosen, shares) -> jax.Array:
    """Ids of experts and their weights, both [T, K], as one array, int32 [T, 2 K]."""
    shares = without_gradients(shares, "weights of experts have no gradients where devices exchange them as integers")
    return jnp.concatenate([chosen, lax.bitcast_convert_type(shares, jnp.int32)], axis=-1)


def _unpacked(routing) -> tuple[jax.Array, jax.Array]:
    """The inverse of `_packed`, with any leading axes."""
    chosen, shares = jnp.split(routing, 2, axis=-1)
    return chosen, lax.bitcast_convert_type(shares, jnp.float32)
