"""Calls of kernels without their operations."""

from jaxkv_kernels import calls

RECORDS = {
    record.operation: record
    for record in vars(calls).values()
    if isinstance(record, type) and issubclass(record, calls.Call) and hasattr(record, "operation")
}
"""The class of the calls of each operation."""


def run(kernels, operation, **fields):
    """The kernel of an operation, for a call with these fields."""
    return RECORDS[operation](**fields).run_on(kernels)


def called(kernels, operation, names, **static):
    """The kernel of an operation as a function of the fields `names`, in this order."""

    def call(*arrays):
        return run(kernels, operation, **dict(zip(names, arrays, strict=True)), **static)

    return call
