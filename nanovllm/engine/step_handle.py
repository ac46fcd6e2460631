"""The results of a launched step on their way to the host, and what they say to the sequences."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from nanovllm.engine.outputs import TokenLogprob, TokenLogprobs
from nanovllm.engine.scheduler import ScheduledBatch

# Ids, ranks and log-probabilities of a token and of the best ones at its position.
_ScoreRow = tuple[list[int], list[int], list[float]]


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
        sampled_rows, prompt_rows = self._score_rows()
        asking = [seq for seq in batch.sampled_sequences if seq.params.logprobs is not None]
        for seq, row in zip(asking, sampled_rows, strict=True):
            if not seq.is_finished:
                seq.logprobs.append(_by_token(row, seq.params.logprobs))
        first = 0
        for seq, targets in batch.scored:
            rows = prompt_rows[first : first + len(targets)]
            first += len(targets)
            seq.prompt_logprobs.extend(_by_token(row, seq.params.prompt_logprobs) for row in rows)

    def _score_rows(self) -> list[list[_ScoreRow]]:
        results, first = [], self.num_tokens
        for shape in self.score_shapes:
            ids, ranks, logprobs = self.values[first : first + shape.numel()].view(shape)
            first += shape.numel()
            columns = ids.tolist(), ranks.tolist(), logprobs.view(torch.float32).tolist()
            results.append(list(zip(*columns, strict=True)))
        return results


def _by_token(row: _ScoreRow, num_best: int | None) -> TokenLogprobs:
    """The token itself and so many best ones of a row, which may have more: another sequence wanted those."""
    ids, ranks, logprobs = row
    num_entries = 1 + (num_best or 0)
    entries = map(TokenLogprob, logprobs[:num_entries], ranks)
    return dict(zip(ids, entries, strict=False))
