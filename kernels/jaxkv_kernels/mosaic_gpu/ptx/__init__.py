"""Inline PTX and MLIR that a lane runs, a file per family of instructions."""
