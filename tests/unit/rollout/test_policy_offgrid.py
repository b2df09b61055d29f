"""Off-grid noise: bounded by each group's own step, keyed by seed and name, and nothing else."""

import math

import pytest
import torch
from torch import Tensor

from rollout.engine.native.perplexity import CHUNK_ROWS, perplexity, perplexity_change
from rollout.engine.native.rows import PAGE_TOKENS, RowBatch
from rollout.engine.native.torch_forward.decoder import TorchDecoder
from rollout.policy.offgrid import offgrid
from rollout.testing import TinyPolicy, tiny_policy

EMBEDDING, DOWN = "model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight"


def steps(weight: Tensor, group: int = 32) -> Tensor:
    groups = weight.double().reshape(weight.shape[0], -1, group)
    step = (groups.amax(-1) - groups.amin(-1)) / 15
    return step.repeat_interleave(group, 1)


def test_every_linear_moves_by_at_most_a_quarter_step_and_most_of_it_is_used() -> None:
    state = tiny_policy(dtype=torch.float64).state
    moved = offgrid(state, seed=3)
    for name, before in state.items():
        if name == "lm_head.weight" or name.endswith("_proj.weight"):
            share = (moved[name] - before).abs() / steps(before)
            assert share.max() <= 0.25 * (1 + 1e-5)
            # 2000 and more uniform draws: a maximum below 0.24 has odds under 0.96 ** 2000 < 1e-35.
            assert share.max() > 0.24
            assert share.mean() == pytest.approx(0.125, rel=0.1)
        else:
            assert moved[name] is before


def test_a_tied_embedding_moves_once_and_an_untied_one_stays() -> None:
    tied, untied = tiny_policy(family="smollm2").state, tiny_policy(family="llama").state
    assert not torch.equal(offgrid(tied)[EMBEDDING], tied[EMBEDDING])
    assert "lm_head.weight" not in offgrid(tied)
    assert torch.equal(offgrid(untied)[EMBEDDING], untied[EMBEDDING])


def test_noise_depends_on_seed_and_name_and_not_on_threads_or_other_tensors() -> None:
    state = tiny_policy().state
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(offgrid(state, seed=1))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(results[0][n], results[1][n]) for n in state)
    alone = offgrid({EMBEDDING: state[EMBEDDING], DOWN: state[DOWN]}, seed=1)
    assert torch.equal(alone[DOWN], results[0][DOWN])
    assert not torch.equal(offgrid(state, seed=2)[DOWN], results[0][DOWN])
    assert results[0][DOWN].dtype == torch.bfloat16


def test_in_features_that_do_not_fill_the_last_group_are_moved_by_their_own_step() -> None:
    weight = torch.randn(7, 40, generator=torch.Generator().manual_seed(0)) + 3
    moved = offgrid({EMBEDDING: torch.zeros(2, 32), "x_proj.weight": weight})["x_proj.weight"]
    share = (moved - weight).abs()[:, 32:] / steps(weight[:, 32:], 8)
    assert 0.2 < share.max() <= 0.2501


def decoder_of(policy: TinyPolicy) -> TorchDecoder:
    return TorchDecoder(
        policy.spec, cos_PH=policy.cos_PH, sin_PH=policy.sin_PH, dtype=torch.float64, exact=False
    )


def whole_logprob(decoder: TorchDecoder, text: list[int]) -> float:
    """Return the log-probability of all tokens but the first, from one forward without chunks."""
    rows, pages = len(text) - 1, -(-len(text) // PAGE_TOKENS)
    batch = RowBatch(
        token_ids_M=torch.tensor(text[:-1], dtype=torch.int32),
        positions_M=torch.arange(rows, dtype=torch.int32),
        table_M=torch.zeros(rows, dtype=torch.int32),
        page_table_SP=torch.arange(pages, dtype=torch.int32)[None],
        head_rows_R=torch.arange(rows, dtype=torch.int32),
    )
    logits_RV = decoder.forward(batch, decoder.new_storage(pages)).logits_RV
    return float(logits_RV.log_softmax(-1)[range(rows), text[1:]].sum())


def test_perplexity_is_that_of_the_tokens_given_all_before_them() -> None:
    policy = tiny_policy()
    decoder = decoder_of(policy)
    decoder.load(policy.state)
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(48, (n,), generator=generator).tolist() for n in (100, 2)]
    assert len(texts[0]) > CHUNK_ROWS + 1
    total = sum(whole_logprob(decoder, text) for text in texts)
    assert perplexity(decoder, texts) == pytest.approx(math.exp(-total / 100), rel=1e-9)
    with pytest.raises(ValueError, match="fewer than two"):
        perplexity(decoder, [[3]])


def test_the_change_of_perplexity_is_measured_between_the_two_states_and_leaves_the_second() -> None:
    policy = tiny_policy()
    decoder = decoder_of(policy)
    moved = offgrid(policy.state, seed=1)
    text = list(range(40))
    change = perplexity_change(decoder, before=policy.state, after=moved, texts=[text])
    assert change.tokens == 39
    assert change.after == perplexity(decoder, [text])
    assert 0.9 < change.ratio < 1.1
    assert change.ratio != 1.0
    same = perplexity_change(decoder, before=policy.state, after=policy.state, texts=[text])
    assert same.ratio == 1.0
