"""Which KV page belongs to whom. Bookkeeping only: no torch, no memory.

A page is free, or held by one or more owners (sequences, and the prefix index). Only full pages that
the policy wrote are ever shared, so no page with more than one holder is ever written again.
"""

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from heapq import heappop, heappush

from rollout.engine.native.rows import PAGE_TOKENS


def pages_for(tokens: int) -> int:
    """Return how many pages hold ``tokens`` tokens."""
    return -(-tokens // PAGE_TOKENS)


class PagePool:
    """Counts the holders of every page.

    The lowest free page is handed out first: pages in use stay dense and those of a sequence mostly rise,
    also after many sequences came and went, and attention reads such pages faster than scattered ones.
    """

    def __init__(self, pages: int) -> None:
        self.total = pages
        self._free = list(range(pages))  # a heap
        self._holders = [0] * pages

    @property
    def free(self) -> int:
        """Pages nobody holds."""
        return len(self._free)

    def take(self, count: int) -> list[int] | None:
        """Return ``count`` fresh pages with one holder each, or None, and take nothing, when short."""
        if count > len(self._free):
            return None
        taken = [heappop(self._free) for _ in range(count)]
        for page in taken:
            self._holders[page] = 1
        return taken

    def hold(self, pages: Sequence[int]) -> None:
        """Add a holder to each page."""
        for page in pages:
            assert self._holders[page] > 0, f"page {page} is free and cannot be shared"
            self._holders[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Drop a holder of each page; a page without holders is free."""
        for page in pages:
            self._holders[page] -= 1
            assert self._holders[page] >= 0, f"page {page} was released twice"
            if self._holders[page] == 0:
                heappush(self._free, page)

    def holders(self, page: int) -> int:
        """Return how many hold ``page``."""
        return self._holders[page]


class PrefixIndex:
    """Finds full prompt pages by what stands in them and everything before, per policy version.

    An entry is made only after the forward that wrote its page has returned, so a match always reads
    finished keys. The index holds its pages; the least recently used are given up when the pool is short.
    """

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._page_of: OrderedDict[bytes, int] = OrderedDict()
        self.hit_tokens = 0
        self.lookup_tokens = 0

    def __len__(self) -> int:
        return len(self._page_of)

    def match(self, version: int, tokens: Sequence[int], *, count: bool = True) -> list[int]:
        """Return the longest run of known pages of ``tokens``, held for the caller.

        At least one token is left over, because the caller needs the logits of its last one.
        """
        found: list[int] = []
        for key in _chain(version, tokens, full_pages=(len(tokens) - 1) // PAGE_TOKENS):
            page = self._page_of.get(key)
            if page is None:
                break
            self._page_of.move_to_end(key)
            found.append(page)
        self._pool.hold(found)
        if count:
            self.lookup_tokens += len(tokens)
            self.hit_tokens += len(found) * PAGE_TOKENS
        return found

    def publish(self, version: int, tokens: Sequence[int], pages: Sequence[int]) -> None:
        """Make the full pages of ``tokens`` known. ``pages`` are the sequence's own, in order."""
        full = len(tokens) // PAGE_TOKENS
        for key, page in zip(_chain(version, tokens, full_pages=full), pages, strict=False):
            if key not in self._page_of:
                self._pool.hold([page])
                self._page_of[key] = page

    def evict(self, pages: int) -> int:
        """Give up entries, oldest first, until ``pages`` more are free; return how many became free."""
        before = self._pool.free
        while self._page_of and self._pool.free - before < pages:
            _, page = self._page_of.popitem(last=False)
            self._pool.release([page])
        return self._pool.free - before

    def clear(self) -> None:
        """Forget everything: the weights that wrote it are gone."""
        self._pool.release(list(self._page_of.values()))
        self._page_of.clear()


def _chain(version: int, tokens: Sequence[int], *, full_pages: int) -> list[bytes]:
    """Return one key per full page; each digests the version and every token up to its end."""
    key = version.to_bytes(8, "little", signed=True)
    keys = []
    for page in range(full_pages):
        part = tokens[page * PAGE_TOKENS : (page + 1) * PAGE_TOKENS]
        data = b"".join(t.to_bytes(4, "little") for t in part)
        key = blake2b(key + data, digest_size=16).digest()
        keys.append(key)
    return keys
