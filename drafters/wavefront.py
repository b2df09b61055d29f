"""Loop-level pipelining of a looped policy: what plans, settings and proofs find by the name ``wavefront``.

There is nothing to build and nothing to keep: its drafts are readouts of the policy's own loops, made in the
passes that compute the policy (``rollout/engine/native/lanes/wavefront.py``). This says when it can be had
and what one such pass reads.
"""

from collections.abc import Sequence

from drafters.config import DrafterConfig
from drafters.types import DraftError, DraftModel, DraftRequest, PolicyView, Proposal

WAVEFRONT = "wavefront"


class WavefrontDrafter:
    """Implements ``Drafter`` for an engine whose passes take rows of different depth one loop further."""

    name = WAVEFRONT
    held_bytes = 0
    switch_tokens_per_sequence = 0
    model: DraftModel | None = None
    """It runs none of its own."""

    def __init__(self, config: DrafterConfig) -> None:
        self.max_gamma = config.max_gamma
        self.depth = config.wavefront_depth
        """Loops after which a token proposes its successor."""
        self.most_passes = config.wavefront_passes
        """Of a round that is its own."""
        self.drafter_version = -1
        self._pass_bytes = 0

    @property
    def weight_bytes(self) -> int:
        """Bytes one pass reads: the block once, and the head; 0 before the first build."""
        return self._pass_bytes

    def rebuild(self, view: PolicyView) -> None:
        """Note the version; the weights are the policy's. Raises ``DraftError`` for one of too few loops."""
        self.drafter_version, self._pass_bytes = -1, 0
        problem = unfit(depth=self.depth, loops=view.loops)
        if problem:
            raise DraftError(problem)
        self._pass_bytes = sum(2 * linear.out_features * linear.in_features for linear in view.linears())
        self.drafter_version = view.policy_version

    def propose(self, requests: Sequence[DraftRequest]) -> Proposal:
        """Raises ``DraftError``: only an engine that runs its passes can draft with it."""
        raise DraftError("wavefront drafts inside the policy's own passes, and this engine runs none for it")

    def ready(self, requests: Sequence[DraftRequest]) -> list[int] | None:
        """Return None: only running its passes can tell."""
        return None

    def finished(self, request: DraftRequest) -> None:
        """Keep nothing: the KV it writes is the policy's."""

    def forget(self, key: int) -> None:
        """Keep nothing, so there is nothing to drop."""


def unfit(*, depth: int, loops: int) -> str:
    """Return why a policy of ``loops`` loops cannot draft at ``depth``, or nothing."""
    if depth < loops:
        return ""
    return (
        f"wavefront proposes after {depth} of a policy's loops (drafter.wavefront_depth) and needs at least "
        f"one more to verify, but this policy has {loops}"
    )
