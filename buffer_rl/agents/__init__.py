"""Agents that play several turns: turns and rows, messages, the prompt of the next turn."""
