"""`Exchange`: how the processes of one `jax.distributed` job agree on a step."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import jax

WAIT_MS = 10_000
"""How long a process waits for a message at a time.  It waits again and again."""

TOGETHER = "this process serves a model together with others: if one of them has ended, start all of them again"
"""What is added to an error in a step."""

LEFT = "left"
"""The value of a process that takes part in no further exchange."""

_numbers = count()
"""Counts leaders in process 0, calls of `follow` in the others, and `Exchange` in all: equal numbers share messages."""


@contextmanager
def together() -> Iterator[None]:
    """Adds `TOGETHER` to errors of JAX."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        error.add_note(TOGETHER)
        raise


class Store:
    """The key-value store of `jax.distributed`, for the processes of one engine."""

    def __init__(self):
        from jax._src import distributed  # JAX has no public name for its store

        self._client: Any = distributed.global_state.client
        self._prefix = f"jaxkv/serving/{next(_numbers)}"

    def set(self, key: str, message: str) -> None:
        """Stores a message, in place of an earlier one of this key."""
        self._client.key_value_set(f"{self._prefix}/{key}", message, allow_overwrite=True)

    def delete(self, key: str) -> None:
        """Removes a message."""
        self._client.key_value_delete(f"{self._prefix}/{key}")

    def wait_for(self, key: str) -> str:
        """The message, as soon as there is one; JaxRuntimeError if process 0 ends, which has the store."""
        while True:
            try:
                return self._client.blocking_key_value_get(f"{self._prefix}/{key}", WAIT_MS)
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise


class Exchange:
    """Exchanges a value of each process with all others.  Every process takes part in every exchange."""

    def __init__(self):
        self._store, self._number = Store(), 0

    @together()
    def all_gather(self, value: Any) -> list[Any]:
        """The values of all processes, in their order; anything that JSON can have.

        Raises:
          RuntimeError: another process has left.
          JaxRuntimeError: process 0 has ended.
        """
        own, number = jax.process_index(), self._number
        self._store.set(f"{number}/{own}", json.dumps(value))
        values = [
            value if process == own else json.loads(self._store.wait_for(f"{number}/{process}"))
            for process in range(jax.process_count())
        ]
        if number:
            self._store.delete(f"{number - 1}/{own}")  # all take part in this exchange, and have read the last one
        self._number += 1
        if LEFT in values:
            raise RuntimeError(f"process {values.index(LEFT)} has ended its engine because of an exception: {TOGETHER}")
        return values

    def leave(self) -> None:
        """Makes the next exchange of all others fail, or the one after it if they are in one that this process left."""
        for number in (self._number, self._number + 1):
            self._store.set(f"{number}/{jax.process_index()}", json.dumps(LEFT))
