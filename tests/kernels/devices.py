"""The device of kernel tests, a GPU or a CPU with Triton's interpreter, and tolerances beside float64."""

import torch

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}  # a few units of the dtype


def assert_near(actual, exact, tolerance):
    error = float((actual.double() - exact).norm() / exact.norm().clamp(min=1e-30))
    assert error < tolerance, f"{error:.1e}"
