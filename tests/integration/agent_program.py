"""The guessing game of the example as a program of the standard library: a command, or an agent elsewhere.

python agent_program.py                                 plays the sample of BUFFER_RL_SAMPLE
python agent_program.py CLIENT RUN/agents/worker_0.json  leases samples with the client in the file CLIENT
python agent_program.py CLIENT                           the same, as a program that a rollout worker has started

If KILLS names a folder, every second sample of a group kills the process once, each in one of ``PHASES`` of its play.
"""

import http.client
import importlib.util
import json
import os
import sys
import urllib.parse
import zlib

PHASES = ("before the request", "while it is sampled", "between turns", "before the finish", "finished")


def die(phase, sample):
    """Kill this process if it is the phase of the sample, which has not died yet."""
    index, row = int(sample["row_id"].rsplit("/", 1)[1].split(".")[0]), zlib.crc32(sample["row_id"].encode())
    if not os.environ.get("KILLS") or index % 2 == 0 or PHASES[row % len(PHASES)] != phase:
        return
    try:
        mark = f"{phase} {row}".replace(" ", "_")
        os.close(os.open(os.path.join(os.environ["KILLS"], mark), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    os.kill(os.getpid(), 9)


def ask(sample, base_url, api_key, messages):
    die("before the request", sample)
    body = json.dumps({"model": "policy", "messages": messages}).encode()
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    url = urllib.parse.urlsplit(base_url)
    connection = http.client.HTTPConnection(url.hostname, url.port)
    connection.request("POST", f"{url.path}/chat/completions", body, headers)
    die("while it is sampled", sample)
    answer = json.load(connection.getresponse())["choices"][0]["message"]["content"] or ""
    die("between turns", sample)
    return answer


def play(sample, base_url, api_key):
    messages, secret, guesses = sample["prompt"], sample["label"]["secret"], sample["label"]["guesses"]
    low, high = map(int, messages[0]["content"].split("-"))
    for number in range(guesses):
        guess = ask(sample, base_url, api_key, messages)
        if not guess.isdigit() or not low <= int(guess) <= high:
            return {"score": 0.2 * number / guesses, "won": 0.0}
        if int(guess) == secret:
            return {"score": 1.0, "won": 1.0}
        low, high = (low, int(guess) - 1) if secret < int(guess) else (int(guess) + 1, high)
        hint = "<" if secret < int(guess) else ">"
        messages = [*messages, {"role": "assistant", "content": guess}, {"role": "user", "content": hint}]
    return {"score": 0.2, "won": 0.0}


def main(client="", source="", key=""):
    if not client:
        with open(os.environ["BUFFER_RL_SAMPLE"], encoding="utf-8") as sample:
            sample = json.load(sample)
        reward = play(sample, os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"])
        die("before the finish", sample)
        print(json.dumps({"reward": reward}), flush=True)
        die("finished", sample)
        return
    spec = importlib.util.spec_from_file_location("remote_client", client)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not source:
        source, key = os.environ["BUFFER_RL_LEASE_URL"], os.environ["BUFFER_RL_LEASE_API_KEY"]
    for episode in module.leases(source, key, wait_s=2.0, patience_s=120.0):
        with episode:
            reward = play(episode.sample, episode.base_url, episode.api_key)
            die("before the finish", episode.sample)
            episode.finish(reward)
            die("finished", episode.sample)


if __name__ == "__main__":
    main(*sys.argv[1:])
