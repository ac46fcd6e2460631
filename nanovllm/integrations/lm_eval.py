"""EleutherAI's lm-evaluation-harness on this engine, as its model "nanovllm" (`pip install lm_eval`).

    python -m nanovllm.integrations.lm_eval --model nanovllm --model_args pretrained=path/to/model --tasks arc_easy

takes all arguments of the harness's own command. In Python, import this module before
`lm_eval.simple_evaluate(model="nanovllm", model_args="pretrained=path/to/model", ...)`, or pass the object:
`lm_eval.simple_evaluate(model=NanoLM(llm), ...)`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from nanovllm import LLM, SamplingParams

# What a task's generation_kwargs may say beside the harness's own `until`, `max_gen_toks` and `do_sample`.
_SAMPLING_KEYS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
# Texts with their tokens: (prompt, continuation) or None, the prompt's, the continuation's.
_Encoded = tuple[tuple[str, str] | None, list[int], list[int]]


@register_model("nanovllm")
class NanoLM(TemplateLM):
    """Hands each call's requests to the engine at once, which batches them itself. Texts are tokenised by the harness's
    rules, and cut as its Hugging Face model cuts them, so that the numbers are the same."""

    def __init__(
        self,
        pretrained: str | LLM,
        *,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        chat_template_args: Mapping[str, Any] | None = None,
        device: str | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        """
        Args:
            pretrained: what `LLM` takes, or an LLM.
            max_length: most tokens that the model sees at once, at most (and by default) the engine's own limit.
            max_gen_toks: output tokens of tasks that don't say how many.
            add_bos_token: whether texts begin with that token; None leaves it to the tokenizer.
            prefix_token_id: stands before texts that nothing precedes; None is the tokenizer's BOS, else its EOS.
            chat_template_args: more variables of the chat template.
            device: of the engine, if it is made here.
            batch_size, max_batch_size: the harness passes them; the engine needs none.
            **kwargs: settings of the engine, if it is made here.
        """
        super().__init__()
        if isinstance(pretrained, LLM):
            if kwargs:
                raise TypeError(f"{', '.join(kwargs)}: settings of an engine that is made already")
            self.llm = pretrained
        else:
            # Unless told otherwise, the harness's command says "cuda:0", whatever the machine has.
            if device is None or (device.startswith("cuda") and not torch.cuda.is_available()):
                device = "auto"
            self.llm = LLM(pretrained, device=device, **kwargs)
        if self.llm.tokenizer is None:
            raise ValueError(f"{self.llm.config.model} has no tokenizer, but tasks are texts")
        self.tokenizer = self.llm.tokenizer
        limit = min(self.llm.max_model_len, self.llm.inputs.num_kv_tokens)
        if max_length is not None and not 1 < max_length <= limit:
            raise ValueError(f"max_length must be in [2, {limit}], got {max_length}")
        self.max_length = max_length or limit
        self.max_gen_toks = max_gen_toks
        self._add_bos_token = add_bos_token
        self._prefix_token_id = prefix_token_id
        self._chat_template_args = dict(chat_template_args or {})

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        own = (self._prefix_token_id, self.tokenizer.bos_token_id, self.tokenizer.eos_token_id)
        token_id = next((token_id for token_id in own if token_id is not None), None)
        if token_id is None:
            raise ValueError("this tokenizer begins and ends texts with no token of its own: pass prefix_token_id")
        return token_id

    @property
    def tokenizer_name(self) -> str:
        return (self.tokenizer.name_or_path or self.llm.config.model).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        if add_special_tokens is None:
            add_special_tokens = self._add_bos_token
            if string.startswith(self.tokenizer.decode([self.prefix_token_id])):
                add_special_tokens = False  # the text, a chat template's perhaps, has them
        return self.tokenizer.encode(string, add_special_tokens=add_special_tokens is not False)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
            **self._chat_template_args,
        )

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-probability of each whole text. One that is longer than the model sees at once is cut into windows, each
        token scored once."""
        windows: list[_Encoded] = []
        owners: list[int] = []
        for index, request in enumerate(requests):
            pairs = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for pair in pairs:
                windows.append((None, *make_disjoint_window(pair)))
                owners.append(index)
        totals = [0.0] * len(requests)
        for owner, (logprob, _) in zip(owners, self._loglikelihood_tokens(windows, disable_tqdm), strict=True):
            totals[owner] += logprob
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The text that follows each request's, up to a stop string, an end-of-sequence token or `max_gen_toks`."""
        prompts, params = [], []
        for request in requests:
            text, gen_kwargs = request.args
            one = self._sampling_params(gen_kwargs)
            if one.max_tokens >= self.max_length:
                raise ValueError(f"max_gen_toks={one.max_tokens} leaves nothing of max_length={self.max_length}")
            prompts.append(self.tok_encode(text)[one.max_tokens - self.max_length :])
            params.append(one)
        outputs = self.llm.generate(prompts, params, use_tqdm=not disable_tqdm)
        texts = [output["text"] for output in outputs]
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts

    def _loglikelihood_tokens(
        self, requests: Sequence[_Encoded], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        prompts, continuations = [], []
        for _, prompt, continuation in requests:
            num_left = self.max_length + 1 - len(continuation)  # the last token is not seen
            if num_left < 1:
                raise ValueError(
                    f"a continuation has {len(continuation)} tokens, more than max_length={self.max_length}"
                )
            prompts.append(prompt[-num_left:])
            continuations.append(continuation)
        outputs = self.llm.score(prompts, continuations, use_tqdm=not disable_tqdm)
        results = [(output["logprob"], output["is_greedy"]) for output in outputs]
        for (texts, _, _), result in zip(requests, results, strict=True):
            if texts is not None:  # a window of a rolling one is nothing to be remembered
                self.cache_hook.add_partial("loglikelihood", texts, result)
        return results

    def _sampling_params(self, gen_kwargs: Mapping[str, Any]) -> SamplingParams:
        """Raises ValueError for a setting of generation that this engine doesn't have."""
        settings: dict[str, Any] = dict(normalize_gen_kwargs(dict(gen_kwargs), self.max_gen_toks))
        max_tokens = settings.pop("max_gen_toks")
        stop = tuple(text for text in settings.pop("until") if text)
        if not settings.pop("do_sample"):
            settings["temperature"] = 0.0
        settings.setdefault("temperature", 1.0)
        if unknown := settings.keys() - set(_SAMPLING_KEYS):
            raise ValueError(f"generation_kwargs: {', '.join(sorted(unknown))} not supported")
        return SamplingParams(max_tokens=max_tokens, stop=stop, **settings)


def main() -> None:
    """The harness's command line, which knows this model."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()
