"""All known text of one prompt, and an index that finds the last tokens of a sequence again.

The prompt is held and indexed once. A sample's own text starts with it too, so that a match may reach back
into the prompt, but only the runs that end after it are indexed under the sample.

The index maps every run of ``min_match`` tokens to the place it stood last, and each place to the one
before it, so indexing a token costs the same whatever the length of the text, and a search walks a
bounded chain of places, newest first, keeping the longest agreement. Text is indexed when it is searched:
where nobody looks for copies, it is only kept.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

CHAIN_PLACES = 64
"""Most places one search visits. Frequent runs stand in hundreds of places; the newest ones are the likely
ones, and the bound keeps a search in microseconds."""

KEPT_ROLLOUTS = 16
"""Finished rollouts kept per prompt, the newest: two groups of eight. Older policies' text rarely helps."""

_NOWHERE = -1
_TEXT_STRIDE = 1 << 32
"""A place is text number times this, plus the count of tokens up to and including the run."""


@dataclass(kw_only=True, slots=True)
class _Text:
    """The prompt, or one sample's prompt and output."""

    number: int
    tokens: "array[int]" = field(default_factory=lambda: array("i"))
    first_end: int
    """``links[i]`` belongs to the run that ends after ``first_end + i`` tokens."""

    links: "array[int]" = field(default_factory=lambda: array("q"))
    """Per indexed run, the place it stood before."""

    usable: bool = True
    policy_version: int = -1


class PromptTexts:
    """Texts of one prompt: running samples by key, and finished ones."""

    def __init__(self, prompt: Sequence[int], *, min_match: int, max_match: int) -> None:
        self._min_match = min_match
        self._max_match = max_match
        self._prompt = _Text(number=0, tokens=array("i", prompt), first_end=min_match)
        self._texts = [self._prompt]
        """By number."""
        self._newest: dict[int, int] = {}
        """By hash of a run; places are compared token by token, so a collision only costs time."""
        self._running: dict[int, _Text] = {}
        self._finished: list[_Text] = []
        self._grown = [self._prompt]
        """Texts with tokens that are not indexed yet, oldest growth first."""

    @property
    def running(self) -> int:
        """How many samples are running."""
        return len(self._running)

    @property
    def finished_versions(self) -> list[int]:
        """Policy versions of the finished rollouts kept, oldest rollout first."""
        return [text.policy_version for text in self._finished]

    def follow(self, key: int, tokens: Sequence[int], *, policy_version: int) -> None:
        """Take the tokens of running sample ``key`` (prompt included) that are new since the last call."""
        text = self._running.get(key)
        if text is None:
            first_end = max(self._min_match, len(self._prompt.tokens))
            text = self._running[key] = _Text(number=len(self._texts), first_end=first_end)
            self._texts.append(text)
        known = len(text.tokens)
        if len(tokens) > known:
            text.tokens.extend(tokens[known:])
            text.policy_version = policy_version
            self._grown.append(text)

    def finish(self, key: int) -> None:
        """Keep the text of ``key`` as a finished rollout; the oldest beyond the limit is dropped."""
        self._finished.append(self._running.pop(key))
        if len(self._finished) > KEPT_ROLLOUTS:
            self._discard(self._finished.pop(0))

    def drop(self, key: int) -> None:
        """Drop the text of running sample ``key``."""
        self._discard(self._running.pop(key))

    def continuation(self, key: int, most: int) -> list[int]:
        """Return up to ``most`` tokens that followed the longest match of its suffix, the newest of those."""
        for text in self._grown:
            self._index(text)
        self._grown.clear()
        own = self._running[key]
        found = self._longest_match(own)
        if found is None:
            return []
        text, end = found
        if text is not own and text is not self._prompt:
            return list(text.tokens[end : end + most])
        # Text found in the prompt goes on as the sample itself did. A copy may run into what it has just
        # written: a repeating text goes on repeating.
        period = len(own.tokens) - end
        return [own.tokens[end + i % period] for i in range(most)]

    def _longest_match(self, own: _Text) -> tuple[_Text, int] | None:
        tokens = own.tokens
        if len(tokens) < self._min_match:
            return None
        best: tuple[_Text, int] | None = None
        best_length, longest = self._min_match - 1, min(self._max_match, len(tokens))
        (suffix,) = self._runs(tokens, len(tokens), len(tokens) + 1)
        place = self._newest.get(suffix, _NOWHERE)
        for _ in range(CHAIN_PLACES):
            if place == _NOWHERE:
                break
            number, end = divmod(place, _TEXT_STRIDE)
            text = self._texts[number]
            # One token tells of most places that they agree no further than the best.
            if (
                text.usable
                and best_length < end < len(text.tokens)
                and text.tokens[end - 1 - best_length] == tokens[-1 - best_length]
            ):
                length = _agreement(text.tokens, end, tokens, self._max_match)
                if length > best_length:
                    best, best_length = (text, end), length
                    if length == longest:
                        break
            place = text.links[end - text.first_end]
        return best

    def _runs(self, tokens: "array[int]", first_end: int, stop: int) -> Iterator[int]:
        """Return the hashes of the runs that end after ``first_end`` tokens, and so on to before ``stop``."""
        starts = range(first_end - self._min_match, first_end)
        return map(hash, zip(*[tokens[at : at + stop - first_end] for at in starts], strict=True))

    def _index(self, text: _Text) -> None:
        """Index every run of ``text`` that is not indexed yet."""
        first_end = text.first_end + len(text.links)
        # A sample's last prompt token ends its first run: what follows differs from sample to sample.
        stop = len(text.tokens) + (text is not self._prompt)
        if first_end >= stop or not text.usable:
            return
        newest, number = self._newest, text.number * _TEXT_STRIDE
        for end, run in enumerate(self._runs(text.tokens, first_end, stop), first_end):
            text.links.append(newest.get(run, _NOWHERE))
            newest[run] = number + end

    def _discard(self, text: _Text) -> None:
        """Stop using ``text``. Chains still lead through it, so it is only freed by compaction."""
        text.usable = False
        usable = [t for t in self._texts if t.usable]
        if 2 * len(usable) <= len(self._texts):
            self._compact(usable)

    def _compact(self, usable: list[_Text]) -> None:
        """Index the usable texts afresh, oldest first; newest now means of the text that began last."""
        self._texts, self._newest, self._grown = usable, {}, list(usable)
        for number, text in enumerate(usable):
            text.number = number
            text.links = array("q")


def _agreement(text: "array[int]", end: int, tokens: "array[int]", most: int) -> int:
    """Return how many tokens before ``end`` of ``text`` equal the last ones of ``tokens``, up to ``most``."""
    length = 0
    last = len(tokens)
    limit = min(most, end, last)
    while length < limit and text[end - 1 - length] == tokens[last - 1 - length]:
        length += 1
    return length
