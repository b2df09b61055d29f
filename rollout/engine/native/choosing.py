"""The policy's forward and the choice from every head row's logits, in one compiled call.

The decoder's kernels call the chooser's by address (``compiled_forward/kernels/choosing.h``), so no Python
runs between the head and the choice. Tokens and logprobs are those of a forward and a call of the chooser
after it.

Shapes: M rows, N states.
"""

import ctypes
from collections.abc import Sequence

from torch import Tensor

from controller.types import VerifyMode
from rollout.engine.choice_rows import ChoiceRows
from rollout.engine.chooser_call import CallStruct, PortStruct
from rollout.engine.native.compiled_forward.decoder import CompiledDecoder
from rollout.engine.native.compiled_forward.kernels import abi
from rollout.engine.native.decoder import Decoder, KVStorage
from rollout.engine.native.depths import Standing
from rollout.engine.native.loops import check_kept_states, checked_standing
from rollout.engine.native.pass_clock import PassClock, TimedChooser
from rollout.engine.native.rows import RowBatch
from rollout.engine.target import Choice, TargetRow


class ForwardChooser:
    """Computes head rows and chooses from them. What a call reads and writes is kept from round to round."""

    def __init__(self, decoder: CompiledDecoder, port: PortStruct, clock: PassClock) -> None:
        self._decoder = decoder
        self._clock = clock
        self.vocab_size = decoder.spec.vocab_size
        self._rows = ChoiceRows(vocab_size=self.vocab_size)
        self._call = abi.ChoosingStruct(port=port)
        self._states = 0
        self._states_ND: Tensor | None = None
        """The last states that were found to be what compiled code reads: mostly the next round's as well."""

    def choose(
        self, batch: RowBatch, kv: KVStorage, standing: Standing | None, rows: Sequence[TargetRow]
    ) -> list[Choice]:
        """Return a choice per head row of ``batch``, each row computed from where it stands.

        Raises ``ValueError`` as ``Decoder.forward`` and ``Chooser.choose`` do.
        """
        if len(rows) != batch.head_rows_R.shape[0]:
            raise ValueError(f"{batch.head_rows_R.shape[0]} head rows, and targets of {len(rows)}")
        call = self._call
        self._rows.fill(rows)
        call.choose = self._rows.call
        call.depths = call.plain = None
        if standing is not None:
            spec, states_ND = self._decoder.spec, standing.states_ND
            if states_ND is not self._states_ND:
                check_kept_states(spec, states_ND)
                self._states_ND, self._states = states_ND, len(states_ND)
                call.states = states_ND.data_ptr()
            depth_M, number_M = checked_standing(
                standing.depths, standing.numbers, states=self._states, rows=batch.rows
            )
            call.depths, call.numbers = depth_M.buffer_info()[0], number_M.buffer_info()[0]
        self._run(batch, kv)
        return self._rows.choices()

    def choose_plainly(
        self, choice: CallStruct, columns: abi.PlainStruct, batch: RowBatch, kv: KVStorage
    ) -> None:
        """Choose as ``choice`` says, a row of it and of ``columns`` per head row, and move the columns on.

        Raises ``ValueError`` as ``Decoder.forward`` does.
        """
        if choice.rows != batch.head_rows_R.shape[0]:
            raise ValueError(f"{batch.head_rows_R.shape[0]} head rows, and choices of {choice.rows}")
        call = self._call
        call.choose, call.depths, call.plain = choice, None, ctypes.addressof(columns)
        self._run(batch, kv)

    def _run(self, batch: RowBatch, kv: KVStorage) -> None:
        split = self._decoder.run_choosing(self._call, batch, kv)
        self._clock.chained(split, self._call.choose_s)


def forward_chooser(
    decoder: Decoder, chooser: TimedChooser, *, verify: VerifyMode, clock: PassClock
) -> ForwardChooser | None:
    """Return what computes and chooses in one call.

    None where decoder or chooser only answer Python, and for ``block`` and ``token``, which need whole
    distributions.
    """
    if verify != "coupled" or chooser.port is None or not isinstance(decoder, CompiledDecoder):
        return None
    return ForwardChooser(decoder, chooser.port, clock)
