"""Which hosts are this machine, and who is told before the start that memory cannot be shared."""

from __future__ import annotations

import pytest

from buffer_rl.cluster.locality import is_this_machine, require_local_engines, require_local_trainer
from buffer_rl.errors import ConfigError

ELSEWHERE = "192.0.2.7"  # RFC 5737: an address for documentation, which no machine has


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.0.0.9"])
def test_the_loopback_interface_is_this_machine(host: str) -> None:
    assert is_this_machine(host)


def test_addresses_of_others_are_not() -> None:
    assert not is_this_machine(ELSEWHERE)


def test_engines_elsewhere_are_refused_for_shared_memory_only() -> None:
    urls = ["http://127.0.0.1:30000", f"http://{ELSEWHERE}:30000"]
    require_local_engines("disk", urls)
    require_local_engines("tensor", urls[:1])
    with pytest.raises(ConfigError, match=r"192\.0\.2\.7:30000 is not on this machine"):
        require_local_engines("tensor", urls)


def test_a_trainer_elsewhere_is_refused_for_shared_memory_only() -> None:
    require_local_trainer("disk", ELSEWHERE)
    require_local_trainer("tensor", "127.0.0.1")
    with pytest.raises(ConfigError, match="the trainer runs on"):
        require_local_trainer("tensor", ELSEWHERE)
