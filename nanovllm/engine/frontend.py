"""What an engine knows of its model without weights: the tokenizer, and what checks and makes requests."""

import logging
from typing import Any

from nanovllm.config import Config
from nanovllm.engine.inputs import InputProcessor
from nanovllm.engine.output_text import OutputTexts
from nanovllm.engine.requests import RequestFactory
from nanovllm.models import resolve_architecture
from nanovllm.models.decoder import DecoderSpec
from nanovllm.utils.checkpoint import Checkpoint, open_checkpoint

logger = logging.getLogger(__name__)


class Frontend:
    """The way into an engine, and its texts on the way out: the same whoever computes.

    Attributes:
        tokenizer: a transformers tokenizer, or None if the checkpoint has none.
        max_model_len: most tokens of a sequence, by the config and the model.
        inputs: checks prompts and params.
        requests: makes requests of what was checked.
        texts: makes results of requests.
    """

    config: Config
    inputs: InputProcessor
    requests: RequestFactory
    texts: OutputTexts

    def _open_model(self) -> tuple[Checkpoint, DecoderSpec]:
        """Reads everything of the model but its weights."""
        checkpoint = open_checkpoint(self.config.model, with_weights=self.config.load_format != "dummy")
        _, spec = resolve_architecture(checkpoint.config)
        self.tokenizer = checkpoint.load_tokenizer()
        self.eos_token_ids = checkpoint.eos_token_ids(self.tokenizer)
        self.generation_config = checkpoint.generation_config()
        self.max_model_len = min(self.config.max_model_len, spec.max_model_len)
        if self.max_model_len < self.config.max_model_len:
            logger.info("max_model_len is %d: the model's own limit", self.max_model_len)
        self._num_sampled_ids = min(spec.vocab_size, _num_token_ids(self.tokenizer, spec.vocab_size))
        return checkpoint, spec

    def _make_way_in(self, spec: DecoderSpec, num_kv_tokens: int) -> None:
        """What checks prompts, and makes requests of them, under the limits of the model and the KV cache."""
        self.inputs = InputProcessor(
            self.tokenizer,
            vocab_size=spec.vocab_size,
            max_model_len=self.max_model_len,
            num_kv_tokens=num_kv_tokens,
            num_sampled_ids=self._num_sampled_ids,
            eos_token_ids=self.eos_token_ids,
        )
        self.texts = OutputTexts(self.tokenizer)
        self.requests = RequestFactory(
            self.inputs,
            self.texts,
            seed=self.config.seed,
            salt_above=spec.max_position_embeddings if spec.rope.depends_on_length else None,
        )


def _num_token_ids(tokenizer: Any | None, vocab_size: int) -> int:
    """One more than the highest token id that the tokenizer can decode."""
    return vocab_size if tokenizer is None else 1 + max(tokenizer.get_vocab().values())
