"""Options of the ``code`` reward, and the check of its sandbox before anything starts."""

from __future__ import annotations

from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import field_validator

from buffer_rl.errors import ConfigError
from buffer_rl.kinds.kind import implements
from buffer_rl.options.checks import refuse
from buffer_rl.options.redaction import holds_credentials
from buffer_rl.options.section import Section, option
from buffer_rl.plugin.hookspecs import hookimpl
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl_code.sandbox import Sandbox

if TYPE_CHECKING:
    from buffer_rl.args import Args

REWARDS = ("code", "code_fraction")
MODULE = "buffer_rl_code.reward"
METHODS = ("check()", "run(program)")
SHIPPED = MappingProxyType(
    {"bubblewrap": "buffer_rl_code.bubblewrap:Bubblewrap", "http": "buffer_rl_code.server:SandboxServer"}
)
"""References of the sandboxes that come with buffer_rl."""


class CodeOptions(Section):
    """The ``code`` reward: where candidates run, and their limits."""

    heading: ClassVar[str] = "Code reward"

    code_sandbox: str | None = option(
        None, "where --rm-type code runs candidates: bubblewrap (the default), the URL of a SandboxFusion server, or "
        "module:Class of your own",
        metavar="NAME|URL",
    )  # fmt: skip
    code_timeout_s: float = option(
        10.0, "seconds of processor time of a candidate for all its tests together, and of time that it sleeps", gt=0
    )
    code_memory_mb: int = option(
        2048, "memory of all processes of a candidate together, with its temporary files; each of 8 gets its share",
        ge=512,
    )  # fmt: skip

    @field_validator("code_sandbox")
    @classmethod
    def _has_no_credentials(cls, value: str | None) -> str | None:
        if value and holds_credentials(value):
            raise ValueError("an address here has no credentials: set BUFFER_RL_CODE_SANDBOX_TOKEN")
        return value


if TYPE_CHECKING:

    class CodeArgs(Args, CodeOptions):
        """The options of a run with those of this plugin, for a type checker."""


@hookimpl
def buffer_rl_add_options() -> list[str]:
    """The section above, by reference."""
    return [f"{__name__}:CodeOptions"]


@hookimpl
def buffer_rl_configure(config: Any) -> None:
    """Raises ConfigError if the run uses the ``code`` reward and its sandbox does not work, or does not hold."""
    if not hasattr(config, "code_sandbox"):  # options that a program made may lack the section
        return
    from buffer_rl.data.eval_sets import rewards_named  # needs packages that naming a plugin does not

    if config.code_sandbox is not None or any(map(_is_code, rewards_named(config))):
        once, most = config.code_timeout_s, config.rm_timeout_s
        what = f"--code-timeout-s {once:g} and --rm-timeout-s {most:g}: a reward has no time left for its candidate"
        refuse(once >= most, what, "a higher --rm-timeout-s, such as 120")
        sandbox_of(config).check()


def sandbox_of(args: CodeArgs) -> Sandbox:
    """The sandbox of ``--code-sandbox``. Raises PluginError for a reference that does not resolve, ConfigError for what
    is no sandbox."""
    reference = args.code_sandbox or "bubblewrap"
    shipped = SHIPPED.get("http" if reference.startswith(("http://", "https://")) else reference, reference)
    found = _class_of(shipped, tuple(args.plugin))
    made = found(args) if callable(found) else found
    expected = f"a class, called with args, whose objects have {' and '.join(METHODS)}"
    if not implements(made, Sandbox):
        raise ConfigError(f"{reference} is no sandbox", where="--code-sandbox", expected=expected)
    return made


@lru_cache(maxsize=8)
def _class_of(reference: str, plugins: tuple[str, ...]) -> Any:
    return PluginRegistry.from_flags(plugins).load(reference)


def _is_code(name: str) -> bool:
    return name in REWARDS or name.startswith((f"{MODULE}:", f"{MODULE}."))
