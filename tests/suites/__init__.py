"""One abstract suite an operation.  An implementation subclasses them and says its name and its gaps.

class TestWriteMLA(suites.WriteMLA):
    implementation = "xla"
"""

import scenes as scenes
from suites.base import assert_a_scan_stacks as assert_a_scan_stacks
from suites.base import layout_of as layout_of
from suites.blocks import BlockChecks as BlockChecks
from suites.blocks import Blocks as Blocks
from suites.decode_kv import DecodeKV as DecodeKV
from suites.decode_kv import DecodeKVChecks as DecodeKVChecks
from suites.decode_kv import UnseenByKV as UnseenByKV
from suites.decode_mla import DecodeMLA as DecodeMLA
from suites.decode_mla import DecodeMLAChecks as DecodeMLAChecks
from suites.decode_mla import UnseenByMLA as UnseenByMLA
from suites.decode_mla import assert_batch_invariant as assert_batch_invariant
from suites.decode_mla import queries as queries
from suites.decode_mla_sparse import DecodeMLASparse as DecodeMLASparse
from suites.gathers import GatherChecks as GatherChecks
from suites.gathers import Gathers as Gathers
from suites.in_place import BlocksInScans as BlocksInScans
from suites.in_place import LargeCaches as LargeCaches
from suites.in_place import WritesInScans as WritesInScans
from suites.indexer import Indexer as Indexer
from suites.indexer import IndexerChecks as IndexerChecks
from suites.merge import Merge as Merge
from suites.writes import WriteChecks as WriteChecks
from suites.writes import Writes as Writes
from suites.writes import new_tokens as new_tokens
