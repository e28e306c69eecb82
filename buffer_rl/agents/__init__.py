"""Agents: several turns in a sample, from messages to token ids and from turns to rows.

turns           a turn, and the rows that the turns of a sample make
messages        the answer that a text is; when two messages are equal
rendering       messages to text and ids, and back, with the tokenizer and its chat template
conversation    the ids of the next prompt: those held, and the encoded rest
"""
