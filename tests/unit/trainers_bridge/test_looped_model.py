"""The looped module against a plain float64 loop written here, and as trainers use it.

Shapes: B sequences, T tokens, C hidden size, A heads, H head dimension, N scored positions.
"""

import copy
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from rollout.errors import UnsupportedError
from rollout.policy.ouro_config import OuroConfig
from trainers_bridge.looped.configuration import DISTILLATION_WEIGHT, LOSS_WEIGHTS
from trainers_bridge.looped.folder import load_served, write_policy
from trainers_bridge.looped.loss import IGNORED
from trainers_bridge.looped.model import LoopCache, OuroForCausalLM

SETTINGS = {
    "vocab_size": 24,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
}


def policy(**options: object) -> OuroForCausalLM:
    """Return a random float64 policy whose norms and gate are no identities."""
    model = OuroForCausalLM(OuroConfig(**SETTINGS, **options)).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(noise * 0.3 if parameter.dim() == 2 else 1 + 0.2 * noise)
    return model


MODEL = policy().eval()
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5, 8, 9, 7, 9, 3]])


def plain_loops(model: OuroForCausalLM, ids_T: Tensor) -> list[Tensor]:
    """Return the states (TC) after each loop: dense, one head and one row at a time, no module used."""
    weights = {name: value.double() for name, value in model.state_dict().items()}
    size, theta, eps = 16, 10000.0, model.config.rms_norm_eps

    def norm(x_TC: Tensor, name: str) -> Tensor:
        return x_TC / (x_TC.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weights[f"{name}.weight"]

    def turn(x_H: Tensor, position: int) -> Tensor:
        out = torch.empty_like(x_H)
        for h in range(size // 2):
            angle = position * theta ** (-2 * h / size)
            a, b = x_H[h], x_H[h + size // 2]
            out[h] = a * math.cos(angle) - b * math.sin(angle)
            out[h + size // 2] = b * math.cos(angle) + a * math.sin(angle)
        return out

    def attend(x_TC: Tensor, name: str) -> Tensor:
        q, k, v = (x_TC @ weights[f"{name}.{n}_proj.weight"].T for n in "qkv")
        rows = []
        for t in range(len(x_TC)):
            heads = []
            for head in range(4):
                own, shared = slice(head * size, (head + 1) * size), head // 2
                kv = slice(shared * size, (shared + 1) * size)
                query_H = turn(q[t, own], t)
                scores = torch.stack([query_H @ turn(k[s, kv], s) for s in range(t + 1)]) / math.sqrt(size)
                heads.append(scores.softmax(0) @ v[: t + 1, kv])
            rows.append(torch.cat(heads))
        return torch.stack(rows) @ weights[f"{name}.o_proj.weight"].T

    def feed(x_TC: Tensor, name: str) -> Tensor:
        gate, up = (x_TC @ weights[f"{name}.{n}_proj.weight"].T for n in ("gate", "up"))
        return (gate * gate.sigmoid() * up) @ weights[f"{name}.down_proj.weight"].T

    hidden_TC = weights["model.embed_tokens.weight"][ids_T]
    states = []
    for _ in range(4):
        for layer in range(2):
            at = f"model.layers.{layer}"
            inner = attend(norm(hidden_TC, f"{at}.input_layernorm"), f"{at}.self_attn")
            hidden_TC = hidden_TC + norm(inner, f"{at}.input_layernorm_2")
            inner = feed(norm(hidden_TC, f"{at}.post_attention_layernorm"), f"{at}.mlp")
            hidden_TC = hidden_TC + norm(inner, f"{at}.post_attention_layernorm_2")
        hidden_TC = norm(hidden_TC, "model.norm")
        states.append(hidden_TC)
    return states


def test_every_loop_equals_a_plain_float64_forward() -> None:
    with torch.no_grad():
        body = MODEL.model(input_ids=IDS)
        logits = MODEL(input_ids=IDS).logits
    states = plain_loops(MODEL, IDS[1])
    gate = MODEL.model.early_exit_gate
    for loop, state_TC in enumerate(states):
        torch.testing.assert_close(body.loop_hidden_states[loop][1], state_TC, rtol=0, atol=1e-10)
        gate_T = state_TC @ gate.weight[0] + gate.bias
        torch.testing.assert_close(body.exit_gates[loop][1], gate_T, rtol=0, atol=1e-10)
    torch.testing.assert_close(logits[1], states[-1] @ MODEL.lm_head.weight.T, rtol=0, atol=1e-10)


def test_padding_a_cache_and_kept_logits_change_nothing() -> None:
    with torch.no_grad():
        whole = MODEL(input_ids=IDS).logits
        mask = torch.tensor([[0, 0, 0] + [1] * 8, [1] * 8 + [0, 0, 0]])
        padded = torch.zeros(2, 11, dtype=torch.long)
        padded[0, 3:], padded[1, :8] = IDS[0], IDS[1]
        beside = MODEL(input_ids=padded, attention_mask=mask).logits
        torch.testing.assert_close(beside[0, 3:], whole[0], rtol=0, atol=1e-10)
        torch.testing.assert_close(beside[1, :8], whole[1], rtol=0, atol=1e-10)
        cache = LoopCache()
        first = MODEL(input_ids=IDS[:, :5], past_key_values=cache).logits
        second = MODEL(input_ids=IDS[:, 5:], past_key_values=cache, logits_to_keep=2).logits
        assert sorted(cache.planes) == list(range(4 * 2))
        torch.testing.assert_close(first, whole[:, :5], rtol=0, atol=1e-10)
        torch.testing.assert_close(second, whole[:, 6:], rtol=0, atol=1e-10)
        picked = MODEL(input_ids=IDS, logits_to_keep=torch.tensor([0, 4])).logits
        torch.testing.assert_close(picked, whole[:, [0, 4]], rtol=0, atol=1e-12)
        shallow = MODEL(input_ids=IDS, loops=2).logits
        second_BTC = MODEL.model(input_ids=IDS).loop_hidden_states[1]
        torch.testing.assert_close(shallow, MODEL.lm_head(second_BTC), rtol=0, atol=1e-10)


def labelled() -> tuple[Tensor, Tensor]:
    labels = IDS.clone()
    labels[:, :3] = IGNORED
    return labels, labels[:, 1:][labels[:, 1:] != IGNORED]


def test_the_loss_is_the_weighted_sum_of_every_loops_loss() -> None:
    model = policy(**{LOSS_WEIGHTS: [0.1, 0.2, 0.3, 0.4], DISTILLATION_WEIGHT: 0.7})
    labels, targets_N = labelled()
    output = model(input_ids=IDS, labels=labels, train_gates=True)
    logits = [model.lm_head(s[:, 2:-1]).flatten(0, 1) for s in model.model(IDS).loop_hidden_states]
    cross = [F.cross_entropy(each, targets_N) for each in logits]
    deep = logits[-1].softmax(-1)
    kl = [(deep * (deep.log() - each.log_softmax(-1))).sum(-1).mean() for each in logits[:-1]]
    expected = sum(w * ce for w, ce in zip([0.1, 0.2, 0.3, 0.4], cross, strict=True)) + 0.7 * sum(kl) / 3
    # The module's losses are taken in float32, as trainers take them.
    torch.testing.assert_close(output.loss.double(), expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(output.loop_losses.double(), torch.stack(cross), rtol=1e-5, atol=0)
    alone = policy()(input_ids=IDS, labels=labels)
    torch.testing.assert_close(alone.loss.double(), cross[-1], rtol=1e-5, atol=0)
    output.gate_loss.backward()
    moved = {name for name, p in model.named_parameters() if p.grad is not None}
    assert moved == {"model.early_exit_gate.weight", "model.early_exit_gate.bias"}


@pytest.mark.slow
def test_the_teaching_loss_reaches_weights_through_hidden_states_alone() -> None:
    model = policy(**{DISTILLATION_WEIGHT: 0.7}).train()
    mask = torch.ones_like(IDS)
    mask[0, 6:] = 0

    def gradients(loss: Tensor) -> dict[str, Tensor]:
        model.zero_grad()
        loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    def own_loss(auxiliary: bool) -> Tensor:
        body = model.model(input_ids=IDS, attention_mask=mask, auxiliary=auxiliary)
        value: Tensor = (model.lm_head(body.last_hidden_state) ** 2).mean()
        return value

    with_teaching, without = gradients(own_loss(True)), gradients(own_loss(False))
    body = model.model(input_ids=IDS, attention_mask=mask, auxiliary=False)
    states = [state[mask.bool()] for state in body.loop_hidden_states]
    taught = gradients(0.7 * model._distillation_of(states))
    assert set(taught) <= set(with_teaching)
    for name, gradient in with_teaching.items():
        expected = without[name] + taught.get(name, torch.zeros_like(gradient))
        torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-12)
    assert max(float(g.abs().max()) for g in taught.values()) > 1e-4
    twin = copy.deepcopy(model)
    assert twin.model.score_loops.__self__ is twin
    model.eval()
    torch.testing.assert_close(gradients(own_loss(True)), without)


def test_a_saved_folder_has_published_names_and_loads_through_the_auto_classes(tmp_path: Path) -> None:
    model = policy(**{DISTILLATION_WEIGHT: 0.7}).float()
    write_policy(model, tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert type(config) is OuroConfig
    assert config.rope_parameters == {"rope_theta": 10000.0, "rope_type": "default"}
    assert getattr(config, DISTILLATION_WEIGHT, None) is None
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is OuroForCausalLM
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert set(loaded.state_dict()) == published_names()
    served = load_served(tmp_path)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(
            served.state_dict()[name], value.to(torch.bfloat16).float(), rtol=0, atol=0
        )
    served.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype=torch.float32)
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, served(IDS).logits)


def published_names() -> set[str]:
    layer = ["input_layernorm", "input_layernorm_2", "post_attention_layernorm", "post_attention_layernorm_2"]
    layer += [f"self_attn.{x}_proj" for x in "qkvo"] + [f"mlp.{x}_proj" for x in ("gate", "up", "down")]
    names = {f"model.layers.{i}.{part}.weight" for i in range(2) for part in layer}
    ends = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
    return names | {"model.early_exit_gate.weight", "model.early_exit_gate.bias", *ends}


def test_what_is_not_computed_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError) as refused:
        policy(early_exit_threshold=0.5, hidden_act="gelu", use_sliding_window=True)
    for word in ("early_exit_threshold=0.5", "hidden_act='gelu'", "use_sliding_window"):
        assert word in str(refused.value)
    with pytest.raises(UnsupportedError, match="2 values for 4 loops"):
        policy(**{LOSS_WEIGHTS: [1.0, 1.0]})
    with pytest.raises(UnsupportedError, match="DynamicCache has no plane per loop"):
        MODEL(input_ids=IDS, past_key_values=DynamicCache())


def test_generate_works_without_a_cache() -> None:
    ids = MODEL.generate(
        IDS, max_new_tokens=3, do_sample=False, use_cache=False, eos_token_id=None, pad_token_id=0
    )
    for step in range(3):
        expected = MODEL(input_ids=ids[:, : 8 + step]).logits[:, -1].argmax(-1)
        assert torch.equal(ids[:, 8 + step], expected)
