"""Targets for tests of what does not depend on whose memory it is."""

from __future__ import annotations

import pytest

# For a fixture `target`: on npu-virtual, such tests wait for `pytest -m sweep`.
LOCAL_FIRST = ["npu-local", pytest.param("npu-virtual", marks=pytest.mark.sweep)]
