"""What IREE reads parameters from is kept as long as it refers to it, and no longer."""

from __future__ import annotations

import gc
import weakref

import torch

from npu_iree.frozen import bytes_at
from npu_iree.parameter_index import parameter_index


def owned_by(tensor: torch.Tensor) -> object:
    return bytes_at(tensor.data_ptr(), tensor.nbytes, owner=tensor)


def test_memory_is_kept_until_iree_lets_go_of_it() -> None:
    """Who lets go last frees it; IREE does so on threads of its own, without Python's lock."""
    tensor = torch.ones(16)
    owner = weakref.ref(tensor)
    index = parameter_index({"weight": owned_by(tensor)})
    provider = index.create_provider(scope="model")
    del tensor, index
    gc.collect()
    assert owner() is not None
    del provider
    assert owner() is not None, "not where IREE lets go of it"
    gc.collect()
    assert owner() is None


def test_the_next_index_lets_go_of_what_is_not_needed() -> None:
    tensor = torch.ones(16)
    owner = weakref.ref(tensor)
    index = parameter_index({"weight": owned_by(tensor)})
    del tensor
    other = parameter_index({"other": owned_by(torch.ones(4))})
    assert owner() is not None
    del index
    parameter_index({})
    assert owner() is None
    del other
