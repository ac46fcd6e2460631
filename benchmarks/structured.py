"""What constrained output costs on the host: compiling, filling the masks of a step, taking its tokens.

    python -m benchmarks.structured [--model PATH] [--num-seqs 256]

Sequences write documents of three schemas, each from another place on, and begin anew at the end. Only the tokenizer
of the model is used (default: the demo's). Masks are filled while the device computes the forward, so they cost nothing
as long as they take less time. Median and highest of the steps; the last line is JSON.
"""

import argparse
import json
import random
import statistics
import time
from typing import Any

from benchmarks.workloads import describe_environment
from nanovllm import SamplingParams
from nanovllm.constraint import Constraint
from nanovllm.engine.grammar_compiler import Grammar, GrammarCompiler
from nanovllm.engine.grammar_matcher import Matcher, fill_bitmasks
from nanovllm.utils.checkpoint import open_checkpoint
from nanovllm.utils.demo import demo_model

NODE = {
    "type": "object",
    "properties": {"v": {"type": "integer"}, "kids": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
    "required": ["v", "kids"],
}
CALL = {
    "type": "object",
    "properties": {
        "tool": {"enum": ["search", "calc", "mail"]},
        "query": {"type": "string", "maxLength": 80},
        "limit": {"type": "integer", "minimum": 1, "maximum": 100},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z_]{1,16}$"}, "maxItems": 5},
    },
    "required": ["tool", "query", "limit", "tags"],
}
WIDE = {"type": "object", "properties": {f"field_{i}": {"type": "string"} for i in range(30)}}
DOCUMENTS: list[tuple[dict[str, Any], Any]] = [
    ({"$defs": {"node": NODE}, "$ref": "#/$defs/node"}, {"v": 1, "kids": [{"v": 22, "kids": []}] * 3}),
    (CALL, {"tool": "search", "query": "weather in Paris tomorrow", "limit": 25, "tags": ["weather", "travel_plan"]}),
    (WIDE, {f"field_{i}": "some words of a longer text" for i in range(30)}),
]


class Writer:
    """A sequence that writes one document again and again."""

    def __init__(self, grammar: Grammar, token_ids: list[int], start: int) -> None:
        self.grammar, self.token_ids, self.position = grammar, token_ids, start
        self.matcher = self._restart()
        for token_id in token_ids[:start]:
            self.matcher.accept(token_id)

    def write(self) -> None:
        assert self.matcher.accept(self.token_ids[self.position]), self.matcher.error
        self.position += 1
        if self.position == len(self.token_ids):
            self.position, self.matcher = 0, self._restart()

    def _restart(self) -> Matcher:
        return self.grammar.start(min_tokens=0)


def milliseconds(action: Any) -> tuple[Any, float]:
    start = time.perf_counter()
    result = action()
    return result, 1e3 * (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None)
    parser.add_argument("--num-seqs", type=int, default=256)
    parser.add_argument("--num-steps", type=int, default=200)
    args = parser.parse_args()
    tokenizer = open_checkpoint(args.model or demo_model(), with_weights=False).load_tokenizer()
    assert tokenizer is not None
    compiler = GrammarCompiler(tokenizer, len(tokenizer), {tokenizer.eos_token_id}, patience=60)
    first_ms = milliseconds(lambda: compiler.compile(Constraint("regex", "a")))[1]
    grammars, compile_ms = [], []
    for schema, _ in DOCUMENTS:
        constraint = SamplingParams(json_schema=schema).constraint
        assert constraint is not None
        future, elapsed = milliseconds(lambda one=constraint: compiler.compile(one))
        grammars.append(future.result())
        compile_ms.append(elapsed)
    texts = [tokenizer(json.dumps(value), add_special_tokens=False)["input_ids"] for _, value in DOCUMENTS]
    random.seed(0)
    writers = [Writer(grammars[i % 3], texts[i % 3], random.randrange(len(texts[i % 3]))) for i in range(args.num_seqs)]
    fill_ms, accept_ms = [], []
    for _ in range(args.num_steps):
        fill_ms.append(milliseconds(lambda: fill_bitmasks([writer.matcher for writer in writers]))[1])
        accept_ms.append(milliseconds(lambda: [writer.write() for writer in writers])[1])
    result = {
        "vocabulary": len(tokenizer),
        "num_seqs": args.num_seqs,
        "tokenizer_ms": round(first_ms, 1),
        "compile_ms": [round(ms, 2) for ms in compile_ms],
        "fill_ms": [round(statistics.median(fill_ms), 2), round(max(fill_ms), 2)],
        "accept_ms": [round(statistics.median(accept_ms), 2), round(max(accept_ms), 2)],
        **describe_environment(),
    }
    for name, value in result.items():
        print(f"{name:14s}{value}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
