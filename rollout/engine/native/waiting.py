"""The order of those that wait. Who may come in is the scheduler's to say."""

from collections import Counter, deque
from collections.abc import Collection, Iterator

from rollout.engine.native.sequence import LiveSequence


class WaitingLine:
    """Sequences in the order in which they are to come in; knows how many wait with each prompt."""

    def __init__(self) -> None:
        self._sequences: deque[LiveSequence] = deque()
        self._with_prompt: Counter[bytes] = Counter()

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[LiveSequence]:
        return iter(self._sequences)

    def __contains__(self, sequence: LiveSequence) -> bool:
        return sequence in self._sequences

    def append(self, sequence: LiveSequence) -> None:
        """Put a sequence last."""
        self._sequences.append(sequence)
        self._with_prompt[sequence.prompt_bytes] += 1

    def appendleft(self, sequence: LiveSequence) -> None:
        """Put a sequence first."""
        self._sequences.appendleft(sequence)
        self._with_prompt[sequence.prompt_bytes] += 1

    def remove(self, sequence: LiveSequence) -> None:
        """Take a sequence out, wherever it stands."""
        self._sequences.remove(sequence)
        self._with_prompt[sequence.prompt_bytes] -= 1
        if not self._with_prompt[sequence.prompt_bytes]:
            del self._with_prompt[sequence.prompt_bytes]

    def in_turn(self, held: Collection[bytes]) -> Iterator[LiveSequence]:
        """Yield, in order, those whose prompt is not ``held``.

        The prompt of the sequence last yielded may be added to ``held`` meanwhile; the line stays as it is.
        """
        # So that a line in which everybody waits for one leader is not walked in every round.
        left = len(self) - sum(self._with_prompt[prompt] for prompt in held)
        if not left:
            return
        for sequence in self:
            prompt = sequence.prompt_bytes
            if prompt in held:
                continue
            yield sequence
            left -= self._with_prompt[prompt] if prompt in held else 1
            if not left:
                return
