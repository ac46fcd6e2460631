"""The name that users import."""

from nanovllm.engine.llm_engine import LLMEngine


class LLM(LLMEngine):
    """A model, ready to complete prompts: `LLM(model).generate(prompts, sampling_params)`."""
