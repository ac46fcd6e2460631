"""A whole job on Ray Data: reads Parquet, generates, writes Parquet.

    python -m benchmarks.ray_parquet path/to/model prompts/ answers/ --actors 8

Run it on a node of the cluster (`ray start`), or alone, which starts a cluster of this machine. Paths, and the model's,
must mean the same on every node. `prompts/` has a column `prompt`; `answers/` gets `generated_text` and `error`, too.
"""

import argparse

import ray.data

from nanovllm import SamplingParams
from nanovllm.integrations.ray import predict


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("input")
    parser.add_argument("output")
    parser.add_argument("--actors", type=int, default=1)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--max-tokens", type=int, default=256)
    args = parser.parse_args()
    dataset = predict(
        ray.data.read_parquet(args.input),
        args.model,
        SamplingParams(temperature=0, max_tokens=args.max_tokens),
        num_actors=args.actors,
        tensor_parallel_size=args.tensor_parallel_size,
        device=args.device,
    )
    dataset.write_parquet(args.output)


if __name__ == "__main__":
    main()
