"""Weight updates are refused whole, name everything at fault, and never half apply."""

import math
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rollout.engine.native.torch_forward.decoder import TorchDecoder
from rollout.errors import WeightUpdateError
from rollout.policy.manifest import UpdateManifest
from rollout.policy.weights import EMBEDDING, HEAD, WeightStage, checksum, expected_tensors, manifest
from rollout.service.payload import pack
from rollout.testing import SPECS, tiny_config, tiny_policy

NORM = "model.layers.1.input_layernorm.weight"
GATE = "model.layers.0.mlp.gate_proj.weight"


def update(
    state: dict[str, Tensor],
    *,
    declared: UpdateManifest | None = None,
    family: str = "llama",
    version: int = 3,
    live: int = 2,
    dtype: str = "bfloat16",
) -> dict[str, Tensor]:
    """Run one whole update of ``state``, in three buckets, and return what would become live."""
    stage = WeightStage(SPECS[family], dtype, live, declared or manifest(state, version))
    pairs = list(state.items())
    for bucket in (pairs[:5], pairs[5:6], pairs[6:]):
        stage.add(bucket)
    return stage.finish()


def fault(call: str, *names: str) -> str:
    """Return a pattern that wants the phrase and every name."""
    return "".join(f"(?=.*{re.escape(part)})" for part in (call, *names)) + "update to version"


@pytest.mark.parametrize("family", sorted(SPECS))
def test_expected_tensors_are_those_of_transformers(family: str) -> None:
    policy = tiny_policy(family=family)
    model = AutoModelForCausalLM.from_config(tiny_config(policy.spec))
    theirs = {n: tuple(p.shape) for n, p in model.named_parameters()}
    assert expected_tensors(policy.spec) == theirs
    assert {n: tuple(t.shape) for n, t in policy.state.items()} == theirs


def test_a_correct_update_arrives_tensor_by_tensor_as_sent() -> None:
    """A25."""
    state = tiny_policy(seed=4).state
    received = update(state)
    assert checksum(received) == checksum(state)
    assert {n: checksum({n: t}) for n, t in received.items()} == {
        n: checksum({n: t}) for n, t in state.items()
    }


def test_a_misspelt_name_is_refused_with_the_name_it_was_meant_to_be() -> None:
    """A25."""
    state = tiny_policy().state
    state["model.layers.0.mlp.gate_prj.weight"] = state.pop(GATE)
    with pytest.raises(WeightUpdateError, match=fault(f"closest: {GATE}", f"{GATE} is missing")):
        update(state)


def test_a_missing_and_an_extra_tensor_are_both_named_in_one_refusal() -> None:
    """A25."""
    state = tiny_policy().state
    del state[NORM]
    state["model.layers.7.extra.weight"] = torch.zeros(3)
    with pytest.raises(
        WeightUpdateError, match=fault(f"{NORM} is missing", "model.layers.7.extra.weight is not")
    ):
        update(state)


def test_a_transposed_tensor_is_refused() -> None:
    """A25."""
    state = tiny_policy().state
    state[GATE] = state[GATE].T.contiguous()
    with pytest.raises(WeightUpdateError, match=fault("has shape (64, 128), expected (128, 64)", GATE)):
        update(state)


def test_a_stream_cut_after_sixty_percent_is_refused_with_what_never_came() -> None:
    """A25."""
    state = tiny_policy().state
    stage = WeightStage(SPECS["llama"], "bfloat16", 2, manifest(state, 3))
    pairs = list(state.items())
    stage.add(pairs[: len(pairs) * 6 // 10])
    lost = [name for name, _ in pairs[len(pairs) * 6 // 10 :]]
    with pytest.raises(WeightUpdateError, match=fault("never sent", *lost)):
        stage.finish()


def test_float32_is_rounded_to_nearest_even_into_a_bfloat16_policy_and_nothing_else_is_cast(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A25."""
    sent = tiny_policy(seed=1, dtype=torch.float32).state
    with caplog.at_level("INFO"):
        received = update(sent)
    assert "21 float32 tensors rounded to bfloat16" in caplog.text
    for name, tensor in sent.items():
        assert received[name].dtype == torch.bfloat16
        bits = tensor.view(torch.int32).long()
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16
        assert torch.equal(received[name].float().view(torch.int32).long(), nearest)
    with pytest.raises(WeightUpdateError, match=fault("is float16 and cannot update", *sent)):
        update({n: t.half() for n, t in sent.items()})
    with pytest.raises(WeightUpdateError, match=fault("is bfloat16 and cannot update a float32 policy")):
        update(tiny_policy().state, dtype="float32")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3.4e38])
def test_a_value_that_is_or_rounds_to_no_number_is_refused(value: float) -> None:
    state = tiny_policy(dtype=torch.float32).state
    state[GATE][3, 5] = value
    with pytest.raises(WeightUpdateError, match=fault(f"{GATE} holds NaN or infinity")):
        update(state)


def test_a_single_changed_bit_is_caught_by_the_checksum() -> None:
    state = tiny_policy().state
    declared = manifest(state, 3)
    flipped = dict(state)
    flipped[NORM] = state[NORM].clone()
    flipped[NORM].view(torch.int16)[0] ^= 1
    with pytest.raises(WeightUpdateError, match="checksum"):
        update(flipped, declared=declared)


@pytest.mark.parametrize("version", [1, 2])
def test_a_version_not_above_the_live_one_is_refused(version: int) -> None:
    with pytest.raises(WeightUpdateError, match="does not exceed the live version 2"):
        update(tiny_policy().state, version=version)


def test_tensors_sent_twice_or_unlike_their_manifest_are_refused() -> None:
    state = tiny_policy().state
    stage = WeightStage(SPECS["llama"], torch.bfloat16, 2, manifest(state, 3))
    stage.add(state.items())
    stage.add([(NORM, state[NORM]), ("stranger", state[NORM])])
    with pytest.raises(
        WeightUpdateError, match=fault(f"{NORM} was sent twice", "stranger was sent but is not")
    ):
        stage.finish()
    with pytest.raises(WeightUpdateError, match=fault(f"{GATE} was sent as float32 (128, 64)")):
        update({**state, GATE: state[GATE].float()}, declared=manifest(state, 3))
    doubled = manifest(state, 3)
    doubled = replace(doubled, tensors=(*doubled.tensors, doubled.tensors[0]))
    with pytest.raises(WeightUpdateError, match=fault(f"{EMBEDDING} is listed twice")):
        update(state, declared=doubled)


def test_a_tied_policy_takes_its_head_again_only_if_it_equals_the_embedding() -> None:
    state = tiny_policy(family="qwen3", dtype=torch.float32).state
    received = update({**state, HEAD: state[EMBEDDING]}, family="qwen3")
    assert HEAD not in received
    other = state[EMBEDDING].clone()
    # Rounds to the same bfloat16, and is still not the embedding.
    other[0, 0] = torch.nextafter(other[0, 0], torch.tensor(9.0))
    with pytest.raises(WeightUpdateError, match=fault(f"{HEAD} differs from {EMBEDDING}")):
        update({**state, HEAD: other}, family="qwen3")
    untied = {HEAD: state[EMBEDDING], **{n: t for n, t in state.items() if n != EMBEDDING}}
    with pytest.raises(WeightUpdateError, match=fault(f"{EMBEDDING} is missing")):
        update(untied, family="qwen3")


def test_an_update_of_a_tied_embedding_changes_the_head_as_well() -> None:
    """A27."""
    old, new = tiny_policy(seed=0, family="smollm2"), tiny_policy(seed=1, family="smollm2")
    decoder = TorchDecoder(old.spec, cos_PH=old.cos_PH, sin_PH=old.sin_PH, dtype=torch.bfloat16, exact=True)
    decoder.load(old.state)
    decoder.load(update({**old.state, EMBEDDING: new.state[EMBEDDING]}, family="smollm2"))
    assert torch.equal(list(decoder.linears())[-1].rows(), new.state[EMBEDDING])


def test_a_checksum_depends_on_names_shapes_dtypes_and_bytes_but_not_on_order_or_layout() -> None:
    state = tiny_policy().state
    same = dict(reversed(state.items()))
    same[GATE] = same[GATE].T.contiguous().T
    assert not same[GATE].is_contiguous()
    assert checksum(same) == checksum(state.items()) == checksum(state)
    base = {"a": torch.arange(6, dtype=torch.float32)}
    others = [
        {"b": base["a"]},
        {"a": base["a"].view(2, 3)},
        {"a": base["a"].view(torch.int32)},
        {"a": base["a"] + 1},
        {**base, "b": torch.zeros(0)},
    ]
    assert len({checksum(x) for x in [base, *others]}) == 6
    assert checksum({"a": torch.tensor(1.0)}) != checksum({"a": torch.tensor([1.0])})


@pytest.mark.parametrize("version", ["4", None, 4.0, math.nan, True, [4]])
def test_a_version_that_is_no_integer_is_refused_by_the_sender_and_by_the_receiver(version: object) -> None:
    state = tiny_policy().state
    with pytest.raises(WeightUpdateError, match=r"version .*integer"):
        manifest(state, version)  # type: ignore[arg-type]
    forged = replace(manifest(state, 3), version=version)  # type: ignore[arg-type]
    with pytest.raises(WeightUpdateError, match=r"version .*integer"):
        update(state, declared=forged)


def test_an_integer_of_numpy_is_a_version() -> None:
    declared = manifest(tiny_policy().state, np.int64(3))  # type: ignore[arg-type]
    assert type(declared.version) is int
    assert update(tiny_policy().state, declared=declared)


@pytest.mark.parametrize(
    "change", [{"name": 7}, {"dtype": None}, {"shape": [4, 4]}, {"shape": (4, -1)}, {"shape": (4.0,)}]
)
def test_a_manifest_with_an_entry_of_another_type_is_refused(change: dict[str, Any]) -> None:
    state = tiny_policy().state
    declared = manifest(state, 3)
    forged = replace(declared, tensors=(replace(declared.tensors[0], **change), *declared.tensors[1:]))
    with pytest.raises(WeightUpdateError, match="refused whole"):
        update(state, declared=forged)


UNSENDABLE: dict[str, object] = {
    "a.sparse": torch.eye(3).to_sparse(),
    "b.meta": torch.zeros(3, device="meta"),
    "c.none": None,
    "d.float8": torch.zeros(3).to(torch.float8_e4m3fn),
    "e.list": [1.0, 2.0],
    "f.conj": torch.zeros(3, dtype=torch.complex64).conj(),
}


def test_everything_that_is_no_dense_tensor_is_named_in_one_refusal() -> None:
    mixed = {"good": torch.zeros(2), 5: torch.zeros(2), **UNSENDABLE}
    with pytest.raises(
        WeightUpdateError, match="(?s)" + "".join(f"(?=.*{re.escape(n)})" for n in UNSENDABLE)
    ):
        manifest(mixed, 3)  # type: ignore[arg-type]
    with pytest.raises(WeightUpdateError, match="5 is a int, not the name") as refused:
        manifest(mixed, 3)  # type: ignore[arg-type]
    assert "good" not in str(refused.value)


@pytest.mark.parametrize("name", sorted(UNSENDABLE))
def test_packing_refuses_by_name_what_cannot_be_sent(name: str) -> None:
    with pytest.raises(WeightUpdateError, match=re.escape(name)):
        pack({name: UNSENDABLE[name]})  # type: ignore[dict-item]
