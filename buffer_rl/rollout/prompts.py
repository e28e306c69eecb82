"""Prompts to token ids, each distinct prompt once."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from buffer_rl.args import Args
from buffer_rl.data.options import check_template_kwargs
from buffer_rl.errors import BufferRLError, DataError, RolloutError
from buffer_rl.records.groups import Prompt, Sample
from buffer_rl.records.sample import RenderedPrompt

_DECODED = "a template that takes arguments of tool calls as text, not as objects, wants --no-decode-json"
TOO_LONG = "prompt_too_long"  # why a training group is rejected; see --rollout-max-prompt-len
CACHE_SIZE = 4096  # prompts; a rollout asks for each prompt n_samples_per_prompt times in close succession


def load_tokenizer(path: str | None, flag: str = "--hf-checkpoint", *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of the Hugging Face folder ``path``, which ``flag`` names; never asks the network, and runs
    no code of the folder unless ``trust_remote_code`` says so.

    Raises RolloutError if the folder is not named, holds no tokenizer or a damaged one.
    """
    if not path:
        raise RolloutError(f"no tokenizer: {flag} is not set", hint="name a Hugging Face folder")
    from transformers import AutoTokenizer  # here, because it takes a second and option parsing must not pay for it

    where, expected = f"{flag} {path}", "a folder with tokenizer.json or another file that AutoTokenizer reads"
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=trust_remote_code)
    except Exception as error:  # fault boundary: of a damaged file, transformers raises whatever its parser meets
        what = f"the tokenizer does not load: {type(error).__name__}: {error}"
        raise RolloutError(what, where=where, expected=expected) from error
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        # Where the folder holds a model only, transformers makes an empty tokenizer of the model's usual class.
        raise RolloutError("there is no tokenizer in the folder", where=where, expected=expected)
    return tokenizer


@contextmanager
def data_errors(what: str, where: str, expected: str = "", hint: str = "") -> Iterator[None]:
    """Whatever a tokenizer or a chat template raises in the block is the fault of the text: a DataError, which names
    the row ``where``. A panic of the Rust library is no ``Exception``."""
    try:
        yield
    except (BufferRLError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        text = f"{what}: {type(error).__name__}: {error}"
        raise DataError(text, where=where, expected=expected, hint=hint) from error


class PromptEncoder:
    """Renders prompts and turns them into token ids; the samples of a group share one encoding.

    Plain text is encoded with the special tokens that the tokenizer adds, unless it begins with ``<bos>`` itself or
    ``add_special_tokens`` is false. Chat messages, and plain text under ``--apply-chat-template``, go through the
    tokenizer's chat template with a generation prompt, and get no other special tokens than the template's. The
    template also receives the tools of the row (``sample.metadata["tools"]``, see ``--tool-key``) and
    ``template_kwargs``.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        apply_chat_template: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        add_special_tokens: bool = True,
    ) -> None:
        self.tokenizer = tokenizer
        self._add_special_tokens = add_special_tokens
        self._apply_chat_template = apply_chat_template
        self._template_kwargs = check_template_kwargs(template_kwargs)
        self._cache: OrderedDict[str, list[int]] = OrderedDict()

    @classmethod
    def from_args(cls, args: Args, tokenizer: Any) -> PromptEncoder:
        """From ``--apply-chat-template``, ``--apply-chat-template-kwargs`` and ``--add-special-tokens``. Raises
        ConfigError."""
        return cls(
            tokenizer,
            apply_chat_template=args.apply_chat_template,
            template_kwargs=args.apply_chat_template_kwargs,
            add_special_tokens=args.add_special_tokens,
        )

    def encode(self, sample: Sample) -> list[int]:
        """Token ids of the sample's prompt; the caller gets a list of its own.

        Raises DataError, naming the row, for a prompt that is empty or cannot be rendered.
        """
        prompt, tools = sample.prompt, sample.metadata.get("tools")
        if isinstance(prompt, RenderedPrompt):
            return self.encode_text(prompt, where=_where(sample), as_prompt=self._is_plain(prompt.source))
        plain = isinstance(prompt, str) and not tools
        key = str(prompt) if plain else "\0" + json.dumps([prompt, tools], default=str)
        cached = self._cache.get(key)
        if cached is None:
            cached = self._encode(prompt, tools, where=_where(sample))
            self._cache[key] = cached
            if len(self._cache) > CACHE_SIZE:
                self._cache.popitem(last=False)
        return list(cached)

    def rendered(self, sample: Sample) -> RenderedPrompt:
        """The prompt as the text that ``encode`` encodes. Raises DataError as ``encode`` does."""
        if isinstance(sample.prompt, RenderedPrompt):
            return sample.prompt
        text = self._render(sample.prompt, sample.metadata.get("tools"), where=_where(sample))
        return RenderedPrompt.of(text, sample.prompt)

    def too_long(self, sample: Sample, limit: int | None) -> bool:
        """Whether the sample's prompt has more tokens than ``limit``. Raises DataError as ``encode`` does."""
        return limit is not None and len(self.encode(sample)) > limit

    def encode_text(self, text: str, *, where: str = "", as_prompt: bool = False) -> list[int]:
        """Token ids of ``text``, without added special tokens unless it is a prompt of plain text. Raises DataError,
        naming ``where``, if it is refused."""
        add = as_prompt and self._add_special_tokens and not self._begins(text)
        with data_errors("the tokenizer cannot encode the text", where):
            ids: list[int] = self.tokenizer.encode(text, add_special_tokens=add)
        return ids

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Any,
        *,
        where: str,
        add_generation_prompt: bool = True,
        **more: Any,
    ) -> Any:
        """The text that the chat template makes of ``messages``, or what ``more`` asks transformers for in its place.

        Raises DataError, naming ``where``, if there is no template or if it refuses the messages."""
        self._require_template("the prompt is a list of chat messages", where)
        asked = {"tokenize": False, "add_generation_prompt": add_generation_prompt, **more, **self._template_kwargs}
        expected = "messages of the form {'role': ..., 'content': ...} in an order that the template accepts"
        hint = _DECODED if any(message.get("tool_calls") for message in messages) else ""
        with data_errors("the chat template refuses the prompt", where, expected, hint):
            return self.tokenizer.apply_chat_template(list(messages), tools=tools or None, **asked)

    def _encode(self, prompt: Prompt, tools: Any, *, where: str) -> list[int]:
        text = self._render(prompt, tools, where=where)
        tokens = self.encode_text(text, where=where, as_prompt=self._is_plain(prompt))
        if not tokens:
            raise DataError("the prompt has no tokens", where=where, expected="at least one token")
        return tokens

    def _render(self, prompt: Prompt, tools: Any, *, where: str) -> str:
        if self._is_plain(prompt):
            return str(prompt)
        if isinstance(prompt, str):
            self._require_template("--apply-chat-template is set", where)
            prompt = [{"role": "user", "content": prompt}]
        return str(self.render(prompt, tools, where=where))

    def _is_plain(self, prompt: Prompt) -> bool:
        """Whether the prompt goes through no chat template."""
        return isinstance(prompt, str) and not self._apply_chat_template

    def _begins(self, text: str) -> bool:
        """Whether the text has its ``<bos>`` already."""
        token = getattr(self.tokenizer, "bos_token", None)
        return isinstance(token, str) and bool(token) and text.startswith(token)

    def _require_template(self, asked: str, where: str) -> None:
        if not getattr(self.tokenizer, "chat_template", None):
            raise DataError(
                f"{asked}, but the tokenizer has no chat template",
                where=where,
                expected="a tokenizer with a chat template, or prompts that are plain text",
                see="docs/troubleshooting.md#tokenizer-and-chat-template-do-not-fit",
            )


def _where(sample: Sample) -> str:
    return f"row {sample.row_id}" if sample.uid is not None else "a sample without uid"
