"""What may be written down of options and addresses: everything but their secrets."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

MASK = "***"
_USERINFO = re.compile(r"(?<=://)[^/?#\s]*@")
_QUERY_VALUE = re.compile(r"(?<=[?&;#])([^=&;#\s]+)=[^&;#\s]*")
# Names of options, fields and headers whose whole value is a secret. Not every key is: --label-key names a field.
_SECRET = (
    r"(?:(?:api|access|secret|private|auth|wandb|signing)[_-]?key|pass(?:word|wd|phrase)|secret|token|credentials?"
    r"|authorization|cookie)"
)
_VARIABLE = r"(?-i:[A-Z][A-Z0-9_]*_KEY)"  # of the environment, as OPENAI_KEY
_SECRET_NAME = re.compile(rf"(?:(?:^|[_-]){_SECRET}|^{_VARIABLE})$", re.IGNORECASE)
# In a text: --api-key VALUE, --api-key=VALUE, OPENAI_API_KEY=VALUE. Words are read once, from their beginning.
_NAMED_VALUE = re.compile(
    rf"(?<![\w?&;#-])(--(?:[\w-]*[_-])?{_SECRET}\s+(?!-)|(?:--)?(?:(?:[\w-]*[_-])?{_SECRET}|{_VARIABLE})=)"
    r"""(?:"[^"]*"|'[^']*'|[^\s"']+)""",
    re.IGNORECASE,
)
_AUTHORIZATION = re.compile(
    r"(\bauthorization[\"']?\s*:\s*[\"']?(?:(?:bearer|basic|token)\s+)?)[^\s\"',]+", re.IGNORECASE
)
_URL_USERINFO = re.compile(r"([a-z][a-z0-9+.-]*)://([^/?#\s]*)@", re.IGNORECASE)
_SIGNATURE = re.compile(r"(^|[_-])sig(nature)?$", re.IGNORECASE)


def is_secret(name: str) -> bool:
    """Whether the whole value of an option, field or header of this name is a secret."""
    return _SECRET_NAME.search(name) is not None


def mask_url(text: str) -> str:
    """``text`` without the secrets that a URL in it may hold: user and password, and every value of its query."""
    if "://" not in text:
        return text
    return _QUERY_VALUE.sub(rf"\1={MASK}", _USERINFO.sub(f"{MASK}@", text))


def holds_credentials(text: str) -> bool:
    """Whether a URL in ``text`` has a password, over HTTP any user (that is how tokens are written), or a query field
    whose name says that it is a secret or a signature."""
    if "://" not in text:
        return False
    userinfo = ((scheme.lower(), user) for scheme, user in _URL_USERINFO.findall(text))
    if any(user and (":" in user or scheme in ("http", "https")) for scheme, user in userinfo):
        return True
    return any(is_secret(name) or _SIGNATURE.search(name) for name in _QUERY_VALUE.findall(text))


def mask_command(command: Sequence[str]) -> list[str]:
    """The words of a command line without secrets: those of URLs and of JSON, and the values of flags whose name says
    that they are secret, as ``--engine-api-key KEY`` or ``--engine-api-key=KEY``."""
    masked, hides = [], False
    for word in command:
        name, equals, value = word.partition("=")
        if " " in name:  # a text of several words
            name, equals = word, ""
        is_flag, secret = word.startswith("--"), is_secret(name.removeprefix("--"))
        if equals and (secret or is_flag):
            masked.append(f"{name}={MASK if secret else _mask_word(value)}")
        else:
            masked.append(MASK if hides and not is_flag else _mask_word(word))
        hides = is_flag and secret and not equals
    return masked


def _mask_word(word: str) -> str:
    if word.lstrip().startswith(("{", "[")):
        with suppress(ValueError, RecursionError):
            return json.dumps(mask_secrets(json.loads(word)), ensure_ascii=False)
    return _mask_text(word)


def _mask_text(text: str) -> str:
    """``text`` without the secrets of URLs, of an Authorization header, and of flags and variables by their names."""
    return _NAMED_VALUE.sub(rf"\1{MASK}", _AUTHORIZATION.sub(rf"\1{MASK}", mask_url(text)))


def mask_secrets(value: Any, name: str = "") -> Any:
    """A JSON value without secrets: those of any text of it (``_mask_text``), and the values of fields whose name
    says that they are secret. ``name``: that of the value itself."""
    if isinstance(value, Mapping):
        return {key: mask_secrets(item, str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [mask_secrets(item, name) for item in value]
    if isinstance(value, str):
        return MASK if value and is_secret(name) else _mask_text(value)
    return value
