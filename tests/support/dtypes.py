"""The dtypes in which measurements are computed."""

import pytest
import torch

EACH_DTYPE = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
