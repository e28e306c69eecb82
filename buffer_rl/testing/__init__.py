"""Fakes that ship with the library, for tests of plugins and of the library itself."""
