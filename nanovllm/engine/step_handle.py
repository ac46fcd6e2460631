"""The results of a launched step on their way to the host, and what they say to the sequences."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from nanovllm.engine.scheduler import ScheduledBatch


@dataclass(frozen=True)
class StepHandle:
    """What a step has sampled, and the log-probabilities that were asked for.

    `values` is host memory, filled when `done` has happened (at once, where there is none): the N tokens, then the
    scores [3, L, 1 + K] of sampled and [3, Q, 1 + K'] of prompt tokens, if there are any; see `score_tokens`. `wait` is
    how `done` is waited for.
    """

    values: torch.Tensor
    num_tokens: int
    score_shapes: tuple[torch.Size, ...] = ()
    done: torch.cuda.Event | None = None
    wait: Callable[[torch.cuda.Event], None] = torch.cuda.Event.synchronize

    @classmethod
    def send(cls, tokens: torch.Tensor, *scores: torch.Tensor) -> "StepHandle":
        """Enqueues one copy of a step's results to the host.

        Args:
            tokens: [N] int64.
            *scores: int32, of sampled tokens and of prompt tokens; nothing if the step has no extras.
        """
        values = torch.cat([tokens.int(), *(part.flatten() for part in scores)]) if scores else tokens
        shapes = tuple(part.shape for part in scores)
        if values.device.type == "cpu":
            return cls(values, len(tokens), shapes)
        on_host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        on_host.copy_(values, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        return cls(on_host, len(tokens), shapes, done)

    def read(self) -> list[int]:
        """Waits for the step and returns its N tokens."""
        if self.done is not None:
            self.wait(self.done)
        return self.values[: self.num_tokens].tolist()

    def record_logprobs(self, batch: ScheduledBatch) -> None:
        """Hands the log-probabilities to the batch's sequences that asked for them: of prompts, and of tokens that will
        be theirs. Call it after `read`, and before they take those."""
        if not self.score_shapes:
            return
        sampled, prompts = self._scores()
        # Rows may have more entries than a sequence wants: another one wanted those.
        asking = [seq for seq in batch.sampled_sequences if seq.params.logprobs is not None]
        for row, seq in enumerate(asking):
            if not seq.is_finished:
                seq.logprobs.append(sampled[:, row : row + 1, : 1 + (seq.params.logprobs or 0)])
        first = 0
        for seq, targets in batch.scored:
            rows = slice(first, first + len(targets))
            first = rows.stop
            seq.prompt_logprobs.append(prompts[:, rows, : 1 + (seq.params.prompt_logprobs or 0)])

    def _scores(self) -> list[npt.NDArray[np.int32]]:
        """Copies: the sequences keep them, and pinned memory is short."""
        parts = torch.split(self.values[self.num_tokens :], [shape.numel() for shape in self.score_shapes])
        return [part.view(shape).numpy().copy() for part, shape in zip(parts, self.score_shapes, strict=True)]
