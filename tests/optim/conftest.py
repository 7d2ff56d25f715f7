"""Each test ends the watching of torch's clipping that optimizers without an undo would leave to other tests."""

import pytest

from lowtide.optim import hooks


@pytest.fixture(autouse=True)
def _own_refusals():
    before = hooks._refusals.copy()
    yield
    for refusal in hooks._refusals - before:
        hooks._end_refusal(refusal)
