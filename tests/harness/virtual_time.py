"""Virtual time, under the name that tests import: ``buffer_rl.testing.virtual_time``."""

from buffer_rl.testing.virtual_time import NothingLeft, Span, VirtualLoop, VirtualRuntime, VirtualTask

__all__ = ["NothingLeft", "Span", "VirtualLoop", "VirtualRuntime", "VirtualTask"]
