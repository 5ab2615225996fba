"""For test_isolation: a module that imports something of megatron, as no module with isolated tests may."""

from importlib.util import module_from_spec, spec_from_loader
from sys import modules

modules["megatron"] = module_from_spec(spec_from_loader("megatron", None))  # type: ignore[arg-type]
modules["megatron"].__file__ = "package_info.py"


def anything() -> None:
    """A test's body that needs nothing."""
