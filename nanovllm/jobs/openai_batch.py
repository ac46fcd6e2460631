"""OpenAI's batch files: one request a line as the HTTP API takes it, one response a line as it would give it."""

import re
import time
from collections.abc import Mapping
from typing import Any

from nanovllm.engine.outputs import LogprobList, RequestOutput, SampleOutput
from nanovllm.jobs.errors import RowError
from nanovllm.jobs.formats import RowFormat, RowRequest
from nanovllm.jobs.params import FIELDS
from nanovllm.jobs.readers import Row

_CHAT, _COMPLETION = "/v1/chat/completions", "/v1/completions"
# Fields of a body that change nothing about the tokens of a local model.
_IGNORED = {"model", "user", "metadata", "store", "service_tier", "stream_options", "safety_identifier",
            "prompt_cache_key", "parallel_tool_calls"}  # fmt: skip
# Fields that may only have the value that means: not used.
_UNUSED = {"stream": False, "echo": False, "best_of": 1, "suffix": "", "tools": [], "tool_choice": "none",
           "functions": [], "modalities": ["text"], "logprobs": False}  # fmt: skip
# The API's own defaults where a request sets no limit: none for a chat, so what fits.
_DEFAULTS: dict[str, dict[str, Any]] = {_CHAT: {"max_tokens": 1 << 30}, _COMPLETION: {"max_tokens": 16}}
_RECORD_ID = re.compile(r"batch_req_(\d+)")


class OpenAIFormat(RowFormat):
    """Lines of `custom_id`, `method`, `url` and `body`. The id of a result holds the index of its row."""

    def __init__(self, model: str, tokenizer: Any | None) -> None:
        """
        Args:
            model: named in responses to requests that name none.
            tokenizer: of the model, which names tokens in log-probabilities.
        """
        self._model, self._tokenizer = model, tokenizer

    def parse(self, row: Row) -> RowRequest:
        data = row.data
        if not isinstance(data.get("custom_id"), str):
            raise RowError("custom_id", f"must be a string, got {data.get('custom_id')!r:.80}")
        if data.get("method") != "POST":
            raise RowError("method", f"must be 'POST', got {data.get('method')!r:.80}")
        url, body = data.get("url"), data.get("body")
        if url not in (_CHAT, _COMPLETION):
            raise RowError("url", f"must be {_CHAT!r} or {_COMPLETION!r}, got {url!r:.80}")
        if not isinstance(body, dict):
            raise RowError("body", f"must be an object, got {body!r:.80}")
        body = {name: value for name, value in body.items() if value is not None and name not in _IGNORED}
        column = "messages" if url == _CHAT else "prompt"
        if column not in body:
            raise RowError(f"body.{column}", "is missing")
        content = body.pop(column)
        prompt = _messages(content) if url == _CHAT else _prompt(content)
        return RowRequest(prompt, f"body.{column}", _params(body, url == _CHAT), "body", _DEFAULTS[url])

    def completed(self, row: Row, output: RequestOutput) -> dict[str, Any]:
        is_chat = row.data["url"] == _CHAT
        samples = output.get("samples") or [output]
        num_prompt, num_output = len(output["prompt_token_ids"]), sum(len(one["token_ids"]) for one in samples)
        body = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{row.index:012}",
            "object": "chat.completion" if is_chat else "text_completion",
            "created": int(time.time()),
            "model": row.data["body"].get("model") or self._model,
            "choices": [self._choice(index, sample, is_chat) for index, sample in enumerate(samples)],
            "usage": {
                "prompt_tokens": num_prompt,
                "completion_tokens": num_output,
                "total_tokens": num_prompt + num_output,
                "prompt_tokens_details": {"cached_tokens": output["num_cached_tokens"]},
            },
        }
        response = {"status_code": 200, "request_id": f"req_{row.index:012}", "body": body}
        return self._record(row, response, None)

    def failed(self, row: Row, error: RowError, message: str) -> dict[str, Any]:
        return self._record(row, None, {"code": "invalid_request", "message": message, "param": error.field})

    @staticmethod
    def index_of(record: Mapping[str, Any]) -> int | None:
        match = _RECORD_ID.fullmatch(str(record.get("id")))
        return int(match.group(1)) if match and {"response", "error"} <= record.keys() else None

    @staticmethod
    def is_failure(record: Mapping[str, Any]) -> bool:
        return record["error"] is not None

    def _record(self, row: Row, response: Any, error: Any) -> dict[str, Any]:
        custom_id = row.data.get("custom_id")
        return {"id": f"batch_req_{row.index:012}", "custom_id": custom_id, "response": response, "error": error}

    def _choice(self, index: int, sample: SampleOutput, is_chat: bool) -> dict[str, Any]:
        logprobs = sample.get("logprobs")
        choice: dict[str, Any] = {"index": index, "finish_reason": sample["finish_reason"]}
        if is_chat:
            choice["message"] = {"role": "assistant", "content": sample["text"], "refusal": None}
            choice["logprobs"] = None if logprobs is None else {"content": self._chat_logprobs(logprobs)}
        else:
            choice["text"] = sample["text"]
            choice["logprobs"] = None if logprobs is None else self._completion_logprobs(logprobs)
        return choice

    def _chat_logprobs(self, logprobs: LogprobList) -> list[dict[str, Any]]:
        content, num_best = [], logprobs.token_ids.shape[1] - 1
        for entries in logprobs:
            tokens = [self._token(token_id, entry.logprob) for token_id, entry in entries.items()]
            # First the token that is there; if it is one of the best, it isn't repeated among them.
            best = tokens if len(tokens) == num_best else tokens[1:]
            content.append({**tokens[0], "top_logprobs": sorted(best, key=lambda token: -token["logprob"])})
        return content

    def _completion_logprobs(self, logprobs: LogprobList) -> dict[str, Any]:
        rows = [[(self._text(token_id), entry.logprob) for token_id, entry in entries.items()] for entries in logprobs]
        tokens = [row[0][0] for row in rows]
        offsets = [0]
        for token in tokens[:-1]:
            offsets.append(offsets[-1] + len(token))
        return {
            "tokens": tokens,
            "token_logprobs": [row[0][1] for row in rows],
            "top_logprobs": [dict(row) for row in rows],
            "text_offset": offsets[: len(tokens)],
        }

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self._text(token_id)
        # A part of a character has no text of its own; its bytes are lost in the replacement character.
        return {"token": text, "logprob": logprob, "bytes": None if "\ufffd" in text else list(text.encode())}

    def _text(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._tokenizer is None else str(self._tokenizer.decode([token_id]))


def _messages(content: Any) -> list[Any]:
    if not isinstance(content, list) or not content:
        raise RowError("body.messages", f"must be a list of messages, got {content!r:.80}")
    return [_message(message, f"body.messages[{place}]") for place, message in enumerate(content)]


def _message(message: Any, field: str) -> Any:
    """The message with its content as one text; it may be a list of parts."""
    if not isinstance(message, dict):
        raise RowError(field, f"must be an object with 'role' and 'content', got {message!r:.80}")
    if not isinstance(message.get("content"), list):
        return message
    texts = []
    for place, part in enumerate(message["content"]):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise RowError(f"{field}.content[{place}]", f"must be a part of type 'text', got {part!r:.80}")
        texts.append(part["text"])
    return {**message, "content": "".join(texts)}


def _prompt(content: Any) -> str | list[Any]:
    """The API allows several prompts in a request; of those, a list of one is taken."""
    if isinstance(content, list) and len(content) == 1 and isinstance(content[0], str | list):
        content = content[0]
    is_prompt = isinstance(content, str) or (isinstance(content, list) and all(type(one) is int for one in content))
    if not is_prompt:
        raise RowError("body.prompt", f"must be one string or one list of token ids, got {content!r:.80}")
    return content


def _params(body: dict[str, Any], is_chat: bool) -> dict[str, Any]:
    """The body's remaining fields as those of `SamplingParams`, which may be in a body under their own names, too."""
    params = dict(body)
    if "max_completion_tokens" in params:
        params["max_tokens"] = params.pop("max_completion_tokens")
    num_best = params.pop("top_logprobs", 0)
    if is_chat and params.get("logprobs") is True:
        params["logprobs"] = num_best
    for name, unused in _UNUSED.items():
        if name in params and params[name] == unused and type(params[name]) is type(unused):
            del params[name]
    if "response_format" in params:
        params.update(_response_format(params.pop("response_format")))
    for name in params:
        if name not in FIELDS:
            raise RowError(f"body.{name}", f"is not supported, got {params[name]!r:.80}")
    return params


def _response_format(value: Any) -> dict[str, Any]:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"json_schema": {"type": "object"}}
    if kind == "json_schema":
        schema = value.get("json_schema")
        if isinstance(schema, dict) and isinstance(schema.get("schema"), dict):
            return {"json_schema": schema["schema"]}
        raise RowError(
            "body.response_format.json_schema", f"must have a 'schema' that is an object, got {schema!r:.80}"
        )
    raise RowError("body.response_format", f"must be of type text, json_object or json_schema, got {value!r:.80}")
