"""A step between its launch and the reading of its tokens, and what those mean for the masks of the next one."""

import logging
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nanovllm.engine.batch import PackedBatch
from nanovllm.engine.grammar_matcher import Allocate, Matcher, fill_bitmasks, new_array
from nanovllm.engine.outputs import StepOutput
from nanovllm.engine.scheduler import ScheduledBatch
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step_handle import StepHandle

logger = logging.getLogger(__name__)


@dataclass
class LaunchedStep:
    """A batch whose computation was launched.

    Attributes:
        constrained: its sampled sequences that have a constraint, in the order of their rows of logits.
        token_ids: of its sampled sequences, once they have been read.
    """

    batch: ScheduledBatch
    handle: StepHandle
    constrained: list[Sequence]
    token_ids: list[int] | None = None

    def read(self) -> list[int]:
        """The tokens of the sampled sequences; waits for them the first time."""
        if self.token_ids is None:
            self.token_ids = self.handle.read()
        return self.token_ids

    def report_tokens(self, output: StepOutput) -> dict[int, str]:
        """Shows the tokens to who follows them, before the scheduler takes them; returns the stop strings that they
        complete in the texts, by seq_id."""
        stop_strings = {}
        for seq, token_id in zip(self.batch.sampled_sequences, self.read(), strict=True):
            if seq.is_finished:
                continue
            if not seq.is_streamed:
                output.new_token_ids[seq.seq_id] = [token_id]
            if seq.text is not None and (found := seq.text.push(token_id)) is not None:
                stop_strings[seq.seq_id] = found
        return stop_strings

    def failed_sequences(self) -> list[Sequence]:
        """Those whose matcher has given up. They end before taking their token: it may be what the matcher refused."""
        failed = []
        for seq in self.constrained:
            if seq.matcher is not None and seq.matcher.error is not None:
                logger.error("sequence %d ends: its constraint can't be followed: %s", seq.seq_id, seq.matcher.error)
                failed.append(seq)
        return failed


def constrained_sequences(batch: ScheduledBatch, packed: PackedBatch) -> list[Sequence]:
    """The sampled sequences of a batch that have a constraint, in the order of their rows."""
    if packed.extras is None or not len(packed.extras.constrained_rows):
        return []
    sampled = batch.sampled_sequences
    return [sampled[row] for row in packed.extras.constrained_rows]


def advance_matchers(
    previous: LaunchedStep | None, constrained: list[Sequence], allocate: Allocate = new_array
) -> npt.NDArray[np.int32]:
    """Moves the previous step's matchers past its tokens, which it waits for, and fills the masks of the next tokens.

    Called before anybody else reads that step's tokens; a second call finds that the matchers have them. So a matcher
    takes each sampled token once, and never one that is computed again. Afterwards it knows whether its sequence is
    complete, which can show only when its mask is filled.

    Args:
        previous: the step in flight, if there is one.
        constrained: the sequences of the step after it that sample a token under a constraint.
        allocate: of `fill_bitmasks`.

    Returns:
        [len(constrained), ceil(ids / 32)] int32, see `fill_bitmasks`. All tokens are allowed to a sequence that turns
        out to be complete: its token will be dropped.
    """
    moved = _accept_tokens(previous) if previous is not None else []
    matchers = [_matcher_of(seq) for seq in constrained]
    # Those that sample nothing now, having reached their length or been preempted, are filled to learn how they end.
    next_ids = {seq.seq_id for seq in constrained}
    others = [_matcher_of(seq) for seq in moved if seq.seq_id not in next_ids]
    return fill_bitmasks(matchers + others, allocate)[: len(matchers)]


def _accept_tokens(step: LaunchedStep) -> list[Sequence]:
    """Moves the matchers of a step's sequences past their tokens, unless that was done; returns the sequences."""
    if step.token_ids is not None or not step.constrained:
        return []
    token_of = dict(zip([seq.seq_id for seq in step.batch.sampled_sequences], step.read(), strict=True))
    moved = [seq for seq in step.constrained if not seq.is_finished]  # an aborted one has dropped its token
    for seq in moved:
        _matcher_of(seq).accept(token_of[seq.seq_id])
    return moved


def _matcher_of(seq: Sequence) -> Matcher:
    """Made when the sequence samples its first token; until then its grammar may be on its way."""
    if seq.matcher is None:
        assert seq.grammar is not None
        seq.matcher = seq.grammar.result().start(seq.stop_ids, seq.params.min_tokens)
    return seq.matcher
