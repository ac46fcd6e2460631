"""A step between its launch and the reading of its tokens, and what those mean for the masks of the next one."""

import logging
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from nanovllm.engine.batch import PackedBatch
from nanovllm.engine.grammar_matcher import Allocate, MaskFilling, Matcher, fill_bitmasks
from nanovllm.engine.outputs import StepOutput
from nanovllm.engine.scheduler import ScheduledBatch
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step_handle import StepHandle

logger = logging.getLogger(__name__)


@dataclass
class LaunchedStep:
    """A batch whose computation was launched; if it has constrained rows, only up to its logits at first.

    Attributes:
        constrained: its sampled sequences that have a constraint, in the order of their rows of logits.
        handle: of its results; None until its sampling is launched.
        masks: of the constrained rows, from when the tokens of the step before are known. None if there are none, or
            their tokens concern nobody any more.
        ended: seq_id -> finish reason of sequences that take no token of this step, as their matchers have found.
    """

    batch: ScheduledBatch
    constrained: list[Sequence]
    handle: StepHandle | None
    masks: MaskFilling | None = None
    ended: dict[int, str] = field(default_factory=dict)

    def take_masks(self) -> npt.NDArray[np.int32] | None:
        """What `masks` are. That a sequence was complete before can show only here."""
        if self.masks is None:
            return None
        masks = self.masks.result()
        for seq in self.constrained:
            self._note_end(seq)
        return masks

    def read(self) -> list[int]:
        """The tokens of the sampled sequences; waits for them."""
        assert self.handle is not None
        return self.handle.read()

    def accept_tokens(self, token_ids: list[int]) -> list[Sequence]:
        """Moves the matchers past the step's tokens; returns the sequences that will take them. One whose matcher
        refuses its token will not."""
        if not self.constrained:
            return []
        token_of = dict(zip([seq.seq_id for seq in self.batch.sampled_sequences], token_ids, strict=True))
        moved = []
        for seq in self.constrained:
            if seq.is_finished or seq.seq_id in self.ended:  # an aborted one has dropped its token
                continue
            if matcher_of(seq).accept(token_of[seq.seq_id]):
                moved.append(seq)
            else:
                self._note_end(seq)
        return moved

    def report_tokens(self, token_ids: list[int], output: StepOutput) -> dict[int, str]:
        """Shows the tokens, and their log-probabilities, to who follows them, before the scheduler takes them; returns
        the stop strings that they complete in the texts, by seq_id."""
        assert self.handle is not None
        self.handle.record_logprobs(self.batch)
        stop_strings = {}
        for seq, token_id in zip(self.batch.sampled_sequences, token_ids, strict=True):
            if seq.is_finished or seq.seq_id in self.ended:
                continue
            if not seq.is_streamed:
                output.new_token_ids[seq.seq_id] = [token_id]
            if seq.text is not None and (found := seq.text.push(token_id)) is not None:
                stop_strings[seq.seq_id] = found
        return stop_strings

    def _note_end(self, seq: Sequence) -> None:
        if seq.is_finished or seq.matcher is None or not seq.matcher.is_terminated:
            return
        self.ended[seq.seq_id] = "stop" if seq.matcher.error is None else "abort"
        if seq.matcher.error is not None:
            logger.error("sequence %d ends: its constraint can't be followed: %s", seq.seq_id, seq.matcher.error)


def constrained_sequences(batch: ScheduledBatch, packed: PackedBatch) -> list[Sequence]:
    """The sampled sequences of a batch that have a constraint, in the order of their rows."""
    if packed.extras is None or not len(packed.extras.constrained_rows):
        return []
    sampled = batch.sampled_sequences
    return [sampled[row] for row in packed.extras.constrained_rows]


def begin_masks(step: LaunchedStep | None, moved: list[Sequence], allocate: Allocate) -> None:
    """Begins to fill the masks of a step's constrained rows, now that their matchers are where they have to be.

    Args:
        step: the one that was launched last, if there was anything to launch.
        moved: the sequences whose matchers have just moved. Those that sample nothing in the step, having reached
            their length or been preempted, have a mask filled nevertheless, at once, to learn how they end.
    """
    constrained = [] if step is None else step.constrained
    sampled_ids = {seq.seq_id for seq in constrained}
    others = [matcher_of(seq) for seq in moved if seq.seq_id not in sampled_ids]
    if others:
        fill_bitmasks(others)
    matchers = [None if seq.is_finished else matcher_of(seq) for seq in constrained]
    if step is not None and any(matchers):
        step.masks = MaskFilling(matchers, allocate)


def matcher_of(seq: Sequence) -> Matcher:
    """Made when the sequence samples its first token; until then its grammar may be on its way."""
    if seq.matcher is None:
        assert seq.grammar is not None
        seq.matcher = seq.grammar.result().start(seq.stop_ids, seq.params.min_tokens)
    return seq.matcher
