"""Which host gets a group of samples. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(kw_only=True, slots=True)
class HostLoad:
    """What one ready host holds. Changed by whoever assigns work, so that one pass may assign many."""

    host: str
    remaining_tokens: int
    """Most tokens its requests may still commit."""

    in_flight: int
    cap: int
    """Requests it may hold; a group larger than this still runs, alone."""

    def fits(self, group: int) -> bool:
        """Whether ``group`` more requests may go there."""
        return self.in_flight == 0 or self.in_flight + group <= self.cap


def choose_host(hosts: Sequence[HostLoad], *, group: int, prefer: str | None = None) -> HostLoad | None:
    """Return the host with least remaining work that has room; None when none has.

    ``prefer`` already holds samples of the same prompt, whose pages the group can share: it wins while it
    has room.
    """
    fitting = [h for h in hosts if h.fits(group)]
    for host in fitting:
        if host.host == prefer:
            return host
    return min(fitting, key=lambda h: (h.remaining_tokens, h.in_flight, h.host), default=None)
