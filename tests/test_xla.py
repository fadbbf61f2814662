"""Every operation on the XLA implementation, which has no gaps."""

import suites


class TestWrites(suites.Writes):
    implementation = "xla"


class TestGathers(suites.Gathers):
    implementation = "xla"


class TestDecodeMLA(suites.DecodeMLA, suites.UnseenByMLA):
    implementation = "xla"


class TestDecodeKV(suites.DecodeKV, suites.UnseenByKV):
    implementation = "xla"


class TestDecodeMLASparse(suites.DecodeMLASparse):
    implementation = "xla"


class TestIndexer(suites.Indexer):
    implementation = "xla"


class TestMerge(suites.Merge):
    implementation = "xla"


class TestBlocks(suites.Blocks):
    implementation = "xla"
