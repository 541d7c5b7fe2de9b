"""Pairs that lie joined add what they would add one by one, whichever of them are on."""

from __future__ import annotations

import pytest
import torch

from runtime.pairs import JoinedPairs, Pair
from tests.lora_files import Draw

draw = Draw(1)
PAIRS = [Pair(draw(rank, 48), draw(32, rank, spread=0.5), 1.0) for rank in (4, 1, 3, 4)]
X = draw(2, 5, 48, spread=1.0)


def added(joined: JoinedPairs) -> torch.Tensor:
    output = torch.zeros(2, 5, 32)
    joined.add_to(output, X)
    return output.double()


def expected(scales: dict[int, float]) -> torch.Tensor:
    products = (scale * PAIRS[n].up.double() @ PAIRS[n].down.double() for n, scale in scales.items())
    return X.double() @ sum(products, torch.zeros(32, 48).double()).T


@pytest.mark.parametrize(
    "scales", [{0: 1.0}, {3: -0.5, 0: 2.0}, {1: 0.3, 2: 0.7}, {0: 1, 1: 1, 2: 1, 3: 1}, {}], ids=str
)
@pytest.mark.parametrize("before", [{}, {0: 1.0, 1: 1.0, 2: 1.0, 3: 1.0}, {2: 1.0}], ids=str)
def test_what_is_put_on_alone_is_added(before, scales):
    joined = JoinedPairs(X.device)
    for each in (before, scales):
        joined.put([PAIRS[n]._replace(scale=float(scale)) for n, scale in each.items()])
    assert torch.allclose(added(joined), expected(scales), atol=1e-6)
    assert len(joined.pairs) == len(scales)


def test_a_pair_twice_counts_twice():
    joined = JoinedPairs(X.device)
    joined.put([PAIRS[0], PAIRS[2], PAIRS[0]._replace(scale=0.5)])
    assert torch.allclose(added(joined), expected({0: 1.5, 2: 1.0}), atol=1e-6)


def test_on_off_and_another_strength_copy_no_matrix():
    joined = JoinedPairs(X.device)
    joined.put(PAIRS)
    matrices = {run.down.untyped_storage().data_ptr() for run in joined._runs}
    for chosen in ([PAIRS[1]], [], [PAIRS[3]._replace(scale=0.2), PAIRS[0]]):
        joined.put(chosen)
        assert {run.down.untyped_storage().data_ptr() for run in joined._runs} <= matrices
    other = Pair(PAIRS[0].down.clone(), PAIRS[0].up.clone(), 1.0)
    joined.put([other])
    assert [len(run.down) for run in joined._runs] == [4] and joined._lying == [other], "what is off has gone"
