"""Steps of a model on the device: copies, forward pass, sampling."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from nanovllm.attention.base import AttentionBackend
from nanovllm.engine.batch import UNKNOWN_TOKEN, PackedBatch
from nanovllm.engine.block_copier import BlockCopier
from nanovllm.engine.cuda_graphs import DecodeGraphs
from nanovllm.engine.extra_sampler import ExtraSampler
from nanovllm.engine.extras import PackedExtras
from nanovllm.engine.host_cache import BlockCopies
from nanovllm.engine.step_handle import StepHandle
from nanovllm.engine.step_tensors import StepTensors, host_ints, upload, upload_extras, upload_ints, view_flat
from nanovllm.layers.parallel import Parallel
from nanovllm.layers.sampler import sample
from nanovllm.models import DecoderForCausalLM
from nanovllm.utils.context import forward_context

Masks = npt.NDArray[np.int32]
SampleRest = Callable[[torch.Tensor | None], StepHandle]


class StepRunner:
    """Launches steps. `run` returns at once; the tokens are read from its handle later, and the next step takes them
    from `last_tokens`, where sampling has left them, without the host.

    Attributes:
        parallel: which rank this is, of those that share the model.
        last_tokens: int64, of each slot.
    """

    device: torch.device
    parallel: Parallel
    num_sampled_ids: int
    model: DecoderForCausalLM
    prefill_backend: AttentionBackend
    decode_backend: AttentionBackend
    last_tokens: torch.Tensor
    extra_sampler: ExtraSampler
    graphs: DecodeGraphs | None
    _copier: BlockCopier | None
    _sample_rest: SampleRest | None  # of a batch whose masks are being made

    @property
    def is_lost(self) -> bool:
        """Whether nothing can be run any more."""
        return False

    @torch.inference_mode()
    def run(self, batch: PackedBatch) -> StepHandle | None:
        """Launches the forward pass and the sampling of a batch. Of one with constrained rows it launches everything up
        to the logits and returns None: `sample` has to follow before the next `run`."""
        with self._current_device():
            handle = self._launch(batch)
            self._flush_copies()
            return handle

    def copy_blocks(self, copies: BlockCopies) -> None:
        """Takes over copies between KV cache and host memory, to be begun beside the step that `run` launches next."""
        assert self._copier is not None
        with self._current_device():
            self._copier.begin(copies)

    def finished_copies(self) -> tuple[int, int]:
        """The tickets up to which loads, and saves, are finished."""
        assert self._copier is not None
        return self._copier.finished()

    def wait_for_loads(self) -> None:
        """Waits for all loads from host memory."""
        assert self._copier is not None
        with self._current_device():
            self._copier.wait()

    def _flush_copies(self) -> None:
        if self._copier is not None:
            self._copier.flush()

    @torch.inference_mode()
    def sample(self, masks: Masks | None) -> StepHandle:
        """Launches the sampling that `run` has left.

        Args:
            masks: of the batch's constrained rows, in memory of `allocate_masks`; None if their tokens don't matter.
        """
        assert self._sample_rest is not None
        sample_rest, self._sample_rest = self._sample_rest, None
        with self._current_device():
            return sample_rest(None if masks is None else upload_ints(masks, self.device))

    def allocate_masks(self, num_rows: int, num_words: int) -> Masks:
        """Memory for masks, from where they get to the device at once."""
        return host_ints(self.device, num_rows, num_words)

    def _current_device(self) -> AbstractContextManager[Any]:
        """Kernels are launched on the current device; another engine, or the caller, may have made another one that."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def _launch(self, batch: PackedBatch) -> StepHandle | None:
        if self.graphs is not None and batch.is_pure_decode:
            hidden = self.graphs.replay_forward(batch)
            if batch.has_plain_sampling:
                return StepHandle.send(self.graphs.replay_sampling(batch))
            inputs = view_flat(upload(batch, self.device), batch)
        else:
            inputs = view_flat(upload(batch, self.device), batch)
            hidden = self._forward(inputs)
        if batch.extras is None:
            return StepHandle.send(self._sample(hidden, inputs))
        sample_rest = self._prepare_sampling(hidden, inputs, batch.extras)
        if not len(batch.extras.constrained_rows):
            return sample_rest(None)
        self._sample_rest = sample_rest
        return None

    def _forward(self, inputs: StepTensors) -> torch.Tensor:
        """Final hidden states [T, hidden_size]."""
        token_ids = inputs.token_ids
        if inputs.num_decode_seqs:
            decode_ids = token_ids[: inputs.num_decode_seqs]
            last = self.last_tokens[inputs.slots[: inputs.num_decode_seqs]].int()
            decode_ids = torch.where(decode_ids == UNKNOWN_TOKEN, last, decode_ids)
            prefill_ids = token_ids[len(last) :]
            token_ids = torch.cat((decode_ids, prefill_ids)) if len(prefill_ids) else decode_ids
        context = inputs.forward_context()
        context.decode_plan = self.decode_backend.prepare_decode(context)
        context.prefill_plan = self.prefill_backend.prepare_prefill(context)
        with forward_context(context):
            hidden: torch.Tensor = self.model(token_ids, inputs.positions, inputs.rope_lens)
        return hidden

    def _sample(self, hidden: torch.Tensor, inputs: StepTensors) -> torch.Tensor:
        """Draws the tokens [N] int64, and leaves them where the next step looks for them."""
        if not len(inputs.sampled_slots):
            return torch.empty(0, dtype=torch.int64, device=self.device)
        logits = self._logits(hidden, inputs)
        if self.parallel.rank == 0:
            tokens = sample(logits[:, : self.num_sampled_ids], inputs)
        else:
            tokens = torch.empty(len(logits), dtype=torch.int64, device=self.device)
        self._keep(tokens, inputs)
        return tokens

    def _sample_for_capture(self, hidden: torch.Tensor, inputs: StepTensors) -> torch.Tensor:
        """What a graph is made of; no step's tokens are drawn by it yet."""
        return self._sample(hidden, inputs)

    def _keep(self, tokens: torch.Tensor, inputs: StepTensors) -> None:
        """Takes rank 0's tokens, and leaves them where the next step looks for them."""
        self.parallel.from_first(tokens)
        self.last_tokens.index_copy_(0, inputs.sampled_slots.long(), tokens)

    def _prepare_sampling(self, hidden: torch.Tensor, inputs: StepTensors, packed: PackedExtras) -> SampleRest:
        """The same for a step with extras, log-probabilities included, but for what depends on masks."""
        extras = upload_extras(packed, self.device)
        prompt_scores = self.extra_sampler.score_prompts(hidden, self.model.compute_logits, packed, extras)
        if not len(inputs.sampled_slots):
            return lambda _: StepHandle.send(self._sample(hidden, inputs), prompt_scores[:, :0], prompt_scores)
        logits = self._logits(hidden, inputs)

        def sample_rest(masks: torch.Tensor | None) -> StepHandle:
            tokens, scores = self.extra_sampler.sample(logits, inputs, packed, extras, masks)
            self._keep(tokens, inputs)
            return StepHandle.send(tokens, scores, prompt_scores)

        return sample_rest

    def _logits(self, hidden: torch.Tensor, inputs: StepTensors) -> torch.Tensor:
        """[N, vocab_size], of the tokens that are followed by a sampled one."""
        if len(inputs.sampled_slots) < len(hidden):
            hidden = hidden[inputs.logits_indices]
        return self.model.compute_logits(hidden)
