"""Off-grid noise: bounded by each group's own step, keyed by seed and name, and nothing else."""

import math

import pytest
import torch
from torch import Tensor

from rollout.engine.native.perplexity import perplexity, perplexity_change
from rollout.engine.native.torch_decoder import TorchDecoder
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


def test_perplexity_is_that_of_the_tokens_given_all_before_them() -> None:
    policy = tiny_policy()
    decoder = decoder_of(policy)
    decoder.load(policy.state)
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(48, (n,), generator=generator).tolist() for n in (100, 2)]
    total = 0.0
    for text in texts:
        for end in range(1, len(text)):
            # One token at a time, from nothing: no chunk, no cache.
            total += math.log(perplexity(decoder, [text[: end + 1]])) * end
            total -= math.log(perplexity(decoder, [text[:end]])) * (end - 1) if end > 1 else 0.0
    assert perplexity(decoder, texts) == pytest.approx(math.exp(total / 100), rel=1e-9)
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
