"""Agents: several turns in a sample, from messages to token ids and from turns to rows.

turns           a turn, and the rows that the turns of a sample make
messages        the answer that a text is; when two messages are equal
rendering       messages to text and ids, and back, with the tokenizer and its chat template
conversation    the ids of the next prompt: those held, and the encoded rest
session         one attempt at one sample: its turns, its limits, its end
journal         what agents were answered, in a file, so that it is replayed after a death
chat_dialect    OpenAI's chat completions: requests and bodies of answers
gateway         the HTTP server of a rollout worker's sessions
runner          runs agents in a loop and in threads of their own, and names one that blocks
play            the generate function of a run with agents: plays a sample and makes rows of it
tools           the built-in agent, which calls tools
options         the options of agents
"""
