"""Faults for the worker processes of a tensor-parallel engine, which a test can't patch from outside."""

import time
from typing import Any

from nanovllm.engine import worker


def install(name: str) -> None:
    """Makes rank 1 fail when it loads its weights ("load"), or in its third step: "raise", or "hang"."""

    def fail(*args: Any, **kwargs: Any) -> Any:
        if name == "hang":
            time.sleep(3600)
        raise LookupError("a fault of rank 1")

    follow, num_steps = worker.FollowingRunner.follow, 0

    def follow_for_a_while(*args: Any) -> None:
        nonlocal num_steps
        num_steps += 1
        return (fail if num_steps == 3 else follow)(*args)

    if name == "load":
        worker.FollowingRunner._load = fail
    else:
        worker.FollowingRunner.follow = follow_for_a_while
