"""What an object of a plugin implements beyond what its kind must have."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any, Protocol

import pytest

import buffer_rl.kinds
from buffer_rl.errors import TrainError
from buffer_rl.kinds.kind import absent_of, implements
from buffer_rl.kinds.trainer import SavesLater, Sleeps
from buffer_rl.plugin.calls import Guarded


class Saves:
    def is_saved(self) -> bool:
        return True


def test_a_guarded_object_offers_what_its_own_does() -> None:
    guarded = Guarded("trainer", "mine:Saves", Saves(), TrainError, ())
    assert implements(guarded, SavesLater)
    assert guarded.is_saved()
    assert not implements(guarded, Sleeps)
    assert absent_of(Saves, Sleeps) == ["sleep", "wake_up"]


def protocols() -> list[Any]:
    names = [name for _, name, _ in pkgutil.iter_modules(buffer_rl.kinds.__path__)]
    found = [value for name in names for value in vars(importlib.import_module(f"buffer_rl.kinds.{name}")).values()]
    contracts = {value for value in found if getattr(value, "_is_protocol", False)} - {Protocol}
    return sorted(contracts, key=lambda value: str(value.__name__))


@pytest.mark.parametrize("protocol", protocols(), ids=lambda protocol: protocol.__name__)
def test_no_contract_is_asked_for_by_isinstance(protocol: Any) -> None:
    """From Python 3.12 on it is blind to guarded objects, and would say in silence that they offer nothing."""
    with pytest.raises(TypeError):
        isinstance(object(), protocol)
