"""The arithmetic of the benchmarks."""

import pytest

from benchmarks.gpu_time import idle_share


@pytest.mark.parametrize(
    ("spans", "share"),
    [
        ([(0.0, 4.0)], 0.0),
        ([(10.0, 14.0), (16.0, 20.0)], 0.2),
        ([(0.0, 8.0), (1.0, 3.0), (2.0, 9.0), (9.0, 10.0)], 0.0),  # beside one another, and without a gap
        ([(0.0, 5.0), (1.0, 2.0), (7.0, 8.0)], 0.25),  # a short one inside of a long one ends nothing
    ],
)
def test_idle_share(spans: list[tuple[float, float]], share: float) -> None:
    assert idle_share([(start, end, "kernel") for start, end in spans]) == pytest.approx(share)
