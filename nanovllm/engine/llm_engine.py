"""The engine: schedules a step, launches it, and reads the one before while it runs."""

import logging
import random
from collections.abc import Iterable
from types import TracebackType
from typing import Any

from nanovllm.config import Config
from nanovllm.engine.batch import pack
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.detokenizer import decode_output
from nanovllm.engine.inputs import InputProcessor, Prompt
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.outputs import RequestOutput, StepOutput
from nanovllm.engine.progress import ProgressBar
from nanovllm.engine.scheduler import ScheduledBatch, Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step_handle import StepHandle
from nanovllm.engine.token_rules import TokenRules, check_token_is_left
from nanovllm.models import resolve_architecture
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.checkpoint import open_checkpoint
from nanovllm.utils.context import clear_forward_context

logger = logging.getLogger(__name__)


class LLMEngine:
    """Generates completions for many prompts at once. Not thread-safe.

    Use `generate` for a list of prompts, or `add_request` and `step` to drive it yourself.
    """

    def __init__(self, model: str, **kwargs: Any) -> None:
        """Loads a model.

        Args:
            model: a local directory, a `.gguf` file, or a Hugging Face id.
            **kwargs: fields of `nanovllm.config.Config`.

        Raises:
            TypeError: an unknown keyword or a wrong type.
            ValueError: an impossible setting, or a model that is damaged or not supported.
            FileNotFoundError: there is no such model.
        """
        self.config = Config.from_kwargs(model, **kwargs)
        checkpoint = open_checkpoint(self.config.model, with_weights=self.config.load_format != "dummy")
        _, spec = resolve_architecture(checkpoint.config)
        self.tokenizer = checkpoint.load_tokenizer()
        self.eos_token_ids = checkpoint.eos_token_ids(self.tokenizer)
        self.max_model_len = min(self.config.max_model_len, spec.max_model_len)
        if self.max_model_len < self.config.max_model_len:
            logger.info("max_model_len is %d: the model's own limit", self.max_model_len)
        self._num_sampled_ids = min(spec.vocab_size, _num_token_ids(self.tokenizer, spec.vocab_size))
        self.runner = ModelRunner(self.config, checkpoint, self.max_model_len, self._num_sampled_ids)

        num_blocks, block_size = self.runner.num_kv_blocks, self.runner.block_size
        self.block_manager = BlockManager(num_blocks, block_size, self.config.enable_prefix_caching)
        self.scheduler = Scheduler(
            self.block_manager,
            max_num_seqs=self.config.max_num_seqs,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
        )
        self.inputs = InputProcessor(
            self.tokenizer,
            vocab_size=spec.vocab_size,
            max_model_len=self.max_model_len,
            num_kv_tokens=num_blocks * block_size,
        )
        self._salt_above = spec.max_position_embeddings if spec.rope.depends_on_length else None
        self._random = random.Random(self.config.seed)
        self._next_seq_id = 0
        self._in_flight: tuple[ScheduledBatch, StepHandle] | None = None
        # Every request is in one of these from its arrival until it is reported.
        self._unfinished: dict[int, Sequence] = {}
        self._ended: dict[int, Sequence] = {}
        self._is_closed = False

    def add_request(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> int:
        """Queues one request and returns its seq_id. Raises like `generate`."""
        self._check_open()
        (seq,) = self._make_sequences([prompt], sampling_params)
        self._enqueue(seq)
        return seq.seq_id

    def abort(self, seq_id: int) -> bool:
        """Ends a request; the next `step` reports what it had. False if there is no such unfinished request."""
        self._check_open()
        seq = self.scheduler.find(seq_id)
        if seq is None:
            return False
        self.scheduler.finish(seq, "abort")
        self._retire([seq])
        return True

    def is_finished(self) -> bool:
        """Whether there is nothing left to compute, to read or to report."""
        return not (self._unfinished or self._ended or self._in_flight)

    def step(self) -> StepOutput:
        """Launches one step and returns the results of the step before.

        If the step fails, every request in the engine is aborted, the next call reports them, and the engine goes on.
        If the text of a result can't be decoded, the results stay for the next call.
        """
        self._check_open()
        output = self._step()
        output.finished = {seq_id: self._make_output(seq) for seq_id, seq in self._ended.items()}
        self._ended.clear()
        return output

    def generate(
        self,
        prompts: str | Iterable[Prompt],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Completes prompts.

        Args:
            prompts: strings and lists of token ids, mixed at will. A single string is a list of one.
            sampling_params: one for all prompts, or one a prompt.
            use_tqdm: show a progress bar.

        Returns:
            One result a prompt, in their order.

        Raises:
            TypeError, ValueError: something about a prompt or its params is wrong. The message names its index;
                nothing has been queued.
        """
        self._check_open()
        sequences = self._make_sequences(prompts, sampling_params)
        outputs: dict[int, RequestOutput] = {}
        own_ids = {seq.seq_id for seq in sequences}
        try:
            for seq in sequences:
                self._enqueue(seq)
            with ProgressBar(len(sequences), enabled=use_tqdm) as progress:
                while len(outputs) < len(sequences):
                    step = self._step()
                    own_ended = own_ids & self._ended.keys()
                    for seq_id in own_ended:
                        outputs[seq_id] = self._make_output(self._ended.pop(seq_id))
                    progress.update(step, len(own_ended))
        finally:
            self._forget(sequences)
        return [outputs[seq.seq_id] for seq in sequences]

    def close(self) -> None:
        """Gives up everything the engine holds. Calling it again does nothing; asking for work raises."""
        if self._is_closed:
            return
        self._is_closed = True
        self._abort_all()
        self._ended.clear()
        self.runner.close()
        del self.runner

    exit = close

    def __enter__(self) -> "LLMEngine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _step(self) -> StepOutput:
        try:
            batch = self.scheduler.schedule()
            launched = None
            if batch is not None:
                launched = batch, self.runner.run(pack(batch, self.block_manager.block_size))
            previous, self._in_flight = self._in_flight, launched
            if batch is None and previous is None and self._unfinished:
                raise RuntimeError("the scheduler is stuck: requests wait, but none can run")
            return self._read(previous, batch or ScheduledBatch())
        except BaseException:
            # What was scheduled may never have been computed, and queues may be half changed: nothing is built on it.
            self._abort_all()
            raise

    def _read(self, previous: tuple[ScheduledBatch, StepHandle] | None, launched: ScheduledBatch) -> StepOutput:
        """Takes over the tokens of the previous step, and reports them with the counts of the launched one."""
        output = StepOutput(
            num_prefill_tokens=launched.num_prefill_tokens,
            num_decode_tokens=launched.num_decode_tokens,
            num_cached_tokens=launched.num_cached_tokens,
            num_preemptions=launched.num_preemptions,
        )
        if previous is not None:
            batch, handle = previous
            token_ids = handle.read()
            handle.record_logprobs(batch)
            for seq, token_id in zip(batch.sampled_sequences, token_ids, strict=True):
                if not seq.is_finished:
                    output.new_token_ids[seq.seq_id] = [token_id]
            self._retire(self.scheduler.postprocess(batch, token_ids))
        output.num_used_blocks = self.block_manager.num_used_blocks
        output.num_free_blocks = self.block_manager.num_free_blocks
        return output

    def _enqueue(self, seq: Sequence) -> None:
        self._unfinished[seq.seq_id] = seq
        self.scheduler.add(seq)

    def _retire(self, sequences: list[Sequence]) -> None:
        """Keeps finished sequences to be reported."""
        for seq in sequences:
            self._ended[seq.seq_id] = seq
            self._unfinished.pop(seq.seq_id, None)
        self._drop_idle_step()

    def _drop_idle_step(self) -> None:
        """Forgets the step in flight if its tokens concern nobody any more."""
        if self._in_flight is not None and all(seq.is_finished for seq in self._in_flight[0].sequences):
            self._in_flight = None

    def _forget(self, sequences: list[Sequence]) -> None:
        """Removes what is left of a call's sequences: nothing, unless it failed."""
        for seq in sequences:
            if self.scheduler.find(seq.seq_id):
                self.scheduler.finish(seq, "abort")
            self._unfinished.pop(seq.seq_id, None)
            self._ended.pop(seq.seq_id, None)
        self._drop_idle_step()

    def _abort_all(self) -> None:
        """Ends every request, whatever state it is in, and begins with empty queues, blocks and cache."""
        clear_forward_context()
        self.scheduler.reset()
        self._in_flight = None
        sequences = list(self._unfinished.values())
        for seq in sequences:
            if not seq.is_finished:  # one that is has ended in the very step that failed
                seq.end("abort")
        self._retire(sequences)

    def _make_sequences(self, prompts: Any, sampling_params: Any) -> list[Sequence]:
        token_ids = self.inputs.process_prompts(prompts)
        params = self.inputs.process_params(sampling_params, len(token_ids))
        rules = self.inputs.compile_rules(params, self._num_sampled_ids)
        return [self._make_sequence(*request) for request in zip(token_ids, params, rules, strict=True)]

    def _make_sequence(self, token_ids: Any, params: SamplingParams, rules: TokenRules | None) -> Sequence:
        stop_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stop_ids |= self.eos_token_ids
        stop_ids = frozenset(id for id in stop_ids if id < self._num_sampled_ids)  # the others never come
        check_token_is_left(params, rules, stop_ids, self._num_sampled_ids)
        is_salted = self._salt_above is not None and len(token_ids) > self._salt_above
        seq = Sequence(
            self._next_seq_id,
            token_ids,
            params,
            seed=self._random.getrandbits(64) if params.seed is None else params.seed,
            max_total_tokens=self.inputs.max_total_tokens(len(token_ids), params.max_tokens),
            stop_ids=stop_ids,
            # Under a rotary embedding that depends on the prompt's length, equal prefixes of prompts of
            # different length are different content.
            cache_salt=len(token_ids) if is_salted else 0,
            rules=rules,
        )
        self._next_seq_id += 1
        return seq

    def _make_output(self, seq: Sequence) -> RequestOutput:
        prompt_ids, output_ids = seq.token_ids[: seq.num_prompt_tokens], seq.output_token_ids
        text = ""
        if self.tokenizer is not None:
            text = decode_output(self.tokenizer, prompt_ids, output_ids, seq.params.skip_special_tokens)
        output = RequestOutput(
            text=text,
            token_ids=output_ids.tolist(),
            prompt_token_ids=prompt_ids.tolist(),
            finish_reason=seq.finish_reason or "",
            stop_reason=seq.stop_reason,
            num_cached_tokens=seq.num_cached_tokens or 0,
        )
        if seq.params.logprobs is not None:
            output["logprobs"] = seq.logprobs[: len(output_ids)]
        if seq.params.prompt_logprobs is not None:
            output["prompt_logprobs"] = seq.prompt_logprobs
        return output

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("this engine is closed")


def _num_token_ids(tokenizer: Any | None, vocab_size: int) -> int:
    """One more than the highest token id that the tokenizer can decode."""
    return vocab_size if tokenizer is None else 1 + max(tokenizer.get_vocab().values())
