"""The model of PyTorch's caching allocator against its rules, by hand, and against what must always
hold."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from workflow.lib.planning.memory.replay import LARGE_PAGE, SMALL_PAGE, CachingAllocator

MIB = 2**20
requests = st.lists(
    st.tuples(
        st.sampled_from([1, 700, 300_000, MIB, MIB + 1, 7 * MIB, 33 * MIB, 100 * MIB]),
        st.sampled_from(["one", "other"]),
        st.integers(0, 9),  # which of the blocks in use is released before; none from 5 on
    ),
    max_size=60,
)


def served(*sizes, limit=None):
    allocator = CachingAllocator(limit_bytes=limit)
    return allocator, [allocator.allocate(size, stream="one") for size in sizes]


def test_request_is_rounded_up_to_512_bytes():
    assert served(1)[0].allocated == 512
    assert served(513)[0].allocated == 1024


def test_small_requests_share_pages_of_2_mib_and_large_ones_of_20():
    assert served(*[MIB] * 3)[0].reserved == 2 * SMALL_PAGE
    assert served(MIB + 1)[0].reserved == LARGE_PAGE
    assert served(MIB, 30 * MIB)[0].reserved == SMALL_PAGE + 2 * LARGE_PAGE


def test_released_memory_serves_the_next_request_of_its_stream_only():
    allocator, (block,) = served(20 * MIB)
    allocator.release(block)
    allocator.allocate(20 * MIB, stream="one")
    assert allocator.reserved == LARGE_PAGE
    allocator.allocate(1, stream="one")
    allocator.allocate(20 * MIB, stream="other")
    assert allocator.reserved == 2 * LARGE_PAGE + SMALL_PAGE


def test_free_neighbours_become_one_block():
    allocator, blocks = served(10 * MIB, 10 * MIB, 20 * MIB)
    for block in blocks[:2]:
        allocator.release(block)
    allocator.allocate(20 * MIB, stream="one")
    assert allocator.reserved == 2 * LARGE_PAGE


def test_smallest_block_that_holds_a_request_is_taken():
    allocator, blocks = served(60 * MIB, 2 * MIB, 40 * MIB, 2 * MIB, 16 * MIB)
    for block in (blocks[0], blocks[2]):
        allocator.release(block)
    allocator.allocate(35 * MIB, stream="one")
    allocator.allocate(60 * MIB, stream="one")
    assert allocator.reserved == 120 * MIB


def test_segment_grows_by_what_its_free_end_lacks():
    allocator, _ = served(10 * MIB)  # a page of 20 MiB, of which 10 are free
    allocator.allocate(25 * MIB, stream="one")
    assert allocator.reserved == 2 * LARGE_PAGE


def test_free_pages_are_given_back_before_a_limit_is_passed():
    allocator, blocks = served(40 * MIB, 2 * MIB, limit=80 * MIB)
    allocator.release(blocks[0])
    allocator.allocate(40 * MIB, stream="other")
    assert (allocator.reserved, allocator.lacking) == (60 * MIB, 0)


def test_what_a_limit_lacks_is_noted():
    allocator, _ = served(40 * MIB, limit=80 * MIB)
    allocator.allocate(60 * MIB, stream="other")
    assert allocator.lacking == 20 * MIB


def test_given_back_addresses_are_used_again():
    allocator, blocks = served(40 * MIB, 20 * MIB, limit=100 * MIB)
    allocator.release(blocks[0])
    other = allocator.allocate(80 * MIB, stream="other")  # gives back the 40
    allocator.release(other)
    again = allocator.allocate(40 * MIB, stream="one")  # and this the 80
    assert (again.address, allocator.reserved) == (0, 60 * MIB)


@settings(deadline=None, max_examples=60)
@given(requests, st.sampled_from([None, 150 * MIB]))
def test_blocks_never_overlap_and_are_always_backed(asked, limit):
    allocator = CachingAllocator(limit_bytes=limit)
    used = []
    for size, stream, place in asked:
        if place < min(5, len(used)):
            allocator.release(used.pop(place))
        used.append(allocator.allocate(size, stream=stream))
        assert all(block.mapped and block.used for block in used)
        assert allocator.allocated == sum(block.size for block in used) <= allocator.reserved
        ranges = sorted((id(b.pool), b.address, b.address + b.size) for b in used)
        for (pool, _, stop), (following, start, _) in pairwise(ranges):
            assert pool != following or stop <= start
