"""``auto``: most expected tokens per second, round by round, plain decoding always among the choices.

Decisions use loads, past rounds and what a history has ready, never a draft token, so they are exact under
every verify mode. What cannot be seen from the current choice is explored on a budget: probes let one
sequence draft while speculation is off, checks decode plainly while it is on.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from controller.allocate import Allocation, Batch, allocate, allocate_uniform, batch_of
from controller.base import BaseController
from controller.calibration import Calibration
from controller.candidates import Candidates, mixed, positions_to
from controller.config import ControllerConfig
from controller.cost import CostModel, DraftLine
from controller.explore import START_S, ExploreBudget, Pace
from controller.keeping import NOTHING_INSTEAD, YOUNG_TOKENS, KeptPlan, PlanKeeper
from controller.log import Record
from controller.looks import LookTimes
from controller.pipeline import allocate_lanes
from controller.tracking import bucket_of
from controller.types import (
    AR,
    Assignment,
    EngineTraits,
    PartShape,
    RoundFacts,
    RoundLoad,
    RoundPlan,
    SequenceLoad,
)

LOOK_UP_S = 3e-5
"""What a look-up takes per sequence. A plan that copies needs one every round, outside what facts tell."""

COPIED_AT_BEST = 0.9
"""Acceptance of copies in text that repeats itself. Where they would not pay even so, none are looked for."""

NOBODY = -1
"""The key of no sequence: what is known of it is what is known of all."""

TAIL_PATIENCE = 0.3
"""In the tail a slot is weighed against its share of the whole round, and the best round may be three
times as long as plain decoding's: so much cheaper may a slot be and still pay."""

SURPRISE_FRAC = 0.07
"""A look that took so much less than predicted is followed by early ones, and by a new plan at once."""

MOST_UNTOLD = 64
"""Plain rounds that are kept to be learnt from together."""

Ints = NDArray[np.intp]
NO_MODEL = DraftLine(pass_s=0.0, row_s=0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class _View:
    """One round, read once."""

    load: RoundLoad
    batch: Batch
    room_BD: dict[str, Ints]
    """Per drafter the most draft tokens of each sequence."""

    ar_s: float
    ar_per_s: float
    """Tokens per second of plain decoding; the sum of worth is the batch, so both units agree."""

    row_worth: float
    """Tokens plain decoding would commit in the time of one more policy row."""

    least_worth: float
    """A slot worth less than this cannot pay even for its own policy row."""


class AutoController(BaseController):
    """Chooses drafter and gamma per sequence and round."""

    def __init__(
        self,
        config: ControllerConfig,
        traits: EngineTraits,
        shapes: Mapping[str, PartShape],
        calibration: Calibration,
    ) -> None:
        super().__init__(config, traits, shapes, calibration)
        assert self._cost is not None
        self._model: CostModel = self._cost
        self._on = False
        self._round = 0
        self._looks = LookTimes(
            self._drafters,
            probe_rounds=config.probe_interval_rounds,
            check_rounds=config.check_interval_rounds,
        )
        self._copies_may_pay = True
        """Of the batch last planned for. While not, nobody looks for text to copy but for probes."""
        self._copies_pay_at_best = True
        """Of that batch. While not, there are no probes either."""
        self._copying = [d.name for d in traits.drafters if not self._model.runs_model(d.name)]
        self._all_drafters = tuple(self._drafters)
        self._switching = {d.name for d in traits.drafters if d.switch_tokens_per_sequence}
        """Drafters that must be caught up with a sequence."""
        self._last_drafter: dict[int, str] = {}
        good = calibration.quality.verdict == "good"
        self._pace = Pace()
        self._budget = ExploreBudget(config.explore_budget_frac, start_s=0.0 if good else START_S)
        self._keeper = PlanKeeper(
            self._acceptance,
            runs_model=self._model.runs_model,
            usable=self._usable,
            look_due=self._look_due,
            may_copy=self._may_copy,
            think_budget_frac=config.think_budget_frac,
        )
        self._options: list[Allocation] = []
        self._last_ar: tuple[float, float] = (0.0, 0.0)
        self._last_ar_per_s = 0.0
        self._untold: list[tuple[int, RoundFacts]] = []
        """Plain rounds, by number, that are learnt from together before anything depends on them: between
        forwards, which read all weights, code is found cold, and the rounds of a short batch feel it."""
        self._repeated: tuple[tuple[int, ...], RoundPlan] | None = None
        """These sequences, and how they decoded when the last plan was repeated for them."""

    # Deciding.

    def wants_look_up(self, load: RoundLoad) -> bool:
        """Whether the last plan is cut to what is ready, or a new one may be due that could copy."""
        if load.prefill_tokens or not self._keeper.wants_look_up(load, self._round + 1):
            return False
        return self._keeper.copies or self._may_copy(self._round + 1)

    def _may_copy(self, round_: int) -> bool:
        """Whether a plan made in a round should see what there is to copy."""
        if self._copies_may_pay or not self._copies_pay_at_best:
            return self._copies_may_pay
        return any(round_ >= self._looks.probe_round(d) for d in self._copiers())

    def _copiers(self) -> list[str]:
        """Return the drafters that run no model and may be used now."""
        return [d for d in self._copying if self._watchdog.usable(d)]

    def _could_pay(self, drafter: str, load: RoundLoad) -> tuple[bool, bool]:
        """Whether a drafter that runs no model would be no slower than plain decoding if all sequences had as
        much to copy as they can use: as copies were found to be accepted, and at best."""
        batch, read = len(load.sequences), float(load.context_tokens)
        gammas = positions_to(min(self._drafters[drafter].max_gamma, self._config.gammas[-1]))
        context = np.asarray(read * (gammas + 1), dtype=np.float64)
        verify_s = self._model.verify_curve_s(
            batch * (gammas + 1), context, sequences=batch, read_tokens=read
        )
        base_s, per_row_s = self._model.other_line_s(speculates=True)
        seconds = verify_s + (base_s + self._free_s(drafter, batch, batch)) + per_row_s * batch * (gammas + 1)
        plain_s = self._model.plain_s(batch, read_tokens=read)
        found = self._acceptance.survival(drafter, (NOBODY,))[0, : len(gammas)]
        found_pays, best_pays = (
            bool((seconds <= plain_s * (1.0 + survival.cumsum())).any())
            for survival in (found, np.maximum(found, COPIED_AT_BEST**gammas))
        )
        return found_pays, best_pays

    def _plan(self, load: RoundLoad) -> RoundPlan:
        self._round += 1
        if load.prefill_tokens:
            # Prompt rows fill the machine, so that a draft token costs as much as a token; and their round
            # tells nothing that the next ones could be planned by.
            return self._priced(load, {}, "beside a prompt")
        kept = self._keeper.still_good(load, self._round)
        if kept is not None:
            return self._repeat(load, kept)
        self._learn_untold()
        plan, best_per_s, view = self._think(load)
        found = self._explore(view, plan, best_per_s)
        could_pay = self._copies_pay_at_best = self._keeper.copies
        if not could_pay:
            pays = [self._could_pay(d, load) for d in self._copiers()]
            could_pay, self._copies_pay_at_best = (any(pay[i] for pay in pays) for i in (0, 1))
        if could_pay and not self._copies_may_pay:
            self._keeper.drop()  # to see what there is
        self._copies_may_pay = could_pay
        return found

    def _usable(self) -> tuple[str, ...]:
        """Return the drafters that plans may use now."""
        if self._watchdog.all_usable:
            return self._all_drafters
        return tuple([d for d in self._drafters if self._watchdog.usable(d)])

    def _think(self, load: RoundLoad) -> tuple[RoundPlan, float, _View]:
        """Return the plan with the best tokens per second, that rate, and what it was made from."""
        view, self._repeated = self._view(load), None
        self._options = self._priced_options(view)
        self._last_ar, self._last_ar_per_s = (view.ar_s, float(view.batch.size)), view.ar_per_s
        best = max(self._options, key=lambda a: a.worth_per_s, default=None)
        gain = best.worth_per_s / view.ar_per_s - 1.0 if best is not None else -1.0
        config = self._config
        enough = config.margin_frac - (config.hysteresis_frac if self._on else 0.0)
        self._on = gain >= enough
        if best is None or not self._on:
            why = "nothing worth drafting" if best is None else f"gain {gain:+.1%} below the margin"
            plan = RoundPlan(
                assignments={}, reason=why, predicted_s=view.ar_s, predicted_tokens=float(view.batch.size)
            )
            self._keeper.keep(plan, load, round_=self._round, gain=gain)
            return plan, view.ar_per_s, view
        assignments = self._assignments_of(view, best)
        seconds, tokens, best_per_s = self._predicted_s(load, assignments), best.tokens, best.worth_per_s
        if len(assignments) < int(np.count_nonzero(best.gamma_B)):  # only tried: so little is all it brings
            tokens = self._expected_tokens(load, assignments)
            best_per_s = min(best_per_s, tokens / seconds)
        plan = RoundPlan(
            assignments=assignments,
            reason=f"{best.candidates.label}: gain {gain:+.1%}",
            predicted_s=seconds,
            predicted_tokens=tokens,
        )
        mixes = self._traits.gamma_per_sequence and not best.candidates.all_model
        instead = self._without_copies(view, enough) if mixes else NOTHING_INSTEAD
        self._keeper.keep(plan, load, round_=self._round, gain=gain, instead=instead)
        return plan, best_per_s, view

    def _without_copies(self, view: _View, enough: float) -> Mapping[int, Assignment]:
        """Return the assignments of the best option that copies nothing, none where plain decoding is."""
        models = [option for option in self._options if option.candidates.all_model]
        best = max(models, key=lambda a: a.worth_per_s, default=None)
        if best is None or best.worth_per_s / view.ar_per_s - 1.0 < enough:
            return NOTHING_INSTEAD
        return self._assignments_of(view, best)

    def _repeat(self, load: RoundLoad, kept: KeptPlan) -> RoundPlan:
        """Return the last plan, cut to what each sequence can still use."""
        if kept.copies and not self._keeper.copies_in(kept, self._round):
            return self._priced_once(load, self._without_copies_now(load, kept), "nothing to copy lately")
        old, same = kept.plan.assignments, kept.keys == self._keeper.keys(load)
        assignments: dict[int, Assignment] = {}
        for s in load.sequences if old else ():
            wanted = old.get(s.key, kept.everyone)
            a = self._cut(s, wanted)
            if a is None and wanted is not None and kept.models:
                # A pass is run for others anyway; for this one alone it would not pay.
                a = self._cut(s, kept.instead.get(s.key))
            same = same and a is wanted
            if a is not None:
                assignments[s.key] = a
        if kept.copies:
            self._keeper.copied(self._round, anything=bool(assignments))
            if not assignments:
                assignments = self._without_copies_now(load, kept)
        return kept.plan if same else self._priced_once(load, assignments, kept.plan.reason)

    def _without_copies_now(self, load: RoundLoad, kept: KeptPlan) -> dict[int, Assignment]:
        """Return what was best without copying, cut to what each sequence can still use."""
        cut = ((s.key, self._cut(s, kept.instead.get(s.key))) for s in load.sequences if kept.instead)
        return {key: a for key, a in cut if a is not None}

    def _cut(self, sequence: SequenceLoad, wanted: Assignment | None) -> Assignment | None:
        """Return an assignment cut to what the sequence can use of it, None where that is nothing."""
        room = 0 if wanted is None else self._room(sequence, wanted.drafter)
        if wanted is None or not room:
            return None
        return wanted if room >= wanted.gamma else self._assignment(wanted.drafter, room)

    def _priced_once(self, load: RoundLoad, assignments: Mapping[int, Assignment], reason: str) -> RoundPlan:
        """Return a plan with its predictions, those of the round before where it decoded alike."""
        keys = self._keeper.keys(load)
        if self._repeated is not None and self._repeated[0] == keys:
            plan = self._repeated[1]
            if plan.assignments == assignments and plan.reason == reason:
                return plan
        self._repeated = (keys, self._priced(load, assignments, reason))
        return self._repeated[1]

    def policy_changed(self, version: int) -> None:
        """Hear that the policy is now ``version``."""
        super().policy_changed(version)
        self._keeper.drop()

    def _view(self, load: RoundLoad) -> _View:
        sequences = load.sequences
        batch = batch_of(
            sequences,
            tail_weight=self._config.tail_weight,
            tail=load.waiting == 0,
        )
        may_copy = self._keeper.copies or self._may_copy(self._round)
        asked = [d for d in self._usable() if may_copy or d not in self._copying]
        room = {name: self._caps(load, batch, name) for name in asked}
        read = batch.read_tokens
        ar_s = self._model.plain_s(batch.size, read_tokens=read)
        ar_per_s = batch.size / ar_s
        row_s = self._model.least_row_s(rows=batch.size, read_tokens=read, context_tokens=read)
        return _View(
            load=load,
            batch=batch,
            room_BD={name: caps for name, caps in room.items() if caps.any()},
            ar_s=ar_s,
            ar_per_s=ar_per_s,
            row_worth=row_s * ar_per_s,
            least_worth=row_s * ar_per_s * (TAIL_PATIENCE if batch.tail else 1.0),
        )

    def _caps(self, load: RoundLoad, batch: Batch, name: str) -> Ints:
        """Return the most draft tokens each sequence can use from one drafter."""
        most = min(self._drafters[name].max_gamma, self._config.gammas[-1])
        silent = most if self._model.runs_model(name) else 0
        ready = [s.history_match_tokens.get(name, silent) for s in load.sequences]
        useful_B = np.maximum(batch.room_B, 1) if name in self._pipelines else batch.room_B
        caps: Ints = np.minimum(np.minimum(useful_B, most), np.asarray(ready, dtype=np.intp))
        return caps

    def _priced_options(self, view: _View) -> list[Allocation]:
        options: list[Allocation] = []
        found: Allocation | None
        for candidates in self._candidates(view):
            if candidates.label in self._pipelines:
                pipeline = self._pipelines[candidates.label]
                found = allocate_lanes(view.batch, candidates, self._model, pipeline)
            elif self._traits.gamma_per_sequence:
                found = allocate(
                    view.batch,
                    candidates,
                    self._model,
                    longest=self._config.gammas,
                    # A slot pays for the part of its row that its draft has not computed already.
                    least_worth=view.least_worth * (1.0 - candidates.reuse_frac),
                )
            else:
                found = allocate_uniform(view.batch, candidates, self._model, longest=self._config.gammas)
            if found is not None:
                options.append(found)
        return options

    def _candidates(self, view: _View) -> list[Candidates]:
        """Return every drafter alone and, where sequences may differ, each model with all free drafters."""
        alone = {name: self._alone(view, name) for name in view.room_BD}
        out = list(alone.values())
        free = [c for name, c in alone.items() if not self._model.runs_model(name)]
        if self._traits.gamma_per_sequence and free:
            models = [
                c for name, c in alone.items() if self._model.runs_model(name) and name not in self._pipelines
            ]
            mixes = (
                mixed(model, free, row_worth=view.row_worth, plain_per_s=view.ar_per_s) for model in models
            )
            out += [m for m in mixes if m is not None]
        return out

    def _alone(self, view: _View, name: str) -> Candidates:
        batch, caps = view.batch, view.room_BD[name]
        runs_model, drafting = self._model.runs_model(name), int(np.count_nonzero(caps))
        line = NO_MODEL
        if runs_model:
            line = self._model.draft_line(
                name,
                sequences=drafting,
                mean_context_tokens=batch.read_tokens / batch.size,
            )
        return Candidates(
            label=name,
            drafter_B=(name,) * batch.size,
            survival_BP=self._acceptance.survival(name, batch.keys)[:, : self._config.gammas[-1]],
            cap_B=caps,
            model_B=np.full(batch.size, runs_model),
            line=line,
            switch_s_B=self._switch_s(view, name, line),
            free_s=0.0 if runs_model else self._free_s(name, batch.size, drafting),
            reuse_frac=self._model.reuse_frac(name),
        )

    def _free_s(self, name: str, sequences: int, drafting: int) -> float:
        """Return seconds of drafting without a model for ``drafting`` of so many sequences."""
        return self._model.free_draft_s(name, drafting) + LOOK_UP_S * sequences

    def _switch_s(self, view: _View, name: str, line: DraftLine) -> NDArray[np.float64] | None:
        """Return per sequence the share of catching up that one round pays, None for drafters without."""
        tokens = self._drafters[name].switch_tokens_per_sequence
        if not tokens:
            return None
        share = (line.pass_s + tokens * line.row_s) / self._config.switch_horizon_rounds
        return np.asarray([0.0 if self._last_drafter.get(k) == name else share for k in view.batch.keys])

    def _assignments_of(self, view: _View, best: Allocation) -> dict[int, Assignment]:
        """Return who drafts what: all of an allocation, but of a drafter little known no more than teaches
        enough. Hope may be wrong, and a large batch would follow it at many times the cost of finding out."""
        drafters, gammas = best.candidates.drafter_B, best.gamma_B.tolist()
        assignments = {
            key: self._assignment(drafter, gamma)
            for key, drafter, gamma in zip(view.batch.keys, drafters, gammas, strict=True)
            if gamma > 0
        }
        for name in set(drafters) if self._traits.gamma_per_sequence else ():
            keys = [key for key, a in assignments.items() if a.drafter == name]
            if not self._keeper.little_known(name) or self._try_together(name, len(keys)):
                continue
            left = YOUNG_TOKENS
            for key in keys:
                if left > 0.0:
                    left -= assignments[key].gamma
                else:
                    del assignments[key]
        return assignments

    def _try_together(self, name: str, sequences: int) -> bool:
        """Whether so many sequences in lanes teach no more in a round than is wanted. Their gamma does not
        tell: it is how far lanes may get, and beside sequences that decode otherwise they get nowhere."""
        pipeline = self._pipelines.get(name)
        return pipeline is not None and sequences * pipeline.loops <= YOUNG_TOKENS * pipeline.depth

    # Exploring.

    def _explore(self, view: _View, plan: RoundPlan, best_per_s: float) -> RoundPlan:
        """Return ``plan``, or in its place a round that shows what it cannot: the look overdue for longest
        that can be afforded, or else one of the other kind."""
        looks = [self._check, self._probe]
        if plan.assignments and self._probe_due(view, plan) < self._check_due(view):
            looks.reverse()  # plans are made as rarely as checks are due: probes would never get a turn
        for look in looks:
            found = look(view, plan, best_per_s)
            if found is not None:
                return found
        return plan

    def _check(self, view: _View, plan: RoundPlan, best_per_s: float) -> RoundPlan | None:
        """Return a round of plain decoding in place of speculation; None when not due, or too dear."""
        if not plan.assignments or self._round < self._check_due(view):
            return None
        loss_s = view.ar_s - view.batch.size / best_per_s
        if not self._budget.afford(loss_s, best_per_s):
            return None
        self._looks.looked(bucket_of(view.batch.size), self._round)
        return self._priced(view.load, {}, "check of plain decoding", probe=True)

    def _check_due(self, view: _View) -> int:
        """Return the round in which plain decoding of this batch is to be looked at again."""
        bucket = bucket_of(view.batch.size)
        self._looks.begin(bucket, self._round)
        return self._looks.check_round(bucket, self._round)

    def _probe_due(self, view: _View, plan: RoundPlan) -> int:
        """Return the round in which the first drafter that ``plan`` leaves out is to be looked at again."""
        used = {a.drafter for a in plan.assignments.values()}
        rounds = [self._looks.probe_round(name) for name in view.room_BD if name not in used]
        return min(rounds, default=sys.maxsize)

    def _look_due(self, kept: KeptPlan, round_: int) -> bool:
        """Whether a look became due since the last plan; one due before that could not be had then."""
        self._learn_untold()
        looks: list[int] = []
        if kept.plan.assignments:
            bucket = bucket_of(len(kept.keys))
            looks.append(self._looks.check_round(bucket, self._round))
        if self._traits.gamma_per_sequence or not kept.plan.assignments:
            looks += [self._looks.probe_round(name) for name in kept.usable]
        return any(kept.round_ < due <= round_ for due in looks)

    def _probe(self, view: _View, plan: RoundPlan, best_per_s: float) -> RoundPlan | None:
        """Return ``plan`` with one sequence moved to a drafter that is due, unseen for longest first.

        None when none is due, or none that is can be afforded.
        """
        due = [name for name in view.room_BD if self._round >= self._looks.probe_round(name)]
        if not due or not (self._traits.gamma_per_sequence or not plan.assignments):
            return None
        for name in sorted(due, key=self._looks.last_seen):
            probe = self._probe_of(name, view, plan)
            loss_s = probe.predicted_s - probe.predicted_tokens / best_per_s
            if self._budget.afford(loss_s, best_per_s):
                self._looks.looked(name, self._round)
                return probe
        return None

    def _probe_of(self, name: str, view: _View, plan: RoundPlan) -> RoundPlan:
        """Return ``plan`` with one sequence moved to drafter ``name``."""
        caps = view.room_BD[name]
        if name not in self._pipelines:  # what those cost and bring shows in full ones only
            caps = np.minimum(caps, self._config.probe_gamma)
        # The heaviest sequence stays longest, so what is learnt about it is used longest.
        at = int(np.argmax(np.where(caps > 0, view.batch.worth_B, -1.0)))
        moved = [at] if self._traits.gamma_per_sequence else np.flatnonzero(caps).tolist()
        assignments, tokens = dict(plan.assignments), plan.predicted_tokens
        for i in moved:
            key, old = view.batch.keys[i], plan.of(view.batch.keys[i])
            if old.gamma:
                tokens -= self._expected_more(view.load, plan.assignments, key)
            assignments[key] = self._assignment(name, int(caps[i]))
            if name not in self._pipelines:
                tokens += self._acceptance.expected_accepted(name, int(caps[i]), key)
        if any(a.drafter in self._pipelines for a in assignments.values()):
            # How far lanes get depends on who else is in the round, so all are counted anew.
            began = {view.batch.keys[i] for i in moved}
            more = [
                self._expected_more(view.load, assignments, key, fresh=key in began) for key in assignments
            ]
            tokens = len(view.load.sequences) + sum(more)
        return RoundPlan(
            assignments=assignments,
            reason=f"probe of {name}",
            predicted_s=self._predicted_s(view.load, assignments),
            predicted_tokens=tokens,
            probe=True,
        )

    # Learning.

    def _learn(self, facts: RoundFacts, plan: RoundPlan | None) -> None:
        self._keeper.passed(facts.total_s)
        plain = not facts.drafts and (plan is None or not plan.probe)
        if plain and not self._switching and len(self._untold) < MOST_UNTOLD:
            self._untold.append((self._round, facts))
            return
        self._learn_untold()
        self._learn_from(facts, plan, self._round)

    def _learn_untold(self) -> None:
        for round_, facts in self._untold:
            self._learn_from(facts, None, round_)
        self._untold.clear()

    def _learn_from(self, facts: RoundFacts, plan: RoundPlan | None, round_: int) -> None:
        self._budget.earn(facts.total_s)
        surprised = plan is not None and plan.probe and self._settle(facts, plan)
        speculated = facts.speculated
        for drafter in {o.drafter for o in facts.outcomes if o.gamma > 0} if speculated else ():
            self._looks.observed(drafter, round_, surprised=surprised)
        if self._switching or self._last_drafter:
            self._note_drafters(facts)
        if facts.batch:
            bucket = bucket_of(facts.batch)
            if not speculated and not facts.prefill_rows:
                self._looks.observed(bucket, round_, surprised=surprised)
            if self._pace.disappoints(facts, bucket, speculated=speculated):
                self._looks.demand(bucket, round_)
                self._keeper.drop()

    def _note_drafters(self, facts: RoundFacts) -> None:
        """Note which sequences a drafter that must be caught up knows by now."""
        for o in facts.outcomes:
            if o.finished:
                self._last_drafter.pop(o.key, None)
            elif o.drafter in self._switching:
                self._last_drafter[o.key] = o.drafter
        if len(self._last_drafter) > 4 * self._traits.max_batch:
            alive = {o.key for o in facts.outcomes}
            self._last_drafter = {k: v for k, v in self._last_drafter.items() if k in alive}

    def _settle(self, facts: RoundFacts, plan: RoundPlan) -> bool:
        """Account for an exploring round; return whether it was so fast that more looks are worth it."""
        self._budget.settle(facts.total_s, facts.decoded)
        # Only speed is a surprise: a stall makes any round long, and nothing makes one short.
        surprised = facts.total_s < (1.0 - SURPRISE_FRAC) * plan.predicted_s
        if surprised:
            self._keeper.drop()
        return surprised

    # Explaining.

    def _alternatives(self) -> list[Record]:
        """Return what the plan in force was chosen from; nothing is weighed beside a prompt."""
        if self._last_load is not None and self._last_load.prefill_tokens:
            return []
        plain = {
            "label": AR,
            "predicted_s": self._last_ar[0],
            "tokens": self._last_ar[1],
            "speed_per_s": self._last_ar_per_s,
            "longest": 0,
            "drafted": 0,
        }
        return [plain, *(_described(option) for option in self._options)]

    def gauges(self) -> dict[str, float]:
        """Return loggable numbers."""
        explored = self._budget.lost_s / self._elapsed_s if self._elapsed_s > 0 else 0.0
        return {
            **super().gauges(),
            "controller/speculating": float(self._on),
            "controller/explored_frac": explored,
        }


def _described(option: Allocation) -> Record:
    """Return an option as plain data."""
    return {
        "label": option.candidates.label,
        "predicted_s": option.seconds,
        "tokens": option.tokens,
        "speed_per_s": option.worth_per_s,
        "longest": int(option.gamma_B.max()),
        "drafted": int(option.gamma_B.sum()),
    }
