"""Where and in what precision a model is computed."""

import torch

from nanovllm.utils.checkpoint import Checkpoint


def resolve_device(name: str, rank: int = 0) -> torch.device:
    """A rank's device for a config's `device`.

    Raises:
        ValueError: it is not a device, or not there.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device must be 'auto', 'cpu', 'cuda' or 'cuda:N', got {name!r}") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be 'auto', 'cpu', 'cuda' or 'cuda:N', got {name!r}")
    if device.type == "cpu":
        return device
    index = (device.index or 0) + rank
    if index >= torch.cuda.device_count():
        shared = f", and rank {rank} needs number {index}" if rank else ""
        raise ValueError(f"device {name!r}: this machine has {torch.cuda.device_count()} CUDA devices{shared}")
    return torch.device("cuda", index)


def place_replicas(name: str, num_replicas: int, num_ranks: int) -> list[str]:
    """The device of rank 0 of each replica, for a config's `device`: replica r has `num_ranks` of them from there on.

    Raises:
        ValueError: it is not a device, or there are too few.
    """
    first = resolve_device(name)
    if first.type == "cpu":
        return ["cpu"] * num_replicas
    start, count = first.index, torch.cuda.device_count()
    stop = start + num_replicas * num_ranks
    if stop > count:
        raise ValueError(
            f"data_parallel_size={num_replicas} with tensor_parallel_size={num_ranks} needs the CUDA devices {start} "
            f"to {stop - 1}, and this machine has {count}"
        )
    return [f"cuda:{index}" for index in range(start, stop, num_ranks)]


def resolve_dtype(name: str, checkpoint: Checkpoint, device: torch.device) -> torch.dtype:
    """The torch dtype of a config's `dtype`; "auto" is float32 on a CPU, else float16 for a float16 checkpoint and
    bfloat16 for any other."""
    if name == "auto":
        if device.type == "cpu":
            return torch.float32
        own = getattr(checkpoint.config, "dtype", None)  # transformers 4 says torch_dtype
        own = own or getattr(checkpoint.config, "torch_dtype", None)
        return torch.float16 if str(own).removeprefix("torch.") == "float16" else torch.bfloat16
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype
