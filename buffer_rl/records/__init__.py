"""What travels between processes, as data.

ids      uids of groups, and the ids of their samples
sample   a prompt and its response: tokens, reward, status, versions of the weights
experts  the experts that computed each token in a mixture of experts
groups   groups of samples, tickets, training rows, and the other records of a run
utf8     text that UTF-8 cannot encode: refused in data, written as an escape
"""
