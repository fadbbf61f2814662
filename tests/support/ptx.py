"""Executes PTX on the host: the instructions of kernels that are one CTA without branches, in lockstep.

    execute(code, memory, shared)

runs every instruction for all threads before the next.  Atomics happen in a random order of the threads.  An access
outside its memory, and an instruction or a type that is not known here, fail.
"""

import re
from collections.abc import Callable, Sequence

import numpy as np

COMPARISONS: dict[str, Callable] = {"lt": np.less, "le": np.less_equal, "gt": np.greater, "eq": np.equal}
ARITHMETIC: dict[str, Callable] = {
    "add.s32": np.add,
    "add.s64": np.add,
    "sub.s32": np.subtract,
    "mul.lo.u32": np.multiply,
    "mul.wide.u32": np.multiply,
    "div.u32": np.floor_divide,
    "min.u32": np.minimum,
    "and.b32": np.bitwise_and,
    "shl.b32": np.left_shift,
    "shr.u32": np.right_shift,
}
WORD = 2**32 - 1
SHARED = 2**10
"""The address of shared memory.  Global arrays have the addresses 2**40, 2**41, ..."""


class _Threads:
    def __init__(self, memory: Sequence[np.ndarray], shared: np.ndarray, count: int, seed: int):
        self._memory, self._shared, self._count = memory, shared, count
        self._rng = np.random.default_rng(seed)
        numbers = np.arange(count, dtype=np.int64)
        self.values = {"%tid.x": numbers, "%laneid": numbers % 32}
        addresses = [(1 + i) << 40 for i in range(len(memory))] + [SHARED]
        self.values |= {f"${i}": np.full(count, address) for i, address in enumerate(addresses)}

    def run(self, instruction: str) -> None:
        guard, operation, rest = re.fullmatch(r"(?:@(\w+) )?([\w.]+)(?: (.*))?", instruction).groups()
        active = self.values[guard] if guard else np.ones(self._count, bool)
        operands = rest.split(", ") if rest else []
        if operation in ("mov.u32", "mov.b32"):
            self._put(operands[0], self._value(operands[1]), active)
        elif operation in ARITHMETIC:
            found = ARITHMETIC[operation](*map(self._value, operands[1:]))
            self._put(operands[0], found if operation in ("add.s64", "mul.wide.u32") else found & WORD, active)
        elif operation.startswith("setp."):
            _, comparison, *others, kind = operation.split(".")
            found = COMPARISONS[comparison](*map(self._value, operands[1:3]))
            assert (others, len(operands)) in (([], 3), (["and"], 4)), instruction
            assert kind == "u32", instruction
            self._put(operands[0], found & self.values[operands[3]] if others else found, active)
        elif operation == "shfl.sync.up.b32":
            (register, inside), lanes = operands[0].split("|"), int(operands[2])
            assert operands[3:] == ["0", "-1"], instruction
            numbers = self.values["%tid.x"]
            self.values[inside] = numbers % 32 >= lanes
            source = np.where(self.values[inside], numbers - lanes, numbers)
            self._put(register, self._value(operands[1])[source], active)
        elif operation in ("ld.global.b32", "ld.shared.b32"):
            words, places = self._places(operation, operands[1], active)
            found = np.zeros(self._count, np.int64)
            found[active] = [word[place] for word, place in zip(words, places, strict=True)]
            self._put(operands[0], found, active)
        elif operation in ("st.global.b32", "st.shared.b32"):
            words, places = self._places(operation, operands[0], active)
            for word, place, value in zip(words, places, self._value(operands[1])[active], strict=True):
                word[place] = value
        elif operation == "atom.shared.add.u32":
            words, places = self._places(operation, operands[1], active)
            former, added = np.zeros(len(places), np.int64), self._value(operands[2])[active]
            for i in self._rng.permutation(len(places)):
                former[i] = words[i][places[i]]
                words[i][places[i]] += added[i]
            found = np.zeros(self._count, np.int64)
            found[active] = former
            self._put(operands[0], found, active)
        else:
            assert (operation, operands) == ("bar.sync", ["0"]), instruction

    def _value(self, operand: str) -> np.ndarray:
        if re.fullmatch(r"-?\d+", operand):
            return np.full(self._count, int(operand) & WORD)
        return self.values[operand]

    def _put(self, register: str, found: np.ndarray, active: np.ndarray) -> None:
        former = self.values.get(register, np.zeros_like(found))
        self.values[register] = np.where(active, found, former)

    def _places(self, operation: str, address: str, active: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
        """The memory of each active thread, and its index there."""
        register, offset = re.fullmatch(r"\[(\S+?)(?: \+ (\d+))?\]", address).groups()
        addresses = self._value(register)[active] + int(offset or 0)
        if ".shared" in operation:
            words, offsets = [self._shared] * len(addresses), addresses - SHARED
        else:
            words, offsets = [self._memory[(at >> 40) - 1] for at in addresses], addresses & (2**40 - 1)
        inside = [0 <= at < 4 * len(word) and at % 4 == 0 for word, at in zip(words, offsets, strict=True)]
        assert all(inside), f"{operation} {address} is outside of its memory"
        return words, offsets // 4


def execute(code: str, memory: Sequence[np.ndarray], shared_words: int, *, threads: int, seed: int = 0) -> None:
    """Runs a kernel, whose operands $0, $1, ... are arrays of words, int64 [n], and the last one shared memory.

    Shared memory begins with arbitrary values.
    """
    shared = np.random.default_rng(seed).integers(0, 2**32, shared_words)
    state = _Threads(memory, shared, threads, seed)
    for instruction in re.sub(r"\s+", " ", code).split(";"):
        if (instruction := instruction.strip()) and not instruction.startswith(".reg"):
            state.run(instruction)
