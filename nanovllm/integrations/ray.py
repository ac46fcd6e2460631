"""Ray Data on this engine, over any number of machines (`pip install "ray[data]"`).

    dataset = ray.data.read_parquet("prompts")
    dataset = predict(dataset, "path/to/model", SamplingParams(max_tokens=256), num_actors=8)
    dataset.write_parquet("answers")

Each actor holds one engine, on `tensor_parallel_size` GPUs of one machine. Ray Data streams blocks through the actors,
and reads no faster than they and the writers go.
"""

import asyncio
import copy
import os
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import ray.data

from nanovllm import LLM, AsyncLLM, SamplingParams
from nanovllm.engine.chat import ChatRenderer, check_conversations
from nanovllm.engine.outputs import RequestOutput

# Keys of a result that can be columns, and their types.
_TYPES = {
    "text": pa.string(),
    "token_ids": pa.list_(pa.int32()),
    "prompt_token_ids": pa.list_(pa.int32()),
    "finish_reason": pa.string(),
    "num_cached_tokens": pa.int64(),
}


class Predictor:
    """A callable class for `Dataset.map_batches(..., batch_format="pyarrow")`, which `predict` calls with all it needs.

    It takes several batches at a time, so that the engine goes on with the next ones while the last rows of one finish.
    A row that can't be completed, because its prompt is empty or too long say, gets its message in the error column,
    and None in the others. An engine that is lost ends its actor, which Ray starts again.
    """

    def __init__(
        self,
        model: str,
        sampling_params: SamplingParams | None = None,
        *,
        prompt_column: str = "prompt",
        messages_column: str | None = None,
        output_columns: Mapping[str, str] | None = None,
        error_column: str = "error",
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """
        Args:
            model: what `LLM` takes, as each machine of the cluster finds it.
            sampling_params: of all rows, with n=1.
            prompt_column: of strings or lists of token ids.
            messages_column: of conversations instead, for the tokenizer's chat template.
            output_columns: name of a column -> key of the result: "text", "token_ids", "prompt_token_ids",
                "finish_reason" or "num_cached_tokens"; None is {"generated_text": "text"}.
            error_column: what was wrong with a row, None if it was completed.
            chat_template_kwargs: more variables of the template.
            **kwargs: settings of the engine.
        """
        self._params = sampling_params or SamplingParams()
        self._outputs = dict(output_columns or {"generated_text": "text"})
        if unknown := set(self._outputs.values()) - _TYPES.keys():
            raise ValueError(f"output_columns: {min(unknown)!r} is none of {', '.join(map(repr, _TYPES))}")
        if self._params.n != 1:
            raise ValueError(f"n must be 1, got {self._params.n}: repeat the row for more samples")
        self._column = prompt_column if messages_column is None else messages_column
        self._error_column = error_column
        self._llm = LLM(model, **kwargs)
        self._tokenizer: Any = None
        if messages_column is not None:
            self._tokenizer = copy.deepcopy(self._llm.tokenizer)  # the engine's own is for its thread
            self._renderer = ChatRenderer(self._tokenizer, chat_template_kwargs=chat_template_kwargs)
        self._engine = AsyncLLM(self._llm)

    async def __call__(self, batch: pa.Table) -> pa.Table:
        """The batch with the columns of the results."""
        rows = batch.column(self._column).to_pylist()
        results = await asyncio.gather(*map(self._complete, rows))
        for column, key in self._outputs.items():
            values = [None if isinstance(result, str) else result[key] for result in results]  # type: ignore[literal-required]
            batch = batch.append_column(column, pa.array(values, _TYPES[key]))
        errors = [result if isinstance(result, str) else None for result in results]
        return batch.append_column(self._error_column, pa.array(errors, pa.string()))

    async def _complete(self, row: Any) -> RequestOutput | str:
        """The result of a row, or what is wrong with it."""
        try:
            prompt = row if self._tokenizer is None else self._render(row)
            return await self._engine.generate(prompt, self._params)
        except (TypeError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        except Exception:
            if self._llm.is_closed:
                os._exit(1)  # an exception would fail the whole job: an actor that has died is started again
            raise

    def _render(self, messages: Any) -> list[int]:
        if isinstance(messages, list):  # Arrow gives every message the keys of all
            messages = [
                {key: value for key, value in message.items() if value is not None}
                if isinstance(message, dict)
                else message
                for message in messages
            ]
        (text,) = self._renderer.render(check_conversations([messages]))
        token_ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return token_ids


def predict(
    dataset: ray.data.Dataset,
    model: str,
    sampling_params: SamplingParams | None = None,
    *,
    num_actors: int,
    batch_size: int = 256,
    max_restarts: int = 3,
    predictor: type[Predictor] = Predictor,
    **kwargs: Any,
) -> ray.data.Dataset:
    """Adds the columns of a `Predictor` to a dataset.

    Args:
        num_actors: engines, each on `tensor_parallel_size` GPUs, or on one CPU core if `device` is "cpu".
        batch_size: rows that an engine is handed together; it works at several batches at a time.
        max_restarts: of each actor. The blocks that an actor had are done again, from their beginning.
        predictor: the class.
        **kwargs: of `Predictor`, and through it of `LLM`.
    """
    is_cpu = kwargs.get("device") == "cpu"
    return dataset.map_batches(
        predictor,
        fn_constructor_args=(model, sampling_params),
        fn_constructor_kwargs=kwargs,
        batch_size=batch_size,
        batch_format="pyarrow",
        compute=ray.data.ActorPoolStrategy(size=num_actors),
        num_cpus=1 if is_cpu else None,
        num_gpus=None if is_cpu else kwargs.get("tensor_parallel_size", 1),
        max_concurrency=2,  # blocks: the next one fills the engine while the last rows of one finish
        max_restarts=max_restarts,
        max_task_retries=max_restarts,
    )
