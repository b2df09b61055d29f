"""The policy itself in 4 bits: requantised at every weight version, drafting over the policy's own KV pages.

A draft pass writes provisional keys and values beyond the frontier, which verification rewrites, so nothing
is prefilled and nothing is kept between rounds. Embeddings, norms and biases are the policy's own; the head
is kept in 8 or 16 bits, because a 4-bit head costs far more acceptance than it saves. In the compiled decoder
a 4-bit head beside it, the screen, ranks all tokens, and the head looks at the few that lead, which costs
next to none.
"""

import logging
from collections.abc import Sequence

from drafters.config import DrafterConfig
from drafters.int4.kept_menus import kept_or_taken
from drafters.int4.linears import Bits, Kernel, RebuildableLinear, build_linear
from drafters.int4.menu import KernelMenu, shapes_of
from drafters.int4.menu_linear import MenuLinear
from drafters.passes import draft_by_passes
from drafters.types import (
    SCREEN,
    DraftError,
    DraftModel,
    DraftRequest,
    LinearWeight,
    PolicyView,
    Proposal,
)

log = logging.getLogger(__name__)

HEAD = "head"

SCREENED_VOCAB = 8192
"""From so many tokens on a head is worth a screen: of a smaller one, the few looked at are a large part."""


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
        self._kernel: Kernel | KernelMenu | None = None
        self._view: PolicyView | None = None
        self._shared_bytes = 0

    @property
    def weight_bytes(self) -> int:
        """Bytes one draft pass reads, a looped body once per loop; 0 before the first build.

        Of a head with a screen that is the screen: all of the head is read by few requests' passes alone.
        """
        loops = 1 if self._view is None else self._view.loops
        body = sum(linear.weight_bytes for name, linear in self.linears.items() if name not in (HEAD, SCREEN))
        head = self.linears[HEAD].weight_bytes if HEAD in self.linears else self._shared_bytes
        return loops * body + (self.linears[SCREEN].weight_bytes if SCREEN in self.linears else head)

    @property
    def held_bytes(self) -> int:
        """Bytes of its linears, in every layout that is packed."""
        return sum(
            linear.held_bytes if isinstance(linear, MenuLinear) else linear.weight_bytes
            for linear in self.linears.values()
        )

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
            if weight.name == HEAD and self._has_screen(view):
                self._rebuild_linear(weight, kernel, name=SCREEN)
        return view.with_linears(self.linears)

    def _has_screen(self, view: PolicyView) -> bool:
        wanted = self._config.w4_screen
        if wanted == "on" and not view.chains:
            raise DraftError(
                "build refused: drafter.w4_screen=on needs the compiled decoder and verify=coupled, "
                "elsewhere nothing reads a screen"
            )
        return wanted == "on" or (wanted == "auto" and view.chains and view.vocab_size >= SCREENED_VOCAB)

    def _rebuild_linear(
        self, weight: LinearWeight, kernel: Kernel | KernelMenu, *, name: str | None = None
    ) -> None:
        """Rebuild the linear of this weight, or the one called ``name`` from the same weight."""
        name = name or weight.name
        linear = self.linears.get(name)
        if linear is None:
            bits: Bits = 8 if name == HEAD else 4
            group = self._config.w4_group
            self.linears[name] = (
                MenuLinear(weight, bits=bits, group=group, menu=kernel)
                if isinstance(kernel, KernelMenu)
                else build_linear(kernel, weight, bits=bits, group=group)
            )
        elif (linear.out_features, linear.in_features) != (weight.out_features, weight.in_features):
            raise DraftError(f"build refused: {name} changed its shape")
        else:
            linear.rebuild(weight)

    def _kernel_for(self, view: PolicyView, weights: Sequence[LinearWeight]) -> Kernel | KernelMenu:
        """Return the kernel, or what chooses it by row count, resolving ``auto`` once."""
        if self._kernel is None:
            wanted = self._config.w4_kernel
            if view.compiled and wanted not in ("auto", "compiled"):
                raise DraftError(f"drafter.w4_kernel={wanted} cannot run inside the compiled decoder")
            if wanted != "auto":
                self._kernel = wanted
            elif view.compiled:
                self._kernel = "compiled"
                log.info("drafter.w4_kernel: auto -> compiled")
            else:
                self._kernel = self._menu(view, weights)
        return self._kernel

    def _menu(self, view: PolicyView, weights: Sequence[LinearWeight]) -> KernelMenu:
        """Return the kernels timed on this machine, and say once what they come to."""
        sample = weights[0].rows()
        own = [w for w in weights if w.name != HEAD or self._config.w4_head_bits == 8]
        menu = kept_or_taken(
            shapes_of(own, head=HEAD, loops=view.loops),
            group=self._config.w4_group,
            dtype=sample.dtype,
            device=sample.device,
        )
        left_out = "; ".join(f"not {kernel}: {reason}" for kernel, reason in menu.why_not.items())
        log.info("drafter.w4_kernel: auto -> %s (%s)", menu.words(), left_out or "all kernels timed")
        return menu

    def propose(self, requests: Sequence[DraftRequest]) -> Proposal:
        """Run up to ``gamma`` passes; a request with a smaller gamma sits out the later ones."""
        view, model = self._live()
        return draft_by_passes(
            self.name, model, requests, max_gamma=self.max_gamma, vocab_size=view.vocab_size
        )

    def _live(self) -> tuple[PolicyView, DraftModel]:
        if self.model is None or self._view is None:
            raise DraftError("w4 has not been built from the live policy")
        if self._view.policy_version != self.drafter_version:
            raise DraftError(
                f"w4 is of policy version {self.drafter_version}, the live one is {self._view.policy_version}"
            )
        return self._view, self.model

    def ready(self, requests: Sequence[DraftRequest]) -> list[int] | None:
        """Return None: only drafting can tell."""
        return None

    def finished(self, request: DraftRequest) -> None:
        """Keep nothing: the KV it reads is the policy's."""

    def forget(self, key: int) -> None:
        """Keep nothing, so there is nothing to drop."""
