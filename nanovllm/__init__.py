"""nanovllm: offline batch inference for large language models."""

from nanovllm.async_llm import AsyncLLM
from nanovllm.llm import LLM
from nanovllm.sampling_params import SamplingParams
from nanovllm.version import __version__

__all__ = ["LLM", "AsyncLLM", "SamplingParams", "__version__"]
