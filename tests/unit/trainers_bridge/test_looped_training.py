"""Training of the looped policy: its batches, its tokenizer, resuming, and what the script writes."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from rollout.policy.embedded import sha256_of
from trainers_bridge.looped import making
from trainers_bridge.looped.batches import batch_of, collate, data_digest, held_out
from trainers_bridge.looped.checkpoint import CheckpointError, read_checkpoint
from trainers_bridge.looped.decoding import replies_to
from trainers_bridge.looped.evaluation import Estimate, right_answers, score_depths
from trainers_bridge.looped.folder import load_served
from trainers_bridge.looped.loss import IGNORED
from trainers_bridge.looped.pretraining import (
    CHECKPOINT,
    Pretraining,
    Shape,
    new_policy,
    plain_settings,
    pretrain,
)
from trainers_bridge.looped.record import depth_helps, read_record
from trainers_bridge.looped.tokenizer import CHARACTERS, END_ID, build_tokenizer, decode, encode, prompt_ids
from trainers_bridge.tasks.exercises import split_of

TINY = Pretraining(
    shape=Shape(hidden_size=32, intermediate_size=32, layers=1, heads=2),
    threads=1,
    steps=6,
    batch_tokens=128,
    warmup_steps=2,
)


def test_the_tokenizer_folder_round_trips_every_character_and_a_chat(tmp_path: Path) -> None:
    build_tokenizer(max_tokens=64).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = CHARACTERS + "  two  spaces\n\nand lines\n"
    ids = tokenizer(text)["input_ids"]
    assert ids == encode(text)
    assert tokenizer.unk_token_id not in ids
    assert tokenizer.decode([*ids, END_ID], skip_special_tokens=True) == decode([*ids, END_ID]) == text
    chat = [{"role": "user", "content": "sort 21"}]
    asked = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert asked == prompt_ids("sort 21")
    chat.append({"role": "assistant", "content": "1 2"})
    whole = tokenizer.apply_chat_template(chat, return_dict=False)
    assert whole == [*prompt_ids("sort 21"), *encode("1 2"), END_ID]
    assert tokenizer("caf\u00e9")["input_ids"] == encode("caf\u00e9")


def test_a_batch_is_a_function_of_its_step_and_scores_replies_only() -> None:
    batch = batch_of(seed=3, step=40, tokens=512)
    assert batch.input_ids_BT.numel() <= 512
    for ids, labels in zip(batch.input_ids_BT, batch.labels_BT, strict=True):
        question, rest = decode(ids.tolist()).split("\n")
        assert split_of(question) == "train"
        scored = labels[labels != IGNORED]
        assert scored[-1] == END_ID
        assert decode(scored.tolist()) == rest
    again = batch_of(seed=3, step=40, tokens=512)
    assert torch.equal(batch.input_ids_BT, again.input_ids_BT)
    assert not torch.equal(batch.input_ids_BT, batch_of(seed=4, step=40, tokens=512).input_ids_BT)
    assert data_digest(seed=3, tokens=512, steps=2) != data_digest(seed=4, tokens=512, steps=2)


def test_a_resumed_run_gives_the_weights_of_an_uninterrupted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = pretrain(TINY, tmp_path / "whole")
    assert whole.finished
    with monkeypatch.context() as patch:
        # Killed in the fifth step, with a checkpoint after each: two loops at first, four since.
        patch.setattr("trainers_bridge.looped.pretraining.CHECKPOINT_EVERY_S", 0.0)
        patch.setattr("trainers_bridge.looped.pretraining.batch_of", interrupted_at(4))
        with pytest.raises(KeyboardInterrupt):
            pretrain(TINY, tmp_path / "parts")
    assert read_checkpoint(tmp_path / "parts" / CHECKPOINT, settings=plain_settings(TINY)).step == 4
    resumed = pretrain(TINY, tmp_path / "parts")
    assert (resumed.step, resumed.tokens) == (whole.step, whole.tokens)
    for name, value in whole.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], value), name
    assert not torch.equal(whole.model.lm_head.weight, new_policy(TINY).lm_head.weight)


def interrupted_at(step: int):  # type: ignore[no-untyped-def]
    def broken(**kwargs: int) -> object:
        if kwargs["step"] == step:
            raise KeyboardInterrupt
        return batch_of(**kwargs)

    return broken


def test_a_run_out_of_time_stops_between_steps_and_says_so(tmp_path: Path) -> None:
    stopped = pretrain(TINY, tmp_path, stop_after_s=0.0)
    assert (stopped.step, stopped.finished) == (0, False)
    assert (tmp_path / CHECKPOINT).is_file()


def test_a_checkpoint_of_other_settings_or_a_damaged_one_is_refused(tmp_path: Path) -> None:
    pretrain(TINY, tmp_path, stop_after_s=0.0)
    with pytest.raises(CheckpointError, match=r"other settings \(learning_rate, seed\)"):
        pretrain(replace(TINY, seed=1, learning_rate=1e-3), tmp_path)
    (tmp_path / CHECKPOINT).write_bytes(b"half a file")
    with pytest.raises(CheckpointError, match="cannot be read"):
        pretrain(TINY, tmp_path)


def test_scores_of_the_full_depth_are_its_own_and_losses_are_plain_cross_entropies() -> None:
    model, given = new_policy(TINY).eval(), held_out(seed=1, count=12)
    assert len({e.question for e in given}) == 12
    assert {split_of(e.question) for e in given} == {"held_out"}
    reports = score_depths(model, given, decode_replies=False)
    assert [r.loops for r in reports] == [1, 2, 3, 4]
    assert (reports[-1].agreement, reports[-1].sum_min) == (1.0, pytest.approx(1.0, abs=1e-12))
    assert reports[0].agreement < 1.0
    each = []
    for exercise in given:
        batch = collate([exercise])
        with torch.no_grad():
            each.append(model(input_ids=batch.input_ids_BT, labels=batch.labels_BT).loop_losses)
    expected = torch.stack(each).mean(0)
    for report, value in zip(reports, expected.tolist(), strict=True):
        assert report.cross_entropy.mean == pytest.approx(value, rel=1e-5)
    better, same = Estimate(mean=0.4, standard_error=0.1), Estimate(mean=0.2, standard_error=0.1)
    deeper = [replace(r, gain=better, accuracy_gain=better) for r in reports]
    assert depth_helps(deeper)
    assert not depth_helps([*deeper[:3], replace(deeper[3], accuracy_gain=same)])
    assert not depth_helps([*deeper[:2], replace(deeper[2], gain=same), deeper[3]])


def test_replies_decoded_together_are_those_decoded_alone() -> None:
    model = new_policy(TINY).eval()
    prompts = [prompt_ids(e.question) for e in held_out(seed=2, count=3)]
    together = replies_to(model, prompts, loops=3, max_new_tokens=5)
    alone = [replies_to(model, [p], loops=3, max_new_tokens=5)[0] for p in prompts]
    assert together == alone
    for prompt, reply in zip(prompts, together, strict=True):
        ids = list(prompt)
        for token in reply.token_ids:
            assert model(input_ids=torch.tensor([ids]), loops=3).logits[0, -1].argmax() == token
            ids.append(token)


def test_sampled_replies_depend_on_their_seed_and_place_and_not_on_who_else_runs() -> None:
    model = new_policy(TINY).eval()
    prompts = [prompt_ids(e.question) for e in held_out(seed=2, count=24)]
    asked = {"loops": 2, "max_new_tokens": 24}
    replies = replies_to(model, prompts, sampled_seed=7, **asked)
    assert replies == replies_to(model, prompts, sampled_seed=7, **asked)
    assert replies != replies_to(model, prompts, sampled_seed=8, **asked)
    assert any(reply.ended for reply in replies)
    # Another neighbour, that ends elsewhere: the others' replies stay.
    others = replies_to(model, [prompts[1], *prompts[1:]], sampled_seed=7, **asked)
    assert others[0] != replies[0]
    assert others[1:] == replies[1:]


def test_samples_follow_the_policys_law() -> None:
    model = new_policy(TINY).eval()
    prompt = prompt_ids("sort 21")
    with torch.no_grad():
        law_V = model(input_ids=torch.tensor([prompt])).logits[0, -1].double().softmax(-1)
    draws = 4000
    replies = replies_to(model, [prompt] * draws, loops=4, max_new_tokens=1, sampled_seed=3)
    found = Counter(reply.token_ids[0] if reply.token_ids else END_ID for reply in replies)
    for token, share in enumerate(law_V.tolist()):
        # Seven standard errors, and six draws where few are expected: a false alarm in under one of 10^6.
        room = 7 * (draws * share * (1 - share)) ** 0.5 + 6
        assert abs(found[token] - draws * share) <= room, token


def test_an_answer_counts_when_the_reply_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from trainers_bridge.looped.decoding import Reply

    given = held_out(seed=2, count=3)
    replies = [Reply(token_ids=encode(e.reply), ended=i != 1) for i, e in enumerate(given)]
    replies[2] = Reply(token_ids=encode("answer 1x"), ended=True)
    monkeypatch.setattr("trainers_bridge.looped.evaluation.replies_to", lambda *_, **__: replies)
    assert right_answers(new_policy(TINY), given, loops=1) == [True, False, False]


@pytest.mark.slow
def test_the_command_writes_a_folder_whose_record_names_its_weights(tmp_path: Path) -> None:
    out, work = tmp_path / "policy", tmp_path / "work"
    common = {"out": out, "work": work, "exercises": 2, "command": "train"}
    assert making.make(TINY, max_minutes=0.0, **common) == making.STOPPED
    assert not out.exists()
    # Six steps teach nothing: the folder is written, and the code says that depth does not help.
    assert making.make(TINY, max_minutes=1.0, **common) == making.NOT_DEEPER
    record = read_record(out)
    assert record["weights_sha256"] == sha256_of(out / "model.safetensors")
    assert (record["steps"], record["settings"]["seed"], record["command"]) == (6, 0, "train")
    assert [d["loops"] for d in record["held_out"]["depths"]] == [1, 2, 3, 4]
    assert json.loads((out / "config.json").read_text())["model_type"] == "ouro"
    assert load_served(out).config.total_ut_steps == 4
    assert AutoTokenizer.from_pretrained(out).eos_token_id == END_ID
