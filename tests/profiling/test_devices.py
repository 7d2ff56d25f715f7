"""The device table."""

import pytest

from lowtide.errors import TraceError
from lowtide.profiling.devices import DEVICES, find_device, hardware_name


def test_devices_are_found_by_name():
    assert find_device("H200") is DEVICES["h200"]
    assert find_device("cuda") in DEVICES.values()
    assert hardware_name("h200") == "NVIDIA H200"
    assert hardware_name("cpu").startswith("CPU")


def test_an_unknown_device_lists_those_that_are_known():
    with pytest.raises(TraceError) as error:
        find_device("h2oo")
    assert "h200" in str(error.value)
