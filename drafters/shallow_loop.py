"""The looped policy itself, stopped early: its first loops draft, and nothing they computed is thrown away.

A draft pass runs loops 1..depth and the head over the policy's own KV pages. Weights, keys, values and hidden
states are the policy's own, so verification computes only the loops that are left, for every row whose draft
left states. That holds where what is read at a loop depends on no later loop of earlier tokens: in policies
of fixed depth with planes of their own for each loop. Others are refused when they are loaded.
"""

from collections.abc import Sequence

from drafters.config import DrafterConfig
from drafters.passes import draft_by_passes
from drafters.types import DraftError, DraftModel, DraftRequest, PolicyView, Proposal

HEAD = "head"


class ShallowLoopDrafter:
    """Implements ``Drafter`` with the first ``depth`` loops of the live policy."""

    held_bytes = 0
    switch_tokens_per_sequence = 0
    """It reads the policy's KV, so a sequence can switch to it at any round."""

    def __init__(self, config: DrafterConfig, *, depth: int) -> None:
        if depth < 1:
            raise ValueError(f"a shallow draft runs at least one loop, got {depth}")
        self.name = f"shallow_loop_{depth}"
        self.max_gamma = config.max_gamma
        self.drafter_version = -1
        self.model: DraftModel | None = None
        self._depth = depth
        self._view: PolicyView | None = None
        self._bytes = 0

    @property
    def weight_bytes(self) -> int:
        """Bytes one draft pass reads: the body once per loop, and the head; 0 before the first build."""
        return self._bytes

    def rebuild(self, view: PolicyView) -> None:
        """Take the live policy's loops; nothing is copied. Raises ``DraftError`` for too few of them."""
        self.drafter_version, self.model, self._view, self._bytes = -1, None, None, 0
        if view.loops <= self._depth:
            runs = f"{view.loops} loops" if view.loops > 1 else "its block once"
            raise DraftError(
                f"{self.name} needs a looped policy of more than {self._depth} loops, this one runs {runs}"
            )
        try:
            self.model = view.shallow(self._depth)
        except (RuntimeError, ValueError) as error:
            raise DraftError(f"{self.name} could not be built: {error}") from error
        for weight in view.linears():
            times = 1 if weight.name == HEAD else self._depth
            self._bytes += 2 * times * weight.out_features * weight.in_features
        self._view, self.drafter_version = view, view.policy_version

    def propose(self, requests: Sequence[DraftRequest]) -> Proposal:
        """Run up to ``gamma`` passes; a request with a smaller gamma sits out the later ones."""
        if self.model is None or self._view is None:
            raise DraftError(f"{self.name} has not been built from the live policy")
        return draft_by_passes(
            self.name, self.model, requests, max_gamma=self.max_gamma, vocab_size=self._view.vocab_size
        )

    def ready(self, requests: Sequence[DraftRequest]) -> list[int] | None:
        """Return None: only drafting can tell."""
        return None

    def finished(self, request: DraftRequest) -> None:
        """Keep nothing: all it leaves behind belongs to the round."""

    def forget(self, key: int) -> None:
        """Keep nothing, so there is nothing to drop."""
