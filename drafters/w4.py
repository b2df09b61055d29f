"""The policy itself in 4 bits: requantised at every weight version, drafting over the policy's own KV pages.

A draft pass writes provisional keys and values beyond the frontier, which verification rewrites, so nothing
is prefilled and nothing is kept between rounds. Embeddings, norms and biases are the policy's own; the head
is kept in 8 or 16 bits, because a 4-bit head costs far more acceptance than it saves.
"""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from drafters.config import DrafterConfig
from drafters.int4.linears import Bits, Kernel, RebuildableLinear, build_linear
from drafters.types import (
    DraftError,
    DraftModel,
    DraftRequest,
    DraftStep,
    LinearWeight,
    PolicyView,
    Proposal,
)

log = logging.getLogger(__name__)

HEAD = "head"


class W4Drafter:
    """Implements ``Drafter`` with a 4-bit copy of the live policy."""

    name = "w4"
    switch_tokens_per_sequence = 0
    """It reads the policy's KV, so a sequence can switch to it at any round."""

    def __init__(self, config: DrafterConfig) -> None:
        self.max_gamma = config.max_gamma
        self.drafter_version = -1
        self.model: DraftModel | None = None
        self.linears: dict[str, RebuildableLinear] = {}
        """By name, built once; a head kept in 16 bits is not among them, it is the policy's."""
        self._config = config
        self._kernel: Kernel | None = None
        self._view: PolicyView | None = None
        self._shared_bytes = 0

    @property
    def weight_bytes(self) -> int:
        """Bytes one draft pass reads, a looped body once per loop; 0 before the first build."""
        loops = 1 if self._view is None else self._view.loops
        body = sum(linear.weight_bytes for name, linear in self.linears.items() if name != HEAD)
        head = self.linears[HEAD].weight_bytes if HEAD in self.linears else self._shared_bytes
        return loops * body + head

    def rebuild(self, view: PolicyView) -> None:
        """Round every linear of the live policy into the same buffers. Raises ``DraftError``.

        After a failure there is nothing to draft with: buffers may be half rewritten.
        """
        self.drafter_version, self.model, self._view, self._shared_bytes = -1, None, None, 0
        try:
            self.model = self._rebuilt_model(view)
        except (RuntimeError, ValueError) as error:
            raise DraftError(f"w4 could not be built: {error}") from error
        self._view, self.drafter_version = view, view.policy_version

    def _rebuilt_model(self, view: PolicyView) -> DraftModel:
        weights = list(view.linears())
        kernel = self._kernel_for(view, weights)
        for weight in weights:
            if weight.name == HEAD and self._config.w4_head_bits == 16:
                self._shared_bytes = 2 * weight.out_features * weight.in_features
            else:
                self._rebuild_linear(weight, kernel)
        return view.with_linears(self.linears)

    def _rebuild_linear(self, weight: LinearWeight, kernel: Kernel) -> None:
        linear = self.linears.get(weight.name)
        if linear is None:
            bits: Bits = 8 if weight.name == HEAD else 4
            self.linears[weight.name] = build_linear(kernel, weight, bits=bits, group=self._config.w4_group)
        elif (linear.out_features, linear.in_features) != (weight.out_features, weight.in_features):
            raise DraftError(f"build refused: {weight.name} changed its shape")
        else:
            linear.rebuild(weight)

    def _kernel_for(self, view: PolicyView, weights: Sequence[LinearWeight]) -> Kernel:
        """Return the kernel, resolving ``auto`` once."""
        if self._kernel is None:
            wanted = self._config.w4_kernel
            if wanted == "auto":
                wanted = "compiled" if view.compiled else self._torch_kernel(weights)
                log.info("drafter.w4_kernel: auto -> %s", wanted)
            elif view.compiled and wanted != "compiled":
                raise DraftError(f"drafter.w4_kernel={wanted} cannot run inside the compiled decoder")
            self._kernel = wanted
        return self._kernel

    def _torch_kernel(self, weights: Sequence[LinearWeight]) -> Kernel:
        """Return ``aten`` where it takes the shape of every linear, else ``torch``."""
        tried: set[tuple[int, int, Bits]] = set()
        try:
            for weight in weights:
                bits: Bits = 8 if weight.name == HEAD else 4
                shape = (weight.out_features, weight.in_features, bits)
                if shape not in tried:
                    tried.add(shape)
                    build_linear("aten", weight, bits=bits, group=self._config.w4_group)
        except DraftError as error:
            log.warning("torch's int4 kernel does not fit this policy, using plain torch: %s", error)
            return "torch"
        return "aten"

    def propose(self, requests: Sequence[DraftRequest]) -> Proposal:
        """Run up to ``gamma`` passes; a request with a smaller gamma sits out the later ones."""
        model = self._live_model()
        gammas = [min(r.gamma, self.max_gamma) for r in requests]
        drafts: list[list[int]] = [[] for _ in requests]
        probs: list[list[Tensor]] = [[] for _ in requests]
        passes = rows = context_tokens = 0
        problem = ""
        for depth in range(max(gammas, default=0)):
            live = [i for i, gamma in enumerate(gammas) if gamma > depth]
            try:
                step = self._step(model, [requests[i] for i in live], [drafts[i] for i in live])
            except DraftError as error:
                if depth == 0:
                    raise
                problem = str(error)
                break
            passes += 1
            rows += len(live)
            # Row i reads the keys of all its tokens and of every draft before it, its own input included.
            context_tokens += sum(len(requests[i].tokens) + depth for i in live)
            for row, i in enumerate(live):
                drafts[i].append(step.tokens[row])
                if step.probs is not None:
                    probs[i].append(step.probs[row])
        return Proposal(
            tokens=drafts,
            probs=_stacked(drafts, probs),
            passes=passes,
            rows=rows,
            context_tokens=context_tokens,
            problem=problem,
        )

    def _live_model(self) -> DraftModel:
        if self.model is None or self._view is None:
            raise DraftError("w4 has not been built from the live policy")
        if self._view.policy_version != self.drafter_version:
            raise DraftError(
                f"w4 is of policy version {self.drafter_version}, the live one is {self._view.policy_version}"
            )
        return self.model

    def _step(
        self, model: DraftModel, requests: Sequence[DraftRequest], drafts: Sequence[Sequence[int]]
    ) -> DraftStep:
        """Run one pass and refuse an answer that cannot be drafted from."""
        assert self._view is not None, "_live_model came first"
        try:
            step = model.step(requests, drafts)
        except (RuntimeError, ValueError, ArithmeticError) as error:
            raise DraftError(f"w4's draft pass failed: {error}") from error
        if len(step.tokens) != len(requests):
            raise DraftError(f"w4's draft pass chose {len(step.tokens)} tokens for {len(requests)} rows")
        if not all(0 <= token < self._view.vocab_size for token in step.tokens):
            raise DraftError(f"w4 drafted an id outside the vocabulary: {step.tokens}")
        if step.probs is not None:
            if len(step.probs) != len(requests):
                raise DraftError(f"w4 reported {len(step.probs)} distributions for {len(requests)} rows")
            if not all(bool(torch.isfinite(p_V).all()) for p_V in step.probs):
                raise DraftError("w4's draft distribution is not finite")
        return step

    def ready(self, requests: Sequence[DraftRequest]) -> list[int] | None:
        """Return None: only drafting can tell."""
        return None

    def finished(self, request: DraftRequest) -> None:
        """Keep nothing: the KV it reads is the policy's."""

    def forget(self, key: int) -> None:
        """Keep nothing, so there is nothing to drop."""


def _stacked(drafts: Sequence[Sequence[int]], probs: Sequence[Sequence[Tensor]]) -> list[Tensor] | None:
    """Return per request the rows its tokens were drawn from, or None when no pass reported any."""
    if not any(probs):
        return None
    if any(len(d) != len(p) for d, p in zip(drafts, probs, strict=True)):
        raise DraftError("w4 reported distributions for some of its drafts only")
    blank_V = next(p for p in probs if p)[0]
    return [torch.stack(list(p)) if p else blank_V.new_empty(0, blank_V.shape[0]) for p in probs]
