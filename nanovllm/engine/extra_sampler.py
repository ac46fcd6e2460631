"""Sampling of the steps in which some row asks for more than temperature and filters."""

from collections.abc import Callable

import torch

from nanovllm.engine.extras import PackedExtras
from nanovllm.engine.step_tensors import ExtraTensors, StepTensors
from nanovllm.layers import logits as edits
from nanovllm.layers.logprobs import score_tokens
from nanovllm.layers.sampler import sample

# The log-probabilities of a long prompt are computed for so many tokens at a time: at most PROMPT_ROWS * vocabulary
# logits of it exist at once (in float32 and with 152k tokens 156 MB, in bfloat16 half of that).
PROMPT_ROWS = 256


class ExtraSampler:
    """Owns what the device remembers of requests that have extras, by slot: `histories` [num_slots, max_model_len]
    int32, the tokens so far, and `masks` [num_slots, ceil(num_ids / 32)] int32, the tokens that may come.

    A row is filled from the arrays of the step that first samples a token for its request, so whatever an earlier
    request left in it is overwritten or beyond its length.
    """

    def __init__(self, num_slots: int, max_model_len: int, num_ids: int, device: torch.device) -> None:
        """`num_ids`: only token ids below this are ever sampled."""
        self.num_ids = num_ids
        self.histories = torch.zeros(num_slots, max_model_len, dtype=torch.int32, device=device)
        self.masks = torch.zeros(num_slots, -(-num_ids // 32), dtype=torch.int32, device=device)

    def sample(
        self,
        logits: torch.Tensor,
        inputs: StepTensors,
        packed: PackedExtras,
        extras: ExtraTensors,
        masks: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draws the tokens [N] int64 of the logits [N, V], and scores those of `scored_rows` by the logits as they
        came: [3, L, 1 + K] int32, see `score_tokens`. `masks` are those of `constrained_rows`, see `apply_masks_`."""
        is_scored = len(extras.scored_rows) > 0
        edited = logits
        if packed.changes_logits:
            edited = logits.to(torch.float32, copy=is_scored)
            if masks is not None:
                edits.apply_masks_(edited[:, : self.num_ids], extras.constrained_rows, masks)
            self._edit(edited, inputs.sampled_slots, packed, extras)
        elif is_scored and len(inputs.filter_rows) + len(inputs.banned_ids):
            edited = logits.clone()  # sampling overwrites what it leaves out
        tokens = sample(edited[:, : self.num_ids], inputs)
        if len(extras.history_rows):
            slots = inputs.sampled_slots[extras.history_rows]
            self.histories[slots, extras.history_lens] = tokens[extras.history_rows].int()
        return tokens, score_tokens(logits, extras.scored_rows, tokens[extras.scored_rows], packed.num_best)

    def score_prompts(
        self,
        hidden: torch.Tensor,
        compute_logits: Callable[[torch.Tensor], torch.Tensor],
        packed: PackedExtras,
        extras: ExtraTensors,
    ) -> torch.Tensor:
        """Scores the prompt tokens that the hidden states [T, hidden_size] are about: [3, Q, 1 + K] int32."""
        scores = [torch.empty(3, 0, 1, dtype=torch.int32, device=hidden.device)]
        for first in range(0, len(extras.prompt_rows), PROMPT_ROWS):
            part = slice(first, first + PROMPT_ROWS)
            logits = compute_logits(hidden[extras.prompt_rows[part]])
            scores.append(score_tokens(logits, None, extras.prompt_targets[part], packed.num_prompt_best))
        return torch.cat(scores[1:] or scores, dim=1)

    def peak_bytes(self, num_rows: int, vocab_size: int, itemsize: int) -> int:
        """Most memory that all this needs at a time, beside what sampling `num_rows` rows without extras needs."""
        edited = num_rows * vocab_size * 4
        counts = min(num_rows, edits.COUNTED_ROWS) * vocab_size * 4
        rows_of_processors = num_rows * vocab_size * 4
        prompt = PROMPT_ROWS * vocab_size * itemsize
        return max(edited + max(counts, rows_of_processors), prompt)

    def _edit(self, logits: torch.Tensor, slots: torch.Tensor, packed: PackedExtras, extras: ExtraTensors) -> None:
        """Everything between constraints and min_tokens, in the order that `SamplingParams` states."""
        if len(extras.mask_slots):
            self.masks[extras.mask_slots] = extras.masks
        if len(extras.fill_slots):
            self.histories[extras.fill_slots, extras.fill_columns] = extras.fill_ids
        if len(extras.allowed_rows):
            masks = self.masks[slots[extras.allowed_rows]]
            edits.apply_masks_(logits[:, : self.num_ids], extras.allowed_rows, masks)
        if len(extras.bias_rows):
            edits.add_biases_(logits, extras.bias_rows, extras.bias_ids, extras.bias_values)
        if not len(extras.history_rows):
            return
        rows, slots = extras.history_rows, slots[extras.history_rows]
        lens = (extras.prompt_lens, extras.history_lens)
        if len(extras.word_rows):
            words = extras.word_rows
            of_words = [values[words] for values in (slots, *lens)]
            edits.ban_words_(logits, rows[words], extras.word_prefixes, extras.word_ids, self.histories, *of_words)
        if packed.has_penalty:
            penalties = (extras.repetition, extras.frequency, extras.presence)
            edits.apply_penalties_(logits, rows, self.histories, slots, *lens, packed.max_history_len, penalties)
        if packed.processors:
            self._run_processors(logits[:, : self.num_ids], slots, packed, extras)

    def _run_processors(
        self, logits: torch.Tensor, slots: torch.Tensor, packed: PackedExtras, extras: ExtraTensors
    ) -> None:
        first = 0
        for processor, num_rows in packed.processors:
            of_history = extras.processor_rows[first : first + num_rows]
            first += num_rows
            rows = extras.history_rows[of_history]
            context = edits.LogitsRows(
                self.histories[slots[of_history], : packed.max_history_len],
                extras.prompt_lens[of_history],
                extras.history_lens[of_history],
            )
            own = logits[rows]
            result = processor(own, context)
            result = own if result is None else result
            if not isinstance(result, torch.Tensor) or result.shape != own.shape:
                got = tuple(result.shape) if isinstance(result, torch.Tensor) else type(result).__name__
                raise ValueError(f"logits_processor {processor!r} must return logits {tuple(own.shape)}, got {got}")
            logits[rows] = result.to(logits)
