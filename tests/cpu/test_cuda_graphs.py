"""Which batch sizes are captured: a rule that needs no GPU."""

import bisect

import pytest

from nanovllm.engine.cuda_graphs import graph_batch_sizes


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 4, 7, 8, 9, 12, 16, 100, 256, 512, 700, 1024, 5000])
def test_every_batch_is_covered_and_none_is_above(max_num_seqs: int) -> None:
    """A batch without a size would have no graph to replay; a size above the limit would be captured for nothing."""
    sizes = graph_batch_sizes(max_num_seqs)
    assert sizes == sorted(set(sizes))
    assert sizes[0] >= 1 and sizes[-1] == max_num_seqs
    for num_seqs in range(1, max_num_seqs + 1):
        size = sizes[bisect.bisect_left(sizes, num_seqs)]
        assert size - num_seqs < max(8, num_seqs / 8), "too much padding"


def test_number_of_graphs_stays_small() -> None:
    """Each costs tens of milliseconds at start."""
    assert len(graph_batch_sizes(512)) < 40
    assert len(graph_batch_sizes(5000)) < 80
