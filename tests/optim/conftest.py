"""Each test ends the watching of torch's clipping that optimizers without an undo would leave to other tests."""

import pytest

from lowtide.optim import hooks


@pytest.fixture(autouse=True)
def _own_refusals():
    before = set(hooks._refusals)
    yield
    for refusal in hooks._refusals.keys() - before:
        hooks._end_refusal(refusal)
