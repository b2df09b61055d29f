"""Drafts copied from text that already exists: a suffix of the sequence, found again, tells what followed it.

Searched are the sequence itself, the other running samples of its prompt, and the prompt's finished
rollouts. Nothing is computed, so drafting is free; every token is certain given its prefix (a point mass).

Text of earlier policy versions stays: a guess from it can only be wrong, never harmful. Each text records
the version that committed its last token. Not here: how often guesses are right, which the controller
measures.
"""

from collections import OrderedDict
from collections.abc import Sequence

from drafters.config import DrafterConfig
from drafters.suffixes import PromptTexts
from drafters.types import DraftModel, DraftRequest, PolicyView, Proposal

_PromptKey = tuple[str, int]
"""The caller's name and a hash of the tokens: a name used for another prompt must not mix their text."""


class HistoryDrafter:
    """Implements ``Drafter`` by suffix matching. Never raises ``DraftError``: no match is an empty draft."""

    name = "history"
    weight_bytes = 0
    held_bytes = 0
    switch_tokens_per_sequence = 0
    model: DraftModel | None = None
    """It runs none."""

    def __init__(self, config: DrafterConfig) -> None:
        self.max_gamma = config.max_gamma
        self.drafter_version = -1
        self._config = config
        self._prompts: OrderedDict[_PromptKey, PromptTexts] = OrderedDict()
        """Least recently used first."""
        self._prompt_of: dict[int, _PromptKey] = {}
        """By key of a running sequence."""

    def rebuild(self, view: PolicyView) -> None:
        """Note the version new text belongs to; text of earlier versions stays usable."""
        self.drafter_version = view.policy_version

    def propose(self, requests: Sequence[DraftRequest]) -> Proposal:
        """Return for each request what followed its longest known suffix, up to ``gamma`` tokens."""
        return Proposal(tokens=self._guesses(requests), probs=None, passes=0, rows=0, context_tokens=0)

    def ready(self, requests: Sequence[DraftRequest]) -> list[int] | None:
        """Return how many tokens ``propose`` would draft now."""
        return [len(guess) for guess in self._guesses(requests)]

    def finished(self, request: DraftRequest) -> None:
        """Keep a finished rollout under its prompt. A running one is indexed when somebody asks."""
        self._follow(request).finish(request.key)
        del self._prompt_of[request.key]
        self._evict()

    def forget(self, key: int) -> None:
        """Drop a running sequence without keeping its text; nothing happens once it has finished."""
        prompt = self._prompt_of.pop(key, None)
        if prompt is not None:
            self._prompts[prompt].drop(key)
            self._evict()

    def _guesses(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        followed = [self._follow(request) for request in requests]  # all first: siblings copy from each other
        return [
            texts.continuation(request.key, gamma)
            if (gamma := min(request.gamma, self.max_gamma)) > 0
            else []
            for texts, request in zip(followed, requests, strict=True)
        ]

    def _follow(self, request: DraftRequest) -> PromptTexts:
        """Return the texts of the request's prompt, brought up to date with its tokens."""
        prompt = self._prompt_of.get(request.key)
        if prompt is None:
            prompt_tokens = tuple(request.tokens[: request.prompt_tokens])
            prompt = self._prompt_of[request.key] = (request.prompt_uid, hash(prompt_tokens))
            if prompt not in self._prompts:
                self._prompts[prompt] = PromptTexts(
                    prompt_tokens,
                    min_match=self._config.history_min_match,
                    max_match=self._config.history_max_match,
                )
        self._prompts.move_to_end(prompt)
        texts = self._prompts[prompt]
        texts.follow(request.key, request.tokens, policy_version=self.drafter_version)
        return texts

    def _evict(self) -> None:
        """Drop the least recently used prompts beyond the limit; those with running samples stay."""
        surplus = len(self._prompts) - self._config.history_prompts
        if surplus <= 0:
            return
        idle = [prompt for prompt, texts in self._prompts.items() if not texts.running]
        for prompt in idle[:surplus]:
            del self._prompts[prompt]
