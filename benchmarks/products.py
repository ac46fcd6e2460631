"""A layer's matrix products in a decode step: as the library chooses, and all by cuBLAS.

    python -m benchmarks.products --shape qwen3-0.6b --rows 1 16 64 128 256
    python -m benchmarks.products --shape qwen3-8b --tensor-parallel-size 2

The products, norms and activation of several layers, whose weights the L2 cache can't hold, run one after the other in
a CUDA graph; without attention, and without exchanges between ranks. Microseconds a layer. The last line is JSON.
"""

import argparse
import json
from collections.abc import Callable

import torch
from torch import nn

from benchmarks.attention import median_graph_seconds
from benchmarks.shapes import SHAPES
from benchmarks.workloads import describe_environment
from nanovllm import kernels
from nanovllm.kernels import skinny_linear
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import GatedLinear, Linear
from nanovllm.layers.parallel import Parallel

WEIGHT_BYTES = 400 << 20


class Layer(nn.Module):
    """What a rank multiplies in a layer."""

    def __init__(self, shape: dict[str, int], parallel: Parallel) -> None:
        super().__init__()
        hidden, self.is_whole = shape["hidden_size"], parallel.size == 1
        heads = parallel.shard_heads(shape["num_attention_heads"], shape["num_key_value_heads"], shape["head_dim"])
        self.num_query_features = len(heads.query_rows)
        features = parallel.shard(shape["intermediate_size"])
        self.qkv = Linear(hidden, len(heads.query_rows) + 2 * len(heads.kv_rows))
        self.output = Linear(len(heads.query_rows), hidden)
        self.gate_up, self.down = GatedLinear(hidden, features), Linear(len(features), hidden)
        self.norms = nn.ModuleList(RMSNorm(hidden, 1e-6) for _ in range(2))

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        queries = self.qkv(hidden)[:, : self.num_query_features]  # for what attention would make of them
        hidden = self.norms[0].add_and_normalize(self._sum(self.output, queries), residual)  # type: ignore[operator]
        result: torch.Tensor = self.norms[1].add_and_normalize(  # type: ignore[operator]
            self._sum(self.down, self.gate_up(hidden)), residual
        )
        return result

    def _sum(self, linear: Linear, x: torch.Tensor) -> torch.Tensor:
        """Ranks add up whole parts."""
        result = linear.in_pieces(x) if self.is_whole else linear(x)
        assert isinstance(result, torch.Tensor)
        return result


def main() -> None:
    args = parse_args()
    shape, parallel = SHAPES[args.shape], Parallel(0, args.tensor_parallel_size)
    with torch.device("cuda"), torch.inference_mode():
        layers = [Layer(shape, parallel).to(torch.bfloat16)]
        num_bytes = sum(parameter.nbytes for parameter in layers[0].parameters())
        layers += [Layer(shape, parallel).to(torch.bfloat16) for _ in range(WEIGHT_BYTES // num_bytes)]
        for layer in layers:
            for parameter in layer.parameters():
                parameter.normal_(0.0, 0.02)
        result: dict[str, object] = {"shape": args.shape, "tensor_parallel_size": args.tensor_parallel_size}
        for num_rows in args.rows:
            ours, library = measure(layers, num_rows, shape["hidden_size"])
            result[f"{num_rows} rows"] = {"us": ours, "cublas_us": library}
            print(f"{num_rows:5} rows: {ours:7.1f} us a layer, all by cuBLAS {library:7.1f}", flush=True)
    print(json.dumps({**result, **describe_environment()}))


def measure(layers: list[Layer], num_rows: int, hidden_size: int) -> tuple[float, float]:
    """Microseconds a layer, as the library chooses and by cuBLAS alone."""
    x, residual = (torch.randn(num_rows, hidden_size, dtype=torch.bfloat16) for _ in range(2))

    def run() -> torch.Tensor:
        hidden = x
        for layer in layers:
            hidden = layer(hidden, residual)
        return hidden

    with kernels.compiling_ahead():
        run()
    ours = _microseconds(run, len(layers))
    suits = skinny_linear.suits
    skinny_linear.suits = lambda *args, **kwargs: False  # type: ignore[assignment]
    try:
        return ours, _microseconds(run, len(layers))
    finally:
        skinny_linear.suits = suits


def _microseconds(run: Callable[[], object], num_layers: int) -> float:
    return round(median_graph_seconds(run) / num_layers * 1e6, 2)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-0.6b")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 128, 256])
    return parser.parse_args()


if __name__ == "__main__":
    main()
