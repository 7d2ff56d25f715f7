"""Bytes that nvidia-smi shows above the allocated ones."""

import pytest
import torch

from lowtide import zoo
from lowtide.profiling import profile
from lowtide.profiling.outside import read_outside


def test_there_is_nothing_outside_on_a_cpu():
    assert read_outside(torch.device("cpu")) is None
    assert profile(zoo.small("lenet")).outside is None


@pytest.mark.gpu
def test_a_profile_on_a_gpu_explains_what_nvidia_smi_shows():
    outside = profile(zoo.small("lenet", device="cuda")).outside
    assert outside is not None
    assert 0 < outside.reserved_bytes <= outside.device_bytes
    free, total = torch.cuda.mem_get_info()
    assert outside.device_bytes == total
    shown = outside.context_bytes + outside.other_bytes + torch.cuda.memory_reserved()
    assert shown == pytest.approx(total - free, rel=0.05)
