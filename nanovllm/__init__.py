"""nanovllm: offline batch inference for large language models."""

from nanovllm.llm import LLM
from nanovllm.sampling_params import SamplingParams
from nanovllm.version import __version__

__all__ = ["LLM", "SamplingParams", "__version__"]
