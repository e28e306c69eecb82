"""The guessing game of the example as a program of the standard library: a command, or an agent elsewhere.

python agent_program.py                                 plays the sample of BUFFER_RL_SAMPLE
python agent_program.py CLIENT RUN/agents/worker_0.json  leases samples with the client in the file CLIENT
"""

import importlib.util
import json
import os
import sys
import time
import urllib.request


def ask(base_url, api_key, messages):
    body = json.dumps({"model": "policy", "messages": messages}).encode()
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{base_url}/chat/completions", body, headers)) as response:
        return json.load(response)["choices"][0]["message"]["content"] or ""


def play(sample, base_url, api_key):
    messages, secret, guesses = sample["prompt"], sample["label"]["secret"], sample["label"]["guesses"]
    low, high = map(int, messages[0]["content"].split("-"))
    for number in range(guesses):
        guess = ask(base_url, api_key, messages)
        if os.environ.get("SLOW_S"):  # so that a test can kill it between two turns
            time.sleep(float(os.environ["SLOW_S"]))
        if not guess.isdigit() or not low <= int(guess) <= high:
            return {"score": 0.2 * number / guesses, "won": 0.0}
        if int(guess) == secret:
            return {"score": 1.0, "won": 1.0}
        low, high = (low, int(guess) - 1) if secret < int(guess) else (int(guess) + 1, high)
        hint = "<" if secret < int(guess) else ">"
        messages = [*messages, {"role": "assistant", "content": guess}, {"role": "user", "content": hint}]
    return {"score": 0.2, "won": 0.0}


def main(client="", file=""):
    if not client:
        with open(os.environ["BUFFER_RL_SAMPLE"], encoding="utf-8") as sample:
            reward = play(json.load(sample), os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"])
        print(json.dumps({"reward": reward}))
        return
    spec = importlib.util.spec_from_file_location("remote_client", client)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for episode in module.leases(file, wait_s=2.0, patience_s=120.0):
        with episode:
            episode.finish(play(episode.sample, episode.base_url, episode.api_key))


if __name__ == "__main__":
    main(*sys.argv[1:])
