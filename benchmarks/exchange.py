"""What the ranks' exchanges of a decode step cost, NCCL's and those through one another's memory.

    python -m benchmarks.exchange --ranks 2 --hidden 4096

In CUDA graphs, medians, microseconds for one: the norm that takes a sum over ranks, with no sum to take, after NCCL's
all-reduce, and adding up the ranks' parts itself; the LM head alone, with its parts gathered, and written to rank 0; a
broadcast of one token a row. Of rank 0. The last line is JSON.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F

from benchmarks.attention import median_graph_seconds
from benchmarks.workloads import describe_environment
from nanovllm.kernels.norm import add_rms_norm
from nanovllm.layers.parallel import Parallel, connect, make_store
from nanovllm.layers.peers import ATTENTION, MLP, connect_peers

COUNT = 20  # exchanges of a graph


def main() -> None:
    args = parse_args()
    if args.rank:
        measure(args.rank, args.port, args)
        return
    store = make_store()
    command = [sys.executable, "-m", "benchmarks.exchange", *sys.argv[1:], "--port", str(store.port), "--rank"]
    children = [subprocess.Popen([*command, str(rank)]) for rank in range(1, args.ranks)]
    try:
        result = measure(0, store.port, args)
        print(json.dumps({"ranks": args.ranks, "hidden": args.hidden, **result, **describe_environment()}))
    finally:
        for child in children:
            child.terminate()


def measure(rank: int, port: int, args: argparse.Namespace) -> dict[str, object]:
    device, dtype = torch.device("cuda", rank), torch.bfloat16
    torch.cuda.set_device(device)
    parallel = connect(device, port, rank, args.ranks, 30)
    with_peers = connect_peers(parallel, device, dtype, max(args.rows), args.hidden, args.vocab)
    alone = Parallel()
    result: dict[str, object] = {"peers": with_peers.peers is not None}
    for rows in args.rows:
        ways = {"alone": alone, "nccl": parallel, "peers": with_peers}
        if with_peers.peers is None or not with_peers.peers.serves(rows):
            del ways["peers"]
        figures = {}
        for make in (norm, head, broadcast):
            for name, place in ways.items():
                run = make(place, rows, args, device, dtype)
                figures[f"{make.__name__} {name}"] = round(1e6 * median_graph_seconds(run) / COUNT, 1)
        result[f"{rows} rows"] = figures
        if rank == 0:
            print(rows, figures, flush=True)
    return result


def norm(
    parallel: Parallel, rows: int, args: argparse.Namespace, device: torch.device, dtype: torch.dtype
) -> Callable[[], object]:
    x, residual = torch.zeros(2, rows, args.hidden, dtype=dtype, device=device)
    weight = torch.ones(args.hidden, dtype=dtype, device=device)

    def run() -> None:
        for index in range(COUNT):
            if parallel.peers is not None:
                place = (ATTENTION, MLP)[index % 2]
                parallel.peers.begin_sum(place, rows).add_and_normalize(residual, weight, 1e-6)
            else:
                add_rms_norm(parallel.all_reduce(x), residual, weight, 1e-6)

    return run


def head(
    parallel: Parallel, rows: int, args: argparse.Namespace, device: torch.device, dtype: torch.dtype
) -> Callable[[], object]:
    size = replace(parallel, size=args.ranks).padded_vocab(args.vocab)
    hidden = torch.zeros(rows, args.hidden, dtype=dtype, device=device)
    weight = torch.zeros(size, args.hidden, dtype=dtype, device=device)

    def run() -> None:
        for _ in range(COUNT):
            if parallel.peers is not None:
                parallel.peers.multiply_on_first(hidden, weight)
            else:
                parallel.gather_vocab(F.linear(hidden, weight), args.vocab)

    return run


def broadcast(
    parallel: Parallel, rows: int, args: argparse.Namespace, device: torch.device, dtype: torch.dtype
) -> Callable[[], object]:
    x = torch.zeros(rows, dtype=torch.int64, device=device)

    def run() -> None:
        for _ in range(COUNT):
            parallel.from_first(x)
        x.add_(1)  # so that there is something in the graph if there is one rank

    return run


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 128, 256, 512, 1024])
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
