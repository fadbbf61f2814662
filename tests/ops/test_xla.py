"""Every operation on the XLA implementation, which has no gaps."""

from support import suites


class TestWrites(suites.Writes):
    implementation = "xla"


class TestGathers(suites.Gathers):
    implementation = "xla"


class TestDecodeMLA(suites.DecodeMLA):
    implementation = "xla"


class TestDecodeKV(suites.DecodeKV):
    implementation = "xla"


class TestDecodeMLASparse(suites.DecodeMLASparse):
    implementation = "xla"


class TestIndexer(suites.Indexer):
    implementation = "xla"


class TestMerge(suites.Merge):
    implementation = "xla"


class TestBlocks(suites.Blocks):
    implementation = "xla"
