"""Agents: several turns in a sample, from messages to token ids and from turns to rows.

turns           a turn, and the rows that the turns of a sample make
messages        the answer that a text is; when two messages are equal
template_reader the same by a response template of transformers
rendering       messages to text and ids, and back, with the tokenizer and its chat template
conversation    the ids of the next prompt: those held, and the encoded rest
session         one attempt at one sample: its turns, its limits, its end
journal         what agents were answered, in a file, so that it is replayed after a death
dialect         what a dialect of HTTP is: how requests are read, and answers, streams and errors written
chat_dialect    OpenAI's chat completions; messages_dialect: Anthropic's Messages; responses_dialect: OpenAI's responses
gateway         the HTTP server of a rollout worker's sessions
runner          runs agents that are functions, in a loop and in threads of their own, and names one that blocks
command         runs agents that are commands: a process for each sample
command_watch   the small program around such a command, which ends all that it has started
remote          offers samples to agents elsewhere: leases, heartbeats
programs        programs that a worker starts to lease its samples, and keeps running
remote_client   leases samples: one file of the standard library, for any machine
finish          how an agent in another process tells of its end
play            the generate function of a run with agents: plays a sample and makes rows of it
tools           the built-in agent, which calls tools
environment     the built-in agent of environments, each in a thread of its own
leftovers       finds and ends the processes that such a thread has left behind
options         the options of agents
"""
