"""`LLM(model, data_parallel_size=N)`: N engines in processes of their own, with one queue in front of them.

This process checks and tokenises prompts, as one engine would, and draws the seeds, in the prompts' order: so results
don't depend on who computes them. It has no weights, and touches no GPU.
"""

import os
import time
from array import array
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn

from nanovllm.config import Config
from nanovllm.engine.child_process import Failure, WorkerError
from nanovllm.engine.feed import PromptFeed
from nanovllm.engine.inputs import Prompt, RequestParams
from nanovllm.engine.memory import host_cache_bytes
from nanovllm.engine.outputs import RequestOutput, ResultError, StepOutput
from nanovllm.engine.placement import place_replicas
from nanovllm.engine.progress import ProgressBar
from nanovllm.engine.replica import Request, pack_params
from nanovllm.engine.replicas import Replicas, Task
from nanovllm.engine.scoring import ScoredIds
from nanovllm.engine.stats import EngineStats
from nanovllm.layers.parallel import Parallel
from nanovllm.llm import LLM
from nanovllm.sampling_params import SamplingParams


class DataParallelLLM(LLM):
    """Several engines as one: `generate`, `chat` and `score` of `LLM`, and for whoever has prompts one after the other,
    `submit` and `collect`, or `add_request` and `step`. Streams belong to a single engine."""

    def __init__(self, model: str, **kwargs: Any) -> None:
        self.config = config = Config.from_kwargs(model, **kwargs)
        num_replicas, num_ranks = config.data_parallel_size, config.tensor_parallel_size
        host_cache_bytes(config.kv_offload_gb, num_ranks, num_replicas)
        devices = place_replicas(config.device, num_replicas, num_ranks)
        checkpoint, spec = self._open_model()
        spec.head_share(Parallel(0, num_ranks))
        location = os.path.abspath(checkpoint.location)
        self._is_closed = False
        self._next_id = 0
        self._replicas = Replicas([replace(config, model=location, device=device) for device in devices])
        self._make_way_in(spec, self._replicas.num_kv_tokens)

    __init__.__doc__ = LLM.__init__.__doc__

    def add_request(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> int:
        """Queues one request and returns its id, under which `step` or `collect` gives the result. Raises like
        `generate`. Any number may be queued; `wants_more` says whether that is of any use."""
        self.check_open()
        (token_ids,) = self.inputs.process_prompts([prompt])
        (prepared,) = self.inputs.process_params(sampling_params, 1)
        request_id = self.add_checked(token_ids, prepared)
        self._replicas.hand_out()
        return request_id

    def add_checked(self, token_ids: "array[int]", params: RequestParams) -> int:
        """Queues a request, as of one engine; the next `step` or `collect` sends it on, together with others."""
        self.check_open()
        (packed,) = pack_params([params])
        return self._add(token_ids, params, packed)

    submit = add_request

    def step(self) -> StepOutput:
        """Waits until a replica says something, and returns what has finished. The numbers of computed tokens are those
        of all replicas since the last step; the tokens become known when their request has finished.

        Raises:
            WorkerError: a replica has died, or stopped answering, for the second time. The engine is closed then.
            ResultError: as of one engine.
        """
        self.check_open()
        replicas, output = self._replicas, StepOutput()
        num_prefill, num_decode = replicas.num_prefill_tokens, replicas.num_decode_tokens
        if replicas.num_unfinished:
            self._poll(0.0 if replicas.finished else None)
        output.num_prefill_tokens = replicas.num_prefill_tokens - num_prefill
        output.num_decode_tokens = replicas.num_decode_tokens - num_decode
        output.finished = self._take_finished()
        for request_id, result in output.finished.items():
            for index, sample in enumerate(result.get("samples", [result])):
                output.new_token_ids[request_id + index] = sample["token_ids"]
        return output

    def collect(self, timeout: float | None = None) -> dict[int, RequestOutput]:
        """Waits until any submitted request has finished, or for `timeout` seconds, and returns all that have.

        Returns:
            id -> result; nothing if nothing is unfinished.

        Raises:
            WorkerError, ResultError: as `step`.
        """
        self.check_open()
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self.is_finished():
            remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
            self._poll(0 if self._replicas.finished else remaining)
            if self._replicas.finished or remaining == 0:
                break
        return self._take_finished()

    @property
    def num_wanted(self) -> int:
        return self.config.max_num_seqs * self.config.data_parallel_size

    @property
    def wants_more(self) -> bool:
        """Whether so little is queued that replicas may soon have nothing to do."""
        return self._replicas.wants_more

    def is_finished(self) -> bool:
        return not (self._replicas.num_unfinished or self._replicas.finished)

    def stats(self) -> EngineStats:
        """The sum over the replicas, as they have last reported: at most about a quarter of a second ago, or a step if
        that takes longer; one that was given nothing, or whose requests were all aborted, holds nothing. Requests are
        counted here. What one computes that dies counts up to its last report."""
        return self._replicas.stats()

    def abort(self, seq_id: int) -> bool:
        """Drops a submitted request; neither `step` nor `collect` will report it. False if it is not known or has
        finished: one that is still to be reported will be."""
        self.check_open()
        if seq_id in self._replicas.finished:
            return False
        num_before = self._replicas.num_unfinished
        self._replicas.forget([seq_id])
        return self._replicas.num_unfinished < num_before

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self.inputs.close()
            self._replicas.close()
            self._replicas.counts.finish("abort", self._replicas.num_unfinished)

    exit = close

    def stream(self, *args: Any, **kwargs: Any) -> NoReturn:
        size = self.config.data_parallel_size
        raise NotImplementedError(f"streams need data_parallel_size=1, and it is {size}")

    open_stream = stream

    def _add(self, prompt: Any, prepared: RequestParams, packed: bytes) -> int:
        params = prepared.params
        num_prompt_tokens = len(prompt.token_ids) if isinstance(prompt, ScoredIds) else len(prompt)
        num_tokens = params.n * self.inputs.max_total_tokens(num_prompt_tokens, params.max_tokens)
        request = Request(self._next_id, prompt, packed, self.requests.seed_of(params))
        # Of a scored pair, the last token is not part of the prompt.
        self._replicas.counts.receive(num_prompt_tokens - isinstance(prompt, ScoredIds))
        self._next_id += params.n  # sample i of a request is id + i
        self._replicas.add(Task(request, num_tokens, params.n))
        return request.request_id

    def _take_finished(self) -> dict[int, Any]:
        finished = self._replicas.finished
        for request_id, output in finished.items():
            if isinstance(output, Failure):
                del finished[request_id]
                raise _result_error(request_id, output)
        self._replicas.finished = {}
        return finished

    def _poll(self, timeout: float | None) -> None:
        try:
            self._replicas.poll(timeout)
        except WorkerError:
            self.close()
            raise

    def _complete(
        self, feed: PromptFeed, use_tqdm: bool, make: Callable[..., Any], output_of: Callable[..., Any]
    ) -> list[Any]:
        """As of one engine, where `make` and `output_of` are called by the replicas' engines."""
        packed = pack_params(feed.params)
        first_id = self._next_id
        indices: dict[int, int] = {}  # of unfinished requests
        outputs: list[Any] = [None] * feed.num_prompts
        try:
            with ProgressBar(feed.num_prompts, enabled=use_tqdm) as progress:
                while indices or not feed.is_taken:
                    feed.encode_chunk()
                    while feed.can_take and self.wants_more:
                        index = feed.num_taken
                        indices[self._add(*feed.take(), packed[index])] = index
                    replicas = self._replicas
                    num_prefill, num_decode = replicas.num_prefill_tokens, replicas.num_decode_tokens
                    self._poll(None if feed.is_encoded else 0.0)
                    own = [request_id for request_id in replicas.finished if request_id in indices]
                    for request_id in own:
                        output = replicas.finished.pop(request_id)
                        if isinstance(output, Failure):
                            raise _result_error(request_id, output)
                        outputs[indices.pop(request_id)] = output
                    num_prefill = replicas.num_prefill_tokens - num_prefill
                    progress.update(num_prefill, replicas.num_decode_tokens - num_decode, len(own))
        except BaseException:
            self._replicas.forget(range(first_id, self._next_id))
            raise
        return outputs


def _result_error(request_id: int, failure: Failure) -> ResultError:
    error = ResultError(request_id)
    error.__cause__ = RuntimeError(failure.traceback)
    return error
