"""The tests that every implementation of an operation must pass: an abstract class per family of operations.

The tests of an implementation subclass them, and name the implementation and its gaps:

class TestWrites(suites.Writes):
    implementation = "xla"
"""

from support import scenes as scenes
from support.suites.attention.combinations import KVCombinations as KVCombinations
from support.suites.attention.combinations import MLACombinations as MLACombinations
from support.suites.attention.decode_kv import BOTH_SIDES as BOTH_SIDES
from support.suites.attention.decode_kv import DecodeKV as DecodeKV
from support.suites.attention.decode_kv import DecodeKVChecks as DecodeKVChecks
from support.suites.attention.decode_kv import KVWindowsOfBothSides as KVWindowsOfBothSides
from support.suites.attention.decode_kv import UnseenByKV as UnseenByKV
from support.suites.attention.decode_mla import DecodeMLA as DecodeMLA
from support.suites.attention.decode_mla import DecodeMLAChecks as DecodeMLAChecks
from support.suites.attention.decode_mla import MLAWindowsOfBothSides as MLAWindowsOfBothSides
from support.suites.attention.decode_mla import UnseenByMLA as UnseenByMLA
from support.suites.attention.decode_mla import assert_batch_invariant as assert_batch_invariant
from support.suites.attention.decode_mla import queries as queries
from support.suites.attention.decode_mla_sparse import DecodeMLASparse as DecodeMLASparse
from support.suites.attention.decode_mla_sparse import DecodeMLASparseChecks as DecodeMLASparseChecks
from support.suites.attention.decode_mla_sparse import MaxLogits as MaxLogits
from support.suites.attention.extra_slots import ExtraSlots as ExtraSlots
from support.suites.attention.extra_slots import ExtraSlotsChecks as ExtraSlotsChecks
from support.suites.attention.gradients import GradientChecks as GradientChecks
from support.suites.attention.gradients import Gradients as Gradients
from support.suites.attention.masks import KVMaskChecks as KVMaskChecks
from support.suites.attention.masks import KVMasks as KVMasks
from support.suites.attention.masks import KVTreeMasks as KVTreeMasks
from support.suites.attention.masks import MLAMasks as MLAMasks
from support.suites.attention.masks import MLATreeMasks as MLATreeMasks
from support.suites.attention.merge import Merge as Merge
from support.suites.attention.shared_prefix import KVSharedPrefixes as KVSharedPrefixes
from support.suites.attention.shared_prefix import MLASharedPrefixes as MLASharedPrefixes
from support.suites.attention.token_scales import TokenScales as TokenScales
from support.suites.base import assert_a_scan_stacks as assert_a_scan_stacks
from support.suites.base import check_ragged as check_ragged
from support.suites.base import layout_of as layout_of
from support.suites.blocks import BlockChecks as BlockChecks
from support.suites.blocks import Blocks as Blocks
from support.suites.delta_rule import DeltaRule as DeltaRule
from support.suites.experts import ExpertChecks as ExpertChecks
from support.suites.experts import Experts as Experts
from support.suites.gathers import GatherChecks as GatherChecks
from support.suites.gathers import GatherEntries as GatherEntries
from support.suites.gathers import GatherEntriesChecks as GatherEntriesChecks
from support.suites.gathers import Gathers as Gathers
from support.suites.gathers import ReadChecks as ReadChecks
from support.suites.gathers import Reads as Reads
from support.suites.hot_rows import HotRows as HotRows
from support.suites.hot_rows import HotRowsMisuse as HotRowsMisuse
from support.suites.in_place import BlocksInScans as BlocksInScans
from support.suites.in_place import LargeCaches as LargeCaches
from support.suites.in_place import WritesInScans as WritesInScans
from support.suites.indexer import Indexer as Indexer
from support.suites.indexer import IndexerChecks as IndexerChecks
from support.suites.linear import Linear as Linear
from support.suites.routing import Routing as Routing
from support.suites.routing import RoutingChecks as RoutingChecks
from support.suites.states import StateChecks as StateChecks
from support.suites.states import States as States
from support.suites.writes import RotatedChecks as RotatedChecks
from support.suites.writes import RotatedWrites as RotatedWrites
from support.suites.writes import WriteChecks as WriteChecks
from support.suites.writes import WriteEntries as WriteEntries
from support.suites.writes import WriteEntriesChecks as WriteEntriesChecks
from support.suites.writes import Writes as Writes
from support.suites.writes import new_tokens as new_tokens
