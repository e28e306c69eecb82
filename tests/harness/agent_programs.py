"""Programs of the standard library that play samples, for the tests of commands and of agents elsewhere."""

from __future__ import annotations

import sys
from pathlib import Path

from buffer_rl.agents import remote_client

CLIENT = Path(remote_client.__file__)
PRELUDE = """
import json, os, signal, subprocess, sys, time, urllib.error, urllib.request

sample = json.load(open(os.environ["BUFFER_RL_SAMPLE"])) if "BUFFER_RL_SAMPLE" in os.environ else {}

def post(path, body, base=os.environ.get("OPENAI_BASE_URL"), key=os.environ.get("OPENAI_API_KEY")):
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(base + path, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)

def ask(messages, **more):
    messages = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    status, answer = post("/chat/completions", {"model": "policy", "messages": messages}, **more)
    return answer["choices"][0]["message"]["content"] if status == 200 else status
"""


def program(folder: Path, body: str, name: str = "agent") -> str:
    """A command that runs ``body`` behind ``PRELUDE``."""
    path = folder / f"{name}.py"
    path.write_text(PRELUDE + body, encoding="utf-8")
    return f"{sys.executable} -I -S {path}"
