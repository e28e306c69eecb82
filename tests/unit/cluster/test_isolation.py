"""A version of Ray without the private names that isolation takes is refused by name."""

from __future__ import annotations

import os

import pytest
import ray

from buffer_rl.cluster.isolation import isolated_ray
from buffer_rl.errors import ClusterError


def test_a_version_of_ray_without_a_private_name_is_refused_and_the_environment_stays(monkeypatch):
    before = dict(os.environ)
    monkeypatch.delattr(ray._raylet, "AuthenticationTokenLoader")
    missing = rf"Ray {ray.__version__} has no ray\._raylet\.AuthenticationTokenLoader"
    with pytest.raises(ClusterError, match=missing), isolated_ray():
        raise AssertionError("the block is not entered")
    assert dict(os.environ) == before
