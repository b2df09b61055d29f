"""How close a choice was: what a first difference must be read against.

Shapes: V vocabulary.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rollout.engine import noise
from rollout.engine.chooser_torch import TorchChooser
from rollout.engine.native.engine import NativeEngine
from rollout.engine.target import TargetRow
from rollout.errors import CapacityError
from rollout.proof.finding import Difference
from rollout.types import Request


def with_margin(
    difference: Difference, engine: NativeEngine, request: Request, new_ids: Sequence[int]
) -> Difference:
    """Return ``difference`` with the margin of plain decoding's choice there.

    ``engine`` must be idle; ``new_ids`` are the tokens plain decoding committed. A pool without room leaves
    the margin out.
    """
    if difference.index >= len(new_ids):
        return difference
    before = list(new_ids[: difference.index])
    try:
        logits_V = engine.logits_after([*request.prompt_ids, *request.prefix_ids, *before])
    except CapacityError:
        return difference
    margin = choice_margin(
        logits_V, request, [*request.prefix_ids, *before], chosen=new_ids[difference.index]
    )
    return replace(difference, margin=margin)


def choice_margin(logits_V: Tensor, request: Request, new_ids: Sequence[int], *, chosen: int) -> float:
    """Return the lead of ``chosen`` over the next best, on the scale of logits over temperature.

    Penalties, bias and the coupled noise count. Filters and bans do not: where they dropped the best token
    the lead is negative.
    """
    params = request.params
    greedy = params.temperature == 0
    row = TargetRow(
        seed=request.seed,
        position=len(request.prompt_ids) + len(new_ids),
        params=replace(
            params, temperature=1.0 if greedy else params.temperature, top_k=0, top_p=1.0, min_p=0.0
        ),
        output_counts=Counter(new_ids),
        prompt_tokens=frozenset(request.prompt_ids),
    )
    score_V = TorchChooser().probs(logits_V.unsqueeze(0), [row])[0].log()
    if not greedy:
        key = noise.noise_key(row.seed, row.position)
        score_V = score_V + noise.gumbel([key], vocab_size=score_V.shape[0])[0]
    lead = float(score_V[chosen])
    score_V[chosen] = -torch.inf
    return lead - float(score_V.max())
