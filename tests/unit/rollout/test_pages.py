import random

import pytest

from rollout.engine.native.pages import PagePool, PrefixIndex, pages_for
from rollout.engine.native.rows import PAGE_TOKENS


def test_pages_for_rounds_up() -> None:
    assert [pages_for(n) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]


def test_a_short_pool_gives_nothing_rather_than_part() -> None:
    pool = PagePool(3)
    assert pool.take(4) is None
    assert pool.free == 3
    assert sorted(pool.take(3) or []) == [0, 1, 2]


def test_a_page_is_free_only_when_its_last_holder_lets_go() -> None:
    pool = PagePool(1)
    pages = pool.take(1)
    assert pages is not None
    pool.hold(pages)
    pool.release(pages)
    assert pool.free == 0
    pool.release(pages)
    assert pool.free == 1


def test_releasing_twice_or_sharing_a_free_page_is_caught() -> None:
    pool = PagePool(1)
    pages = pool.take(1)
    assert pages is not None
    pool.release(pages)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(pages)
    pool = PagePool(1)
    with pytest.raises(AssertionError, match="cannot be shared"):
        pool.hold([0])


def test_the_lowest_free_pages_are_taken_first_and_in_rising_order() -> None:
    pool = PagePool(8)
    assert pool.take(6) == [0, 1, 2, 3, 4, 5]
    pool.release([4, 1, 3])
    assert pool.take(4) == [1, 3, 4, 6]


def _published(pool: PagePool, index: PrefixIndex, tokens: list[int], version: int = 1) -> list[int]:
    pages = pool.take(pages_for(len(tokens)))
    assert pages is not None
    index.publish(version, tokens, pages)
    return pages


def test_a_match_covers_full_pages_and_leaves_a_token_to_compute() -> None:
    pool = PagePool(8)
    index = PrefixIndex(pool)
    tokens = list(range(3 * PAGE_TOKENS))
    pages = _published(pool, index, tokens)
    assert index.match(1, tokens) == pages[:2]
    assert index.match(1, [*tokens, 7]) == pages
    assert index.match(1, tokens[: PAGE_TOKENS + 1]) == pages[:1]
    assert index.match(1, tokens[:PAGE_TOKENS]) == []


def test_a_match_needs_the_same_version_and_everything_before() -> None:
    pool = PagePool(8)
    index = PrefixIndex(pool)
    tokens = list(range(2 * PAGE_TOKENS + 1))
    _published(pool, index, tokens)
    assert index.match(2, tokens) == []
    assert index.match(1, [99, *tokens[1:]]) == []


def test_evicted_and_cleared_entries_give_their_pages_back() -> None:
    pool = PagePool(4)
    index = PrefixIndex(pool)
    pages = _published(pool, index, list(range(4 * PAGE_TOKENS)))
    pool.release(pages)
    assert pool.free == 0
    assert index.evict(2) == 2
    assert pool.free == 2
    index.clear()
    assert pool.free == 4


def test_no_page_is_lost_over_random_use() -> None:
    rng = random.Random(0)
    pool = PagePool(32)
    index = PrefixIndex(pool)
    held: list[list[int]] = []
    for _ in range(2000):
        if held and rng.random() < 0.5:
            pool.release(held.pop(rng.randrange(len(held))))
            continue
        tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 5 * PAGE_TOKENS))]
        pages = index.match(1, tokens)
        fresh = pool.take(pages_for(len(tokens)) - len(pages))
        if fresh is None:
            pool.release(pages)
            index.evict(4)
            continue
        index.publish(1, tokens, pages + fresh)
        held.append(pages + fresh)
    for pages in held:
        pool.release(pages)
    index.clear()
    assert pool.free == pool.total
