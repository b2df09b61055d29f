"""The reference chooser: torch, double precision, any device. The compiled chooser is tested against it.

No row's result depends on the other rows of a call: elementwise work, sorts and running sums are per row
by nature, and sums over the vocabulary are split at fixed columns (``_fixed_sum``), because torch splits a
long sum differently when it is the only one.

Shapes: R rows, V vocabulary, C chunks of the vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rollout.engine import noise
from rollout.engine.target import Choice, TargetRow, logit_edits, needs_edits

_CHUNK = 1024
"""Columns summed together; the size is part of the numerics."""

_ROWS_AT_ONCE = 32
"""Bounds the float64 and int64 temporaries; results do not depend on it."""

_NOT_FINITE = Choice(
    token=0, raw_logprob=0.0, scaled_logprob=0.0, target_logprob=0.0, kept_logmass=0.0, finite=False
)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Processed:
    """A slice of rows after edits, temperature and filters. float64 throughout."""

    raw_RV: Tensor
    below_RV: Tensor
    """(processed logit - its maximum) / temperature; ``-inf`` where banned. Greedy rows: temperature 1."""

    kept_RV: Tensor | None
    """Which tokens the filters keep; None when no row of the slice is filtered."""

    greedy_R: Tensor
    temperature_R1: Tensor
    finite_R: Tensor


class TorchChooser:
    """Implements ``Chooser`` for logits of any float dtype."""

    def choose(
        self, logits_RV: Tensor, rows: Sequence[TargetRow], *, stream: int = 0, logprobs: bool = True
    ) -> list[Choice]:
        """Return argmax of processed logits plus noise per row; see ``Chooser``."""
        _check_shape(logits_RV, rows)
        choices: list[Choice] = []
        for start in range(0, len(rows), _ROWS_AT_ONCE):
            some = rows[start : start + _ROWS_AT_ONCE]
            processed = _process(logits_RV[start : start + len(some)], some)
            token_R = _argmax(processed, some, stream)
            choices += _records(processed, token_R, some, logprobs=logprobs)
        return choices

    def score(self, logits_RV: Tensor, rows: Sequence[TargetRow], tokens: Sequence[int]) -> list[Choice]:
        """Return the logprobs of given tokens, one per row; a token the filters dropped has ``-inf``."""
        _check_shape(logits_RV, rows)
        check_tokens(tokens, rows=len(rows), vocab_size=logits_RV.shape[1])
        token_R = torch.tensor(list(tokens), dtype=torch.int64, device=logits_RV.device)
        choices: list[Choice] = []
        for start in range(0, len(rows), _ROWS_AT_ONCE):
            some = rows[start : start + _ROWS_AT_ONCE]
            processed = _process(logits_RV[start : start + len(some)], some)
            choices += _records(processed, token_R[start : start + len(some)], some, logprobs=True)
        return choices

    def probs(self, logits_RV: Tensor, rows: Sequence[TargetRow]) -> Tensor:
        """Return the target distributions, float64; a row ``choose`` would call not finite is NaN."""
        _check_shape(logits_RV, rows)
        out_RV = torch.empty(logits_RV.shape, dtype=torch.float64, device=logits_RV.device)
        for start in range(0, len(rows), _ROWS_AT_ONCE):
            some = rows[start : start + _ROWS_AT_ONCE]
            processed = _process(logits_RV[start : start + len(some)], some)
            weight_RV = _weights(processed)
            probs_RV = weight_RV / _fixed_sum(weight_RV).unsqueeze(1)
            best_R = processed.below_RV.argmax(-1)
            one_hot_RV = torch.zeros_like(probs_RV).scatter_(1, best_R.unsqueeze(1), 1.0)
            probs_RV = torch.where(processed.greedy_R.unsqueeze(1), one_hot_RV, probs_RV)
            probs_RV[~processed.finite_R] = math.nan
            out_RV[start : start + len(some)] = probs_RV
        return out_RV


def check_tokens(tokens: Sequence[int], *, rows: int, vocab_size: int) -> None:
    """Refuse tokens that cannot be scored: one per row, each within the vocabulary."""
    if len(tokens) != rows:
        raise ValueError(f"{len(tokens)} tokens for {rows} rows")
    if tokens and not (min(tokens) >= 0 and max(tokens) < vocab_size):
        raise ValueError(f"a token lies outside the vocabulary of {vocab_size}: {list(tokens)}")


def _check_shape(logits_RV: Tensor, rows: Sequence[TargetRow]) -> None:
    if logits_RV.dim() != 2 or logits_RV.shape[0] != len(rows):
        raise ValueError(f"logits of shape {tuple(logits_RV.shape)} for {len(rows)} rows")


def _process(logits_RV: Tensor, rows: Sequence[TargetRow]) -> _Processed:
    device = logits_RV.device
    raw_RV = logits_RV.to(torch.float64)
    finite_R = raw_RV.isfinite().all(-1)
    edited_RV = _edited(logits_RV, raw_RV, rows)
    highest_R1 = edited_RV.amax(-1, keepdim=True)
    finite_R = finite_R & highest_R1.squeeze(1).isfinite()
    temperatures = [r.params.temperature for r in rows]
    greedy_R = torch.tensor([t == 0 for t in temperatures], device=device)
    temperature_R1 = torch.tensor([t or 1.0 for t in temperatures], dtype=torch.float64, device=device)
    temperature_R1 = temperature_R1.unsqueeze(1)
    below_RV = (edited_RV - highest_R1) / temperature_R1
    return _Processed(
        raw_RV=raw_RV,
        below_RV=below_RV,
        kept_RV=_kept(below_RV, rows),
        greedy_R=greedy_R,
        temperature_R1=temperature_R1,
        finite_R=finite_R,
    )


def _edited(logits_RV: Tensor, raw_RV: Tensor, rows: Sequence[TargetRow]) -> Tensor:
    if not any(needs_edits(r) for r in rows):
        return raw_RV
    edited_RV = raw_RV.clone()
    for i, row in enumerate(rows):
        if not needs_edits(row):
            continue
        edits = logit_edits(row)
        if edits.ids and not (edits.ids[0] >= 0 and edits.ids[-1] < raw_RV.shape[1]):
            raise ValueError(f"penalties, bias or bans name ids outside the vocabulary of {raw_RV.shape[1]}")
        ids = torch.tensor(edits.ids, dtype=torch.int64, device=raw_RV.device)
        divisor = torch.tensor(edits.divisors, dtype=torch.float64, device=raw_RV.device)
        addend = torch.tensor(edits.addends, dtype=torch.float64, device=raw_RV.device)
        old = edited_RV[i, ids]
        new = torch.where(old > 0, old / divisor, old * divisor) + addend
        edited_RV[i, ids] = new.to(logits_RV.dtype).to(torch.float64)
    return edited_RV


def _kept(below_RV: Tensor, rows: Sequence[TargetRow]) -> Tensor | None:
    """Return which tokens the filters keep; rows without filters keep all that is not banned."""
    filtered = [i for i, r in enumerate(rows) if r.params.has_filters and r.params.temperature > 0]
    if not filtered:
        return None
    kept_RV = below_RV > -math.inf
    params = [rows[i].params for i in filtered]
    vocab_size, device = below_RV.shape[1], below_RV.device

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=device).unsqueeze(1)

    # A stable sort keeps equal probabilities in the order of their ids.
    sorted_FV, order_FV = below_RV[filtered].sort(dim=-1, descending=True, stable=True)
    rank_1V = torch.arange(vocab_size, device=device).unsqueeze(0)
    keep_FV = rank_1V < column([float(p.top_k or vocab_size) for p in params])
    weight_FV = sorted_FV.exp() * keep_FV
    goal_F1 = column([p.top_p if p.top_p < 1 else math.inf for p in params])
    goal_F1 = goal_F1 * _fixed_sum(weight_FV).unsqueeze(1)
    mass_before_FV = weight_FV.cumsum(-1).roll(1, dims=-1)
    mass_before_FV[:, 0] = 0.0
    keep_FV = keep_FV & (mass_before_FV < goal_F1)
    keep_FV = keep_FV & (-sorted_FV <= column([-math.log(p.min_p) if p.min_p else math.inf for p in params]))
    kept_RV[filtered] &= torch.zeros_like(keep_FV).scatter_(1, order_FV, keep_FV)
    return kept_RV


def _argmax(processed: _Processed, rows: Sequence[TargetRow], stream: int) -> Tensor:
    score_RV = processed.below_RV
    if any(r.params.temperature > 0 for r in rows):
        keys = [noise.noise_key(r.seed, r.position, stream) for r in rows]
        noise_RV = noise.gumbel(keys, vocab_size=score_RV.shape[1], device=score_RV.device)
        noise_RV.masked_fill_(processed.greedy_R.unsqueeze(1), 0.0)
        score_RV = score_RV + noise_RV
        if processed.kept_RV is not None:
            score_RV = score_RV.masked_fill(~processed.kept_RV, -math.inf)
    return score_RV.argmax(-1)  # documented to return the first of equal maxima


def _weights(processed: _Processed) -> Tensor:
    """Return the unnormalised target probabilities; the most probable token has 1."""
    weight_RV = processed.below_RV.exp()
    return weight_RV if processed.kept_RV is None else weight_RV * processed.kept_RV


def _fixed_sum(weight_RV: Tensor) -> Tensor:
    """Return row sums whose order of addition does not depend on how many rows there are."""
    rows, vocab_size = weight_RV.shape
    pad = -vocab_size % _CHUNK
    padded_RV = torch.nn.functional.pad(weight_RV, (0, pad)) if pad else weight_RV
    return padded_RV.reshape(rows, -1, _CHUNK).sum(-1).sum(-1)


def _records(
    processed: _Processed, token_R: Tensor, rows: Sequence[TargetRow], *, logprobs: bool
) -> list[Choice]:
    count = len(rows)
    columns = _logprobs(processed, token_R) if logprobs else [[0.0] * count] * 4
    return [
        Choice(
            token=token,
            raw_logprob=raw,
            scaled_logprob=scaled,
            target_logprob=target,
            kept_logmass=kept,
            finite=True,
        )
        if finite
        else _NOT_FINITE
        for token, raw, scaled, target, kept, finite in zip(
            token_R.tolist(), *columns, processed.finite_R.tolist(), strict=True
        )
    ]


def _logprobs(processed: _Processed, token_R: Tensor) -> list[list[float]]:
    """Return raw, scaled and target logprobs and kept log mass, each a list over rows."""
    token_R1 = token_R.unsqueeze(1)
    greedy_R = processed.greedy_R
    raw_below_RV = processed.raw_RV - processed.raw_RV.amax(-1, keepdim=True)
    raw_R = raw_below_RV.gather(1, token_R1).squeeze(1) - _fixed_sum(raw_below_RV.exp()).log()
    # Greedy rows carry temperature 1 here, so their scaled logprob comes out as the raw one.
    scaled_below_RV = raw_below_RV / processed.temperature_R1
    scaled_R = scaled_below_RV.gather(1, token_R1).squeeze(1) - _fixed_sum(scaled_below_RV.exp()).log()
    total_R = _fixed_sum(processed.below_RV.exp()).log()
    log_weight_R = processed.below_RV.gather(1, token_R1).squeeze(1)
    kept_R = total_R
    if processed.kept_RV is not None:
        kept_R = _fixed_sum(_weights(processed)).log()
        dropped_R = ~processed.kept_RV.gather(1, token_R1).squeeze(1)
        log_weight_R = log_weight_R.masked_fill(dropped_R, -math.inf)
    is_best_R = token_R == processed.below_RV.argmax(-1)
    greedy_target_R = torch.zeros_like(raw_R).masked_fill(~is_best_R, -math.inf)
    target_R = torch.where(greedy_R, greedy_target_R, log_weight_R - kept_R)
    kept_logmass_R = torch.where(greedy_R, 0.0, kept_R - total_R)
    return [raw_R.tolist(), scaled_R.tolist(), target_R.tolist(), kept_logmass_R.tolist()]
